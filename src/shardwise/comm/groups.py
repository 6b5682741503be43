"""Process groups of torch, all made by one function, under names that contain the members and the purpose.

torch's ``new_group`` names a group by how many groups *this process* has made, so ranks that have made different
numbers of groups (the middle of a pipeline has two neighbours, its ends have one) wait for one another under different
names, forever. In this module the name follows from the job, the members and their purpose, so it cannot differ, and:

    all ranks of a World walk all groups of a kind in one order   the first unfinished group can always proceed; and if
                                                                  the default group is bound to a device, NCCL splits
                                                                  it, a collective of members and others alike
    host tensors of ranks on devices travel by gloo               whatever the user's default group was made with; see
                                                                  [Note: groups of host tensors]
    its time-out is longer than our deadlines                     so that our error, which names ranks, comes first
    it ends in ``close``, destructors included                    never in Python's collector, which may run in a fork

[Note: groups of host tensors]
gloo connects every rank of a group with every other when the group is made: with N ranks, N - 1 sockets on each rank,
and seconds from some hundred ranks on. Beside a device most groups never see a tensor of the host. A group for the
collectives of devices therefore has the device's backend alone, and its first collective of a host tensor makes a
second group of the same ranks, with gloo alone (comm/links.py). Groups of two ranks for messages have both from the
start, because headers are host tensors.

Cost: nothing is connected for groups that do not contain this rank.
"""

import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 24 * 3600.0
"""Seconds of the time-out of torch's own groups: beyond every deadline of ours, whose errors contain more."""

_MADE_HERE: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Default groups of torch that this package made; the process has one at a time."""

_END_PATIENCE_S = 2.0
"""Seconds to wait for the destructors of groups that end."""


def backends(device: torch.device, backend: str) -> str:
    """Return the backends of a group in torch's notation: gloo for host tensors, ``backend`` for ``device``."""
    return backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"


HOST_BACKENDS = "cpu:gloo"
"""Backends, in torch's notation, of a group for host tensors alone."""


def backend_of_default(device: torch.device) -> str:
    """Return the backend of torch's default group for ``device``, or else the backend that torch would choose."""
    return backend_for(device.type) or dist.get_default_backend_for_device(device)


def backend_for(device_type: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend of a group for tensors on a type of device; "" if the group has none.

    ``dist.get_backend`` answers "cpu:gloo,cuda:nccl" for a group with a backend for each type of device.

    Args:
        device_type: Type of the device, such as "cpu".
        group: The group; None: torch's default group.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return dict(pairs).get(device_type, "")


def is_bound() -> bool:
    """Return whether torch's default group is bound to a device.

    All ranks of a bound group together split new groups off its communicator.
    """
    return getattr(dist.distributed_c10d._get_default_group(), "bound_device_id", None) is not None


def keep_with_default(store: dist.Store) -> None:
    """Keep ``store`` alive until torch's default group, which was made over ``store``, is gone.

    torch keeps only the C++ half of a store. The Python half of a SealedStore answers every call, so without this the
    default group, and every group and World made from it, fails as soon as the World that made the store is collected.
    """
    default = dist.distributed_c10d._get_default_group()
    # The finalizer does nothing: it is the reference that counts.
    weakref.finalize(default, bool, store).atexit = False
    _MADE_HERE.add(default)


def is_made_here() -> bool:
    """Return True if ``keep_with_default`` was called for torch's default group, which a World of this job made."""
    return dist.group.WORLD in _MADE_HERE


def make_group(name: str, ranks: tuple[int, ...], backend: str, timeout_s: float) -> dist.ProcessGroup | None:
    """Make the group of ``ranks`` called ``name``, and return it on its members, None on other ranks.

    Args:
        name: Name, the same on all members and used once in a job.
        ranks: Ranks of the job.
        backend: Backends as ``backends`` returns them, the name of one backend, or ``HOST_BACKENDS``: groups with gloo
            alone are made by their members alone.
        timeout_s: Time-out of torch's own.
    """
    state = dist.distributed_c10d
    default = state._get_default_group()
    device_id = None if backend == HOST_BACKENDS else default.bound_device_id
    rank = dist.get_rank()
    # The public new_group takes no name. This is what it calls, with the same arguments from torch 2.11 to 2.13.
    made, _ = state._new_process_group_helper(
        len(ranks),
        ranks.index(rank) if rank in ranks else None,
        list(ranks),
        state.Backend(backend),
        state._world.pg_map[default][1],
        state.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
        device_id=device_id,
        group_desc=name,
    )
    if rank not in ranks:
        return None
    state._world.pg_group_ranks[made] = {member: place for place, member in enumerate(ranks)}
    return made


def end_groups(groups: list[dist.ProcessGroup]) -> None:
    """End ``groups`` and empty the list; nothing happens to a group that torch has ended before.

    The list holds the last references besides torch's own, so the C++ destructors run in this call. They join threads:
    in a fork, whose collector might meet the groups later, those threads do not exist (a segmentation fault, or a wait
    for ever). A destructor whose group still has an exchange in flight, because an error ended the step on one rank,
    waits for the peers; the destructors therefore run in a thread, which is left behind after ``_END_PATIENCE_S``.
    """
    for group in groups:
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            try:
                dist.destroy_process_group(group)
            except RuntimeError as error:
                # A script that has destroyed all groups leaves those of dropped engines without a name. torch looks
                # the name up last, after it has removed the group from its maps.
                if "name not set" not in str(error):
                    raise
    if not groups:
        return
    del group
    thread = threading.Thread(target=_drop, args=([groups.pop() for _ in range(len(groups))],), daemon=True)
    thread.start()
    thread.join(_END_PATIENCE_S)


def _drop(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        groups.pop()
