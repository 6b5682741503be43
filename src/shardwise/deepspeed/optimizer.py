"""The optimizer that ``initialize`` returns: the user's own, or one made of the configuration, while the engine steps.

Its ``param_groups`` are those that the engine reads before every step, so schedulers and scripts write learning rates
there. The moments are the engine's; ``step`` is ``engine.step()``. Its class says the stage, as DeepSpeed's does:
``DeepSpeedOptimizer`` (0; ``FP16_Optimizer``, ``BF16_Optimizer`` in 16 bits), ``DeepSpeedZeroOptimizer`` (1 and 2),
``DeepSpeedZeroOptimizer_Stage3``.
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn, optim

from shardwise.engine.engine import Engine
from shardwise.optim.named_rules import NamedRules
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

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group, from the next step on."""
        for group in self.param_groups:
            group["lr"] = lr

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

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.optimizer

    __hash__ = object.__hash__


class PlainOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine at stage 0 that computes in the model's own dtypes. It is an instance of the class of
    the user's optimizer too, which is what DeepSpeed returns there."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """The class of the user's optimizer."""
        return type(vars(self).get("optimizer", self))


class FP16_Optimizer(DeepSpeedOptimizer):  # noqa: N801
    """The optimizer of an engine at stage 0 that computes in fp16."""


class FP16_UnfusedOptimizer(FP16_Optimizer):  # noqa: N801
    """The optimizer of an engine at stage 0 that computes in fp16, for rules that look at whole tensors."""


class BF16_Optimizer(DeepSpeedOptimizer):  # noqa: N801
    """The optimizer of an engine at stage 0 that computes in bf16."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine at stage 1, 2 or 3."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer of an engine at stage 1 or 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801
    """The optimizer of an engine at stage 3."""

    @property
    def parameter_offload(self) -> "ParameterOffload":
        """The part of DeepSpeed's stage 3 that holds hooks, for programs that take its hooks away and put them back."""
        return ParameterOffload(self._engine.module)


class ParameterOffload:
    """Answers programs that remove DeepSpeed's hooks around a generation and register them again (TRL).

    The weights of the engine are gathered by hooks that stay: inside ``GatheredParameters`` they find nothing to do. So
    there are no hooks to remove, and none to register.
    """

    def __init__(self, module: nn.Module):
        self.module = _HooklessModule(module)
        """The model, with the call for parameters that other modules use."""
        self.forward_hooks: list[Any] = []
        """No hooks."""
        self.backward_hooks: list[Any] = []
        """No hooks."""

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Return at once: the engine's hooks were never removed."""


class _HooklessModule:
    """A model without parameters of its own to release."""

    def __init__(self, module: nn.Module):
        self._module = module

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing: no module holds on to a parameter."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing: Units know what their modules use."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def optimizer_of(
    inner: optim.Optimizer, engine: Engine, stage: int, was_skipped: Callable[[], bool]
) -> DeepSpeedOptimizer:
    """Return the view of ``inner`` whose class says the stage."""
    stages: dict[int, type[DeepSpeedOptimizer]] = {3: DeepSpeedZeroOptimizer_Stage3}
    kind = stages.get(stage, DeepSpeedZeroOptimizer)
    if stage == 0:
        is_whole = isinstance(inner, NamedRules) and inner.param_groups[0].get("type") in ("lamb", "lars")
        fp16: type[DeepSpeedOptimizer] = FP16_UnfusedOptimizer if is_whole else FP16_Optimizer
        narrow = {"fp16": fp16, "bf16": BF16_Optimizer}
        kind = narrow.get(str(engine.config.precision.compute), PlainOptimizer)
    return kind(inner, engine, was_skipped)
