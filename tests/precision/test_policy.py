"""Which dtype each buffer gets."""

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.config.run import RunConfig
from shardwise.precision.policy import BucketDtypes, PrecisionPolicy

F64, F32, B16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("given", "own", "wanted"),
    [
        ({}, F32, (F32, F32, F32, F32)),
        ({}, F64, (F64, F64, F64, F64)),
        ({}, B16, (B16, F32, F32, F32)),
        ("fp64", F32, (F64, F64, F64, F64)),
        ("bf16", F32, (B16, F32, F32, F32)),
        ("fp16", F64, (F16, F32, F32, F32)),
        ({"compute": "bf16", "grad": "bf16"}, F32, (B16, B16, B16, F32)),
        ({"compute": "bf16", "reduce": "bf16"}, F32, (B16, F32, B16, F32)),
        ({"compute": "bf16", "master": "bf16"}, F32, (B16, F32, F32, B16)),
        ("bf16", torch.int64, (torch.int64,) * 4),
    ],
    ids=str,
)
def test_dtypes_follow(given: object, own: torch.dtype, wanted: tuple[torch.dtype, ...]) -> None:
    assert PrecisionPolicy.model_validate(given).dtypes("w", own) == BucketDtypes(*wanted)


def test_patterns_that_stay_in_fp32() -> None:
    policy = PrecisionPolicy(compute="bf16", keep_fp32=["*norm*", "head.*"])
    assert policy.dtypes("blocks.0.norm.weight", F32) == BucketDtypes(F32, F32, F32, F32)
    assert policy.dtypes("head.weight", B16).compute is F32
    assert policy.dtypes("blocks.0.up.weight", F32).compute is B16
    assert PrecisionPolicy(compute="fp64", keep_fp32=["*"]).dtypes("w", F32).compute is F64


def test_one_word() -> None:
    assert RunConfig.parse({"precision": "bf16"}).precision.compute == "bf16"
    with pytest.raises(ConfigError, match="precision.compute: .*'fp64', 'fp32', 'bf16' or 'fp16'.*'half'"):
        RunConfig.parse({"precision": "half"})
