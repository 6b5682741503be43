"""Which form of a kernel runs."""

import pytest
import torch

from shardwise.kernels import choice
from shardwise.kernels.choice import fused


def test_devices_that_are_served_take_the_fused_form_but_for_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    x, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    elsewhere = torch.zeros(1, device="meta")
    monkeypatch.setattr(choice, "DEVICES", frozenset({"cpu"}))
    assert fused(x) and fused(x, x.half()) and not fused(x, double) and not fused(x, elsewhere)
    monkeypatch.setattr(choice, "DEVICES", frozenset())
    assert not fused(x)
