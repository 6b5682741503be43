"""What lies outside torch on a device is counted by the groups and messages that an engine makes, and compared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.hardware import even_hardware
from shardwise.comm.world import World
from shardwise.engine.fit.fits import FitReport, fits, longest
from shardwise.engine.fit.foresee import foresee
from shardwise.engine.fit.outside import (
    COMMUNICATOR_BYTES,
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACES,
    DRIVER_BYTES,
    HOLES_PER_BYTE,
    HOLES_ROW,
    OUTSIDE_ROW,
    communicators,
    communicators_by_use,
    outside_bytes,
    small_share,
)
from shardwise.models import Gpt, GptPolicy
from shardwise.observe.memory import MAPPED_BYTES
from shardwise.plan.action import Kind
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.storages import StorageOrigin

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "context": 16, "vocab": 64}
RATES = even_hardware(
    "given",
    1e10,
    host_bytes_s=1e10,
    device_bytes_s=1e10,
    link_bytes_s=1e10,
    disk_bytes_s=1e9,
    exchange_bytes_s=2.5e9,
)
BATCH = {"batch": {"accumulation": 4, "micro_size": 2}}
PIPELINE = BATCH | {"mesh": {"pp": 2}}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(SHAPE))


def grouped() -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(SHAPE | {"kv_heads": 2}))


def sparse() -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(SHAPE | {"experts": {"count": 4, "hidden": 32}}))


def tabled() -> nn.Module:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = shardwise.TablePolicy(name="users", rows=64, width=4, placement="row")
            self.tables = shardwise.EmbeddingCollection([table])
            self.head = nn.Linear(4, 1)

    return Scores()


def tokens(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.empty(rows, 16, dtype=torch.int64, device="meta")
    return {"tokens": ids, "targets": ids}


def made(world: World, make: Callable[[], nn.Module], given: dict[str, Any]) -> tuple[dict[str, int], int]:
    """The groups of collectives, by lane, and the wires that the engine of this rank has made."""
    part = world.among(range(world.size))  # without the groups of the tests before
    engine = shardwise.initialize(make(), given | {"check_first_step": "off"}, world=part)
    lanes = [lane for (*_, lane), each in part.links.transports.items() if each is not None]
    wires = [wire for wire in part.links._wires.values() if wire is not None]
    engine.close()
    part.release()
    return {"collectives": lanes.count(""), "keys": lanes.count("keys")}, len(wires)


@pytest.mark.parametrize(
    ("size", "make", "given"),
    [
        (2, gpt, {}),
        (2, gpt, {"mesh": {"tp": 2}}),
        (2, gpt, PIPELINE),
        (2, tabled, {}),
        (4, gpt, {"mesh": {"tp": 2}, "zero": {"stage": 1}}),
        (4, gpt, {"mesh": {"dp": {"replicate": 2, "shard": 2}}, "zero": {"stage": 3}}),
        (4, gpt, PIPELINE),
        (4, sparse, {"mesh": {"ep": 2}}),
        (4, grouped, {"mesh": {"tp": 4}}),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_communicators_are_the_groups_of_an_engine(
    ranks: Any, size: int, make: Callable[[], nn.Module], given: dict[str, Any]
) -> None:
    plan = foresee(make, given, size, CPU).plan
    for rank, (groups, wires) in enumerate(ranks(size).run(made, make, given)):
        told = dict(communicators_by_use(plan, rank))
        assert told.pop("messages") == 2 * wires, "a wire has a communicator in each direction"
        assert told == groups


def test_whole_matrices_have_a_communicator_of_the_stage() -> None:
    given = BATCH | {"mesh": {"pp": 2, "tp": 2}}
    plain = foresee(gpt, given, 8, CUDA).plan
    assert communicators_by_use(plain, 0)["collectives"] == 5, "world, dp, tp, pp and model"
    muon = foresee(gpt, given | {"optimizer": {"type": "muon", "lr": 0.01}}, 8, CUDA).plan
    assert communicators_by_use(muon, 0)["collectives"] == 6


def test_messages_have_a_communicator_for_each_neighbour_and_direction() -> None:
    mesh = {"mesh": {"pp": 4}, "batch": {"accumulation": 4}}
    plain = foresee(gpt, mesh, 4, CUDA).plan
    assert [communicators_by_use(plain, rank)["messages"] for rank in range(4)] == [2, 4, 4, 2]
    backward = foresee(gpt, mesh | {"mesh": {"pp": 2}}, 2, CUDA).plan
    assert [communicators_by_use(backward, rank)["messages"] for rank in range(2)] == [2, 2]
    ring = mesh | {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
    }
    round_trip = foresee(gpt, ring, 2, CUDA).plan
    assert communicators_by_use(round_trip, 0)["messages"] == 2, "both neighbours on the ring are one rank"


def test_a_device_holds_driver_communicators_and_holes() -> None:
    outlook = foresee(gpt, {"mesh": {"tp": 2}}, 4, CUDA, example=tokens())
    step = outlook.step
    assert step is not None
    rows = dict(step.peak.rows)
    apart, holes = rows.pop(OUTSIDE_ROW), rows.pop(HOLES_ROW)
    assert apart == outside_bytes("cuda", communicators(outlook.plan, 0))
    assert apart == DRIVER_BYTES + CUBLAS_WORKSPACES * CUBLAS_WORKSPACE_BYTES + 3 * COMMUNICATOR_BYTES
    assert holes == int(HOLES_PER_BYTE * sum(rows.values())) > 0
    assert outlook.bytes_by_tier["device"] == apart + holes + sum(rows.values())


def test_holes_are_not_counted_for_what_lies_in_host_memory() -> None:
    given = {"offload": {"optimizer": "host", "activations": "host"}, "recompute": "full"}
    step = foresee(gpt, given, 1, CUDA, example=tokens()).step
    assert step is not None and step.bytes_by_tier["host"] > 0
    rows = dict(step.peak.rows)
    apart, holes = rows.pop(OUTSIDE_ROW), rows.pop(HOLES_ROW)
    tensors = step.bytes_by_tier["device"] - apart - holes
    assert tensors < sum(rows.values()), "rows of the host are among them"
    assert holes == int(HOLES_PER_BYTE * tensors)


def test_ranks_on_a_cpu_have_no_driver() -> None:
    step = foresee(gpt, {"mesh": {"tp": 2}}, 4, CPU, example=tokens()).step
    assert step is not None and OUTSIDE_ROW not in step.peak.rows
    assert step.bytes_by_tier == {"device": sum(step.peak.rows.values())}
    assert outside_bytes("cpu", 8) == 0


def test_the_heap_of_a_cpu_rank_keeps_small_pieces_beside_later_gradients() -> None:
    outlook = foresee(gpt, {}, 1, CPU, example=tokens())
    rows = outlook.steps[0].points["step"].rows
    later = outlook.plan.bytes_per_rank()["gradients"] - rows.get("gradients", 0)
    assert rows[HOLES_ROW] == min(later, rows["kept"]) > 0
    assert HOLES_ROW not in outlook.steps[0].points["evaluation"].rows


def test_large_pieces_leave_no_holes() -> None:
    def share(nbytes: int, count: int = 1) -> UnitPass:
        return UnitPass(0, nbytes, 0, net={StorageOrigin("", "aten.mm", "", nbytes): count})

    passed = MeasuredPass({(Kind.F, "a"): share(MAPPED_BYTES), (Kind.F, "b"): share(MAPPED_BYTES // 2, 2)}, 0)
    assert small_share([passed]) == 0.5
    assert small_share([MeasuredPass({(Kind.B, "a"): share(1)}, 0)]) == 1.0, "nothing is kept"


def fit(device: torch.device, memory: int) -> FitReport:
    return fits(gpt, {}, {"device": memory}, tokens(), ranks=2, device=device, hardware=RATES)


def test_what_lies_outside_torch_is_compared_with_the_memory_of_a_device() -> None:
    step = foresee(gpt, {}, 2, CUDA, example=tokens()).step
    assert step is not None
    needs, rows = step.bytes_by_tier["device"], step.peak.rows
    tensors = needs - rows[OUTSIDE_ROW] - rows[HOLES_ROW]
    assert fit(CUDA, needs).fits and not fit(CUDA, needs - 1).fits
    found = fit(CUDA, tensors + rows[OUTSIDE_ROW])
    assert not found.fits, "tensors, driver and communicators fill the memory, and nothing is left for holes"
    said = found.lines()
    [line] = [each for each in said if each.startswith(f"  {OUTSIDE_ROW} ")]
    assert "776 MiB" in line and line.endswith("outside torch: context, cuBLAS, NCCL (estimate)")
    assert any(each.startswith(f"  {HOLES_ROW} ") for each in said)
    assert "the driver and the communicators alone take 776 MiB" in str(fit(CUDA, tensors))
    assert found.plain()["rows"][OUTSIDE_ROW] == rows[OUTSIDE_ROW]


def test_the_longest_sequence_leaves_room_for_what_lies_outside_torch() -> None:
    found = longest(
        lambda _: gpt(), {}, {"device": DRIVER_BYTES}, lambda _: tokens(), multiple=16, device=CUDA
    )
    assert found.tokens == 0
