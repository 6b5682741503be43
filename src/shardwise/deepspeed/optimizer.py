"""The optimizer that ``initialize`` returns: the user's own, or one made of the configuration, while the engine steps.

Its ``param_groups`` are those that the engine reads before every step, so schedulers and scripts write learning rates
there. The moments are the engine's; ``step`` is ``engine.step()``.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import optim

from shardwise.engine.engine import Engine
from shardwise.plan.errors import UsageError


class DeepSpeedOptimizer(optim.Optimizer):
    """A view of ``inner``, whose groups it shares."""

    def __init__(self, inner: optim.Optimizer, engine: Engine, was_skipped: Callable[[], bool]):
        super().__init__(inner.param_groups, {})
        self.optimizer = inner
        """The user's."""
        self._engine = engine
        self._was_skipped = was_skipped

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, for gradients that were not finite."""
        return self._was_skipped()

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by; 1 but under fp16."""
        return self._engine.loss_scale or 1.0

    loss_scale = cur_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine drops gradients when it has used them."""

    def step(self, closure: Any = None) -> NoReturn:
        """Refused: gradients are not here."""
        raise UsageError("optimizer.step(): the gradients are the engine's; call engine.step()")

    def state_dict(self) -> dict[str, Any]:
        """Refused: the moments are the engine's, in pieces."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused as ``state_dict`` is."""
        self.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.optimizer)
