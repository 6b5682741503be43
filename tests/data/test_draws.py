"""Draws: a dataset's random numbers are its own, and leave the model's alone."""

import random

import numpy as np
import torch

from shardwise.data.draws import GeneratorContext


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_same_key_same_numbers_whatever_was_drawn_before() -> None:
    with GeneratorContext(5):
        one = _draw()
    _draw()
    with GeneratorContext(5):
        two = _draw()
    with GeneratorContext(6):
        other = _draw()
    assert one == two
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_outside_goes_on_as_if_nothing_happened() -> None:
    with GeneratorContext(1):
        expected = [_draw(), _draw()]
    with GeneratorContext(1):
        got = [_draw()]
        with GeneratorContext(2):
            _draw()
        got.append(_draw())
    assert got == expected


def test_one_object_goes_on_where_it_stopped() -> None:
    with GeneratorContext(3):
        expected = [_draw(), _draw()]
    draws = GeneratorContext(3)
    got = []
    for _ in range(2):
        with draws:
            got.append(_draw())
        _draw()
    assert got == expected
