"""A backend that refuses what NCCL refuses, hangs on or leaves undefined, over gloo, on a machine without a device.

    a group whose members disagree on its name            NCCL: they wait for one another for ever
    groups that two ranks make in another order           the same, where a communicator is split off its parent's
    the first use of a communicator                       blocks the host until all members make theirs, so first uses
                                                          in different orders wait for one another for ever
    another operation, shape, dtype or root than a        wrong bytes, or for ever: a communicator runs operations in
    member's at the same place                            one order; those of all are compared, the error names both
    communicators of the same members used in another     for ever, or each other's bytes: turns are compared
    order than by a member
    a send without a receive, and the reverse             for ever: nothing is buffered
    messages of both directions through one group         they wait for one another: pairs need two, or one
                                                          ``batch_isend_irecv``
    tags that differ between the ends of a message        NCCL ignores tags, so it would be another message
    a host tensor, one that is not contiguous             refused
    an output that is read before ``wait``                undefined: poisoned until then
    a tensor that is written to before ``wait``           undefined: compared then (tests/comm/late.py)
    ``wait`` with a deadline                              stops the host: counted in ``blocks``
    composed collectives of gloo                          they are gloo's, and never asked of another backend

Each communicator is a thread that takes operations in the order of the calls, and a stream of the bench's timelines
(tests/accelerator/timelines.py). An operation begins when all is over that the calling stream had waited for. ``wait``
makes the stream wait and returns at once: the results come when the host next waits for the device, or when an
operation uses their memory; until then the outputs hold poison. Host tensors have no stream: ``wait`` is then the end.

Sums are a ring's, which begins behind the rank that gets the sum and rounds to the tensor's dtype at every hop, so a
16-bit sum is as wrong as NCCL's. ``register`` makes "strict" known to torch in this process, for tensors of the
pretended device (tests/accelerator/pretend.py), beside gloo for the host's, or for the host's tensors as if they were a
device's.
"""

import itertools
import json
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.accelerator import pretend
from tests.accelerator.timelines import Line, run_all, run_needed
from tests.comm.late import Held, poison

PATIENCE_S = 5.0
"""In which the other members of a communicator must have come to the same operation, on a machine that is idle."""
_LONGEST_S = 90.0
"""Longest wait of a host for an operation, which may have to wait for others before it. No wait is without a bound."""
_HEAD_BYTES = 512
_GRACE_S = 5.0
"""Time for gloo to say that its own timeout is over."""
_GLOO_S = 60.0
"""Timeout of the groups of gloo, and longest time in which bytes come once all members have said what they are at."""
_HEAD, _BODY, _BATCH = 7, 8, 9
"""Tags of gloo's messages."""

_NUMBERS = itertools.count()
_TURNS: Counter[Any] = Counter()
"""Collectives of the main thread, by job and members."""

blocks: Counter[str] = Counter()
"""Waits of this process that would have stopped the host, by operation."""


class Refused(RuntimeError):
    """What NCCL would not do, or wait for without end."""


# What runs on a communicator ----------------------------------------------------------------------------------------


def patience_s() -> float:
    """``PATIENCE_S``, longer by as much as this machine has more to run than cores."""
    return PATIENCE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Work:
    """An operation on its way. ``deliver`` writes its results."""

    def __init__(
        self, operation: str, held: Held, deliver: Callable[[], Any], after: Sequence[Callable[[], Any]] = ()
    ):
        self._operation = operation
        self._held = held
        self._deliver: Callable[[], Any] | None = deliver
        self.after = after
        """Wait, each, for an operation that the calling stream had waited for."""
        self.known: dict[Line, int] = {}
        """Its place in the bench's timelines; empty for tensors of the host."""
        self.tensors: Sequence[Tensor] = ()
        """What torch keeps alive until ``wait``."""
        self._ended = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        """The communicator is past it."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def is_completed(self) -> bool:
        """Whether the communicator is past it."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the stream wait. With ``timeout`` NCCL would stop the host."""
        if threading.current_thread().name.startswith(
            "shardwise-watch"
        ):  # asks whether the communicator has failed
            self._raise()
            return True
        self._check_held()
        if timeout is not None:
            blocks[self._operation] += 1
            if not self.ends_in(timeout.total_seconds()):
                raise RuntimeError(f"{self._operation}: timed out after {timeout}")
        self.tensors = ()
        bench = pretend.Bench.current
        if not self.known or bench is None:
            self.come()
            self.deliver()
            return True
        bench.line.learn(self.known)
        if timeout is not None:
            run_all(self.known)
        return True

    def ends_in(self, limit_s: float) -> bool:
        """Wait for the communicator to be past it; False if the time is over before."""
        return self._ended.wait(limit_s)

    def come(self) -> None:
        """Wait until the communicator is past it, for a bounded time."""
        if not self.ends_in(_LONGEST_S):
            raise Refused(f"{self._operation} has not ended in {_LONGEST_S:.0f} s")
        self._raise()

    def deliver(self) -> None:
        """Write the results, once."""
        if self._deliver is not None:
            deliver, self._deliver = self._deliver, None
            self._check_held()
            deliver()

    def _check_held(self) -> None:
        changed = self._held.changed() if self._deliver is not None else []
        if changed:
            raise Refused(changed[0])

    def _raise(self) -> None:
        if self._error is not None:
            raise Refused(str(self._error)) from self._error


