"""Exchanges of model state in two levels, where the ranks of an axis lie on several hosts.

With L ranks on each of H hosts a rank has the place (h, l) on its axis. A reduce-scatter of a buffer of H·L ranges:

    1  within a host    rank (h, l) gets the ranges (0, l), (1, l) ... (H-1, l) of the L ranks of its host and adds them
    2  across hosts     rank (h, l) gets the range (h, l) of the sums of the ranks (0, l) ... (H-1, l) and adds them

So every host sends its sum once, and not once for each of its ranks. An all-gather goes the other way: the ranges of
the hosts first, then the ranges of the host's ranks. Only gloo gathers so; NCCL's rings enter every host once anyway.

Sums have another order than in one step, so results differ in the last bits; they are the same in every run. Sums of
hosts travel in the dtype that the caller gives.

Paper: Wang et al. 2023, arXiv:2306.10209 (ZeRO++: gradients in two levels).
Cost:  (L-1)/L · P elements within the host, (H-1)/N · P across; on a device a buffer of P elements to send and one to
       receive, until the computation has waited.
Shapes: P elements; N = H·L ranks.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.comm.flights import DONE, PendingCollective
from shardwise.comm.transports import sum_in_order
from shardwise.memory.streams import beside, run_beside
from shardwise.plan.exchange import PIECE_BYTES
from shardwise.plan.exchange_calls import Purpose


class TwoLevels:
    """The two levels of a group whose ranks lie on several hosts.

    Args:
        across: The ranks in this rank's place on every host.
        within: The ranks of this host.
        gathers: True if gathers go in two levels too.
        device: Device of the tensors.
    """

    def __init__(self, across: Group, within: Group, gathers: bool, device: torch.device):
        self.across = across
        self.within = within
        self.gathers = gathers
        self._stream = beside(device)

    def all_gather(self, output: Tensor, shard: Tensor, what: str, purpose: Purpose) -> PendingCollective:
        """Gather the ranks' shards into ``output``, as ``Group.all_gather`` does.

        The second level runs beside the caller; the first one, which it needs, is over when this method returns.
        """
        hosts, per_host = self.across.size, self.within.size
        mine = output.new_empty(hosts, shard.numel())
        self.across.all_gather(mine.view(-1), shard, what, purpose).wait()
        by_place = output.new_empty(per_host, hosts, shard.numel())
        second = self.within.all_gather(by_place.view(-1), mine.view(-1), what, purpose)

        def finish() -> None:
            second.wait()
            output.view(hosts, per_host, -1).copy_(by_place.transpose(0, 1))

        return PendingCollective(finish)

    def reduce_scatter(
        self,
        shard_out: Tensor,
        full: Tensor,
        what: str,
        purpose: Purpose,
        accumulate: bool,
        between: torch.dtype,
    ) -> PendingCollective:
        """Write this rank's part of the sum of ``full`` into ``shard_out``, as ``Group.reduce_scatter`` does.

        On a device both levels run on a stream beside the computation, which waits for them in ``wait``.

        Args:
            shard_out: This rank's part of the sum.
            full: This rank's addend.
            what: Name of the tensor in errors.
            purpose: Kind of traffic.
            accumulate: Add to ``shard_out`` instead of overwriting it.
            between: Dtype in which the sums of hosts travel.
        """
        by_place = full.view(self.across.size, self.within.size, -1).transpose(0, 1)  # [L, H, P/N]

        def run(start: int, stop: int) -> None:
            total = shard_out[start:stop]
            sums = self._within(by_place[..., start:stop], total.dtype, what, purpose).to(between)
            received = _exchanged(self.across, sums, what, purpose)
            if accumulate:
                total.add_(_added(received, total.dtype))
            else:
                total.copy_(_added(received, total.dtype))

        if self._stream is not None:
            clock, meter = self.across.clock, self.across.clock.meter
            with nullcontext() if meter is None else meter.beside():
                arrive = run_beside(self._stream, lambda: run(0, shard_out.numel()))

            kept = [full, shard_out]

            def finish() -> None:
                mark = None if meter is None else clock.mark_wait()
                arrive()
                if meter is not None:
                    meter.end(self.across.axis, mark)
                kept.clear()  # the other stream reads and writes them until here, so nobody may get their memory

            return PendingCollective(finish)
        piece = max(PIECE_BYTES // (full.itemsize * self.across.size * self.within.size), 1)
        for start in range(0, shard_out.numel(), piece):
            run(start, min(start + piece, shard_out.numel()))
        return DONE

    def _within(self, by_place: Tensor, dtype: torch.dtype, what: str, purpose: Purpose) -> Tensor:
        """Return this host's sums of the ranges that go to this rank's place on each host, [H, P/N]."""
        return _added(_exchanged(self.within, by_place.contiguous(), what, purpose), dtype)


def _exchanged(group: Group, rows: Tensor, what: str, purpose: Purpose) -> Tensor:
    """Send row i of ``rows`` to rank i of ``group``, and return the rows that arrive, in rank order."""
    received = torch.empty_like(rows)
    each = rows[0].numel()
    counts = [[each] * group.size] * group.size
    group.all_to_all(received.view(-1), rows.view(-1), counts, what, purpose).wait()
    return received


def _added(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the rows, added in at least ``dtype`` and fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    if rows.device.type == "cpu":
        return sum_in_order(rows, rows.new_empty(rows.shape[1:], dtype=wide))
    return rows.sum(0, dtype=wide)
