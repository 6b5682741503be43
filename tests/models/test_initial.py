"""Start weights: a function of (seed, name, element), however they are cut."""

import math

import pytest
import torch
from torch import nn

from shardwise.base.errors import PlanError
from shardwise.kernels import philox
from shardwise.kernels.initializers import Constant, Initializer, Normal, Uniform
from shardwise.models import initial
from shardwise.models.initial import draw, draw_all, match_rules, torch_rules


@pytest.mark.parametrize("rule", [Normal(0.02), Uniform(-0.5, 0.5), Constant(1.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_any_cut_gives_the_same_bits(
    rule: Initializer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = draw(rule, 3, "w", 0, 10_000, dtype)
    monkeypatch.setattr(initial, "_CHUNK_ELEMENTS", 999)
    cuts = [0, 1, 6, 998, 1000, 5003, 10_000]
    pieces = [draw(rule, 3, "w", start, stop, dtype) for start, stop in zip(cuts, cuts[1:], strict=False)]
    assert torch.equal(torch.cat(pieces), whole)


def test_weights_are_drawn_in_fp64_and_cast() -> None:
    exact = philox.normal(philox.key_of(3, "w"), 5, 105) * 0.02
    assert torch.equal(draw(Normal(0.02), 3, "w", 5, 105, torch.float64), exact)
    assert torch.equal(draw(Normal(0.02), 3, "w", 5, 105, torch.bfloat16), exact.bfloat16())


def test_uniform_fills_its_interval() -> None:
    x = draw(Uniform(-0.5, 0.5), 0, "w", 0, 100_000, torch.float64)
    assert -0.5 < x.min() < -0.4999
    assert 0.4999 < x.max() < 0.5
    assert x.std().item() == pytest.approx(1 / math.sqrt(12), rel=1e-2)


def test_name_and_seed_matter() -> None:
    first = draw(Normal(1), 0, "a", 0, 50, torch.float32)
    assert not torch.equal(first, draw(Normal(1), 1, "a", 0, 50, torch.float32))
    assert not torch.equal(first, draw(Normal(1), 0, "b", 0, 50, torch.float32))


def test_patterns_find_rules_in_their_order() -> None:
    table = {"*.bias": Constant(0), "head.*": Normal(1), "*": Normal(0.02)}
    rules = match_rules(["head.weight", "head.bias", "x.weight"], table)
    assert rules == {"head.weight": Normal(1), "head.bias": Constant(0), "x.weight": Normal(0.02)}
    with pytest.raises(PlanError, match=r"no pattern matches parameter 'x\.weight'"):
        match_rules(["x.weight"], {"head.*": Normal(1)})


def test_torch_rules_are_torch_s_own_distributions() -> None:
    def model() -> nn.Module:
        parts = [nn.Embedding(70, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Conv1d(96, 40, 3)]
        return nn.Sequential(*parts, nn.BatchNorm1d(40), nn.RMSNorm(40))

    torch.manual_seed(0)
    theirs = dict(model().named_parameters())
    ours = model()
    draw_all(ours, torch_rules(ours), 0)
    for name, parameter in ours.named_parameters():
        assert not torch.equal(parameter, theirs[name]) or parameter.std() == 0
        assert parameter.std().item() == pytest.approx(theirs[name].std().item(), rel=0.25), name
        assert parameter.abs().max().item() == pytest.approx(theirs[name].abs().max().item(), rel=0.3), name


def test_torch_rules_name_what_they_do_not_know() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(PlanError, match=r"1\.scale of Own.*initial_rules"):
        torch_rules(nn.Sequential(nn.Linear(2, 2), Own()))
