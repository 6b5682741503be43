"""Random bits of stochastic rounding: those of an element's place in its parameter, on every device."""

import numpy as np
import pytest
import torch

from shardwise.kernels.philox import key_of, words_of
from shardwise.optim import rounding
from shardwise.optim.rounding import RoundedPart, StochasticRounding
from shardwise.plan.placement import AxisCut, ContiguousRun, Shard, runs

CPU = torch.device("cpu")


def test_random_bits_are_those_of_the_place_in_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix that is cut along rows or columns, in any chunks, on the processor or as a device draws them."""
    rows, columns, key = 12, 20, key_of(0, "w")
    expected = torch.from_numpy(
        words_of(key, 0, rows * columns // 4, [(9, 0, 0), (9, 1, 0)]).view(np.int16)
    ).view(2, rows, columns)
    for dim in (0, 1):
        for place in range(2):
            cuts = [AxisCut(Shard(dim), place, 2)]

            def lies(a: int, b: int, cuts: list[AxisCut] = cuts) -> list[ContiguousRun]:
                return list(runs((rows, columns), cuts, a, b))

            size = rows * columns // 2
            flat = StochasticRounding([RoundedPart(5, 5 + size, key, lies)])
            mine = expected.chunk(2, dim + 1)[place].reshape(2, -1)
            for step in (7, 31, size):
                for gap in (0, 1 << 12):
                    monkeypatch.setattr(rounding, "_NEAR", gap)
                    parts = [
                        flat.bits(a, min(a + step, size + 9), 9, 2, CPU) for a in range(0, size + 9, step)
                    ]
                    got = torch.cat(parts, 1)
                    assert torch.equal(got[:, 5 : 5 + size], mine), (dim, place, step, gap)
                    assert not got[:, :5].any() and not got[:, 5 + size :].any()


def test_a_device_draws_all_parts_at_once_and_the_same() -> None:
    parts = [
        RoundedPart(0, 90, key_of(0, "a"), lambda a, b: list(runs((9, 20), [AxisCut(Shard(1), 1, 2)], a, b))),
        RoundedPart(96, 133, key_of(0, "b"), lambda a, b: [ContiguousRun(a, a + 5, b - a)]),
    ]
    for start, stop in ((0, 140), (7, 100), (97, 101), (90, 96)):
        expected = StochasticRounding(parts).bits(start, stop, 3, 2, CPU)
        draws = [draw for part in parts for draw in rounding._draws(part, start, stop, True) if draw.runs]
        got = torch.zeros_like(expected)
        for draw, drawn in zip(draws, rounding.drawn_together(draws, 3, 2, CPU), strict=True):
            for place, full, count in draw.runs:
                got[:, place : place + count] = drawn[:, full - draw.start :][:, :count]
        assert torch.equal(got, expected), (start, stop)
