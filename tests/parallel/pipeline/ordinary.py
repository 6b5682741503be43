"""Ordinary nets, made by program: every one can be cut into stages and must be.

A net is a draw from a grammar of parts that users' models are made of:

    front    tokens or pictures or series, positions (learned, a buffer, a parameter), norm, dropout, writes in place
    blocks   residual MLP, attention with a mask, convolution, GRU, gate, custom function, checkpoint; tensors or tuples
    or
             dictionaries pass from one to the next
    side     masks and scales made of the batch, of shapes and dtypes of what is absent, of buffers; hooks that look
    back     norm, pooling, head (own or tied, read as an attribute), loss in a tensor, dictionary or tuple
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, CLASSES = 6, 11, 5


class Doubled(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Scale(nn.Module):
    """A leaf with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Block(nn.Module):
    """One of the kinds in ``KINDS``; ``carry`` is what passes on: a tensor, a tuple, a dictionary."""

    KINDS = (
        "mlp",
        "gate",
        "attention",
        "gru",
        "conv",
        "custom",
        "checkpoint",
        "counter",
        "batch_norm",
        "weight_norm",
    )

    def __init__(self, kind: str, carry: str) -> None:
        super().__init__()
        self.kind, self.carry = kind, carry
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH if kind != "gate" else WIDTH, WIDTH)
        if kind == "gru":
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "conv":
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if kind == "attention":
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        if kind == "counter":
            self.register_buffer("calls", torch.zeros(()))
        if kind == "batch_norm":
            self.batch_norm = nn.BatchNorm1d(WIDTH)
        if kind == "weight_norm":
            self.up = nn.utils.parametrizations.weight_norm(self.up)

    def body(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.norm(x)
        if self.kind == "attention":
            y = self.attention(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        if self.kind == "gru":
            y = self.rnn(y)[0]
        if self.kind == "conv":
            y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        if self.kind == "custom":
            y = Doubled.apply(y)
        if self.kind == "counter":
            self.calls.add_(1)
        if self.kind == "batch_norm":
            y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)
        y = self.up(y)
        if self.kind == "gate":
            a, b = y.chunk(2, -1)
            y = a * torch.sigmoid(b)
        return x + self.down(torch.tanh(y))

    def forward(self, carried: Any, mask: Tensor | None = None, scale: Any = 1.0) -> Any:
        x = carried["x"] if self.carry == "dict" else carried[0] if self.carry == "tuple" else carried
        again = self.kind == "checkpoint"
        x = checkpoint(self.body, x, mask, use_reentrant=False) if again else self.body(x, mask)
        x = x * scale
        if self.carry == "dict":
            return {"x": x, "rest": carried["rest"]}
        return (x, None) if self.carry == "tuple" else x


class Net(nn.Module):
    """``draw`` decides everything."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        pick = draw.choice
        self.front = pick(["tokens", "tokens", "tokens", "pictures", "series"])
        if self.front == "tokens":
            self.embed: nn.Module = nn.Embedding(VOCABULARY, WIDTH)
        elif self.front == "pictures":
            self.embed = nn.Conv2d(3, WIDTH, 2, 2)
        else:
            self.embed = pick([nn.Linear(3, WIDTH), nn.LSTM(3, WIDTH, batch_first=True)])
        self.positions = pick(["none", "learned", "buffer", "parameter", "in place"])
        if self.positions in ("learned", "in place"):
            self.places = nn.Embedding(16, WIDTH)
        elif self.positions == "parameter":
            self.place = nn.Parameter(torch.randn(1, 16, WIDTH))
        elif self.positions == "buffer":
            self.register_buffer("wave", torch.randn(16, WIDTH), persistent=pick([True, False]))
        self.first = pick([None, nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
                           Scale(), nn.BatchNorm1d(WIDTH, affine=False), nn.Dropout(0.0)])  # fmt: skip
        self.carry = pick(["tensor", "tensor", "tensor", "tuple", "dict"])
        self.container = pick(["list", "list", "sequential", "attributes"])
        count = draw.randint(3, 5)
        kinds = [pick(Block.KINDS) for _ in range(count)]
        if self.front == "series" and isinstance(self.embed, nn.LSTM):
            kinds = [kind if kind != "gru" else "mlp" for kind in kinds]
        blocks = [Block(kind, self.carry) for kind in kinds]
        if pick([False, False, True]):
            blocks[0].up.requires_grad_(False)
        if (
            pick([False, False, True])
            and kinds[0] != "weight_norm" != kinds[-1]
            and "gate" not in (kinds[0], kinds[-1])
        ):
            blocks[-1].down.weight = blocks[0].down.weight
        if self.container == "attributes":
            for i, block in enumerate(blocks):
                setattr(self, f"layer{i}", block)
        else:
            self.blocks = nn.ModuleList(blocks) if self.container == "list" else nn.Sequential(*blocks)
        self.count = count
        self.between = pick(["nothing", "nothing", "buffer", "in place", "collect"])
        self.register_buffer("mild", torch.full((WIDTH,), 0.5))
        self.side = pick(["none", "none", "mask", "finfo", "like", "count", "rotary"])
        self.last = pick(
            [None, nn.LayerNorm(WIDTH), Scale(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())]
        )
        self.head_of = pick(["own", "tied", "attribute", "pooled"]) if self.front == "tokens" else "pooled"
        self.head = nn.Linear(
            WIDTH, CLASSES if self.head_of == "pooled" else VOCABULARY, bias=self.head_of == "own"
        )
        if self.head_of in ("tied", "attribute"):
            self.head.weight = self.embed.weight
        self.returns = pick(["loss", "dict", "tuple"])
        self.logs = pick([False, False, True])
        if self.logs:
            self.seen: list[str] = []
            self.embed.register_forward_hook(self.look)

    def look(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook that prints: it looks at numbers, and nothing comes of it."""
        first = output[0] if isinstance(output, tuple) else output
        self.seen.append(f"{first.mean():.3f}")

    def layers(self) -> list[nn.Module]:
        if self.container == "attributes":
            return [getattr(self, f"layer{i}") for i in range(self.count)]
        return list(self.blocks)

    def begin(self, inputs: Tensor) -> Tensor:
        if self.front == "pictures":
            x = self.embed(inputs).flatten(2).transpose(1, 2)
        else:
            x = self.embed(inputs)
            x = x[0] if isinstance(x, tuple) else x
        at = torch.arange(x.shape[1], device=x.device)
        if self.positions == "learned":
            x = x + self.places(at)
        elif self.positions == "in place":
            x += self.places(at)
        elif self.positions == "parameter":
            x = x + self.place[:, : x.shape[1]]
        elif self.positions == "buffer":
            x = x + self.wave[: x.size(1)].to(x)
        if isinstance(self.first, nn.BatchNorm1d):
            return self.first(x.transpose(1, 2)).transpose(1, 2)
        return x if self.first is None else self.first(x)

    def aside(self, inputs: Tensor, x: Tensor) -> tuple[Tensor | None, Any]:
        """What blocks are given beside the last one's output; nothing of what is absent but its shape and kind."""
        if self.side == "mask" and self.front == "tokens":
            return inputs == VOCABULARY + 1, 1.0
        if self.side == "finfo":
            return None, 1.0 + 0.0 * torch.finfo(x.dtype).eps
        if self.side == "like":
            return None, torch.ones_like(x) * 0.9 + x.new_zeros(x.shape[-1])
        if self.side == "count":
            weight = next(self.parameters())
            return None, 1.0 + 1e-3 * weight.numel() / sum(p.numel() for p in self.parameters())
        if self.side == "rotary":
            return None, torch.cos(torch.arange(x.shape[1], dtype=x.dtype, device=x.device))[None, :, None]
        return None, 1.0

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        x = self.begin(inputs)
        mask, scale = self.aside(inputs, x)
        carried: Any = (
            {"x": x, "rest": None} if self.carry == "dict" else (x, None) if self.carry == "tuple" else x
        )
        states: tuple[Any, ...] = ()
        for layer in self.layers():
            if self.between == "collect":
                states += (carried,)
            carried = layer(carried, mask, scale)
            if self.carry == "tensor" and self.between == "buffer":
                carried = carried * self.mild + carried
            elif self.carry == "tensor" and self.between == "in place":
                carried *= 1.5
        x = carried["x"] if self.carry == "dict" else carried[0] if self.carry == "tuple" else carried
        x = x if self.last is None else self.last(x)
        if self.head_of == "pooled":
            logits, targets = self.head(x.mean(1)), targets[:, 0] % CLASSES
        elif self.head_of == "attribute":
            logits, targets = (x @ self.embed.weight.T).flatten(0, 1), targets.flatten()
        else:
            logits, targets = self.head(x).flatten(0, 1), targets.flatten()
        loss = F.cross_entropy(logits, targets)
        if self.returns == "dict":
            return {"loss": loss, "logits": logits}
        return (loss, logits) if self.returns == "tuple" else loss


def ordinary(seed: int) -> tuple[Net, Callable[[int], tuple[Tensor, Tensor]], tuple[str, ...]]:
    """A net, its batches by length, and where its stages begin."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = Net(draw).double()
    starts = draw.sample(range(1, net.count), draw.randint(1, net.count - 1))
    prefix = "layer" if net.container == "attributes" else "blocks."
    names = tuple(f"{prefix}{i}" for i in sorted(starts))

    def batch(length: int) -> tuple[Tensor, Tensor]:
        targets = torch.randint(0, VOCABULARY, (3, length))
        if net.front == "tokens":
            return torch.randint(0, VOCABULARY, (3, length)), targets
        if net.front == "pictures":
            return torch.randn(3, 3, 4, 4, dtype=torch.float64), targets
        return torch.randn(3, length, 3, dtype=torch.float64), targets

    return net, batch, names
