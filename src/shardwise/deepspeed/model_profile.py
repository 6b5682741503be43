"""``deepspeed.profiling.flops_profiler``: what a model's forward pass costs, module by module.

    flops, macs, params = get_model_profile(model, (32, 784), as_string=False)

Counted are the products that really ran (observe/module_profile.py): FLOPs of matrix products, convolutions and
attention, two to a multiply-add; nothing of torch is patched. In a run under an engine ``flops_profiler`` of the
configuration counts a whole step.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.memory.device_clock import clock_of
from shardwise.observe.flops import flops_text
from shardwise.observe.module_profile import ModuleCounter, ModuleProfilePolicy, ModuleTree
from shardwise.observe.progress import count_text
from shardwise.plan.errors import UsageError

Number = int | float | str


class FlopsProfiler:
    """Of one model: what runs between ``start_profile`` and ``stop_profile`` is counted."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0):
        self.model = model
        self._counter = ModuleCounter(())
        self._running: AbstractContextManager[None] | None = None
        self.started = False
        """Something was counted, and ``end_profile`` has not come."""

    def start_profile(self, ignore_list: Any = None) -> None:
        """Count from here on."""
        self._counter = ModuleCounter(self.model.named_modules(), clock_of(self._device))
        self._running = self._counter.forward()
        self._running.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Count no further."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    reset_profile = stop_profile

    @property
    def _device(self) -> torch.device:
        return next((each.device for each in self.model.parameters()), torch.device("cpu"))

    def end_profile(self) -> None:
        """Forget what was counted."""
        self.stop_profile()
        self._counter, self.started = ModuleCounter(()), False

    @property
    def tree(self) -> ModuleTree:
        """By module. Errors: UsageError before ``start_profile``."""
        if not self.started:
            raise UsageError(
                "FlopsProfiler: nothing was counted; call start_profile() before the forward pass"
            )
        kinds = {name: type(module).__name__ for name, module in self.model.named_modules()}
        elements = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        return ModuleTree(kinds, elements, self._counter.costs)

    def get_total_flops(self, as_string: bool = False) -> Number:
        """Of the forward pass."""
        found = self.tree.root.costs.forward
        return flops_text(found) if as_string else found

    def get_total_macs(self, as_string: bool = False) -> Number:
        """Half the FLOPs."""
        found = self.tree.root.costs.forward // 2
        return f"{count_text(found)}MACs" if as_string else found

    def get_total_duration(self, as_string: bool = False) -> Number:
        """Seconds of the forward pass, counting included."""
        found = self.tree.root.costs.seconds
        return f"{found * 1e3:.2f} ms" if as_string else found

    def get_total_params(self, as_string: bool = False) -> Number:
        """Parameters."""
        found = self.tree.root.parameters
        return count_text(found) if as_string else found

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """The tree, printed or written."""
        depth = module_depth if module_depth > 0 else None
        policy = ModuleProfilePolicy(depth=depth, top=top_modules, tree=detailed)
        text = self.tree.text(policy, f"step {profile_step}: ")
        if output_file is None:
            print(text)
        else:
            Path(output_file).write_text(text + "\n", encoding="utf-8")


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Number, Number, Number]:
    """(FLOPs, multiply-adds, parameters) of one forward pass without gradients.

    ``input_shape``: of one tensor of ones; or give ``args`` and ``kwargs``. ``mode``: ``forward``, or ``generate``.
    Errors: UsageError without an input.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f"get_model_profile: mode {mode!r}; expected forward or generate")
    if input_shape is not None:
        home = next(model.parameters(), torch.empty(0))
        args = [torch.ones(tuple(input_shape), dtype=home.dtype, device=home.device)]
    if not args and not kwargs:
        raise UsageError("get_model_profile: no input; give input_shape, args or kwargs")
    call = model if mode == "forward" else model.generate
    was_training = model.training
    model.eval()
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))  # type: ignore[operator]
        profiler.start_profile()
        try:
            call(*args, **(kwargs or {}))  # type: ignore[operator]
        finally:
            profiler.stop_profile()
    model.train(was_training)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params
    flops, macs, parameters = (each(as_string) for each in found)
    profiler.end_profile()
    return flops, macs, parameters
