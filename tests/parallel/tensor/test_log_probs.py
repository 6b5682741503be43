"""Log-probabilities of given tokens, of a model that is not cut."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.parallel.tensor.log_probs import log_probs_of

LOGITS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.tensor([[0, 4, 2], [1, 1, 3]])


@pytest.mark.parametrize(
    "output", [LOGITS, {"logits": LOGITS}, (LOGITS, None)], ids=["alone", "named", "first"]
)
def test_they_are_those_of_the_softmax(output: Any) -> None:
    found = log_probs_of(nn.Identity(), lambda: output, TARGETS)
    assert torch.allclose(found, LOGITS.log_softmax(-1).gather(-1, TARGETS[..., None])[..., 0])


def test_a_target_for_each_place() -> None:
    with pytest.raises(UsageError, match=r"logits are \[2, 3, 5\], the targets \[2, 2\]"):
        log_probs_of(nn.Identity(), lambda: LOGITS, TARGETS[:, 1:])


@pytest.mark.parametrize("output", [{"loss": LOGITS}, torch.zeros(3), "text"])
def test_without_logits(output: Any) -> None:
    with pytest.raises(UsageError, match="in which there are no logits"):
        log_probs_of(nn.Identity(), lambda: output, TARGETS)