class Part(NamedTuple):
    """One message of a batch."""

    peer: int
    sends: bool
    head: dict[str, Any]
    data: Tensor
    """Its bytes on the host: those that leave, or where they come."""


class Communicator:
    """The operations of one group, or of one pair in it, in one order; made by all members together.

    ``members``: their ranks, and ``first``, the operation that makes it, are said in errors.
    """

    def __init__(
        self, gloo: Any, name: str, members: Sequence[int], index: int, first: str, peer: int | None = None
    ):
        self._gloo, self._name, self._members, self._index, self._peer = gloo, name, members, index, peer
        self._count = 0
        self._error: Exception | None = None
        self._current: Work | None = None
        self._jobs: queue.SimpleQueue[tuple[Work, str, Callable[[list[Any]], Any]] | None] = (
            queue.SimpleQueue()
        )
        # gloo may hold a thread for longer than its timeout, so no thread that others wait for calls gloo.
        threading.Thread(target=self._run, name="strict", daemon=True).start()
        opening = Work("first use", Held(f"first use of {name}"), _nothing)
        head = json.dumps({"operation": "first use", "by": first})
        limit_s = patience_s()
        self._jobs.put((opening, head, _nothing))
        if not opening.ends_in(limit_s + _GRACE_S):
            raise self._absent(head, limit_s + _GRACE_S)
        opening.come()

    def start(self, work: Work, head: dict[str, Any], run: Callable[[list[Any]], Any]) -> Work:
        """``run`` gets what every member said of this operation, and moves the bytes."""
        self._check(work)
        self._count += 1
        self._jobs.put((work, json.dumps({"no": self._count, **head}), run))
        return work

    def start_batch(self, work: Work, parts: Sequence[Part]) -> Work:
        """Messages with some of the members, together; the others know nothing of them."""
        self._check(work)
        self._jobs.put((work, "", lambda _: self._run_batch(parts)))
        return work

    def _check(self, work: Work) -> None:
        """Refuse an operation behind one that has failed; it is over then, for whoever waits for its stream."""
        if self._error is not None:
            error = Refused(f"{self._name} has failed before: {self._error}")
            work.end(error)
            raise error

    def close(self) -> None:
        """End the thread when it is through."""
        self._jobs.put(None)

    def give_up(self) -> None:
        """What is not over fails."""
        self._error = self._error or Refused("it was aborted")
        current = self._current
        if current is not None:
            current.end(self._error)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, head, run = job
            self._current = work
            try:
                for each in work.after:
                    each()
                if self._error is not None:
                    raise self._error
                run(self._meet(head) if head else [])
                work.end(None)
            except Exception as error:
                self._error = self._error or error
                work.end(error)

    def _meet(self, head: str) -> list[Any]:
        """What each member is at; raises where that is not one and the same operation."""
        mine = _line(head)
        limit_s = patience_s()
        patience = timedelta(seconds=limit_s)
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
            raise self._absent(head, limit_s) from error
        said = [json.loads(line.numpy().tobytes().rstrip(b"\0")) for line in every]
        self._compare(said)
        return said

    def _absent(self, head: str, limit_s: float) -> Refused:
        """Return the error of an operation to which some members have not come."""
        others = self._members if self._peer is None else [self._members[self._peer]]
        return Refused(
            f"rank {self._members[self._index]} is at {head} of {self._name}, and of {others} not all have come to an "
            f"operation there in {limit_s:.1f} s"
        )

    def _run_batch(self, parts: Sequence[Part]) -> None:
        """Tell each peer what goes there and what is to come from there, compare, and move the bytes."""
        peers = sorted({part.peer for part in parts})
        mine = {
            peer: [
                [part.head for part in parts if part.peer == peer and part.sends is sends]
                for sends in (True, False)
            ]
            for peer in peers
        }
        theirs = {peer: torch.zeros(_HEAD_BYTES, dtype=torch.uint8) for peer in peers}
        limit_s = patience_s()
        works = [self._gloo.recv([line], peer, _BATCH) for peer, line in theirs.items()]
        for peer in peers:
            works.append(self._gloo.send([_line(json.dumps(mine[peer]))], peer, _BATCH))
        here = self._members[self._index]
        try:
            for work in works:
                work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise Refused(
                f"rank {here} is at a batch of messages of {self._name} with "
                f"{[self._members[peer] for peer in peers]}, and not all have come to theirs in {limit_s:.1f} s"
            ) from error
        for peer, line in theirs.items():
            comes, goes = json.loads(line.numpy().tobytes().rstrip(b"\0"))
            if [goes, comes] != mine[peer]:
                raise Refused(
                    f"{self._name}: rank {here} sends {mine[peer][0]} to rank {self._members[peer]} and expects "
                    f"{mine[peer][1]}, which expects {goes} and sends {comes}"
                )
        works = [
            (self._gloo.send if part.sends else self._gloo.recv)([part.data], part.peer, _BODY)
            for part in parts
        ]
        for work in works:
            work.wait(_limit())

    def _compare(self, said: list[Any]) -> None:
        if self._peer is not None:
            ranks = [self._members[self._index], self._members[self._peer]]
            asked = said[1]["operation"]
            said = [said[0], {**said[1], "operation": {"send": "recv", "recv": "send"}.get(asked, asked)}]
        else:
            ranks = list(self._members)
        keys = [
            {key: value for key, value in each.items() if key not in ("to", "from", "by")} for each in said
        ]
        for rank, key in zip(ranks, keys, strict=True):
            if key != keys[0]:
                raise Refused(f"{self._name}: rank {ranks[0]} is at {keys[0]}, rank {rank} at {key}")
        if "to" in said[0]:
            for i, j in ((i, j) for i in range(len(ranks)) for j in range(len(ranks))):
                if said[i]["to"][j] != said[j]["from"][i]:
                    raise Refused(
                        f"{self._name}: rank {ranks[i]} sends {said[i]['to'][j]} rows to rank {ranks[j]}, which "
                        f"expects {said[j]['from'][i]}"
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
        self._number = next(_NUMBERS)

    def _connect(self, part: str, options: Any) -> Any:
        """Return a group of gloo whose ranks are connected.

        A lazy one connects in the first send, which then waits for the other rank five times as long as its timeout.
        """
        store = dist.PrefixStore(part, options.store)
        with patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="0"):
            return dist.ProcessGroupGloo(
                store, options.group_rank, options.group_size, timedelta(seconds=_GLOO_S)
            )

    def _compare(self, base: dist.Store, ranks: list[int], name: str, rank: int) -> None:
        """Against every other member: the groups that hold both, by name and in the order in which they were made."""
        for other in ranks:
            if other == rank:
                continue
            pair = f"strict/{min(rank, other)}-{max(rank, other)}"
            turn = base.add(f"{pair}/count/{rank}", 1)
            mine, theirs = (f"{pair}/{turn}/{each}" for each in (rank, other))
            base.set(mine, json.dumps([name, ranks]))
            end = time.monotonic() + patience_s()
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
        for each in list(self._communicators.values()):
            each.give_up()

    def _communicator(self, operation: str, peer: int | None = None) -> Communicator:
        """The communicator of the group or of a pair in it, which the first operation makes."""
        if peer not in self._communicators:
            made = Communicator(self._gloo, self._name, self._ranks, self.rank(), operation, peer)
            weakref.finalize(self, made.close)
            self._communicators[peer] = made
        return self._communicators[peer]

    def is_hosts(self, tensor: Tensor) -> bool:
        """Whether gloo carries it."""
        return tensor.device.type == "cpu" and self._host is not None

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
        bench = pretend.Bench.current
        if bench is not None:  # what is given to a communicator has been computed
            run_needed(bench.line.mark(), [block for _, block, _ in bench.uses(tensors, [])])
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
        communicator = self._communicator(operation, peer)
        held = {name: _here(each) for name, each in read.items()}
        if written is not None:
            held["output"] = _here(written)
        deliver = (
            partial(_into, _here(written), result) if written is not None and result is not None else _nothing
        )
        work = Work(operation, Held(f"{operation} in {self._name}", **held), deliver, self._waited_for())
        self._place(work, operation, list(read.values()), [] if written is None else [written], peer)
        if peer is None:
            head = {**head, "turn": self._turn()}
        return communicator.start(work, {"operation": operation, **head}, run)

    def _turn(self) -> int:
        """The number of collectives of the main thread on this job's communicators of these members; 0 elsewhere."""
        if threading.current_thread() is not threading.main_thread():
            return 0
        words = self._name.split("/")  # ours are "shardwise/JOB/..."
        key = (tuple(words[: 1 + (words[0] == "shardwise")]), tuple(self._ranks))
        _TURNS[key] += 1
        return _TURNS[key]

    def _waited_for(self) -> list[Callable[[], Any]]:
        """Of each operation that the calling stream has waited for and that is not over, a wait for its end."""
        bench = pretend.Bench.current
        if bench is None or self._kind == "cpu":
            return []
        known = bench.line.mark()
        return [each.come for line, count in known.items() if line.late for each in line.late_until(count)]

    def _place(
        self, work: Work, operation: str, read: list[Tensor], written: list[Tensor], peer: int | None
    ) -> None:
        """Put it into the bench's timelines: on the communicator's stream, behind the calling stream."""
        bench = pretend.Bench.current
        if bench is None:
            return
        bench.operation(operation)
        if self._kind == "cpu":
            return
        rank, line = bench.rank, bench.rank.line((self._number, peer), f"{self._name},")
        with rank.lock:
            line.learn(bench.line.mark())
            known = line.launch()
            uses = bench.uses(read, written)
            rank.use(line, uses, operation, known)
            work.known, work.tensors = dict(known), (*read, *written)
            touched = pretend.blocks_of(uses, len(read) + len(written))
            rank.copy(line, known, work.deliver, None, touched, work.come)

    def _gathered(self, mine: Tensor) -> Tensor:
        every = torch.empty(self.size(), mine.numel() * mine.itemsize, dtype=torch.uint8)
        _named(self._gloo, "all_gather_single", "_allgather_base")(
            every.view(-1), mine.view(-1).view(torch.uint8), c10d.AllgatherOptions()
        ).wait(_limit())
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
            parts = [each.tensor_split(self.size()) for each in self._gathered(mine)]
            for index, part in enumerate(total.tensor_split(self.size())):
                part.copy_(ring_sum([each[index] for each in parts], index))

        return self._start("all_reduce", _shape(tensor), {}, tensor, total, run)

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

        return self._start("broadcast", {**_shape(tensor), "root": root}, {}, tensor, data, run)

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

        return self._start("all_gather", _shape(tensor), {"input": tensor}, output, every, run)

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
            total.copy_(ring_sum(list(every[:, self.rank()]), self.rank()))

        return self._start("reduce_scatter", _shape(tensor), {"input": tensor}, output, total, run)

    def all_to_all_single(self, output: Any, tensor: Any, outs: Any, ins: Any, options: Any = None) -> Any:
        if self._is_hosts(output, tensor):
            return _named(self._host, "all_to_all_single", "alltoall_base")(
                output, tensor, outs, ins, options or c10d.AllToAllOptions()
            )
        there, given, size = _here(output), _here(tensor), self.size()
        came = list(outs) or [there.shape[0] // size] * size
        goes = list(ins) or [given.shape[0] // size] * size
        inner = given.shape[1:].numel()
        if there.shape[1:] != given.shape[1:] or there.dtype != given.dtype:
            raise Refused(f"{self._name}: all_to_all of {_shape(tensor)} to {_shape(output)}")
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
            ).wait(_limit())

        # Every member's counts are the others', in rows whose shape is one everywhere.
        head = {"dtype": _shape(tensor)["dtype"], "inner": list(given.shape[1:]), "to": goes, "from": came}
        return self._start("all_to_all", head, {"input": tensor}, output, arrived, run)

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
        sent = _bytes_of(_here(tensor).clone())

        def run(_: Any) -> None:
            self._gloo.send([sent], to, _BODY).wait(_limit())

        return self._start("send", {**_shape(tensor), "tag": tag}, {"tensor": tensor}, None, None, run, to)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        (tensor,) = tensors
        if self._is_hosts(tensor):
            return self._host.recv(tensors, source, tag)
        self._one_way("recv")
        there = _here(tensor)
        came = torch.empty(there.numel(), dtype=there.dtype)
        poison(there)

        def run(_: Any) -> None:
            self._gloo.recv([_bytes_of(came)], source, _BODY).wait(_limit())

        return self._start("recv", {**_shape(tensor), "tag": tag}, {}, tensor, came, run, source)

    def batch(self, operations: Sequence[Any]) -> list[Work]:
        """The operations of one ``batch_isend_irecv``, on the communicator of the whole group, in its order."""
        assert not self._is_hosts(*(each.tensor for each in operations)), "gloo carries batches of the host"
        communicator = self._communicator("batch")
        held: dict[str, Tensor] = {}
        parts, into, read, written = [], [], [], []
        for place, each in enumerate(operations):
            sends, there = each.op is c10d.isend, _here(each.tensor)
            data = there.clone().view(-1)
            (read if sends else written).append(each.tensor)
            if not sends:
                poison(there)
                into.append(partial(_into, there, data))
            held[f"tensor {place}"] = there
            head = {**_shape(each.tensor), "tag": each.tag}
            parts.append(Part(each.group_peer, sends, head, _bytes_of(data)))
        deliver = partial(_each, into)
        work = Work("batch", Held(f"batch in {self._name}", **held), deliver, self._waited_for())
        self._place(work, "batch", read, written, None)
        return [communicator.start_batch(work, parts)]

    def _one_way(self, direction: str) -> None:
        if self.size() == 2:
            self._directions.add(direction)
            if len(self._directions) == 2:
                raise Refused("messages of both directions through one communicator wait for one another")


def ring_sum(addends: Sequence[Tensor], last: int) -> Tensor:
    """The sum as a ring makes it that ends at ``last``, in the addends' dtype at every hop."""
    total = addends[(last + 1) % len(addends)].clone()
    for hop in range(2, len(addends) + 1):
        total += addends[(last + hop) % len(addends)]
    return total


def register(base: dist.Store, kind: str = "cpu") -> None:
    """Make "strict" and "deviceonly" backends of this process; ``base`` is where their groups compare.

    ``kind``: the type of device that "strict" is for, "cpu" or that of the pretended one, beside which its groups carry
    host tensors over gloo. "deviceonly" carries none.
    """
    _let_batches_through()
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


def _let_batches_through() -> None:
    """Hand batches of messages over as what they are: torch coalesces those of its own groups alone."""
    plain = c10d.batch_isend_irecv
    if getattr(plain, "is_strict", False):
        return

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(operations)
        group = operations[0].group or c10d._get_default_group()
        if isinstance(group, StrictGroup) and not group.is_hosts(operations[0].tensor):
            return group.batch(operations)
        return plain(operations)

    batch_isend_irecv.is_strict = True  # type: ignore[attr-defined]
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def _line(text: str) -> Tensor:
    """A text as a message of fixed size."""
    given = text.encode()
    assert len(given) <= _HEAD_BYTES, text
    line = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
    line[: len(given)] = torch.frombuffer(bytearray(given), dtype=torch.uint8)
    return line


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _each(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


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


def _nothing(*_: Any) -> None:
    pass


def _limit() -> timedelta:
    return timedelta(seconds=_GLOO_S)


def _named(group: Any, *names: str) -> Any:
    return next(getattr(group, name) for name in names if hasattr(group, name))
