"""Vectors of 16 and 8 bits read within half a step of their form."""

import numpy as np
import torch

from shardwise.models.vector_codes import coded, decoded


def test_int8_is_within_half_a_step_of_each_row() -> None:
    vectors = (
        torch.randn(50, 7, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 50)[:, None]
    )
    vectors[3] = 0
    codes, scales = coded(vectors)
    rows = decoded(codes.numpy(), scales.numpy())
    assert rows.shape == (50, 7) and rows.dtype == np.float32 and codes.abs().amax(1)[4:].min() == 127
    found = torch.from_numpy(rows)
    assert ((found - vectors).abs() <= scales[:, None] * 0.5001).all() and not found[3].any()
    assert coded(torch.zeros(0, 3))[0].shape == (0, 3) and coded(torch.zeros(2, 0))[1].tolist() == [0, 0]


def test_bf16_reads_as_torch_widens_it() -> None:
    vectors = torch.tensor([[1.5, -0.0, float("inf"), 3e-39], [-2.7, 1e38, 0.1, -7.0]]).bfloat16()
    rows = decoded(vectors.view(torch.int16).numpy(), None)
    assert torch.equal(torch.from_numpy(rows), vectors.float())
    half = vectors.half().numpy()
    assert decoded(half, None) is half
