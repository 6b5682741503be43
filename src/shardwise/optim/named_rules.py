"""An optimizer object whose groups name their rules: for ``initialize(optimizer=...)`` if no class of torch does.

    NamedRules([{"params": matrices, "type": "muon", "lr": 0.02}, {"params": rest, "type": "adamw", "lr": 1e-3}])

``type`` is that of ``optimizer.type`` in a configuration; the other keys of a group are the keyword arguments of its
class. As with every optimizer that the engine is given, its ``param_groups`` are read before each step, so schedulers
work on it, and its own ``step`` is never run.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import optim

from shardwise.base.errors import UsageError


class NamedRules(optim.Optimizer):
    """Optimizer object whose groups name their rules.

    Args:
        groups: groups of parameters, each with ``params``, ``type`` and the keyword arguments of its rule.

    Raises:
        UsageError: if there are no groups.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]]):
        made = [dict(group) for group in groups]
        if not made:
            raise UsageError("optimizer: it has no parameters that train")
        first = {key: value for key, value in made[0].items() if key not in ("params", "type")}
        super().__init__(made, {})
        self.defaults.update(first)  # torch's schedulers look here for betas or a momentum

    def step(self, closure: Any = None) -> NoReturn:
        """Raise UsageError, because only the engine has the gradients."""
        raise UsageError("optimizer.step(): the gradients are the engine's; call engine.step()")
