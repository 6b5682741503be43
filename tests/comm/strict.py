"""A backend that refuses what NCCL refuses, hangs on or leaves undefined, over gloo, on a machine without a device.

    a group whose members disagree on its name            NCCL: they wait for one another for ever
    groups that two ranks make in another order           the same, where a communicator is split off its parent's
    another operation, shape, dtype or root than a        wrong bytes, or for ever: a communicator runs operations in
    member's at the same place                            one order; those of all are compared, the error names both
    a send without a receive, and the reverse             for ever: nothing is buffered
    messages of both directions through one group         they wait for one another: pairs need two
    a host tensor, one that is not contiguous             refused
    an output that is read before ``wait``                undefined: poisoned until then
    a tensor that is written to before ``wait``           undefined: compared then (tests/comm/late.py)
    ``wait`` with a deadline                              stops the host: counted in ``blocks``
    composed collectives of gloo                          they are gloo's, and never asked of another backend

Each communicator is a thread that takes operations in the order of the calls, as a stream does, so the host goes on.
Sums are taken in rank order, 16-bit floats in fp32. ``register`` makes "strict" known to torch in this process, for
tensors of the pretended device (tests/accelerator/pretend.py), beside gloo for the host's, or for the host's tensors as
if they were a device's.
"""

import json
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardwise.comm.collectives import sum_in_order
from tests.accelerator import pretend
from tests.comm.late import Held, poison

PATIENCE_S = 20.0
"""In which the other members of a communicator must have come to the same operation."""
_MEETING_S = 5.0
_HEAD_BYTES = 512
_HEAD, _BODY = 7, 8
"""Tags of gloo's messages."""

blocks: Counter[str] = Counter()
"""Waits of this process that would have stopped the host, by operation."""


class Refused(RuntimeError):
    """What NCCL would not do, or wait for without end."""


# What runs on a communicator ----------------------------------------------------------------------------------------


class Work:
    """An operation on its way. ``deliver`` writes its results, when it is waited for."""

    def __init__(self, operation: str, held: Held, deliver: Callable[[], Any]):
        self._operation = operation
        self._held = held
        self._deliver: Callable[[], Any] | None = deliver
        self._ended = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        """The communicator is past it."""
        self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        """Whether the communicator is past it."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the stream wait, which here has nothing else to do. With ``timeout`` NCCL would stop the host."""
        if threading.current_thread().name.startswith(
            "shardwise-watch"
        ):  # asks whether the communicator has failed
            self._raise()
            return True
        if timeout is not None:
            blocks[self._operation] += 1
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"{self._operation}: timed out after {timeout}")
        self._raise()
        if self._deliver is not None:
            deliver, self._deliver = self._deliver, None
            changed = self._held.changed()
            if changed:
                raise Refused(changed[0])
            deliver()
        return True

    def _raise(self) -> None:
        if self._error is not None:
            raise Refused(str(self._error)) from self._error


