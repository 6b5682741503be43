"""Every Kind of Action takes time on its lane, and lanes work beside one another."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from shardwise.base.hardware import Neighbours
from shardwise.compose.spec import BufferSpec
from shardwise.plan.action import Kind
from shardwise.plan.exchange_calls import ExchangeCall
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.registry import UpdateRule
from shardwise.simulate.price import StepSeconds
from tests.plan.described import model, plan
from tests.simulate.given import hardware, one_pass, passes, timeline

PYTHON_ALONE = {Kind.RESHARD, Kind.OFFLOAD, Kind.WAIT}
"""Kinds that wait, or that only let go of memory."""
EVERYTHING = {
    "flops_s": 1e6,
    "host_bytes_s": 1e6,
    "device_bytes_s": 1e6,
    "link_bytes_s": 1e6,
    "disk_bytes_s": 1e6,
    "exchange_bytes_s": 1e6,
}


def needing(what: str) -> list[UpdateRule]:
    return [UpdateRule(("exp_avg",), what)]  # type: ignore[arg-type]


def layouts() -> Iterator[Plan]:
    """Plans whose lists together have every Kind that a handler does."""
    two = Mesh(dp_shard=2)
    yield plan(two, 3)
    yield plan(two, 3, on_disk=0.5, weights_too=True)
    yield plan(Mesh(), 1, on_disk=1.0, delayed=True)
    yield plan(two, 1, saves=True)
    yield plan(Mesh(pp=2, tp=2), spec=model(tied=True))
    yield plan(Mesh(pp=2), schedule="zb_h1")
    yield plan(two, 1, updates=needing("norm"))
    both = [*needing("matrix"), UpdateRule(("exp_avg",))]
    yield plan(two, 1, updates=both, group_of=lambda name: int(name.endswith(("norm.weight", "bias"))))
    yield plan(two, 0, spec=model(tables={"users": ("users",)}))
    layers = [f"blocks.{i}.{name}" for i in range(4) for name in ("qkv", "out")]
    yield plan(two, 3, in_fp8=layers)
    spec = model(stack=4)
    routed = {**spec.buffers, "blocks.0.router": BufferSpec((4,), torch.float32, True)}
    yield plan(two, 0, spec=replace(spec, buffers=routed, load_buffers=frozenset({"blocks.0.router"})))


def priced_kinds() -> tuple[set[Kind], set[Kind]]:
    """Kinds in the lists of ``layouts``, and those that take time on any lane but the computation's waits."""
    listed, priced = set(), set()
    for each in layouts():
        listed |= {action.kind for ranks in each.classes.values() for action in ranks.actions}
        passed = passes(each, one_pass(100), one_pass(200))
        found = timeline(each, passed, hardware(**EVERYTHING), "cuda")  # type: ignore[arg-type]
        spans = [span for row in found.spans.values() for span in row if span.lane != "wait"]
        priced |= {span.action.kind for span in spans if span.stop_s > span.start_s}
    return listed, priced


def test_every_kind_that_a_handler_does_has_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    done = {kind for kind in Kind if kind.row.handler is not None}
    assert all(kind.row.moves is not None for kind in done)
    assert {kind for kind in done if kind.row.moves == ()} == PYTHON_ALONE
    listed, priced = priced_kinds()
    received = {Kind.RECV}  # on a device the sender's link alone carries a message
    assert done - PYTHON_ALONE - received <= listed
    assert done - PYTHON_ALONE - received <= priced
    for forgotten in (Kind.NORM, Kind.DELIVER, Kind.SWAP_WEIGHT, Kind.UNSHARD):
        row = forgotten.row
        monkeypatch.setattr(forgotten, "row", replace(row, moves=(), sends="nothing"))
        assert forgotten not in priced_kinds()[1], "a price that was left out is seen"
        monkeypatch.setattr(forgotten, "row", row)


def test_python_takes_time_for_every_action_of_a_cpu_rank() -> None:
    whole = plan(Mesh(dp_shard=2), 3)
    slow = replace(hardware(), action_s=1.0)
    passed = passes(whole, one_pass(1000), one_pass(1000))
    found = StepSeconds.of(timeline(whole, passed, slow))
    assert found.total == pytest.approx(len(whole.own.actions))
    assert 0 < found.spent["rest"] < found.spent["compute"], "in a pass its time is the pass's"
    bare = StepSeconds.of(timeline(whole, passed, hardware(flops_s=10.0), "cuda"))
    both = StepSeconds.of(timeline(whole, passed, replace(slow, peaks={"fp32": 10.0}), "cuda"))
    assert bare.total < both.total < bare.total + 20, "Python runs ahead of a device, until it reads the norm"


def test_each_operation_takes_its_overhead() -> None:
    whole = plan(Mesh(), 0, microbatches=3)
    passed = passes(whole, one_pass(0, calls=5), one_pass(0, calls=7))
    found = StepSeconds.of(timeline(whole, passed, replace(hardware(), operation_s=0.5)))
    assert found.total == found.spent["compute"] == pytest.approx(len(whole.units) * 3 * 12 * 0.5)


def test_exchanges_inside_passes_are_exposed_on_their_axis() -> None:
    whole = plan(Mesh(tp=2, dp_shard=2), 3)
    sends = (ExchangeCall("all_gather", "activations", "tp", 250, 4),)
    passed = passes(whole, one_pass(0, sends=sends), one_pass(0, sends=sends))
    for device in ("cpu", "cuda"):
        found = timeline(whole, passed, hardware(exchange_bytes_s=1e3), device)
        units = len(whole.units)
        assert StepSeconds.of(found).exposed["tp"] == pytest.approx(2 * units * 2 * 1.0, rel=1e-4)
        lanes = found.lanes(0)
        assert lanes["exchange tp"] == pytest.approx(2 * units * 2 * 1.0, rel=1e-4)
        assert lanes["exchange dp_shard"] > 0


