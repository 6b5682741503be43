"""Seconds of a step are counted bytes and operations over rates, less what runs beside computation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.hardware import Hardware, Neighbours, Product, even_hardware
from shardwise.comm.world import World
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.pipeline.passes import add_communication, nominal_s
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.parallel.zero.cost import unit_bytes
from shardwise.plan.action import F, Kind
from shardwise.plan.dataflow import timeline_of
from shardwise.plan.timeline import USES, Span, Timeline, Use
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.price import StepSeconds, replay_timeline, step_seconds
from shardwise.simulate.work import Work
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


def rates(**given: float) -> Hardware:
    names = ("flops_s", "host_bytes_s", "device_bytes_s", "link_bytes_s", "disk_bytes_s", "exchange_bytes_s")
    every: dict[str, Any] = dict.fromkeys(names, NEVER) | given
    return even_hardware("given", **every)


def priced(known: JobFacts, is_cpu: bool = False, **given: float) -> Mapping[Use, float]:
    plan, device = known.outlook(known.settings.offload).plan, "cpu" if is_cpu else "cuda"
    return step_seconds(plan, known.policies, known.passed, rates(**given), device, data_s=0.0).spent


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
    told = [
        unit_bytes(unit, each, plan.mesh, True) for unit, each in zip(plan.units, strategies, strict=True)
    ]
    moved = [row for row in ranks(2).run(sent_bytes, given)[0] if row[0] in ("UNSHARD", "REDUCE")]
    assert any(nbytes for _, _, nbytes in moved)
    for kind, unit, nbytes in moved:
        assert nbytes == (told[unit].gather if kind == "UNSHARD" else told[unit].reduce)


def measured(world: World, given: dict[str, Any]) -> tuple[Any, ...]:
    """Of a real step: seconds read off its timeline, waits by axis, and (predicted, measured)."""
    settings = {"batch": {"duplicates": "allow", "accumulation": 4}, "check_first_step": "off"}
    engine = shardwise.initialize(gpt(), settings | given, world=world)
    engine.measure_waits()
    for _ in range(2):
        engine.train_step([tokens()] * 4)
    timeline = Timeline.of(engine.trace.spans(world.rank))
    found = (
        StepSeconds.of(timeline),
        engine.trace.waits.seconds(),
        timeline.lanes(world.rank),
        engine.timeline(),
    )
    engine.close()
    return found


@pytest.mark.parametrize("given", [{"zero": {"stage": 3}}, {"mesh": {"pp": 2}}], ids=str)
def test_a_measured_step_is_read_as_a_foreseen_one(ranks: Any, given: dict[str, Any]) -> None:
    for told, waits, lanes, drawn in ranks(2).run(measured, given):
        assert told.total == sum(told.spent.values()) > 0 and told.low_s == told.high_s == told.total
        exposed = sum(seconds for axis, seconds in waits.items())
        assert told.spent["exchange"] + told.spent["bubble"] == pytest.approx(exposed, rel=0.01)
        assert told.spent["compute"] > 0 < told.spent["update"]
        assert lanes["compute"] == told.spent["compute"] and lanes["update"] == told.spent["update"]
        predicted, seen = drawn
        assert {span.lane for row in seen.spans.values() for span in row} >= {"compute", "exchange", "wait"}
        assert predicted.typical_pass_s() == pytest.approx(seen.typical_pass_s(), rel=1e-6)
        assert list(seen.spans) == list(range(given.get("mesh", {}).get("pp", 1)))
        for rank in seen.spans:
            assert seen.passes(rank)
            assert [span.action for span in predicted.passes(rank)] == [
                span.action for span in seen.passes(rank)
            ]


@pytest.mark.parametrize(
    ("ranks", "per_host", "factor"), [(1, None, 0.5), (2, None, 2.0), (2, 1, 0.5), (4, 2, 2.0)]
)
def test_passes_take_longer_beside_other_ranks_of_their_host(
    ranks: int, per_host: int | None, factor: float
) -> None:
    known = read(gpt, {}, ranks, CPU, tokens())
    plan = known.outlook(known.settings.offload).plan
    alone = rates(flops_s=1e9, host_bytes_s=1e9)
    told = [
        step_seconds(plan, known.policies, known.passed, hardware, "cpu", per_host, data_s=0.0).spent
        for hardware in (alone, replace(alone, neighbours=Neighbours(passes=((1.0, 0.5), (2.0, 2.0)))))
    ]
    passes_s = sum(
        share.work.seconds(alone, share.touched_bytes, "host") for share in known.passed[0].shares.values()
    )
    assert passes_s > 0
    assert told[1]["compute"] - told[0]["compute"] == pytest.approx((factor - 1) * passes_s)


@pytest.mark.parametrize(
    "shape", [("1f1b", 4, 6), ("gpipe", 2, 3), ("interleaved_1f1b", 2, 4, 2), ("zb_v", 3, 5)]
)
def test_the_walk_with_given_passes_is_the_proof_of_the_schedule(shape: tuple[Any, ...]) -> None:
    lists = add_communication(schedule(*shape), shape[1], folded=shape[0] == "zb_v")
    replayed, proved = replay_timeline(lists, nominal_s), timeline_of(lists, nominal_s)
    for rank in lists:
        assert replayed.passes(rank) == proved.passes(rank)
    assert replayed.idle_share == pytest.approx(proved.idle_share)


def test_a_price_is_a_range() -> None:
    spans = [Span(0, F(0, 0), 0.0, 6.0), Span(0, F(0, 0), 2.0, 4.0, "wait", "dp", True)]
    timeline = Timeline.of(spans)
    spread: dict[Use, tuple[float, float]] = dict.fromkeys(USES, (1.0, 1.0))
    spread |= {"compute": (0.9, 1.2), "exchange": (0.5, 2.0)}
    wide = StepSeconds.of(timeline, spread=spread)
    assert (wide.low_s, wide.high_s) == (pytest.approx(4 * 0.9 + 1.0), pytest.approx(4 * 1.2 + 4.0))
    narrow = StepSeconds.of(timeline, spread=spread, widest=1.4)
    assert narrow.high_s == pytest.approx(1.4 * narrow.low_s)
    assert wide.low_s < narrow.low_s < narrow.total == 6.0 < narrow.high_s < wide.high_s
    assert (narrow.spent["compute"], narrow.exposed) == (4.0, {"dp": 2.0})


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
    assert bare["compute"] == pytest.approx(0) and compute["exchange"] == pytest.approx(0, abs=1e-3)
    assert bare["exchange"] < compute["compute"] / 2  # what one takes fits beside the other
    both = priced(known, flops_s=1e9, exchange_bytes_s=1e7)
    blocks = known.outlook(known.settings.offload).plan.units[2].weight_bytes / 2 / 1e7
    assert 0 < both["exchange"] < 4 * blocks < bare["exchange"] / 3
    on_cpu = priced(known, is_cpu=True, flops_s=1e9, exchange_bytes_s=1e7)
    assert on_cpu["exchange"] > bare["exchange"]  # nothing is covered, and the ranks add themselves


def test_updates_on_a_disk_hide_behind_the_next_forward_pass() -> None:
    def of(step: str) -> Mapping[Use, float]:
        offload = {"optimizer": "disk", "disk_path": "/tmp", "step": step}
        known = read(gpt, {"offload": offload}, 1, CPU, tokens())
        return priced(known, is_cpu=True, flops_s=2e9, disk_bytes_s=2e8)

    at_end, before_use, delayed = (of(step)["waits"] for step in ("at_end", "before_use", "delayed"))
    assert at_end > 3 * before_use > 0 and before_use > delayed
    alone = read(gpt, {}, 1, CPU, tokens())
    assert of("at_end")["compute"] == pytest.approx(priced(alone, is_cpu=True, flops_s=2e9)["compute"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_waits_for_its_bubble(schedule: str) -> None:
    given = {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}, "batch": {"accumulation": 5}}
    known = read(gpt, given, 2, CPU, tokens())
    plan = known.outlook(known.settings.offload).plan
    alike = {}
    for stage, ranks in enumerate(plan.classes.values()):
        unit = ranks.units_of(stage)[-1].name
        forward, backward = (UnitPass(0, 0, n, work=Work({Product("product", "fp32", n): 1})) for n in (1, 2))
        alike[stage] = MeasuredPass({(Kind.F, unit): forward, (Kind.B, unit): backward}, 0)
    found = step_seconds(plan, known.policies, alike, rates(flops_s=1.0), "cpu").spent
    assert found["compute"] == pytest.approx(5 * 3)
    assert found["bubble"] == pytest.approx(bubble_s(2, 5))
    slow = step_seconds(plan, known.policies, known.passed, rates(exchange_bytes_s=1e6), "cpu").spent
    message = 4 * 64 * 64 * 4
    assert slow["exchange"] == pytest.approx(2 * 5 * message / 2 / 1e6, rel=0.01), "and the norm's numbers"


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
    assert 0 == both["waits"] < part["waits"] < bare["waits"]


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
    assert priced(known, link_bytes_s=1e8)["waits"] == pytest.approx(5 * 2 * half / 1e8, rel=0.02), (
        "down and back"
    )
    assert known.passed is not None
    silent = known.passed[0]._replace(
        shares={key: share._replace(exchanges=()) for key, share in known.passed[0].shares.items()}
    )
    alone = priced(known._replace(passed={0: silent}), exchange_bytes_s=1e8)
    assert alone["waits"] == pytest.approx(5 * half / 1e8, rel=0.01)
