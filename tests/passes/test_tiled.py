"""Feed-forward parts by tiles of tokens against the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError
from shardwise.models.dropout import replace_dropout
from shardwise.models.layers import GeluMlp, SwiGlu
from shardwise.models.tiles import tile_model
from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.passes.tiles import TilesPolicy
from tests.parallel.tensor.test_loss import LargestTensor
from tests.passes.closed_forms import kept_elements
from tests.passes.test_recompute import SHAPES, block_run, gpt, kept_bytes, shape_of


def passed(net: nn.Module, tokens: int | None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The output, and the gradients of input and weights."""
    replay = DrawReplay()
    tile_model(nn.ModuleList([net]), TilesPolicy(mlp=tokens or "off"), replay, at_once=True)
    net.to(dtype).zero_grad()
    x = torch.linspace(-2, 2, 2 * 9 * 4, dtype=torch.float64).sin().view(2, 9, 4).to(dtype).requires_grad_()
    with replay.at(BatchPosition(3)):
        y = net(x)
    (y * y.detach().sin()).sum().backward()
    found = [x.grad, *(p.grad for p in net.parameters() if p.requires_grad)]
    return [y.detach(), *(each.clone() for each in found if each is not None)]


@pytest.mark.parametrize("kind", [SwiGlu, GeluMlp])
def test_equals_the_whole(kind: Any) -> None:
    torch.manual_seed(0)
    net = kind(4, 8, 0.0)
    expected = passed(net, None)
    for tokens in (1, 5, 17):
        for one, other in zip(passed(net, tokens), expected, strict=True):
            assert (one - other).norm() <= 1e-14 * other.norm()
    assert all(torch.equal(*pair) for pair in zip(passed(net, None), expected, strict=True)), "undone"
    next(net.parameters()).requires_grad_(False)
    assert len(passed(net, 5)) == len(passed(net, None)) == len(expected) - 1


def test_sums_of_16_bits_are_kept_in_fp32() -> None:
    torch.manual_seed(0)
    net = SwiGlu(4, 8, 0.0).bfloat16()
    found, whole = passed(net, 1, torch.bfloat16), passed(net, None, torch.bfloat16)
    exact = passed(net.double(), None)
    for one, other, wanted in zip(found, whole, exact, strict=True):
        assert (one - wanted).norm() <= 1.5 * (other - wanted).norm()


def test_dropout_stays_keyed_by_the_place_of_a_token() -> None:
    found = []
    for tokens in (None, 5):
        torch.manual_seed(0)
        net = SwiGlu(4, 8, 0.5)
        replay = DrawReplay()
        replace_dropout(net, 7, replay)
        tile_model(nn.ModuleList([net]), TilesPolicy(mlp=tokens or "off"), replay, at_once=True)
        with replay.at(BatchPosition(1)):
            found.append(net(torch.ones(2, 9, 4)))
    assert torch.equal((found[0] == 0), (found[1] == 0)) and (found[0] == 0).any()


def test_a_weight_lands_once_and_intermediates_stay_small() -> None:
    net, landed = SwiGlu(4, 64, 0.0), []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: landed.append(p.numel()))
    x = torch.ones(100, 4, requires_grad=True)
    tile_model(nn.ModuleList([net]), TilesPolicy(mlp=10), DrawReplay(), at_once=True)
    with LargestTensor() as largest:
        net(x).sum().backward()
    assert sorted(landed) == [256, 512] and largest.elements == 10 * 128


@pytest.mark.parametrize("name", SHAPES)
def test_kept_bytes_equal_the_closed_form(name: str) -> None:
    family, keys = SHAPES[name]
    model, tokens = gpt(family, **keys), torch.zeros(2, 48, dtype=torch.int64)
    tile_model(model, TilesPolicy(mlp=7), DrawReplay(), at_once=True)
    elements = kept_elements(shape_of(model, tokens), "none", tiled_mlp=True)
    assert kept_bytes(*block_run(model, tokens)) == 8 * elements


def test_a_model_without_known_parts_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tiles\.mlp: 8 asks .* none of a Linear"):
        shardwise.initialize(nn.Linear(2, 2), {"tiles": {"mlp": 8}})
