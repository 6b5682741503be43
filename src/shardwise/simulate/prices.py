"""Seconds of the moves of one rank's Actions: counted bytes and operations over the rates of its hardware.

    work                   products and other operations of a pass, by a roofline           (work.py)
    sent                   collectives and messages, as their transport makes them  (sent.py, exchange_price.py)
    on the device          bytes / rate of the memory in which the rank computes; rows of tables have their own rate
    update, disk           bytes / rate of updates or of host memory, or of the disk
    down, up               bytes / rate of the link between host and device; nothing on CPU ranks, where both are one

Cost: a look into a table per move; the work and the exchanges of a Unit are priced once.
"""

from shardwise.base.hardware import Hardware
from shardwise.parallel.zero.cost import Calls
from shardwise.plan.action import Action, Kind
from shardwise.plan.kinds import Move
from shardwise.plan.mesh import Mesh
from shardwise.simulate.exchange_price import ExchangePrices
from shardwise.simulate.exchanges import ExchangeCall
from shardwise.simulate.quantities import Quantities


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
        self._exchanges = ExchangePrices(hardware, mesh, is_cpu, per_host)
        self.is_cpu = is_cpu
        self._near = "host" if is_cpu else "device"
        self._pass_factor = hardware.pass_factor(min(per_host or mesh.world_size, mesh.world_size))
        self._work: dict[tuple[Kind, int], float] = {}
        self._sent: dict[Action, Calls] = {}

    def python_s(self, kind: Kind) -> float:
        """Return the seconds of Python for one Action of a Kind."""
        hardware = self._hardware
        return (kind.ends_step and hardware.ending_action_s) or hardware.action_s

    def near_s(self, nbytes: float) -> float:
        """Return the seconds in which so many bytes are read and written where the rank computes."""
        return self._hardware.touched_s(nbytes, self._near)

    def seconds(self, action: Action, move: Move) -> float:
        """Return the seconds of a move of an Action that sends nothing."""
        if move.quantity == "work":
            return self._work_s(action)
        source = self._job.of_rank if action.unit < 0 else self._job.of[action.unit]
        if move.quantity == "missed":
            return sum(each.seconds(self._hardware) for each in getattr(source, "missed", ()))
        nbytes: float = getattr(source, move.quantity)
        if not nbytes:
            return 0.0
        if move.quantity.startswith("accumulated"):
            # The first microbatch writes gradients into their buffer, and later ones add to it.
            nbytes *= 3 if action.microbatch > 0 else 2
        if move.quantity.startswith("rows_"):
            return nbytes / self._hardware.row_bytes_s
        if move.quantity.startswith("updated_on_") and self.is_cpu:
            return nbytes / self._hardware.operation_bytes_s("update", nbytes, "host")
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
            self._work[key] = self._pass_factor * work.seconds(self._hardware, touched, self._near)
        return self._work[key]

    # Between ranks ---------------------------------------------------------------------------------------------

    def sent(self, action: Action) -> Calls:
        """Return the collectives and messages of an Action."""
        key = action if action.kind is Kind.ARRIVE else action._replace(microbatch=-1)
        if key not in self._sent:
            self._sent[key] = self._job.exchanges(action)
        return self._sent[key]

    def exchange_s(self, call: ExchangeCall) -> float:
        """Return the seconds of equal calls of a collective, or of a message, on a rank."""
        return self._exchanges.of(call)

    def late_s(self, worked_s: float, axis: str) -> float:
        """Return the seconds for which a rank waits for the last rank of an axis, after work since they met."""
        return self._hardware.late_s(worked_s, self._exchanges.place(axis).ranks)

    def taken(self, axis: str) -> float:
        """Return the share of the device that exchanges over an axis take from the computation beside them."""
        return self._hardware.links[self._exchanges.place(axis).level].taken
