"""Feed-forward parts of any model by tiles of tokens: which are found, and what they compute beside the whole."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError, UsageError
from shardwise.models.dropout import replace_dropout
from shardwise.models.feed_forward import feed_forward_parts
from shardwise.models.tiles import tile_model
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.passes.tiles import TilesPolicy
from tests.parallel.tensor.test_loss import LargestTensor

WIDTH, HIDDEN = 6, 30


class Residual(nn.Module):
    """Norm, two matrices with a trained scale and dropout between, dropout and sum behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))
        self.drop, self.last = nn.Dropout(0.4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.inner(F.silu(self.up(self.norm(x))) * self.scale + 1.0))
        out: Tensor = x + self.last(self.down(h))
        return out


class Fused(nn.Module):
    """Halves of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).split(HIDDEN, dim=-1)
        found: Tensor = self.down(torch.tanh(gate).pow(2) * up.float().to(gate.dtype))
        return found


def sequential() -> nn.Module:
    layers = [nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.2), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.2)]
    return nn.Sequential(*layers)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True)


class Holder(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(x)
        return found


def passed(
    make: Any, tokens: int | None, rows: tuple[int, ...] = (3, 5)
) -> tuple[list[Tensor], int, list[Any]]:
    """Output and gradients; elements of the largest tensor; which parameters landed."""
    torch.manual_seed(0)
    model, replay, landed = Holder(make()).double(), DrawReplay(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: landed.append(name))
    replace_dropout(model, 7, replay)
    tile_model(model, TilesPolicy(mlp=tokens or "off"), replay, at_once=True)
    x = torch.linspace(-2, 2, 15 * WIDTH, dtype=torch.float64).sin().view(*rows, WIDTH).requires_grad_()
    torch.manual_seed(1)
    with LargestTensor() as largest:
        with replay.at(BatchPosition(3, first_sample=4)):
            y = model(x)
        (y * y.detach().cos()).sum().backward()
    found = [y.detach(), x.grad, *(each.grad for each in model.parameters())]
    return found, largest.elements, landed  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "rows"),
    [*((make, (3, 5)) for make in (Residual, Fused, sequential, encoder_layer)), (Residual, (15,))],
)
def test_equals_the_whole_dropout_too(make: Any, rows: tuple[int, ...]) -> None:
    expected, whole, _ = passed(make, None, rows)
    for tokens in (2, 7):
        found, largest, landed = passed(make, tokens, rows)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= 1e-13 * other.norm()
        assert largest < whole and len(landed) == len(set(landed))


def test_what_is_found() -> None:
    model = nn.ModuleDict(
        {
            "block": Residual(),
            "around": Holder(sequential()),
            "encoder": encoder_layer(),
            "experts": MixtureOfExperts(WIDTH, HIDDEN, 2, shared=1),
            "attention": nn.MultiheadAttention(WIDTH, 2),
            "head": nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3)),
        }
    )
    assert list(feed_forward_parts(model)) == ["block", "around.part", "encoder", "experts.shared"]


def test_nothing_is_held_when_the_pass_is_over() -> None:
    """A cycle would hold a part's input, and what was made of a tile, until somebody looks for cycles."""
    model = Holder(Residual())
    tile_model(model, TilesPolicy(mlp=2), DrawReplay(), at_once=True)
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(3, 5, WIDTH, requires_grad=True) * 2
        held = ref(x)
        y = model(x).square().sum()
        del x
        y.backward()
        del y
        assert held() is None
    finally:
        gc.enable()


def test_autocast_reaches_the_second_pass() -> None:
    found = []
    for mlp in ("off", 2):
        torch.manual_seed(0)
        model = Holder(Fused())
        tile_model(model, TilesPolicy(mlp=mlp), DrawReplay(), at_once=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.linspace(-1, 1, 15 * WIDTH).view(3, 5, WIDTH))
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()
        found.append([y.detach(), *(each.grad for each in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.004 * other.norm(), "0.006 where the second pass is in fp32"


class Odd(Fused):
    """Mixes tokens between its matrices."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.seen = h
        found: Tensor = self.down(h[..., :HIDDEN].cumsum(-2) + h.flip(-2)[..., HIDDEN:])
        return found


def test_what_mixes_tokens_is_whole_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    expected, _, _ = passed(Odd, None)
    found, _, _ = passed(Odd, 2)
    assert all(map(torch.equal, found, expected))
    assert [each.message for each in caplog.records] == [
        "tiles.mlp: part is computed whole: getitem between its matrices is not known to treat every token alone"
    ]


class Kept(Fused):
    """Keeps for later what is not made."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.up(x)
        found: Tensor = self.down(F.glu(self.seen))
        return found


def test_what_is_kept_for_later_is_refused() -> None:
    model = Holder(Kept())
    tile_model(model, TilesPolicy(mlp=2), DrawReplay(), at_once=True)
    model(torch.ones(3, 5, WIDTH))
    with pytest.raises(UsageError, match=r"tiles\.mlp: what part computes .* but sum is asked of it behind"):
        torch.sum(model.part.seen)  # type: ignore[arg-type, union-attr]


def test_refusals_by_name() -> None:
    config = {"tiles": {"mlp": 2}}
    with pytest.raises(PlanError, match=r"tiles\.mlp: part is computed .* but the Unit part\.up inside"):
        shardwise.initialize(Holder(Fused()), config | {"zero": {"units": ["part.up"]}})
    with pytest.raises(PlanError, match=r"experts \(part\.experts\) take turns by experts\.rows"):
        shardwise.initialize(Holder(MixtureOfExperts(WIDTH, HIDDEN, 2)), config)


def test_dtypes_by_operation(caplog: pytest.LogCaptureFixture) -> None:
    """What is noted goes through the modes that the part runs in: products in bf16, a norm in fp32."""
    found = []
    for mlp in ("off", 2):
        torch.manual_seed(0)
        engine = shardwise.initialize(
            Holder(Residual()), {"precision": {"operations": "bf16"}, "tiles": {"mlp": mlp}}
        )
        y = engine(torch.linspace(-1, 1, 15 * WIDTH).view(3, 5, WIDTH))
        engine.backward(y.square().mean())
        found.append([y.detach(), *engine.gradients().values()])
        engine.step()
        engine.close()
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.01 * other.norm()
    assert "whole" not in caplog.text
