"""Seconds of the moves of one rank's Actions: counted bytes and operations over the rates of its hardware.

    work                   products and other operations of a pass, by a roofline           (work.py)
    sent                   exchanges with other ranks, by axis
    on the device          bytes / rate of the memory in which the rank computes; rows of tables have a rate of their own
    update, disk           bytes / rate of host memory, or of the disk
    down, up               bytes / rate of the link between host and device; nothing on CPU ranks, where both are one

Cost: a look into a table per move; the work of a Unit is priced once.
"""

from typing import NamedTuple

from shardwise.base.hardware import Hardware, Level
from shardwise.plan.action import Action, Kind
from shardwise.plan.kinds import Move
from shardwise.plan.mesh import Mesh
from shardwise.simulate.quantities import Quantities

_CONTROL_BYTES = 8 * 64
"""Bytes of the numbers on which ranks agree in NORM."""


class SentBytes(NamedTuple):
    """What one Action sends over one axis."""

    axis: str
    nbytes: float
    calls: int = 1
    is_control: bool = False
    """True for numbers on which all ranks agree, for which they wait for one another."""


class ActionPrices:
    """Seconds of the moves of one rank's Actions.

    Args:
        job: Bytes and operations of the rank's Actions.
        hardware: Rates of the rank.
        mesh: The mesh.
        is_cpu: True if ranks compute on CPUs.
        per_host: Ranks of one host; None: all ranks are on one host.
    """

    def __init__(
        self, job: Quantities, hardware: Hardware, mesh: Mesh, is_cpu: bool, per_host: int | None = None
    ):
        self._job = job
        self._hardware = hardware
        self._mesh = mesh
        self._per_host = per_host
        self.is_cpu = is_cpu
        self.action_s = hardware.action_s
        """Seconds of Python for one Action."""
        self._near = "host" if is_cpu else "device"
        self._work: dict[tuple[Kind, int], float] = {}
        self._sent: dict[tuple[Kind, int], tuple[SentBytes, ...]] = {}
        self._levels: dict[str, Level] = {}

    def near_s(self, nbytes: float) -> float:
        """Return the seconds in which so many bytes are read and written where the rank computes."""
        return self._hardware.touched_s(nbytes, self._near)

    def seconds(self, action: Action, move: Move) -> float:
        """Return the seconds of a move of an Action that sends nothing."""
        if move.quantity == "work":
            return self._work_s(action)
        source = self._job.of_rank if action.unit < 0 else self._job.of[action.unit]
        nbytes: float = getattr(source, move.quantity)
        if not nbytes:
            return 0.0
        if move.quantity == "accumulated":
            # The first microbatch writes gradients into their buffer, and later ones add to it.
            nbytes *= 3 if action.microbatch > 0 else 2
        if move.quantity.startswith("rows_"):
            return nbytes / self._hardware.row_bytes_s
        if move.lane == "compute":
            return self.near_s(nbytes)
        if move.lane in ("update", "disk"):
            return self._hardware.touched_s(nbytes, "disk" if move.lane == "disk" else "host")
        if self.is_cpu:
            # Nothing goes between host and device but weights that are adopted, which are copied in memory.
            return self.near_s(2 * nbytes) if move.quantity == "adopted" else 0.0
        return nbytes / self._hardware.links["device"].bytes_s

    def _work_s(self, action: Action) -> float:
        key = (action.kind, action.unit)
        if key not in self._work:
            if action.unit < 0:
                work, touched = self._job.matrices, 0
            else:
                share = self._job.share(action.kind, action.unit)
                work, touched = share.work, share.touched_bytes
            self._work[key] = work.seconds(self._hardware, touched, self._near)
        return self._work[key]

    # Between ranks ---------------------------------------------------------------------------------------------

    def sent(self, action: Action) -> tuple[SentBytes, ...]:
        """Return what an Action sends, by axis."""
        if action.kind.row.of == "message":
            return self._message(action)
        key = (action.kind, action.unit)
        if key not in self._sent:
            found = self._rank_sends(action.kind) if action.unit < 0 else self._unit_sends(*key)
            self._sent[key] = tuple(
                each for each in found if each.nbytes and self._mesh.size(each.axis) > 1
            )
        return self._sent[key]

    def exchange_s(self, sent: SentBytes) -> float:
        """Return the seconds of an exchange."""
        return self._exchange_s(sent.nbytes, sent.axis, sent.calls)

    def _exchange_s(self, nbytes: float, axis: str, calls: int = 1) -> float:
        link = self._hardware.links[self._level(axis)]
        return nbytes / link.bytes_s + calls * link.latency_s

    def _level(self, axis: str) -> Level:
        """Return what the ranks of an axis have in common: a host, or the cluster."""
        if axis not in self._levels:
            per_host = self._per_host or self._mesh.world_size
            hosts = {rank // per_host for rank in self._mesh.ranks(axis, 0)}
            self._levels[axis] = "host" if len(hosts) == 1 else "cluster"
        return self._levels[axis]

    def _message(self, action: Action) -> tuple[SentBytes, ...]:
        # On CPU ranks the sender copies the message in and the receiver copies it out.
        size = self._job.message(action)
        if self.is_cpu:
            return (SentBytes("pp", size / 2),)
        return (SentBytes("pp", size),) if action.kind is Kind.SEND else ()

    def _unit_sends(self, kind: Kind, unit: int) -> list[SentBytes]:
        amounts, strategy = self._job.of[unit], self._job.strategies[unit]
        if kind in (Kind.F, Kind.B):
            axis = "tp" if self._mesh.tp > 1 else "ep" if self._mesh.ep > 1 else "cp"
            return [SentBytes(axis, self._job.share(kind, unit).sent_bytes)]
        if kind is Kind.UNSHARD:
            return [SentBytes(strategy.axes[1], amounts.gathered)]
        if kind is Kind.REDUCE:
            axis = strategy.axes[1] if strategy.cuts_master else self._mesh.name_of(strategy.axes)
            return [SentBytes(axis, amounts.reduced)]
        if kind is Kind.RELOAD:
            return [SentBytes("tp", amounts.saved_elsewhere)]
        rows = self._job.rows_of(unit)
        if kind is Kind.FETCH:
            return [SentBytes("dp", rows.sent_bytes[0], rows.messages[0])]
        return [SentBytes("dp", rows.sent_bytes[1], rows.messages[1])] if kind is Kind.DELIVER else []

    def _rank_sends(self, kind: Kind) -> list[SentBytes]:
        if kind is Kind.NORM:
            return [
                SentBytes("dp_replicate", self._job.over_replicas),
                SentBytes("dp", _CONTROL_BYTES, is_control=True),
                SentBytes("model", _CONTROL_BYTES, is_control=True),
            ]
        if kind is Kind.SUM:
            return [SentBytes("model", self._job.summed)]
        if kind is Kind.TRUST_RATIO:
            return [SentBytes("world", _CONTROL_BYTES)]
        if kind is Kind.SCALE:
            return [SentBytes("dp", _CONTROL_BYTES)]
        if kind is Kind.ALL_TO_ALL:
            sharers = self._mesh.world_size // self._mesh.pp
            part = self._job.matrix_elements / sharers * (sharers - 1) / sharers
            return [SentBytes("world", 2 * 2 * part, 2)]
        return []
