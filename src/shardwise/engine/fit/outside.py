"""Outside: the memory that a step takes beside the tensors of its rows.

On a device:

    driver and communicators    driver + cuBLAS workspaces + (communicators of the rank) · (bytes of a communicator)
    holes                       a twentieth of the other rows on the device, for the allocator's rounding and gaps

The communicators are those of the groups that an engine of the Plan makes, counted as a device's backend makes them:

    collectives    one for all ranks in common, and one for each distinct group along an axis with more than one rank
                   (engine/construction/site.py); one for each group that sums shared gradients, for the matrices of
                   Muon, and for keys of tables, which travel beside the main thread
    messages       one for each neighbour in a pipeline and each direction, because sends and receives of one NCCL
                   communicator would wait for one another (comm/links.py)

The bytes are estimates for CUDA and not yet measured on a device. Other accelerators are counted with the same bytes.

On a CPU:

    holes                       gradients that are made after the moment at which a step's tensors are largest, at most
                                what passes keep in pieces under 32 MiB; and as much as the rows of tables on their way
                                take, in such pieces. Beside a save of tables, which a thread with memory of its own
                                reads and writes, all that a step has taken beside the state

glibc keeps freed pieces of less than 32 MiB for later requests and seldom joins what activations leave into the larger
buffers of gradients, so that the process holds both; larger pieces go back to the system. With
``MALLOC_MMAP_THRESHOLD_=65536`` in the environment these go back too (benchmarks/plan/memory.py measures both).

Two things are not counted: the groups by host of the experts' exchange, because a mesh does
not contain hosts, and groups that the program makes itself. A group that a job never uses takes no memory, because NCCL
connects a group at its first collective; the count includes such groups.

Cost: the ranks of each axis, and one look at each message of the rank's list.
"""

from collections.abc import Iterable, Mapping

from shardwise.engine.construction.site import EXPERT_GROUP_AXES, GROUP_AXES, has_expert_state
from shardwise.observe.memory import MAPPED_BYTES
from shardwise.plan.action import Kind
from shardwise.plan.plan import Plan, bytes_by_tier, class_of
from shardwise.plan.slices import TensorSlices
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.timeline import StepMemory

OUTSIDE_ROW = "driver and communicators"
"""Name of the row for the bytes that torch's allocator does not hold."""
HOLES_ROW = "holes"
"""Name of the row for the bytes that torch's allocator holds without tensors in them."""
TABLES_ROW = "table rows"
"""Name of the row for the bytes that a save holds of tables beside the tables."""

DRIVER_BYTES = 512 << 20
"""Bytes of the driver's context with its loaded kernels; an estimate, not yet measured on a device."""
CUBLAS_WORKSPACE_BYTES = 32 << 20
"""Bytes of the workspace of one cuBLAS handle on one stream; an estimate, not yet measured on a device."""
CUBLAS_WORKSPACES = 2
"""Number of cuBLAS workspaces: the main thread and the thread of autograd have a handle each, on one stream."""
COMMUNICATOR_BYTES = 200 << 20
"""Bytes of one NCCL communicator; an estimate, not yet measured on a device: 100 to 300 MB are usual."""
HOLES_PER_BYTE = 0.05
"""Bytes of holes for each byte of the other rows on the device; an estimate, not yet measured on a device."""


def with_outside(step: StepMemory, plan: Plan, device_type: str, small: float = 1.0) -> StepMemory:
    """Return the memory of a step with the rows of what lies outside its tensors.

    Args:
        step: Memory of a step on one rank.
        plan: The Plan.
        device_type: Type of the device, such as ``cuda``.
        small: Part of what passes keep that lies in pieces under ``MAPPED_BYTES``, for CPU ranks.
    """
    if device_type == "cpu":
        return _with_heap(step, plan.bytes_per_rank(step.rank).get("gradients", 0), small)
    apart = outside_bytes(device_type, communicators(plan, step.rank))
    points = {
        phase: point._replace(
            rows={
                **point.rows,
                OUTSIDE_ROW: apart,
                HOLES_ROW: int(HOLES_PER_BYTE * bytes_by_tier(point.rows)["device"]),
            }
        )
        for phase, point in step.points.items()
    }
    step = step._replace(points=points)
    on_device = max(bytes_by_tier(point.rows)["device"] for point in step.counted)
    return step._replace(bytes_by_tier={**step.bytes_by_tier, "device": on_device})