def test_what_exchanges_take_of_a_device_slows_the_computation_beside_them() -> None:
    whole = plan(Mesh(dp_shard=2), 3, prefetch_bytes=1 << 20)
    rates = hardware(flops_s=1e2, exchange_bytes_s=1e4)
    passed = passes(whole, one_pass(100), one_pass(200))
    free = StepSeconds.of(timeline(whole, passed, rates, "cuda"))
    links = {**rates.links, "host": rates.links["host"]._replace(taken=0.5)}
    taken = StepSeconds.of(timeline(whole, passed, replace(rates, links=links), "cuda"))
    assert free.spent["compute"] < taken.spent["compute"] < 2 * free.spent["compute"]


def test_messages_of_devices_do_not_stand_behind_reductions() -> None:
    """A message has a communicator of its own: stages would hand on the delay of one another's reductions."""
    whole = plan(Mesh(pp=4, dp_shard=2), 0)
    sends = (ExchangeCall("send", "activations", "pp", 1000, 1),)
    passed = {
        stage: each._replace(leaves=sends, answered=sends)
        for stage, each in passes(whole, one_pass(100), one_pass(200)).items()
    }
    found = timeline(whole, passed, hardware(flops_s=1e2, exchange_bytes_s=1e2), "cuda")
    spans = [span for row in found.spans.values() for span in row if span.lane == "exchange"]
    sends = [span for span in spans if span.action.kind is Kind.SEND]
    reduces = [span for span in spans if span.action.kind is Kind.REDUCE]
    assert sends and any(
        one.rank == two.rank and one.start_s < two.stop_s and two.start_s < one.stop_s
        for one in sends
        for two in reduces
    )


def test_batches_are_read_beside_the_step_before() -> None:
    whole = plan(Mesh(), 0)
    passed = passes(whole, one_pass(1), one_pass(2))
    work_s = 2 * 3 * len(whole.units)
    for data_s in (0.5 * work_s, 1.5 * work_s):
        found = timeline(whole, passed, hardware(flops_s=1.0), data_s=data_s)
        told = StepSeconds.of(found)
        assert told.spent["data"] == pytest.approx(max(data_s - work_s, 0.0))
        assert found.lanes(0)["data"] == pytest.approx(data_s)


def test_rows_of_tables_have_a_rate_of_their_own() -> None:
    whole = plan(Mesh(dp_shard=2), 0, spec=model(tables={"users": ("users",)}))
    passed = passes(whole, one_pass(0), one_pass(0))
    found = StepSeconds.of(timeline(whole, passed, replace(hardware(), row_bytes_s=100.0)))
    read, updated = 5 * 8 * 4, 5 * 2 * 8 * 4  # momentum has a state of as many columns
    each_s = (read + 2 * read + 2 * updated) / 100
    assert found.total == pytest.approx(2 * each_s, rel=1e-3)
    assert found.spent["compute"] == pytest.approx(2 * read / 100, rel=1e-3)


def test_actions_that_end_a_step_take_longer_in_python() -> None:
    whole = plan(Mesh(), 0)
    passed = passes(whole, one_pass(0), one_pass(0))
    actions = whole.own.actions
    ending = sum(action.kind.ends_step for action in actions)
    rates = replace(hardware(), action_s=1.0, ending_action_s=10.0)
    assert 0 < ending < len(actions)
    found = StepSeconds.of(timeline(whole, passed, rates)).total
    assert found == pytest.approx(len(actions) + 9 * ending)


def test_ranks_that_exchange_wait_for_the_last_one() -> None:
    """The wait follows from the work since the ranks last met, is exposed on their axis, and exists on CPUs alone."""
    whole = plan(Mesh(dp_shard=2), 3)
    passed = passes(whole, one_pass(100), one_pass(200))
    even, uneven = (
        hardware(flops_s=100.0),
        replace(hardware(flops_s=100.0), neighbours=Neighbours(((1.0, 0.25),))),
    )
    before, after = (StepSeconds.of(timeline(whole, passed, each)) for each in (even, uneven))
    assert before.total == pytest.approx(before.spent["compute"]) and not any(before.exposed.values())
    assert after.spent["compute"] == pytest.approx(before.total)
    # All work lies between two meetings, but for what is done behind the last one of the step.
    assert after.total == pytest.approx(1.25 * before.total, rel=0.02)
    assert sum(after.exposed.values()) == pytest.approx(after.total - before.total)
    on_device = [StepSeconds.of(timeline(whole, passed, each, "cuda")).total for each in (even, uneven)]
    assert on_device[0] == on_device[1]


def test_updates_have_a_rate_of_their_own_on_cpus() -> None:
    whole = plan(Mesh(), 0)
    passed = passes(whole, one_pass(0), one_pass(0))
    slow = hardware(host_bytes_s=1e3)
    fast = replace(slow, operations={"update": ((1.0, 2e3),)})
    before, after = (StepSeconds.of(timeline(whole, passed, each)) for each in (slow, fast))
    updates = [each.spent["update"] for each in (before, after)]
    normed = updates[0] - 2 * (updates[0] - updates[1])
    assert 0 <= normed < updates[0] / 2, "the norm's bytes keep the rate of the memory"
    assert before.spent["compute"] == pytest.approx(after.spent["compute"])
