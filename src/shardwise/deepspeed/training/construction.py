"""Contexts in which a model is constructed: ``deepspeed.OnDevice`` and ``deepspeed.zero.Init``.

``OnDevice(dtype, "meta")`` constructs a model without memory, for weights that are loaded in slices (``init_from``).
"""

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.engine.construction.sharded_init import cut_made, sharded_init


class OnDevice:
    """A context in which modules are constructed on ``device`` with floating tensors in ``dtype``."""

    def __init__(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True
    ):
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._place: Any = None
        self._before: torch.dtype | None = None

    def __enter__(self) -> "OnDevice":
        if not self.enabled:
            return self
        self._before = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        self._place = torch.device(self.device)
        self._place.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is not None:
            self._place.__exit__(kind, error, trace)
            self._place = None
        if self._before is not None:
            torch.set_default_dtype(self._before)
            self._before = None


def zero_wrapper_for_fp_tensor_constructor(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``function`` as it is: torch's constructors are not replaced."""
    return function


class Init:
    """A context in which a model is constructed for stage 3, so that each rank keeps 1/N of every parameter.

    A parameter is cut as soon as it is made (engine/construction/sharded_init.py). ``initialize`` takes over the
    pieces, at any stage.

    Args:
        module: An existing model, which is cut at once.
        data_parallel_group: No effect: the parameters are cut over all ranks.
        mem_efficient_linear: No effect.
        remote_device: None, ``cpu`` or ``none``.
        pin_memory: No effect.
        config_dict_or_path: No effect.
        config: No effect.
        enabled: False to do nothing.
        dtype: The dtype of floating tensors; None: torch's default.
        mpu: No effect: the parameters are cut over all ranks.
        **others: DeepSpeed's other arguments, without effect.

    Raises:
        UsageError: if ``remote_device`` is not host memory.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ):
        if remote_device not in (None, "cpu", "none"):
            raise UsageError(
                f"zero.Init: remote_device {remote_device!r}: pieces are kept where they are made, on the CPU or "
                "on the device; leave it out"
            )
        self.dtype = dtype
        self.enabled = enabled
        self._context = contextlib.ExitStack()
        if module is not None and enabled:
            cut_made(module)

    def __enter__(self) -> "Init":
        if self.enabled:
            if self.dtype is not None:
                self._context.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
            self._context.enter_context(sharded_init())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)
