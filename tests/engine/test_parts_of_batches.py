"""A pipeline of a list of layers: the first stage is given inputs, the last one targets, the others None."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.parallel.pipeline.layers import Layers, LayerSpec, TiedSpec
from tests.engine.nets import Block
from tests.engine.plain import worst


def logits(module: nn.Module, x: Tensor) -> Tensor:
    weight: Any = module.weight
    return x @ weight.T


def language() -> Layers:
    """With dropout, whose numbers hang on the place of a sample in the global batch."""
    return Layers(
        [
            TiedSpec("embedding", nn.Embedding, 11, 6),
            LayerSpec(Block, 6),
            nn.Dropout(0.3),
            LayerSpec(Block, 6),
            LayerSpec(Block, 6),
            TiedSpec("embedding", nn.Embedding, 11, 6, forward=logits),
        ],
        loss=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    )


def piece(step: int, i: int) -> tuple[Tensor, Tensor]:
    """Unlike numbers of labels."""
    generator = torch.Generator().manual_seed(10 * step + i)
    tokens = torch.randint(11, (2, 5), generator=generator)
    targets = tokens.roll(1, 1)
    targets[0, : 1 + i] = -100
    return tokens, targets


def run(world: World, brings: str, partition: Any) -> dict[str, Any]:
    pipeline = {"pipeline": {"partition": partition}} if world.size > 1 else {}
    engine = shardwise.initialize(
        language(),
        {"mesh": {"pp": world.size}, "batch": {"accumulation": 3}, "precision": "fp64", **pipeline},
        world=world,
    )

    def part(batch: tuple[Tensor, Tensor]) -> Any:
        is_first, is_last = world.rank == 0, world.rank == world.size - 1
        if brings == "all" or (is_first and is_last):
            return batch
        if is_first or is_last:
            pair = batch[0] if is_first else None, batch[1] if is_last else None
            return dict(zip(("inputs", "targets"), pair, strict=True)) if brings == "named" else pair
        return None

    found: dict[str, Any] = {}
    for step in range(3):
        result = engine.train_step([part(piece(step, i)) for i in range(3)])
        found[f"step {step}"] = torch.tensor([result.loss, result.grad_norm, result.weight])
    if world.size > 1:
        assert not engine.trace.divergences
    found["evaluated"] = torch.tensor(engine.evaluate([(part(piece(9, 0)), 9.0), (part(piece(9, 1)), 8.0)]))
    engine.eval()
    with torch.no_grad():
        tokens = piece(9, 0)[0]
        outputs = engine.predict([(tokens,) if world.rank == 0 else None])
        kept = engine.predict([(tokens,) if world.rank == 0 else None], everywhere=False)
    found["predicted"] = outputs[0]
    assert torch.equal(kept[0], outputs[0]) if world.rank == world.size - 1 else kept == []
    found |= engine.state_dict()
    if world.size > 1:
        for what, missing in (("inputs", 0), ("targets", world.size - 1)):
            batches = [part(piece(4, i)) for i in range(3)]
            if world.rank == missing:
                batches[1] = None
            with pytest.raises(UsageError, match=f"was given no {what} for microbatch 1"):
                engine.train_step(batches)
        with pytest.raises(UsageError, match="the first stage, rank 0, was given no inputs"):
            engine.evaluate([(None, 1.0)])
        engine.train_step([part(piece(5, i)) for i in range(3)])
    engine.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_bring_what_their_stages_read(ranks: Any, size: int) -> None:
    (wanted,) = ranks(1).run(run, "all", "parameters")
    for brings, partition in (
        ("parts", "type:block" if size == 2 else ["1", "3", "4"]),
        ("named", "parameters"),
    ):
        if brings == "named" and size == 4:
            continue
        for found in ranks(size).run(run, brings, partition):
            assert worst(found, wanted) <= 1e-10
