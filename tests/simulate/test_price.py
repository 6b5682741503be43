"""Seconds of a step are counted bytes and operations over rates, less what runs beside computation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.rates import RankRates
from shardwise.comm.world import World
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.zero.cost import unit_bytes
from shardwise.plan.action import Kind
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.price import StepSeconds, step_seconds
from tests.parallel.pipeline.closed_forms import bubble_s
from tests.parallel.tensor.closed_forms import elements_sent_per_pass

CPU = torch.device("cpu")
NEVER = 1e30
"""Bytes a second of what takes no time."""


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy(layers=6, width=64, heads=4, context=64, vocab=256))


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(4 * 64).view(4, 64)
    return {"tokens": ids, "targets": ids}


def rates(**given: float) -> RankRates:
    return RankRates(**(dict.fromkeys(RankRates._fields, NEVER) | given))


def priced(known: JobFacts, is_cpu: bool = False, **given: float) -> StepSeconds:
    plan = known.outlook(known.settings.offload).plan
    return step_seconds(plan, known.policies, known.passed, rates(**given), is_cpu)


def sent_bytes(world: World, given: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Of the Actions of a step: kind, Unit, bytes that its trace has."""
    settings = {"batch": {"duplicates": "allow"}, "check_first_step": "off"}
    engine = shardwise.initialize(gpt(), settings | given, world=world)
    for _ in range(2):
        engine.train_step([tokens()])
    found = [(done.action.kind.name, done.action.unit, done.bytes) for done in engine.trace.rows()]
    engine.close()
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"zero": {"stage": 0}},
        {"zero": {"stage": 1}, "precision": "bf16"},
        {"zero": {"stage": 3}},
        {"zero": {"stage": 3}, "mesh": {"dp": {"replicate": 2, "shard": 1}}},
    ],
    ids=str,
)
def test_bytes_between_ranks_are_those_of_the_trace(ranks: Any, given: dict[str, Any]) -> None:
    plan = shardwise.foresee(gpt, given, 2).plan
    strategies = plan.own.strategies
    told = [unit_bytes(unit, each, plan.mesh) for unit, each in zip(plan.units, strategies, strict=True)]
    moved = [row for row in ranks(2).run(sent_bytes, given)[0] if row[0] in ("UNSHARD", "REDUCE")]
    assert any(nbytes for _, _, nbytes in moved)
    for kind, unit, nbytes in moved:
        assert nbytes == (told[unit].gather if kind == "UNSHARD" else told[unit].reduce)


@pytest.mark.parametrize("overlap", ["auto", 3, "symmetric_memory"])
def test_what_slices_send_is_in_their_pass(overlap: Any) -> None:
    known = read(gpt, {"mesh": {"tp": 2}, "tensor": {"overlap": overlap}}, 2, CPU, tokens())
    sent = sum(share.sent_bytes for share in known.passed[0].shares.values())
    assert sent == 4 * elements_sent_per_pass(6, 4, 64, 64, 2, sequence=True)


def test_gathers_hide_behind_computation_on_devices_alone() -> None:
    given = {"zero": {"stage": 3, "prefetch_bytes": 1 << 20, "reductions_under_way": 1}}
    known = read(gpt, given, 2, CPU, tokens())
    compute = priced(known, flops_s=1e9)
    bare = priced(known, exchange_bytes_s=1e7)
    assert bare.compute == pytest.approx(0) and compute.exchange == pytest.approx(0)
    assert bare.exchange < compute.compute / 2  # what one takes fits beside the other
    both = priced(known, flops_s=1e9, exchange_bytes_s=1e7)
    blocks = known.outlook(known.settings.offload).plan.units[2].weight_bytes / 2 / 1e7
    assert 0 < both.exchange < 4 * blocks < bare.exchange / 3
    on_cpu = priced(known, is_cpu=True, flops_s=1e9, exchange_bytes_s=1e7)
    assert on_cpu.exchange == pytest.approx(bare.exchange)


