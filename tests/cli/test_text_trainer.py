"""Training on text: which targets are counted."""

import torch

from shardwise.cli.text_trainer import tokens_in


def test_only_targets_that_count_are_counted() -> None:
    targets = torch.tensor([[1, 2, -100], [-100, -100, 3]])
    assert tokens_in({"tokens": targets, "targets": targets}) == 3
    assert tokens_in({"targets": torch.rand(3)}) is None
    assert tokens_in((targets, targets)) is None
