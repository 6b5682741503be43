"""Runs Triton's forms: in its interpreter, on tensors of the CPU, or on a device.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own, which
tests/kernels/test_fused.py starts; elsewhere they are not collected.
"""

import numpy as np
import pytest
import torch

from shardwise.kernels import choice

from .cases import INTERPRETED

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    def _converted(data: np.ndarray, from_: tl.dtype, to: tl.dtype, rounding: object) -> np.ndarray:
        """As a device converts between fp32 and bf16: to the nearest; the interpreter cuts bits off."""
        if (from_, to) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16).view(torch.uint16).numpy()
        assert (from_, to) == (tl.bfloat16, tl.float32), f"{from_} to {to}"
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)

    interpreter._convert_float = _converted
    choice.DEVICES = frozenset({"cpu"})
elif not (choice.DEVICES and torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(
            pytest.mark.filterwarnings("ignore::RuntimeWarning")
        )  # numpy's, where a device has NaN
        if not INTERPRETED and "kernels/fused/" in item.path.as_posix():
            item.add_marker("gpu")
