"""Builders of kernels under DeepSpeed's names: which have a counterpart here."""

import pytest
import torch

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError


def test_kernels_have_counterparts_or_not() -> None:
    from shardwise.deepspeed.ops.op_builder import AsyncIOBuilder, FusedAdamBuilder

    assert FusedAdamBuilder().is_compatible() and deepspeed.ops.__compatible_ops__[FusedAdamBuilder.NAME]
    assert not AsyncIOBuilder().is_compatible()
    with pytest.raises(UsageError, match=r"FusedAdamBuilder\.load"):
        FusedAdamBuilder().load()


def test_builders_by_the_file_of_each() -> None:
    from shardwise.deepspeed.ops.aio import AsyncIOBuilder
    from shardwise.deepspeed.ops.op_builder.cpu_adam import CPUAdamBuilder

    assert AsyncIOBuilder is deepspeed.ops.op_builder.AsyncIOBuilder
    assert CPUAdamBuilder is deepspeed.ops.op_builder.CPUAdamBuilder
    hip = torch.version.hip
    assert CPUAdamBuilder.is_rocm_pytorch() == (hip is not None)
    assert CPUAdamBuilder.installed_rocm_version() == (0, 0) or hip is not None