def test_updates_on_a_disk_hide_behind_the_next_forward_pass() -> None:
    def of(step: str) -> StepSeconds:
        offload = {"optimizer": "disk", "disk_path": "/tmp", "step": step}
        known = read(gpt, {"offload": offload}, 1, CPU, tokens())
        return priced(known, is_cpu=True, flops_s=2e9, disk_bytes_s=2e8)

    at_end, before_use, delayed = (of(step).waits for step in ("at_end", "before_use", "delayed"))
    assert at_end > 3 * before_use > 0 and before_use > delayed
    alone = read(gpt, {}, 1, CPU, tokens())
    assert of("at_end").compute == pytest.approx(priced(alone, is_cpu=True, flops_s=2e9).compute)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_waits_for_its_bubble(schedule: str) -> None:
    given = {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}, "batch": {"accumulation": 5}}
    known = read(gpt, given, 2, CPU, tokens())
    plan = known.outlook(known.settings.offload).plan
    alike = {}
    for stage, ranks in enumerate(plan.classes.values()):
        unit = ranks.units_of(stage)[-1].name
        alike[stage] = MeasuredPass({(Kind.F, unit): UnitPass(0, 0, 1), (Kind.B, unit): UnitPass(0, 0, 2)}, 0)
    found = step_seconds(plan, known.policies, alike, rates(flops_s=1.0), True)
    assert found.compute == pytest.approx(5 * 3)
    assert found.bubble == pytest.approx(bubble_s(2, 5))
    slow = step_seconds(plan, known.policies, known.passed, rates(exchange_bytes_s=1e6), True)
    message = 4 * 64 * 64 * 4
    assert slow.exchange == pytest.approx(2 * 5 * message / 2 / 1e6)


def test_experts_send_what_even_routing_does() -> None:
    with torch.device("meta"):
        model = Gpt(
            GptPolicy(layers=2, width=64, heads=4, context=64, vocab=256, experts={"count": 4, "hidden": 64})  # type: ignore[arg-type]
        )
    known = read(lambda: model, {"mesh": {"ep": 2}}, 2, CPU, tokens())
    plan = known.outlook(known.settings.offload).plan
    sent = sum(share.sent_bytes for share in known.passed[0].shares.values())
    told = sum(each.rows * 4 * 64 * each.row_bytes for each in plan.exchanges)
    assert sent == pytest.approx(told, rel=0.02)


def test_activations_come_back_beside_computation() -> None:
    given = {"offload": {"activations": "host"}, "tiles": {"logits": "off"}}
    known = read(gpt, given, 1, torch.device("cuda"), tokens())
    bare = priced(known, link_bytes_s=1e8)
    part = priced(known, link_bytes_s=1e8, flops_s=4e9)
    both = priced(known, link_bytes_s=1e8, flops_s=2e8)
    assert 0 == both.waits < part.waits < bare.waits


def test_parts_along_tp_come_by_the_link_and_from_other_ranks() -> None:
    given = {
        "mesh": {"tp": 2},
        "tensor": {"sequence_parallel": False},
        "recompute": "full",
        "offload": {"activations": "host"},
    }
    batch = {name: each.repeat(4, 1) for name, each in tokens().items()}
    known = read(gpt, given, 2, torch.device("cuda"), batch)
    half = 16 * 64 * 64 * 4 / 2  # of the input of each block but the last
    assert priced(known, link_bytes_s=1e8).waits == pytest.approx(5 * 2 * half / 1e8, rel=0.01), (
        "down and back"
    )
    assert known.passed is not None
    silent = known.passed[0]._replace(
        shares={key: share._replace(sent_bytes=0) for key, share in known.passed[0].shares.items()}
    )
    alone = priced(known._replace(passed={0: silent}), exchange_bytes_s=1e8)
    assert alone.waits == pytest.approx(5 * half / 1e8, rel=0.01)