class Communicator:
    """The operations of one group, or of one pair in it, in one order. ``members``: their ranks, in errors."""

    def __init__(self, gloo: Any, name: str, members: Sequence[int], index: int, peer: int | None = None):
        self._gloo, self._name, self._members, self._index, self._peer = gloo, name, members, index, peer
        self._count = 0
        self._error: Exception | None = None
        self._jobs: queue.SimpleQueue[tuple[Work, str, Callable[[list[Any]], Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="strict", daemon=True).start()

    def start(self, work: Work, head: dict[str, Any], run: Callable[[list[Any]], Any]) -> Work:
        """``run`` gets what every member said of this operation, and moves the bytes."""
        if self._error is not None:
            raise Refused(f"{self._name} has failed before: {self._error}")
        self._count += 1
        self._jobs.put((work, json.dumps({"no": self._count, **head}), run))
        return work

    def close(self) -> None:
        """End the thread when it is through."""
        self._jobs.put(None)

    def give_up(self) -> None:
        """What is not over fails."""
        self._error = self._error or Refused("it was aborted")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, head, run = job
            try:
                if self._error is not None:
                    raise self._error
                run(self._meet(head))
                work.end(None)
            except Exception as error:
                self._error = self._error or error
                work.end(error)

    def _meet(self, head: str) -> list[Any]:
        """What each member is at; raises where that is not one and the same operation."""
        mine = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        text = head.encode()
        assert len(text) <= _HEAD_BYTES, text
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        patience = timedelta(seconds=PATIENCE_S)
        try:
            if self._peer is None:
                every = torch.empty(len(self._members), _HEAD_BYTES, dtype=torch.uint8)
                _named(self._gloo, "all_gather_single", "_allgather_base")(
                    every.view(-1), mine, c10d.AllgatherOptions()
                ).wait(patience)
            else:
                every = torch.stack([mine, mine])
                works = [
                    self._gloo.send([mine], self._peer, _HEAD),
                    self._gloo.recv([every[1]], self._peer, _HEAD),
                ]
                for work in works:
                    work.wait(patience)
        except RuntimeError as error:
            others = self._members if self._peer is None else [self._members[self._peer]]
            raise Refused(
                f"rank {self._members[self._index]} is at {head} of {self._name}, and of {others} not all have come to "
                f"an operation there in {PATIENCE_S:.0f} s"
            ) from error
        said = [json.loads(line.numpy().tobytes().rstrip(b"\0")) for line in every]
        self._compare(said)
        return said

    def _compare(self, said: list[Any]) -> None:
        if self._peer is not None:
            ranks = [self._members[self._index], self._members[self._peer]]
            turned = {"send": "recv", "recv": "send"}.get(said[1]["operation"])
            said = [said[0], {**said[1], "operation": turned}]
        else:
            ranks = list(self._members)
        keys = [{key: value for key, value in each.items() if key not in ("to", "of")} for each in said]
        for rank, key in zip(ranks, keys, strict=True):
            if key != keys[0]:
                raise Refused(f"{self._name}: rank {ranks[0]} is at {keys[0]}, rank {rank} at {key}")
        if "to" in said[0]:
            for i, j in ((i, j) for i in range(len(ranks)) for j in range(len(ranks))):
                if said[i]["to"][j] != said[j]["of"][i]:
                    raise Refused(
                        f"{self._name}: rank {ranks[i]} sends {said[i]['to'][j]} elements to rank {ranks[j]}, which "
                        f"expects {said[j]['of'][i]}"
                    )


# Groups -------------------------------------------------------------------------------------------------------------


class StrictGroup(dist.ProcessGroup):
    """See the module's docstring. ``kind``: the type of the device whose tensors it carries."""

    def __init__(self, base: dist.Store, options: Any, kind: str, carries_host: bool = True):
        super().__init__(options.group_rank, options.group_size)
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._compare(base, ranks, options.group_id, ranks[options.group_rank])
        self._kind, self._name, self._ranks = kind, options.group_id, ranks
        self._gloo = self._connect("device", options)
        self._host = self._connect("host", options) if carries_host and kind != "cpu" else None
        self._communicators: dict[int | None, Communicator] = {}
        self._directions: set[str] = set()

    def _connect(self, part: str, options: Any) -> Any:
        store = dist.PrefixStore(part, options.store)
        return dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timedelta(seconds=60))

    def _compare(self, base: dist.Store, ranks: list[int], name: str, rank: int) -> None:
        """Against every other member: the groups that hold both, by name and in the order in which they were made."""
        for other in ranks:
            if other == rank:
                continue
            pair = f"strict/{min(rank, other)}-{max(rank, other)}"
            turn = base.add(f"{pair}/count/{rank}", 1)
            mine, theirs = (f"{pair}/{turn}/{each}" for each in (rank, other))
            base.set(mine, json.dumps([name, ranks]))
            end = time.monotonic() + _MEETING_S
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

    def abort(self) -> None:
        for each in self._communicators.values():
            each.give_up()

    def _communicator(self, peer: int | None = None) -> Communicator:
        if peer not in self._communicators:
            made = Communicator(self._gloo, self._name, self._ranks, self.rank(), peer)
            weakref.finalize(self, made.close)
            self._communicators[peer] = made
        return self._communicators[peer]

    def _is_hosts(self, *tensors: Tensor) -> bool:
        """Whether gloo carries them; refuses what NCCL refuses."""
        kinds = {each.device.type for each in tensors}
        if kinds == {"cpu"} and self._host is not None:
            return True
        if kinds != {self._kind}:
            raise Refused(
                f"{self._name}: No backend type associated with device type {', '.join(sorted(kinds))}"
            )
        if not all(each.is_contiguous() for each in tensors):
            raise Refused(f"{self._name}: Tensors must be contiguous")
        return False

    def _start(
        self,
        operation: str,
        head: dict[str, Any],
        read: dict[str, Tensor],
        written: Tensor | None,
        result: Tensor | None,
        run: Callable[[list[Any]], Any],
        peer: int | None = None,
    ) -> Work:
        """``read`` and ``written`` are the caller's tensors, ``result`` comes into ``written``."""
        held = dict(read) if written is None else {**read, "output": written}
        deliver = partial(_into, written, result) if written is not None and result is not None else _nothing
        work = Work(operation, Held(f"{operation} in {self._name}", **held), deliver)
        if pretend.Bench.current is not None:
            pretend.Bench.current.operation(operation)
        return self._communicator(peer).start(work, {"operation": operation, **head}, run)

    def _gathered(self, mine: Tensor) -> Tensor:
        every = torch.empty(self.size(), mine.numel() * mine.itemsize, dtype=torch.uint8)
        _named(self._gloo, "all_gather_single", "_allgather_base")(
            every.view(-1), mine.view(-1).view(torch.uint8), c10d.AllgatherOptions()
        ).wait()
        return every.view(-1).view(mine.dtype).view(self.size(), -1)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = tensors
        if self._is_hosts(tensor):
            return self._host.allreduce(tensors, options or c10d.AllreduceOptions())
        _sums(options)
        there = _here(tensor)
        mine, total = there.clone().view(-1), torch.empty(there.numel(), dtype=there.dtype)
        poison(there)

        def run(_: Any) -> None:
            self._sum(self._gathered(mine), total)

        return self._start("all_reduce", _shape(tensor), {}, there, total, run)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = tensors
        if self._is_hosts(tensor):
            return self._host.broadcast(tensors, options or c10d.BroadcastOptions())
        there, root = _here(tensor), options.rootRank
        data = there.clone().view(-1)
        if root != self.rank():
            poison(there)

        def run(_: Any) -> None:
            data.copy_(self._gathered(data)[root])

        return self._start("broadcast", {**_shape(tensor), "root": root}, {}, there, data, run)

    def all_gather_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        if self._is_hosts(output, tensor):
            return _named(self._host, "all_gather_single", "_allgather_base")(
                output, tensor, options or c10d.AllgatherOptions()
            )
        there, shard = _here(output), _here(tensor)
        mine, every = shard.clone().view(-1), torch.empty(there.numel(), dtype=there.dtype)
        poison(there)
        shard.copy_(mine.view(shard.shape))  # it may lie in the output, and may be read

        def run(_: Any) -> None:
            every.copy_(self._gathered(mine).view(-1))

        return self._start("all_gather", _shape(tensor), {"input": shard}, there, every, run)

    def reduce_scatter_single(self, output: Any, tensor: Any, options: Any = None) -> Any:
        if self._is_hosts(output, tensor):
            return _named(self._host, "reduce_scatter_single", "_reduce_scatter_base")(
                output, tensor, options or c10d.ReduceScatterOptions()
            )
        _sums(options)
        there, full = _here(output), _here(tensor)
        if there.dtype != full.dtype or there.numel() * self.size() != full.numel():
            raise Refused(f"{self._name}: reduce_scatter of {_shape(tensor)} to {_shape(output)}")
        mine, total = full.clone().view(-1), torch.empty(there.numel(), dtype=there.dtype)
        poison(there)

        def run(_: Any) -> None:
            every = self._gathered(mine).view(self.size(), self.size(), -1)
            self._sum(every[:, self.rank()].contiguous(), total)

        return self._start("reduce_scatter", _shape(tensor), {"input": full}, there, total, run)

    def all_to_all_single(self, output: Any, tensor: Any, outs: Any, ins: Any, options: Any = None) -> Any:
        if self._is_hosts(output, tensor):
            return _named(self._host, "all_to_all_single", "alltoall_base")(
                output, tensor, outs, ins, options or c10d.AllToAllOptions()
            )
        there, given, size = _here(output), _here(tensor), self.size()
        came = list(outs) or [there.shape[0] // size] * size
        goes = list(ins) or [given.shape[0] // size] * size
        inner = given[:1].numel() if given.shape[0] else 1
        width = inner * given.itemsize
        mine, arrived = given.clone().view(-1), torch.empty(there.numel(), dtype=there.dtype)
        poison(there)

        def run(_: Any) -> None:
            _named(self._gloo, "all_to_all_single", "alltoall_base")(
                arrived.view(torch.uint8),
                mine.view(torch.uint8),
                [n * width for n in came],
                [n * width for n in goes],
                c10d.AllToAllOptions(),
            ).wait()

        # Dims after the first are the same everywhere, and every member's counts are the others'.
        head = {"dtype": str(given.dtype), "to": [n * inner for n in goes], "of": [n * inner for n in came]}
        return self._start("all_to_all", head, {"input": given}, there, arrived, run)

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    def barrier(self, options: Any = None) -> Any:
        if self._host is not None:
            return self._host.barrier(options or c10d.BarrierOptions())
        return self._start("barrier", {}, {}, None, None, lambda _: None)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        (tensor,) = tensors
        if self._is_hosts(tensor):
            return self._host.send(tensors, to, tag)
        self._one_way("send")
        given = _here(tensor)
        sent = given.clone().view(-1).view(torch.uint8)

        def run(_: Any) -> None:
            self._gloo.send([sent], to, _BODY).wait()

        return self._start("send", _shape(tensor), {"tensor": given}, None, None, run, to)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        (tensor,) = tensors
        if self._is_hosts(tensor):
            return self._host.recv(tensors, source, tag)
        self._one_way("recv")
        there = _here(tensor)
        came = torch.empty(there.numel(), dtype=there.dtype)
        poison(there)

        def run(_: Any) -> None:
            self._gloo.recv([came.view(torch.uint8)], source, _BODY).wait()

        return self._start("recv", _shape(tensor), {}, there, came, run, source)

    def _one_way(self, direction: str) -> None:
        if self.size() == 2:
            self._directions.add(direction)
            if len(self._directions) == 2:
                raise Refused("messages of both directions through one communicator wait for one another")

    def _sum(self, rows: Tensor, total: Tensor) -> None:
        if self.size() == 1:
            total.copy_(rows[0])
        else:
            sum_in_order(rows, total)


def register(base: dist.Store, kind: str = "cpu") -> None:
    """Make "strict" and "deviceonly" backends of this process; ``base`` is where their groups compare.

    ``kind``: the type of device that "strict" is for, "cpu" or that of the pretended one, beside which its groups carry
    host tensors over gloo. "deviceonly" carries none.
    """
    dist.Backend.register_backend(
        "deviceonly",
        lambda options, given: StrictGroup(
            base, options, "meta" if kind == "cpu" else kind, carries_host=False
        ),
        extended_api=True,
        devices=["meta" if kind == "cpu" else kind],
    )
    dist.Backend.register_backend(
        "strict", lambda options, given: StrictGroup(base, options, kind), extended_api=True, devices=[kind]
    )


def _here(tensor: Tensor) -> Tensor:
    """Its bytes as a host tensor, behind autograd's back."""
    return pretend.on_host(tensor) if pretend.is_on_device(tensor) else tensor.data


def _shape(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _sums(options: Any) -> None:
    if options is not None and options.reduceOp != dist.ReduceOp.SUM:
        raise Refused(f"{options.reduceOp} is not made strict")


def _into(written: Tensor, result: Tensor) -> None:
    written.copy_(result.view(written.shape))


def _nothing() -> None:
    pass


def _named(group: Any, *names: str) -> Any:
    return next(getattr(group, name) for name in names if hasattr(group, name))
