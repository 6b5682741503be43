"""Contexts in which a model is made: ``deepspeed.OnDevice``, and ``deepspeed.zero.Init`` as far as it stands.

``OnDevice(dtype, "meta")`` makes a model without memory, for weights that are loaded by slices (``init_from``).
"""

from types import TracebackType
from typing import Any

import torch
from torch import nn


class OnDevice:
    """Modules inside are made on ``device``, their floating tensors in ``dtype``."""

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


class Init:
    """A context around the making of a model for stage 3. Modules are made whole, in host memory, in ``dtype`` where
    one is given; ``initialize`` then keeps 1/N of them on each rank."""

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
        self.dtype = dtype
        self.enabled = enabled
        self._before: torch.dtype | None = None

    def __enter__(self) -> "Init":
        if self.enabled and self.dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            torch.set_default_dtype(self._before)
            self._before = None
