"""Models that depart from a plain row of blocks, each in one way. All take (x, flag) and return a mean loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5


class Block(nn.Module):
    """Two linears around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 2)
        self.down = nn.Linear(WIDTH + 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


class Net(nn.Module):
    """A row of blocks between two linears. The others say what they do differently."""

    units: Any = "auto"

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 1)

    def block(self) -> nn.Module:
        return Block()

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x), flag)).square().mean()
        return result

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# Order -------------------------------------------------------------------------------------------------------------


class TwiceInARow(Net):
    """Each block runs twice; autograd hands over the sum of both gradients."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class ThereAndBack(Net):
    """A B C B A: each block is needed again after others had its memory."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in [*self.blocks, *reversed(self.blocks[:-1])]:
            x = block(x)
        return x


class LastFirst(Net):
    """The blocks run in the reverse of their order of registration."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class CallsItself(Block):
    """Uses its own weights before and after the inner call."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x)
        return torch.sin(self.inner(self(x, depth - 1))) if depth else x


class Recursive(Net):
    """A Unit inside itself."""

    def block(self) -> nn.Module:
        return CallsItself()


class OneOfTwo(Net):
    """Data decide which block runs: ranks, microbatches and steps differ."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        x = self.blocks[0](x)
        result: Tensor = self.blocks[1 if flag.item() else 2](x)
        return result


class SkipsTheLast(Net):
    """Where the flag is set the last block does not run."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks[: 2 if flag.item() else 3]:
            x = block(x)
        return x


class SkipsAll(Net):
    """Where the flag is set no block runs."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        return x if flag.item() else super().middle(x, flag)


class Siblings(Net):
    """All blocks read the same input: their backward order is not the mirror of a chain."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class Branches(Net):
    """An early output is used again late."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        return self.blocks[2](second * first) + first


# Nesting -----------------------------------------------------------------------------------------------------------


class Outer(nn.Module):
    """A block with weights of its own around another Unit, before it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = Block()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(self.inside(torch.tanh(self.before(x))))
        return result


class Nested(Net):
    """Units inside Units: the inner may not stand in the outer's memory."""

    units = ["blocks.*", "blocks.*.inside"]

    def block(self) -> nn.Module:
        return Outer()


class Passing(nn.Module):
    """Returns the very tensor that the Unit inside it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(self.before(x))
        return result


class SameOutput(Net):
    """One tensor is the output of two nested Units, twice: the inner one's hook is called first."""

    units = ["blocks.*", "blocks.*.inside"]

    def block(self) -> nn.Module:
        return Passing()

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        return super().middle(super().middle(x, flag), flag)


class Leaves(Net):
    """Every linear a Unit of its own."""

    units = ["first", "blocks.*.up", "blocks.*.down", "last"]


class Whole(Net):
    """No Unit but the root."""

    units: Any = []


class Shared(Net):
    """One block object is registered three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


# Outputs -----------------------------------------------------------------------------------------------------------


class DictBlock(Block):
    def forward(self, x: Any) -> Any:
        y = x["y"] if isinstance(x, dict) else x
        return {"note": "kept", "more": [None, (self.inner(y),)], "y": super().forward(y)}


class ReturnsDict(Net):
    """Blocks return nested dictionaries; a hook on the first output alone would gather too late."""

    def block(self) -> nn.Module:
        return DictBlock()

    def middle(self, x: Any, flag: Tensor) -> Tensor:
        extra = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x)
            extra = extra + x["more"][1][0] * 0.5
        result: Tensor = x["y"] + extra
        return result


@dataclass
class Inner:
    y: Tensor
    count: int = 3


@dataclass
class Result:
    inner: Inner
    nothing: None = None


class DataclassBlock(Block):
    def forward(self, x: Any) -> Any:
        return Result(Inner(super().forward(x.inner.y if isinstance(x, Result) else x)))


class ReturnsDataclass(Net):
    """Blocks return dataclasses inside dataclasses."""

    def block(self) -> nn.Module:
        return DataclassBlock()

    def middle(self, x: Any, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = x.inner.y
        return result


class ChangedInPlace(Net):
    """What a block returned is overwritten."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x[:, 0].mul_(2.0)
            x += 1
            torch.relu_(x)
        return x


class SideBlock(Block):
    """Leaves an auxiliary loss behind as an attribute, as routers do."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.softmax(self.up(x), -1)
        self.side = gate.square().mean()
        return super().forward(x)


class SideLosses(Net):
    """The loss reads what the blocks left behind."""

    def block(self) -> nn.Module:
        return SideBlock()

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        loss = super().forward(x, flag)
        return loss + sum(block.side for block in self.blocks)  # type: ignore[misc]


# Parameters --------------------------------------------------------------------------------------------------------


class TiedAcrossBlocks(Net):
    """The first and the last block share a matrix: it moves up to the root, whose window covers both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].down.weight = self.blocks[0].down.weight


