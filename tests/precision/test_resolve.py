"""Patterns of a policy and the modules of a model that they name."""

import pytest
import torch
from tests.precision.modules import model
from torch import nn

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import join
from shardwise.precision.policy import PrecisionPolicy
from shardwise.precision.resolve import names_of, norms_with_statistics, resolved

F32 = torch.float32


def test_which_norms() -> None:
    model = nn.Sequential(
        nn.LayerNorm(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)
    )
    bf16 = PrecisionPolicy(compute="bf16")
    assert norms_with_statistics(bf16, model) == ["1"]
    policy, notes = resolved(bf16, model)
    wide = [name for name, _ in model.named_parameters() if policy.dtypes(name, F32).compute is F32]
    assert wide == ["1.weight", "1.bias"] and len(notes) == 1
    assert resolved(PrecisionPolicy(), model)[1] == ()
    assert resolved(PrecisionPolicy(compute="bf16", buffers="bf16"), model)[1] == ()
    assert resolved(PrecisionPolicy(compute="bf16", buffers="bf16", keep_fp32=["1.*"]), model)[1] != ()
    assert resolved(bf16, model.bfloat16())[1] == ()


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("class:LayerNorm", {"1.weight", "1.bias"}),
        ("class:torch.nn.LayerNorm", {"1.weight", "1.bias"}),
        ("class:torch.nn.modules.linear.Lin*", {"0.weight", "0.bias", "2.linear.weight", "2.linear.bias"}),
        ("class:Router", {"2.bias", "2.count", "2.other", "2.linear.weight", "2.linear.bias"}),
        ("class:Norm", set()),
        ("1.*", set()),
    ],
)
def test_names_of_a_class(pattern: str, wanted: set[str]) -> None:
    assert set(names_of(pattern, model())) == wanted


def test_of_tied_parameters_the_first_name() -> None:
    net = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert set(names_of("class:Linear", net)) == {"0.weight"}


def test_refused_with_a_model() -> None:
    for precision, said in (
        (
            {"operations": "bf16", "narrow_reduce": ["class:Conv2d"]},
            "narrow_reduce: pattern 'class:Conv2d' matches no",
        ),
        (
            {"compute": "bf16", "keep_fp32": ["class:Typo"]},
            "keep_fp32: pattern 'class:Typo' matches no parameter",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            shardwise.initialize(model(), {"precision": precision}, world=join(quiet=True))
    with pytest.raises(ConfigError, match="compiled block hides its operations"):
        shardwise.initialize(
            model(), {"precision": {"amp": "O1"}, "compile": "blocks"}, world=join(quiet=True)
        )
    net = model()
    net.gradient_checkpointing = True
    with pytest.raises(ConfigError, match="recomputes by itself"):
        resolved(PrecisionPolicy(operations="bf16"), net)
