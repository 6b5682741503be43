"""Modules that are registered in one order and used in another; a decoder whose blocks are each given the encoder's
output. Norms registered first and used last, heads in front of the blocks and encoder-decoder models were refused.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.blocks import find_blocks
from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.uses import ModuleUses, order_of_use
from tests.parallel.pipeline.chain import forward_backward, gradients_of
from tests.parallel.pipeline.test_stand_in import TOKENS, WIDTH, HeadFirst, Net, NormFirst


def call(model: nn.Module) -> Tensor:
    return model(TOKENS)


class Between(Net):
    """A norm that is registered last and used in the middle, and a head whose inner part is used without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.LayerNorm(WIDTH)
        first = nn.ModuleDict({"head": nn.MultiheadAttention(WIDTH, 2, batch_first=True)})
        self._modules = {"first": first, **self._modules}

    def walk(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(self.middle(x) if i == 2 else x)
        return self.first["head"](x, x, x)[0]


class Counts(Net):
    """Its pass changes attributes, lists and buffers, and draws; a hook keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.embed.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, tokens: Tensor) -> Any:
        self.last = self.embed(tokens)
        self.moving = self.moving + 1
        self.wave = torch.rand(2)
        self.kept.append(self.wave)
        return super().forward(tokens)


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.outer(self.inner(x + memory.mean(1, keepdim=True)).tanh())


class EncoderDecoder(nn.Module):
    """The decoder's blocks are heavier, as with transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Net()
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))
        self.places = nn.Embedding(11, WIDTH)
        self.places.weight = self.encoder.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.encoder.norm(self.encoder.walk(self.encoder.begin(tokens)))
        x = self.places(tokens.flip(1))
        for block in self.decoder:
            x = block(x, memory)
        return x.square().mean()


def seen(net: nn.Module) -> ModuleUses:
    uses = order_of_use(net, call)
    assert uses is not None
    return uses


@pytest.mark.parametrize("made", [NormFirst, HeadFirst, Between, EncoderDecoder])
@pytest.mark.parametrize("stages", [2, 4])
def test_parts_belong_to_the_stage_that_uses_them(made: Callable[[], nn.Module], stages: int) -> None:
    torch.manual_seed(0)
    net = made().double()
    wanted = call(net)
    wanted.backward()
    truth = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    uses = seen(net)
    blocks = find_blocks(net, uses)
    starts = blocks[2:3] if stages == 2 else blocks[1:4]
    with pytest.raises(PlanError):  # by the order of registration
        forward_backward(
            cut(net, starts if made is not EncoderDecoder else ("decoder.1",), range(len(starts) + 1)), call
        )
    parts = cut(net, starts, range(stages), uses)
    assert abs(float(forward_backward(parts, call) - wanted.detach())) <= 1e-12
    found = gradients_of(parts, net)
    assert set(found) == set(truth)
    assert all(torch.allclose(found[name], truth[name], rtol=1e-9, atol=1e-12) for name in truth)


def test_the_encoder_is_cut_and_the_decoder_stays_whole() -> None:
    net = EncoderDecoder()
    assert find_blocks(net)[0] == "decoder.0"
    assert find_blocks(net, seen(net)) == tuple(f"encoder.blocks.{i}" for i in range(4))


def test_the_look_leaves_nothing_behind() -> None:
    net = Counts().train()
    state = torch.random.get_rng_state()
    before = {name: dict(vars(module)) for name, module in net.named_modules()}
    assert order_of_use(net, call) is not None
    assert torch.equal(torch.random.get_rng_state(), state) and net.training
    for name, module in net.named_modules():
        assert {key: id(value) for key, value in vars(module).items()} == {
            key: id(value) for key, value in before[name].items()
        }
    assert float(net.moving.sum()) == 0 and not net.kept and not net.seen
    call(net)
    assert (len(net.kept), len(net.seen)) == (1, 2)


def test_what_cannot_be_seen_keeps_the_order_of_registration() -> None:
    net = Net(lambda net, first, x: x * 2 if float(first.sum()) > 0 else x)
    assert order_of_use(net, call) is None
    assert order_of_use(net) is None  # nothing to call it with
