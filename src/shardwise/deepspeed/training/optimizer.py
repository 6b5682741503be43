"""The optimizer that ``initialize`` returns: a view of the user's or the configured optimizer, for use with the engine.

``param_groups`` are the groups that the engine reads before every step, so schedulers and scripts set learning rates
in them. The engine stores the moments, and ``engine.step()`` updates the weights. The view's class follows from the
ZeRO stage, as in DeepSpeed: ``DeepSpeedOptimizer`` (stage 0; ``FP16_Optimizer`` and ``BF16_Optimizer`` in 16 bits),
``DeepSpeedZeroOptimizer`` (stages 1 and 2), ``DeepSpeedZeroOptimizer_Stage3``.
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn, optim

from shardwise.base.errors import UsageError
from shardwise.engine.engine import Engine
from shardwise.optim.named_rules import NamedRules


class DeepSpeedOptimizer(optim.Optimizer):
    """A view of the optimizer ``inner`` that shares its parameter groups."""

    def __init__(self, inner: optim.Optimizer, engine: Engine, was_skipped: Callable[[], bool]):
        super().__init__(inner.param_groups, {})
        self.optimizer = inner
        """The optimizer that the user gave or the configuration named."""
        self._engine = engine
        self._was_skipped = was_skipped

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because gradients were not finite."""
        return self._was_skipped()

    @property
    def cur_scale(self) -> float:
        """The factor by which losses are multiplied; 1 unless the engine computes in fp16."""
        return self._engine.loss_scale or 1.0

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale moves: under fp16, unless the configuration gives a number."""
        return self._engine.loss_scale is not None and self._engine.config.precision.loss_scale.dynamic

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group, from the next step on."""
        for group in self.param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine drops gradients after using them."""

    def step(self, closure: Any = None) -> NoReturn:
        """Raise UsageError: only ``engine.step()`` can update the weights."""
        raise UsageError("optimizer.step(): the gradients are the engine's; call engine.step()")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, which raises because the engine stores the moments in shards."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer, which raises for the same reason as ``state_dict``."""
        self.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.optimizer

    __hash__ = object.__hash__


class PlainOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine at stage 0 that computes in the model's own dtypes.

    ``isinstance`` accepts this view as an instance of the user's optimizer class too, because DeepSpeed returns the
    user's optimizer itself at stage 0.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """The class of the user's optimizer."""
        return type(vars(self).get("optimizer", self))


class FP16_Optimizer(DeepSpeedOptimizer):  # noqa: N801
    """The optimizer of an engine at stage 0 that computes in fp16."""


class FP16_UnfusedOptimizer(FP16_Optimizer):  # noqa: N801
    """The optimizer of an engine at stage 0 that computes in fp16, for rules that need whole tensors (LAMB, LARS)."""


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
        """DeepSpeed's holder of stage-3 hooks, for programs that remove the hooks and register them again."""
        return ParameterOffload(self._engine.module)


class ParameterOffload:
    """An object without hooks, for programs (TRL) that remove and re-register DeepSpeed's hooks around generation.

    The engine gathers weights by hooks that stay registered: inside ``GatheredParameters`` the weights are whole
    already, so the hooks do nothing. There are no hooks to remove and none to register.
    """

    def __init__(self, module: nn.Module):
        self.module = _HooklessModule(module)
        """The model, with the methods that such programs call on its modules."""
        self.forward_hooks: list[Any] = []
        """An empty list: there are no hooks."""
        self.backward_hooks: list[Any] = []
        """An empty list: there are no hooks."""

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Return at once: the engine's hooks were never removed."""


class _HooklessModule:
    """A model that reports no parameters of its own to release."""

    def __init__(self, module: nn.Module):
        self._module = module

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an empty iterator: no module holds on to a parameter."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an empty iterator: each Unit records the parameters that its modules use."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def optimizer_of(
    inner: optim.Optimizer, engine: Engine, stage: int, was_skipped: Callable[[], bool]
) -> DeepSpeedOptimizer:
    """Return a view of ``inner`` whose class corresponds to the ZeRO stage and the compute dtype."""
    stages: dict[int, type[DeepSpeedOptimizer]] = {3: DeepSpeedZeroOptimizer_Stage3}
    kind = stages.get(stage, DeepSpeedZeroOptimizer)
    if stage == 0:
        is_whole = isinstance(inner, NamedRules) and inner.param_groups[0].get("type") in ("lamb", "lars")
        fp16: type[DeepSpeedOptimizer] = FP16_UnfusedOptimizer if is_whole else FP16_Optimizer
        narrow = {"fp16": fp16, "bf16": BF16_Optimizer}
        kind = narrow.get(str(engine.config.precision.compute), PlainOptimizer)
    return kind(inner, engine, was_skipped)
