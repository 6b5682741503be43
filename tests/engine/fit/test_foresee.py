"""What a step takes, foreseen from shapes, is what it takes when it runs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.base.ragged import Ragged
from shardwise.base.words import bytes_text
from shardwise.comm.world import World
from shardwise.data.clicks import ClickBatch
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.engine.fit.foresee import foresee, read
from shardwise.models import Gpt, GptPolicy
from shardwise.models.ctr.build import build_ctr
from shardwise.models.ctr.policy import CTR_POLICIES
from shardwise.parallel.embedding.policy import TablesPolicy
from shardwise.plan.action import Kind
from shardwise.simulate.passes import LiveBytes
from shardwise.simulate.storages import added

SHAPE: dict[str, Any] = {"layers": 4, "width": 64, "heads": 4, "context": 64, "vocab": 256}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"recompute": {"scope": "selective", "blocks": 2}},
    {"tiles": {"logits": 32, "mlp": 64}},
    {"precision": "bf16", "batch": {"accumulation": 2}},
]


def gpt(**given: Any) -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(SHAPE | given))


def tokens(rows: int = 4) -> dict[str, Tensor]:
    ids = torch.arange(rows * 64).view(rows, 64)
    return {"tokens": ids, "targets": ids}


def passing(step: Any) -> int:
    """Bytes at the peak of what comes and goes within a step."""
    return sum(step.peak.rows.get(row, 0) for row in ("gradients", "leaving", "kept", "received", "at work"))


def added_nets(passed: Any) -> dict[Any, int]:
    """Storages that a pass leaves, by origin."""
    total: dict[Any, int] = {}
    for share in passed.shares.values():
        total = added(total, share.net)
    return total


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_the_peak_of_a_step_is_foreseen(given: dict[str, Any]) -> None:
    step = foresee(gpt, given, example=tokens()).step
    assert step is not None
    batches = [tokens()] * given.get("batch", {}).get("accumulation", 1)
    engine = shardwise.initialize(gpt(), given)
    engine.train_step(batches)
    with LiveBytes() as live:
        engine.train_step(batches)
    engine.close()
    assert 0.97 * passing(step) <= live.most <= passing(step)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pass_of_a_stage_ends_all_that_it_keeps(recompute: str) -> None:
    """Blocks that are passed over in the measurement must not leave a gradient each: microbatches would add up."""
    settings = {"mesh": {"pp": 2}, "batch": {"accumulation": 4}, "recompute": recompute}
    known = read(lambda: gpt(layers=8), settings, 2, torch.device("cuda"), tokens())
    for stage, passed in known.passed.items():
        assert sum(share.net_bytes for share in passed.shares.values()) == 0, f"stage {stage}"
        assert not [each for each in added_nets(passed).values() if each]


def test_a_pass_that_depends_on_numbers_leaves_model_state_and_says_where() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x).sum()
            return y if y.item() > 0 else -y

    found = foresee(Chooses, {}, example=torch.zeros(2, 4))
    assert found.step is None and found.bytes_per_rank()["weights"] == 128
    (said,) = found.assumes
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "y.item() > 0" in text)
    assert said.startswith("model state alone") and f"of the model (Chooses), at {__file__}:{line}" in said
    with pytest.raises(UsageError, match="fits: model state alone: .*depends on its numbers"):
        shardwise.fits(Chooses, {}, {"device": "1 GiB"}, torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("given", "count", "named"),
    [
        ({}, 2, set()),
        ({"mesh": {"tp": 2}}, 2, {"check_first_step"}),
        ({"mesh": {"tp": 2}, "check_first_step": "off"}, 2, set()),
        ({"compile": "blocks"}, 1, {"compile"}),
    ],
    ids=str,
)
def test_what_is_not_counted_is_named(given: dict[str, Any], count: int, named: set[str]) -> None:
    found = foresee(gpt, given, count, example=tokens())
    assert {said.partition(":")[0] for said in found.assumes} == named
    size = 4 * sum(each.nbytes for each in gpt().parameters())
    assert all(bytes_text(size) in said for said in found.assumes if said.startswith("check_first_step"))


def test_tables_are_foreseen_by_their_vectors() -> None:
    """``foresee`` ended in ".numpy() is not supported for tensor subclasses" at the rows of a table."""
    schema = ClickSchema(("a", "b", "c"), (SparseFeature("user"), SparseFeature("item")))
    keys = Ragged(torch.arange(32), torch.arange(33))
    batch = ClickBatch(dense=torch.zeros(32, 3), sparse={"user": keys, "item": keys}, labels=torch.zeros(32))
    known = read(
        lambda: build_ctr(CTR_POLICIES["dlrm"](width=4), schema, TablesPolicy(), {"user": 50, "item": 50}),
        {},
        1,
        torch.device("cpu"),
        batch,
    )
    outlook = known.outlook(known.settings.offload)
    assert outlook.step is not None and outlook.step.rows["tables"] == outlook.plan.bytes_per_rank()["tables"]
    assert outlook.assumes[0].startswith("tables: ")
    found = known.reasons(outlook.plan, outlook.step, outlook.step.points["step"])
    assert any(each.row == "kept" and "ctr" in each.line for each in found)


EXPERTS = {"count": 4, "hidden": 64, "router": {"capacity": 1.25}}


def most_held(world: World, model: dict[str, Any], given: dict[str, Any]) -> int:
    """Bytes that come and go in a step, at most."""
    batches = [tokens()] * given.get("batch", {}).get("accumulation", 1)
    batch = given.get("batch", {}) | {"duplicates": "allow"}
    engine = shardwise.initialize(
        gpt(**model), given | {"batch": batch, "check_first_step": "off"}, world=world
    )
    engine.train_step(batches)
    with LiveBytes() as live:
        engine.train_step(batches)
    engine.close()
    return live.most


@pytest.mark.parametrize(
    "given",
    [{"mesh": {"tp": 2}}, {"mesh": {"tp": 2}, "tensor": {"overlap": 3}}, {"zero": {"stage": 3}}],
    ids=str,
)
def test_the_peak_of_several_ranks_is_foreseen(ranks: Any, given: dict[str, Any]) -> None:
    step = foresee(gpt, given, 2, example=tokens()).step
    assert step is not None
    for most in ranks(2).run(most_held, {}, given):
        assert 0.95 * passing(step) <= most <= 1.02 * passing(step)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pipeline": {"schedule": "gpipe"}, "zero": {"stage": 1}},
        {"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}},
        {"pipeline": {"schedule": "zb_h1"}},
        {"pipeline": {"schedule": "zb_v"}},
        {"recompute": "full", "precision": "bf16"},
    ],
    ids=str,
)
def test_the_peak_of_each_stage_is_foreseen(ranks: Any, given: dict[str, Any]) -> None:
    given = given | {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}
    outlook = foresee(gpt, given, 2, example=tokens())
    found = ranks(2).run(most_held, {}, given)
    for step, most in zip(outlook.steps, found, strict=True):
        assert 0.98 * passing(step) <= most <= 1.01 * passing(step)
    assert outlook.step is not None and outlook.step.rank == found.index(max(found))


@pytest.mark.parametrize(
    ("recompute", "delay", "most"), [("none", None, 2), ("full", None, 1), ("full", 1, 2)], ids=str
)
def test_recomputed_stages_keep_no_products_waiting(recompute: str, delay: int | None, most: int) -> None:
    """What waits for W are the inputs of layers, so that recomputation would save them only until I."""
    given = {
        "mesh": {"pp": 2},
        "batch": {"accumulation": 4},
        "recompute": recompute,
        "pipeline": {"schedule": "zb_h1", "wgrad_delay": delay},
    }
    found = 0
    for actions in foresee(gpt, given, 2).plan.actions.values():
        waiting = set()
        for action in actions:
            if action.kind is Kind.I:
                waiting.add(action.microbatch)
            elif action.kind is Kind.W:
                waiting.discard(action.microbatch)
            found = max(found, len(waiting))
    assert found == most


@pytest.mark.parametrize("given", [{}, {"experts": {"rows": 128}}, {"recompute": "full"}], ids=str)
def test_the_peak_of_experts_is_foreseen(given: dict[str, Any]) -> None:
    outlook = foresee(lambda: gpt(experts=EXPERTS), given, example=tokens())
    step = outlook.step
    assert step is not None and "where routers choose evenly" in outlook.assumes[0]
    assert ("128 pairs" in outlook.assumes[0]) == ("experts" in given)
    engine = shardwise.initialize(gpt(experts=EXPERTS), given)
    engine.train_step([tokens()])
    with LiveBytes() as live:
        engine.train_step([tokens()])
    engine.close()
    assert 0.9 * passing(step) <= live.most <= 1.01 * passing(step)


@pytest.mark.parametrize(
    "given",
    [{"mesh": {"ep": 2}}, {"mesh": {"ep": 2}, "experts": {"exchange": "blocks"}}, {"mesh": {"tp": 2}}],
    ids=str,
)
def test_the_peak_of_experts_on_several_ranks_is_foreseen(ranks: Any, given: dict[str, Any]) -> None:
    step = foresee(lambda: gpt(experts=EXPERTS), given, 2, example=tokens()).step
    assert step is not None
    for most in ranks(2).run(most_held, {"experts": EXPERTS}, given):
        # What is foreseen holds the buffer of the experts' gradients beside the gate's gradients of all groups, which
        # are computed at once where rows are few. When the step makes the buffer, the gate's gradients are gone.
        assert 0.92 * passing(step) <= most <= 1.05 * passing(step)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_receive_into_memory_on_a_device(precision: str) -> None:
    """At the peak one Unit's sum is under way behind the backward pass; CPU ranks add where the gradients lie."""
    given = {"precision": precision, "zero": {"stage": 2}}
    few = {name: ids[:, :4] for name, ids in tokens(1).items()}  # so that gradients make the peak
    there, here = (
        foresee(gpt, given, ranks=2, device=torch.device(name), example=few).step for name in ("cuda", "cpu")
    )
    assert there is not None and here is not None and "reducing" not in here.peak.rows
    plan = foresee(gpt, given, ranks=2, device=torch.device("cuda")).plan
    held = [
        sum(
            bucket.elements * 2 if precision == "bf16" else bucket.shard_elements * 4
            for bucket in unit.buckets
        )
        for unit in plan.units
    ]
    assert there.peak.rows["reducing"] in {*held, *(a + b for a, b in pairwise(held))}