class TiedInsideABlock(Net):
    """Two names inside one Unit."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.extra = nn.Linear(WIDTH, WIDTH + 2)
            block.extra.weight = block.up.weight

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Adapter(nn.Module):
    """A frozen linear with a trained low-rank update beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t())


class Adapters(Net):
    """Frozen and trained parameters in one Unit."""

    def block(self) -> nn.Module:
        return Adapter()


class FrozenBlock(Net):
    """A block without any trained parameter, through which gradients must pass all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class FrozenRoot(Net):
    """Only the last block trains; the first sees no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[2].requires_grad_(True)


class OddShapes(Net):
    """A scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        return super().middle(x, flag) * self.scale + self.nothing.sum()


class Sometimes(nn.Module):
    """A block with a parameter that only flagged data use, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = torch.tanh(self.always(x))
        if flag.item():
            x = x + self.sometimes(x)
        result: Tensor = self.after(x)
        return result


class Unused(Net):
    """Parameters unused on some ranks, in some steps on all, and always."""

    def block(self) -> nn.Module:
        return Sometimes()

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, flag)
        return x


class ExtraHead(Net):
    """A parameter of the root that only flagged data use."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        x = super().middle(x, flag)
        return self.extra(x) if flag.item() else x


def scaled_by_its_weight(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * module.up.weight.mean(),)


class Hooked(Net):
    """A hook of the user's, older than the engine's, reads the weights before the forward pass."""

    def block(self) -> nn.Module:
        block = Block()
        block.register_forward_pre_hook(scaled_by_its_weight)
        return block


class Normed(Net):
    """torch's weight normalization computes the weight from two parameters at each use."""

    def block(self) -> nn.Module:
        block = Block()
        torch.nn.utils.parametrizations.weight_norm(block.up)
        return block


# Recomputing -------------------------------------------------------------------------------------------------------


def recomputed(function: Callable[..., Any], *args: Any, reentrant: bool = False) -> Any:
    return checkpoint(function, *args, use_reentrant=reentrant)


class AroundABlock(Net):
    """Activation checkpointing around each block."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = recomputed(block, x)
        return x


class InsideBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + recomputed(self.inner, x)
        return result


class InsideABlock(Net):
    """Activation checkpointing inside each block."""

    def block(self) -> nn.Module:
        return InsideBlock()


class AroundTwoBlocks(Net):
    """One checkpoint over several Units: an early block recomputes while a late one is open."""

    def __init__(self) -> None:
        super().__init__(blocks=4)

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        def two(x: Tensor, first: int) -> Tensor:
            result: Tensor = self.blocks[first + 1](self.blocks[first](x))
            return result

        return recomputed(two, recomputed(two, x, 0), 2)


class AroundAll(Net):
    """One checkpoint over all blocks and some of the root, whose output is no block's."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        def all_blocks(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return torch.tanh(self.first(x))

        return recomputed(all_blocks, x)


class RecomputedInsideRecomputed(Net):
    """A checkpoint inside a checkpoint."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        def all_blocks(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = recomputed(block, x)
            return x

        return recomputed(all_blocks, x)


class Reentrant(Net):
    """The old kind of checkpointing, which runs a backward pass inside the backward pass."""

    def middle(self, x: Tensor, flag: Tensor) -> Tensor:
        for block in self.blocks:
            x = recomputed(block, x, reentrant=True)
        return x


NETS: dict[str, type[Net]] = {
    cls.__name__: cls
    for cls in (
        Net,
        TwiceInARow,
        ThereAndBack,
        LastFirst,
        Recursive,
        OneOfTwo,
        SkipsTheLast,
        SkipsAll,
        Siblings,
        Branches,
        Nested,
        SameOutput,
        Leaves,
        Whole,
        Shared,
        ReturnsDict,
        ReturnsDataclass,
        ChangedInPlace,
        SideLosses,
        TiedAcrossBlocks,
        TiedInsideABlock,
        Adapters,
        FrozenBlock,
        FrozenRoot,
        OddShapes,
        Unused,
        ExtraHead,
        Hooked,
        Normed,
        AroundABlock,
        InsideABlock,
        AroundTwoBlocks,
        AroundAll,
        RecomputedInsideRecomputed,
        Reentrant,
    )
}
