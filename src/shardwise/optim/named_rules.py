"""An optimizer object whose groups name their rules: for ``initialize(optimizer=...)`` where no class of torch's does.

    NamedRules([{"params": matrices, "type": "muon", "lr": 0.02}, {"params": rest, "type": "adamw", "lr": 1e-3}])

``type``: as ``optimizer.type`` in a configuration; the other keys of a group are the keyword arguments of its class. As
with every optimizer that the engine is given, its ``param_groups`` are read before each step, so schedulers work on it,
and it never steps itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import optim

from shardwise.plan.errors import UsageError


class NamedRules(optim.Optimizer):
    """See the module's docstring. ``groups``: each with ``params``, ``type`` and the numbers of its rule."""

    def __init__(self, groups: Iterable[Mapping[str, Any]]):
        made = [dict(group) for group in groups]
        if not made:
            raise UsageError("optimizer: it has no parameters that train")
        first = {key: value for key, value in made[0].items() if key not in ("params", "type")}
        super().__init__(made, {})
        self.defaults.update(first)  # which torch's schedulers look at for betas or a momentum

    def step(self, closure: Any = None) -> NoReturn:
        """Refused: gradients are the engine's."""
        raise UsageError("optimizer.step(): the gradients are the engine's; call engine.step()")
