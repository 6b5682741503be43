"""Contexts in which a model is constructed."""

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.deepspeed.training.construction import Init, OnDevice


def test_a_model_on_meta_in_another_dtype() -> None:
    with OnDevice(torch.float16):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16
    with OnDevice(device="cpu"):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    with OnDevice(torch.float16, enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    assert torch.get_default_dtype() == torch.float32 and not torch.zeros(1).is_meta


def test_an_error_inside_leaves_torch_as_it_was() -> None:
    for context in (OnDevice(torch.float16), Init(dtype=torch.float16)):
        with pytest.raises(ValueError, match="inside"), context:
            assert torch.get_default_dtype() == torch.float16
            raise ValueError("inside")
        assert torch.get_default_dtype() == torch.float32 and not torch.zeros(1).is_meta


def test_pieces_lie_where_they_are_made() -> None:
    with pytest.raises(UsageError, match="remote_device 'nvme'"):
        Init(remote_device="nvme")
    with Init(enabled=False, remote_device="cpu", dtype=torch.float16):
        assert type(nn.Linear(2, 2).weight) is nn.Parameter and torch.get_default_dtype() == torch.float32
