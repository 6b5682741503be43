"""A backend that refuses what NCCL refuses or hangs on, over gloo, so that a machine without a device can try it.

    a group whose members disagree on its name            NCCL: they wait for one another for ever
    groups that two ranks make in another order           the same, where a communicator is split off its parent's
    a send and a receive through one group at a time      one communicator runs its messages in order: pairs need two
    composed collectives of gloo                          they are gloo's, and never asked of another backend

``register`` makes "strict" known to torch in this process.
"""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PATIENCE_S = 5.0


class Refused(RuntimeError):
    """What NCCL would not do, or wait for without end."""


class StrictGroup(dist.ProcessGroup):
    """gloo, once its members are found to agree."""

    def __init__(self, base: dist.Store, options: Any):
        super().__init__(options.group_rank, options.group_size)
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._compare(base, ranks, options.group_id, ranks[options.group_rank])
        self._gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timedelta(seconds=60)
        )
        self._directions: set[str] = set()

    def _compare(self, base: dist.Store, ranks: list[int], name: str, rank: int) -> None:
        """Against every other member: the groups that hold both, by name and in the order in which they were made."""
        for other in ranks:
            if other == rank:
                continue
            pair = f"strict/{min(rank, other)}-{max(rank, other)}"
            turn = base.add(f"{pair}/count/{rank}", 1)
            mine, theirs = (f"{pair}/{turn}/{each}" for each in (rank, other))
            base.set(mine, json.dumps([name, ranks]))
            end = time.monotonic() + _PATIENCE_S
            while not base.check([theirs]):
                if time.monotonic() > end:
                    raise Refused(
                        f"rank {rank} makes its group no. {turn} with rank {other}, {name!r}, and that never comes"
                    )
                time.sleep(0.01)
            given = json.loads(base.get(theirs))
            if given != [name, ranks]:
                raise Refused(
                    f"rank {rank} makes {name!r} of {ranks}, rank {other} at the same turn {given[0]!r} of {given[1]}"
                )

    def getBackendName(self) -> str:
        return "strict"

    def _one_way(self, direction: str) -> None:
        if self.size() == 2:
            self._directions.add(direction)
            if len(self._directions) == 2:
                raise Refused("messages of both directions through one communicator wait for one another")

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._gloo.allreduce(tensors, options or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self._gloo.broadcast(tensors, options or dist.BroadcastOptions())

    def all_gather_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        return _named(self._gloo, "all_gather_single", "_allgather_base")(
            output, tensor, options or dist.AllgatherOptions()
        )

    def reduce_scatter_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        return _named(self._gloo, "reduce_scatter_single", "_reduce_scatter_base")(
            output, tensor, options or dist.ReduceScatterOptions()
        )

    def all_to_all_single(self, output: Any, tensor: Any, outs: Any, ins: Any, options: Any = None) -> Any:
        return _named(self._gloo, "all_to_all_single", "alltoall_base")(
            output, tensor, outs, ins, options or dist.AllToAllOptions()
        )

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    def barrier(self, options: Any = None) -> Any:
        return self._gloo.barrier(options or dist.BarrierOptions())

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        self._one_way("send")
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        self._one_way("recv")
        return self._gloo.recv(tensors, source, tag)


class DeviceGroup(StrictGroup):
    """Carries tensors of a device alone, as a group of NCCL's does."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("No backend type associated with device type cpu")

    allreduce = broadcast = barrier = send = recv = _refuse
    all_gather_single = reduce_scatter_single = all_to_all_single = _refuse
    _allgather_base = _reduce_scatter_base = alltoall_base = _refuse


def register(base: dist.Store) -> None:
    """Make "strict" and "deviceonly" backends of this process; ``base`` is where their groups compare."""
    dist.Backend.register_backend(
        "deviceonly", lambda options, given: DeviceGroup(base, options), extended_api=True, devices=["meta"]
    )
    dist.Backend.register_backend(
        "strict", lambda options, given: StrictGroup(base, options), extended_api=True, devices=["cpu"]
    )


def _named(group: Any, *names: str) -> Any:
    return next(getattr(group, name) for name in names if hasattr(group, name))