def _with_heap(step: StepMemory, gradient_bytes: int, small: float) -> StepMemory:
    points = dict(step.points)
    for phase in ("first step", "step"):
        if phase in points:
            rows = points[phase].rows
            later = gradient_bytes - rows.get("gradients", 0)
            holes = min(max(later, 0), int(small * rows.get("kept", 0)))
            holes += rows.get(HOLES_ROW, 0)
            points[phase] = points[phase]._replace(rows={**rows, HOLES_ROW: holes} if holes else rows)
    if {"save", "step"} <= points.keys() and points["save"].rows.get(TABLES_ROW):
        # The thread of the save does not reuse what the thread of the steps has freed.
        steps = points["step"].rows
        holes = sum(steps.get(row, 0) for row in (HOLES_ROW, "kept", "at work"))
        points["save"] = points["save"]._replace(rows={**points["save"].rows, HOLES_ROW: holes})
    step = step._replace(points=points)
    tiers = {**step.bytes_by_tier, "device": max(point.bytes_on(step.near) for point in step.counted)}
    return step._replace(bytes_by_tier=tiers)


def small_share(passes: Iterable[MeasuredPass]) -> float:
    """Return the part of what forward passes keep that lies in pieces under ``MAPPED_BYTES``."""
    small = total = 0
    for passed in passes:
        for (kind, _), share in passed.shares.items():
            for origin, count in share.net.items() if kind is Kind.F else ():
                size = max(count, 0) * origin.nbytes
                total += size
                small += size * (origin.nbytes < MAPPED_BYTES)
    return small / total if total else 1.0


def outside_bytes(device_type: str, communicators: int) -> int:
    """Return the bytes of a device's memory that torch's allocator does not hold; 0 on a CPU.

    Args:
        device_type: Type of the device, such as ``cuda``.
        communicators: Number of communicators of the rank.
    """
    if device_type == "cpu":
        return 0
    return DRIVER_BYTES + CUBLAS_WORKSPACES * CUBLAS_WORKSPACE_BYTES + communicators * COMMUNICATOR_BYTES


def communicators(plan: Plan, rank: int) -> int:
    """Return the number of communicators that an engine of the Plan makes on ``rank`` if its ranks have devices."""
    return sum(communicators_by_use(plan, rank).values())


def communicators_by_use(plan: Plan, rank: int) -> Mapping[str, int]:
    """Return the number of communicators of ``rank``, for collectives, for keys of tables and for messages."""
    mesh, registry = plan.mesh, plan.registry
    return {
        "collectives": len(groups_of(plan, rank)),
        "keys": int(mesh.size("dp") > 1 and bool(registry.of_kind("table"))),
        "messages": len(_ways(plan, rank)),
    }


def groups_of(plan: Plan, rank: int) -> set[tuple[int, ...]]:
    """Return the ranks of each distinct group whose collectives an engine of the Plan runs on ``rank``."""
    mesh, registry = plan.mesh, plan.registry
    axes = [*GROUP_AXES]
    if has_expert_state(plan):
        axes += EXPERT_GROUP_AXES
    if registry.needs("matrix"):
        axes.append("stage")
    groups = {mesh.ranks(axis, rank) for axis in axes if mesh.size(axis) > 1}
    groups.update(
        ranks for ranks in TensorSlices(registry, mesh, rank).groups_of_addends([rank]) if rank in ranks
    )
    return groups


def neighbours_of(plan: Plan, rank: int) -> set[int]:
    """Return the indices on "pp" of the ranks that an engine of the Plan exchanges messages with on ``rank``."""
    mesh = plan.mesh
    if mesh.pp == 1:
        return set()
    own = mesh.index("pp", rank)
    return {(own - 1) % mesh.pp, (own + 1) % mesh.pp} - {own}


def _ways(plan: Plan, rank: int) -> set[tuple[int, str]]:
    """Return the ways of the rank's messages: the index of the other rank on "pp", and the Kind of the message."""
    actions = plan.classes[class_of(plan.mesh, rank)].actions
    return {
        (plan.mesh.places.place(action.other), action.kind.name)
        for action in actions
        if action.kind.row.of == "message"
    }
