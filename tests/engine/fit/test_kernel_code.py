"""Kernels run once without drawing numbers or leaving memory, so that a process is as large as one that trains."""

import torch

from shardwise.engine.fit.kernel_code import load_kernels


def test_every_kind_runs_without_drawing() -> None:
    before = torch.get_rng_state()
    kinds = [
        (kind, dtype)
        for kind in ("product", "attention", "convolution")
        for dtype in ("fp32", "bf16", "fp64")
    ]
    with torch.no_grad():
        load_kernels([*kinds, ("product", "fp8")])
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
