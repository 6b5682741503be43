"""Outputs of modules and the gradients that reach them, recorded by hooks on all modules while a run lasts.

    key of a tensor    "blocks.1 step 0 piece 3"; piece: place of the microbatch in the global batch of the step

The reference and the ranks of a layout are recorded by the same hooks, so that each tensor has one key in both. A
module that runs again (recompute) or several times in a microbatch counts once, with its first output.

Cost: a copy of every recorded output.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from shardwise.passes.replay import DrawReplay


class ActivationRecorder:
    """Records the outputs of the modules of one model and the gradients of these outputs.

    Args:
        replay: The replay that knows the place of the running microbatch.
        rows: Samples of a microbatch.
    """

    def __init__(self, replay: DrawReplay, rows: int) -> None:
        self._replay = replay
        self._rows = rows
        self._names: dict[int, str] = {}
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.order: list[str] = []
        """Names of modules in the order of their first use."""
        self.scale = 1.0
        """Divisor of the recorded gradients."""

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record every pass inside the context."""
        self._names = {id(module): name for name, module in model.named_modules() if name}
        handle = register_module_forward_hook(self._ran)
        try:
            yield
        finally:
            handle.remove()

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        tensor = output[0] if isinstance(output, tuple) and output else output
        if name is None or type(tensor) is not Tensor or not tensor.is_floating_point():
            return
        if not self._replay.is_running:
            return
        place = self._replay.place
        key = f"{name} step {place.step} piece {place.first_sample // self._rows}"
        if name not in self.order:
            self.order.append(name)
        if key not in self.outputs:
            self.outputs[key] = tensor.detach().clone()
        if tensor.requires_grad and torch.is_grad_enabled():

            def reached(gradient: Tensor) -> None:
                if key not in self.gradients:
                    self.gradients[key] = gradient.detach().clone()

            tensor.register_hook(reached)
