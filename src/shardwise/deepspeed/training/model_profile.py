"""``deepspeed.profiling.flops_profiler``: the cost of a model's forward pass, module by module.

    flops, macs, params = get_model_profile(model, (32, 784), as_string=False)

The profiler counts the operations that really ran (observe/module_profile.py): FLOPs of matrix products, convolutions
and attention, two per multiply-add. Torch is not patched. In a run under an engine, the configuration's
``flops_profiler`` counts a whole step.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.memory.device_clock import clock_of
from shardwise.observe.flops import flops_text
from shardwise.observe.module_profile import ModuleCounter, ModuleProfilePolicy, ModuleTree
from shardwise.observe.progress import count_text

Number = int | float | str


class FlopsProfiler:
    """A counter of the operations that one model runs between ``start_profile`` and ``stop_profile``."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0):
        self.model = model
        self._counter = ModuleCounter(())
        self._running: AbstractContextManager[None] | None = None
        self.started = False
        """True from ``start_profile`` to ``end_profile``."""

    def start_profile(self, ignore_list: Any = None) -> None:
        """Start counting; earlier counts are dropped."""
        self._counter = ModuleCounter(self.model.named_modules(), clock_of(self._device))
        self._running = self._counter.forward()
        self._running.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting and keep the counts."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    reset_profile = stop_profile

    @property
    def _device(self) -> torch.device:
        return next((each.device for each in self.model.parameters()), torch.device("cpu"))

    def end_profile(self) -> None:
        """Stop counting and drop the counts."""
        self.stop_profile()
        self._counter, self.started = ModuleCounter(()), False

    @property
    def tree(self) -> ModuleTree:
        """The counts of each module.

        Raises:
            UsageError: before ``start_profile``.
        """
        if not self.started:
            raise UsageError(
                "FlopsProfiler: nothing was counted; call start_profile() before the forward pass"
            )
        kinds = {name: type(module).__name__ for name, module in self.model.named_modules()}
        elements = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        return ModuleTree(kinds, elements, self._counter.costs)

    def get_total_flops(self, as_string: bool = False) -> Number:
        """Return the FLOPs of the forward pass, as a number or as text."""
        found = self.tree.root.costs.forward
        return flops_text(found) if as_string else found

    def get_total_macs(self, as_string: bool = False) -> Number:
        """Return the multiply-adds of the forward pass: half of its FLOPs."""
        found = self.tree.root.costs.forward // 2
        return f"{count_text(found)}MACs" if as_string else found

    def get_total_duration(self, as_string: bool = False) -> Number:
        """Return the seconds of the forward pass, with the overhead of counting; as text, milliseconds."""
        found = self.tree.root.costs.seconds
        return f"{found * 1e3:.2f} ms" if as_string else found

    def get_total_params(self, as_string: bool = False) -> Number:
        """Return the number of the model's parameters, as a number or as text."""
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
        """Print the counts of the modules as a tree, or write the tree to ``output_file``.

        Args:
            profile_step: The step's number, for the title.
            module_depth: The depth of the tree; 0 or less: the whole tree.
            top_modules: The number of the most expensive modules to list.
            detailed: True to print the tree.
            output_file: The file to write to; None: print.
        """
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
    """Count one forward pass without gradients and return (FLOPs, multiply-adds, parameters).

    Args:
        model: The model.
        input_shape: The shape of a tensor of ones that is the input; None: ``args`` and ``kwargs`` are the inputs.
        args: Positional inputs of the model.
        kwargs: Inputs of the model by name.
        print_profile: True to print the counts of the modules.
        detailed: True to print the tree.
        module_depth: The depth of the tree; 0 or less: the whole tree.
        top_modules: The number of the most expensive modules to list.
        warm_up: The number of passes that run before the counted one.
        as_string: True to return texts with units.
        output_file: The file to write to; None: print.
        ignore_modules: No effect.
        mode: ``forward`` for a call of the model, or ``generate``.

    Raises:
        UsageError: if there is no input, or ``mode`` is another word.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f"get_model_profile: mode {mode!r}; expected forward or generate")
    if input_shape is not None:
        home = next(model.parameters(), torch.empty(0))
        args = [torch.ones(tuple(input_shape), dtype=home.dtype, device=home.device)]
    if not args and not kwargs:
        raise UsageError("get_model_profile: no input; give input_shape, args or kwargs")
    called: Any = model if mode == "forward" else model.generate
    profiler = _profiled(model, lambda: called(*args, **(kwargs or {})), warm_up)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params
    flops, macs, parameters = (each(as_string) for each in found)
    profiler.end_profile()
    return flops, macs, parameters


def _profiled(model: nn.Module, call: Callable[[], object], warm_up: int) -> FlopsProfiler:
    """Return the counts of one ``call`` in evaluation mode without gradients, after ``warm_up`` calls."""
    was_training = model.training
    model.eval()
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call()
        profiler.start_profile()
        try:
            call()
        finally:
            profiler.stop_profile()
    model.train(was_training)
    return profiler
