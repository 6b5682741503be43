"""Draws: a dataset's random numbers are its own, and leave the model's alone."""

import random

import numpy as np
import torch

from shardwise.data.draws import Draws


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_same_key_same_numbers_whatever_was_drawn_before() -> None:
    with Draws(5):
        one = _draw()
    _draw()
    with Draws(5):
        two = _draw()
    with Draws(6):
        other = _draw()
    assert one == two
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_outside_goes_on_as_if_nothing_happened() -> None:
    with Draws(1):
        expected = [_draw(), _draw()]
    with Draws(1):
        got = [_draw()]
        with Draws(2):
            _draw()
        got.append(_draw())
    assert got == expected


def test_one_object_goes_on_where_it_stopped() -> None:
    with Draws(3):
        expected = [_draw(), _draw()]
    draws = Draws(3)
    got = []
    for _ in range(2):
        with draws:
            got.append(_draw())
        _draw()
    assert got == expected
