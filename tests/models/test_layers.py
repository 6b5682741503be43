"""Layers of a block, by their formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.attention import causal_attention
from shardwise.kernels.head_loss import LossTile
from shardwise.models.cache import LayerCache
from shardwise.models.layers import Attention, GeluMlp, Head, RmsNorm, SwiGlu, TransformerBlock

F64 = torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=F64)


def test_a_head_returns_logits_or_their_loss() -> None:
    head, x, targets = Head(4, 7).double(), drawn(2, 3, 4), torch.tensor([[1, 6, 0], [-100, 2, 2]])
    assert torch.equal(head(x), F.linear(x, head.weight, head.bias))
    loss = F.cross_entropy(head(x).flatten(0, 1), targets.flatten())
    assert torch.allclose(head(x, targets), loss)
    head.tile = LossTile(2)
    assert torch.allclose(head(x, targets), loss) and head(x).shape == (2, 3, 7)


def test_a_norm_divides_by_the_root_mean_square() -> None:
    norm, x = RmsNorm(4, eps=0.1).double(), drawn(3, 4)
    torch.nn.init.uniform_(norm.weight)
    assert torch.allclose(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight)
    assert torch.allclose(RmsNorm(4, eps=0.0).double()(x), F.rms_norm(x, (4,), eps=0.0))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_of_grouped_heads_is_torchs_and_the_same_piece_by_piece(kv_heads: int) -> None:
    layer = Attention(6, 4, kv_heads, 3, bias=True, dropout=0.0, attention=causal_attention).double()
    x = drawn(2, 5, 6)
    q, k, v = (
        part.unflatten(-1, (-1, 3)).transpose(1, 2)
        for part in layer.qkv(x).split([4 * 3, kv_heads * 3, kv_heads * 3], -1)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    whole = layer.out(mixed.transpose(1, 2).flatten(2))
    assert torch.allclose(layer(x), whole)
    cache = LayerCache(5)
    pieces = [layer(x[:, start:stop], cache=cache) for start, stop in ((0, 3), (3, 4), (4, 5))]
    assert torch.allclose(torch.cat(pieces, 1), whole)


def test_feed_forward_parts_are_their_formulas() -> None:
    x, gated, plain = drawn(2, 4), SwiGlu(4, 5, 0.0).double(), GeluMlp(4, 5, 0.0).double()
    gate, up = gated.gate_up(x).split(5, -1)
    assert torch.allclose(gated(x), gated.down(F.silu(gate) * up))
    u = plain.up(x)
    tanh = 0.5 * u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3)))
    assert torch.allclose(plain(x), plain.down(tanh))


def test_dropout_acts_on_what_a_part_returns() -> None:
    for part in (
        SwiGlu(4, 5, 0.999),
        GeluMlp(4, 5, 0.999),
        Attention(6, 2, 2, 3, True, 0.999, causal_attention),
    ):
        x = torch.randn(1, 2, 6 if isinstance(part, Attention) else 4)
        torch.manual_seed(0)
        assert float((part(x) == 0).float().mean()) > 0.5
        assert float((part.eval()(x) == 0).float().mean()) == 0


def test_a_block_adds_its_parts_behind_their_norms() -> None:
    layer = Attention(4, 2, 2, 2, bias=False, dropout=0.0, attention=causal_attention)
    block = TransformerBlock(RmsNorm(4), layer, RmsNorm(4), SwiGlu(4, 5, 0.0)).double()
    x = drawn(1, 3, 4)
    middle = x + layer(block.attention_norm(x))
    assert torch.allclose(block(x), middle + block.mlp(block.mlp_norm(middle)))


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "forward"])
def test_a_norm_that_something_watches_is_called(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sum is then computed apart; without hooks a device has one kernel for both."""
    monkeypatch.setattr("shardwise.models.layers.joins_sum", lambda weight, *addends: True)
    norm, x = RmsNorm(4, eps=0.1), torch.ones(3, 4)
    assert norm.joins_sum(x)
    if hook == "forward":
        norm.forward = lambda x: x  # type: ignore[method-assign]
    else:
        getattr(norm, hook)(lambda *arguments: None)
    assert not norm.joins_sum(x)


def test_a_sum_and_a_norm_stay_apart_on_a_cpu() -> None:
    assert not RmsNorm(4, eps=0.1).joins_sum(torch.ones(3, 4))
