"""Stages that are not alike: one without trained weights, a tied weight that one stage does not use, batch norm that is
computed again, a list of layers with buffers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError, UsageError
from tests.engine.nets import VOCABULARY, Language, seeded
from tests.engine.test_model_parallel import Layout, model_of

F32 = torch.float32


def batch(step: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, VOCABULARY, (2, rows, 5), generator=generator)
    return tokens, targets


class TwoHeads(Language):
    """The tied head is there, but the loss takes another one: the last stage does not use the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(self.norm.normalized_shape[0], VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.other(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Counted(nn.Module):
    """A block with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.norm(torch.tanh(self.up(x)))
        return result


def run(world: Any, make: Any, mesh: dict[str, int], steps: int = 3, **config: Any) -> dict[str, Any]:
    """Losses, rates and the state after some steps."""
    model = make()
    engine = shardwise.initialize(
        model, {"mesh": mesh, "batch": {"accumulation": 2}, "optimizer": {"lr": 0.01}, **config}, world=world
    )
    results = [engine.train_step([batch(2 * step), batch(2 * step + 1)]) for step in range(steps)]
    lr, state = engine.lr, engine.state_dict()
    tied = [
        bucket.weight.shard.clone() for buckets in engine._parts.shared.tied.values() for bucket in buckets
    ]
    engine.close()
    lrs = [*(r.lr for r in results), lr]
    return {"losses": [r.loss for r in results], "lrs": lrs, "state": state, "tied": tied}


def frozen_front() -> nn.Module:
    model = seeded(Language, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.2", "blocks.3", "norm")))
    return model


def frozen_run(world: Any, mesh: dict[str, int], precision: str) -> dict[str, Any]:
    make = frozen_front if precision == "fp64" else lambda: frozen_front().to(F32)
    return run(world, make, mesh, precision=precision, pipeline={"partition": ["blocks.2"]})


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
def test_a_stage_without_trained_weights(ranks: Any, precision: str) -> None:
    """It scales the loss and logs the rate as the others do."""
    (one,) = ranks(1).run(frozen_run, {}, precision)
    for two in ranks(2).run(frozen_run, {"pp": 2}, precision):
        limit = 1e-12 if precision == "fp64" else 2e-3
        assert two["losses"] == pytest.approx(one["losses"], rel=limit)
        assert two["lrs"] == one["lrs"] == [0.01] * 4


def two_heads(world: Any, mesh: dict[str, int]) -> dict[str, Any]:
    return run(world, lambda: seeded(TwoHeads), mesh, pipeline={"partition": ["blocks.1"]})


def test_a_tied_weight_that_one_stage_does_not_use(ranks: Any) -> None:
    (one,) = ranks(1).run(two_heads, {})
    first, last = ranks(2).run(two_heads, {"pp": 2})
    assert torch.equal(first["tied"][0], last["tied"][0])
    for two in (first, last):
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-12)
        for name, tensor in one["state"].items():
            torch.testing.assert_close(two["state"][name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scope", ["full", "selective"])
def test_batch_statistics_are_counted_once(scope: str) -> None:
    def statistics(recompute: str) -> dict[str, Tensor]:
        model = seeded(lambda: nn.Sequential(Counted(), Counted()))
        engine = shardwise.initialize(
            model, {"recompute": recompute}, loss=lambda model, x: model(x).square().mean()
        )
        for step in range(2):
            engine.train_step(
                [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))]
            )
        return {
            name: tensor for name, tensor in engine.state_dict().items() if "running" in name or "num" in name
        }

    once, again = statistics("none"), statistics(scope)
    assert int(once["0.norm.num_batches_tracked"]) == 2
    for name in once:
        torch.testing.assert_close(again[name], once[name])


def layers_with_buffers(world: Any, mesh: dict[str, int]) -> list[float]:
    model = shardwise.Layers(
        [shardwise.LayerSpec(nn.Linear, 4, 4), shardwise.LayerSpec(nn.BatchNorm1d, 4), torch.tanh]
        + [shardwise.LayerSpec(nn.Linear, 4, 1)],
        loss=nn.functional.mse_loss,
    )
    engine = shardwise.initialize(model, {"mesh": mesh, "pipeline": {"partition": "uniform"}}, world=world)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=draw), torch.randn(6, 1, generator=draw)
    losses = [engine.train_step([(x, y)]).loss for _ in range(3)]
    engine.close()
    return losses


def test_a_list_of_layers_with_buffers(ranks: Any) -> None:
    (one,) = ranks(1).run(layers_with_buffers, {})
    assert ranks(2).run(layers_with_buffers, {"pp": 2}) == [pytest.approx(one, rel=1e-6)] * 2


def foreign_weights(world: Any) -> tuple[int, int]:
    model = model_of(Layout())
    engine = shardwise.initialize(model, {"mesh": {"pp": 2}}, world=world)
    held = {id(p) for stage in engine._parts.stages for p in stage.module.parameters()}
    foreign = [p for p in model.parameters() if id(p) not in held]
    for parameter in foreign:
        with pytest.raises(UsageError, match="lives on another stage"):
            parameter.isnan()
    with torch._C.DisableTorchFunctionSubclass():
        return len(foreign), sum(p.untyped_storage().nbytes() for p in foreign)


def test_weights_of_other_stages_take_no_memory(ranks: Any) -> None:
    for count, held_bytes in ranks(2).run(foreign_weights):
        assert count > 0 and held_bytes == 8 * count


def refused_output(world: Any) -> str:
    class Odd(Language):
        def forward(self, tokens: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
            loss = super().forward(tokens, targets)
            return {"loss": loss, "cache": object()}

    engine = shardwise.initialize(seeded(Odd), {"mesh": {"pp": 2}, "comm": {"timeout_s": 10.0}}, world=world)
    try:
        engine.predict([batch(0)])
    except PlanError as error:
        return str(error)
    return ""


def test_an_output_that_cannot_travel_is_refused_on_every_rank(ranks: Any) -> None:
    for message in ranks(2).run(refused_output):
        assert "cannot travel" in message


def too_few_weights(world: Any) -> str:
    engine = shardwise.initialize(
        seeded(Language), {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, world=world
    )
    with pytest.raises(UsageError) as caught:
        engine.train_step([batch(0), batch(1)], [1.0])
    assert engine.timeline() is not None
    return str(caught.value)


def test_too_few_weights(ranks: Any) -> None:
    assert all("2 microbatches but 1 weights" in message for message in ranks(2).run(too_few_weights))


def unkeyed(world: Any) -> str:
    model = model_of(Layout())
    model.blocks[0].mlp.dropout = nn.Dropout2d(0.5)
    with pytest.raises(PlanError) as caught:
        shardwise.initialize(model, {"mesh": {"tp": 2}}, world=world)
    return str(caught.value)


def test_dropout_that_would_differ_between_ranks_is_refused(ranks: Any) -> None:
    assert all("blocks.0.mlp.dropout" in message for message in ranks(2).run(unkeyed))


def masks(world: Any) -> list[float]:
    layout = Layout(dropout=0.5)
    engine = shardwise.initialize(model_of(layout), {"mesh": {"tp": world.size}}, world=world)
    tokens = torch.arange(12).remainder(VOCABULARY)[None]
    (logits,) = engine.predict([tokens])
    return [float(x) for x in logits.flatten()[:50]]


def test_a_pass_without_gradients_draws_the_masks_of_one_rank(ranks: Any) -> None:
    """In training mode: the sequence is whole there."""
    (one,) = ranks(1).run(masks)
    for two in ranks(2).run(masks):
        assert two == pytest.approx(one, rel=1e-9)


class Projected(Language):
    """A cut pair of matrices in front of the blocks: foreign to the last stage, where they must not sum anything."""

    def __init__(self) -> None:
        super().__init__()
        width = self.norm.normalized_shape[0]
        self.wide, self.narrow = nn.Linear(width, 8), nn.Linear(8, width)
        blocks, norm, head = self.blocks, self.norm, self.head
        del self.blocks, self.norm, self.head
        self.blocks, self.norm, self.head = blocks, norm, head

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.narrow(torch.tanh(self.wide(self.embed(tokens))))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def projected(world: Any, mesh: dict[str, int]) -> list[float]:
    table = {"embed": "replicate", "wide": "column", "narrow": "row", "blocks.*.norm": "replicate"}
    table |= {
        "blocks.*.up": "replicate",
        "blocks.*.down": "replicate",
        "norm": "replicate",
        "head": "replicate",
    }
    tensor = {"table": table, "sequence_parallel": False}
    pipeline = {"partition": ["blocks.1"]}
    losses: list[float] = run(world, lambda: seeded(Projected), mesh, tensor=tensor, pipeline=pipeline)[
        "losses"
    ]
    return losses


def test_cut_matrices_in_front_of_the_blocks(ranks: Any) -> None:
    (one,) = ranks(1).run(projected, {})
    for four in ranks(4).run(projected, {"pp": 2, "tp": 2}):
        assert four == pytest.approx(one, rel=1e-12)
