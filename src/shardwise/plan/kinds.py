"""Kind: the definition of each operation that an Action may stand for. One row of a table is one Kind.

A row holds everything that other modules must know of a Kind, so a new Kind is one row and the function that does it:

    field        read by
    uses         plan/validate.py: where the Kind may stand in a list, how often, and next to which other Kinds
    handler      engine/construction/handlers.py: the object and the method that do the Action
    moves        simulate/clocks.py: the lanes on which bytes travel, and what the Action waits for
    memory       simulate/timeline.py: the rows of memory that the Action takes and releases
    sends        simulate/sent.py: the collectives and messages of the Action
    meaning      the glossary, the printed Plan, errors

What a Kind asks of a Unit follows from the Unit's placements and tiers (``UnitFacts``), never from a policy:

    UNSHARD  in a pass       if the weight is cut or lies on another tier
    UNSHARD  after STEP      if the weight is whole and the master is cut
    REDUCE   each microbatch if the gradient is cut between microbatches, else once in the last microbatch
    LOAD, STORE              if master and moments lie on a disk

Cost: the table is built once; a field of a Kind is an attribute.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from shardwise.plan.strategy import Strategy

Lane = Literal["compute", "exchange", "update", "disk", "down", "up", "data", "wait"]
"""What works, or moves bytes, beside other lanes: the device that computes, the network between ranks, the thread of
updates off the device, a disk, the link from the device to the host, and back, and the reader of batches. Time in which
the computation waits is the lane "wait"."""


class Times(Enum):
    """The number of times that a list must have a Kind for one Unit, or for one rank."""

    NEVER = "never"
    STEP = "once per step"
    LAST = "once, in the last microbatch"
    MICROBATCH = "once per microbatch"
    PASS = "as often as the Unit's forward pass"
    AT_MOST_REDUCED = "at most once for each reduction of the Unit's gradient"
    WINDOW = "once for each window of the Unit's weights"
    SAVED = (
        "once for each forward pass of the Unit; the last of a pass may wait for the next pass, or come never"
    )


class UnitFacts(NamedTuple):
    """Facts about one Unit on one class of ranks that decide which Actions the Unit needs."""

    strategy: Strategy
    trains: bool
    """True if any parameter or row of the Unit is trained."""
    has_rows: bool = False
    """True for a collection of embedding tables."""
    directs: bool = False
    """True if the Unit's updates look at whole tensors."""
    is_skipped: bool = False
    """True in the list of a step that is skipped, which updates nothing."""

    @property
    def moves(self) -> bool:
        """True if the weights are on the device only inside windows."""
        return self.strategy.has_windows and not self.has_rows

    @property
    def brings(self) -> bool:
        """True if the rank's shard comes from another tier before it is gathered."""
        return self.moves and self.strategy.brings_shard

    @property
    def reduces_each(self) -> bool:
        """True if the gradient is reduced in each microbatch."""
        return self.strategy.reduces_each

    @property
    def returns(self) -> bool:
        """True if the weights are whole but updated in pieces, and so gathered after the update."""
        in_pieces = self.strategy.cuts_master and not self.strategy.has_windows
        return self.trains and not self.has_rows and in_pieces and (self.adopts or not self.is_skipped)

    @property
    def recalls(self) -> bool:
        """True if tensors that the forward saves wait for the backward on another tier."""
        return self.strategy.saved_tier != "device"

    @property
    def adopts(self) -> bool:
        """True if updates take effect one step late."""
        return self.trains and self.strategy.is_delayed

    @property
    def updates(self) -> bool:
        """True if the step updates the Unit's state."""
        return self.trains and not self.is_skipped

    @property
    def needs_directions(self) -> bool:
        """True if the step computes directions of updates before it applies them."""
        return self.directs and not self.is_skipped

    @property
    def waits(self) -> bool:
        """True if the step's end waits for the update on another tier, and no gather has waited for it."""
        return self.updates and self.strategy.waits_at_end and not self.has_rows and not self.returns

    @property
    def loads(self) -> bool:
        """True if masters and moments lie on a disk."""
        return self.updates and self.strategy.tier == "disk" and not self.has_rows


class RankFacts(NamedTuple):
    """Facts about one class of ranks that decide which Actions the ranks need once per step."""

    sums: bool
    """True if other ranks of the model hold addends of the same gradients."""
    norms: bool
    """True if the updates of any rank need norms of whole tensors."""
    matrices: bool
    """True if updates of these ranks need whole matrices."""
    loads: bool = False
    """True if these ranks hold buffers that a step updates by the loads of experts."""
    scales: bool = False
    """True if the step updates weights that these ranks gather in fp8."""


class OrderRule(NamedTuple):
    """A condition on the order of a Kind and another Kind in a list."""

    other: str
    """Name of the other Kind."""
    follows: bool
    """True if the other Kind must stand before, False if it may not stand before."""
    scope: Literal["unit", "units", "rank"]
    """The other Action is that of the same Unit, those of all Units that need it, or that of the rank."""
    why: str = ""
    """Rest of the error's sentence."""
    when: Callable[[Any], bool] = lambda facts: True
    """Function of the facts that is True if the condition holds for the Unit."""


class Use(NamedTuple):
    """One place of a list at which a Kind may stand."""

    phase: Literal["pass", "sums", "update"]
    """Inside a pass; between the passes and NORM, which ends this phase; or after NORM."""
    times: Callable[[Any], Times]
    """Function from ``UnitFacts`` (or ``RankFacts``, for an Action of the rank) to how often the list has the Kind."""
    unasked: str = ""
    """Rest of the error's sentence if the Kind stands in a list that does not need it."""
    missing: str = ""
    """Rest of the error's sentence if the Kind is missing in a list that needs it."""
    inside: tuple[str, ...] = ("F", "B", "I")
    """Passes of a stage in which the Kind may stand."""
    order: tuple[OrderRule, ...] = ()


class Move(NamedTuple):
    """Bytes that an Action moves or changes on a lane."""

    lane: Lane
    quantity: str
    """Name of the bytes of the Action's Unit or rank, a field of ``UnitQuantities`` or ``RankQuantities``
    (simulate/quantities.py); ``sent``: all that the Action sends to other ranks (simulate/sent.py); ``work``: its
    operations."""
    is_aside: bool = False
    """True if no later move of the Action waits for this one."""
    is_limited: bool = False
    """True if the computation waits when too many such moves are under way."""


@dataclass(frozen=True)
class Definition:
    """The row of one Kind."""

    meaning: str
    """What the Action does, as a sentence of the glossary."""
    elsewhere: str = ""
    """Words of other systems for the same thing."""
    of: Literal["unit", "tables", "any unit", "rank", "message", "pass"] = "unit"
    """What the Action is of: a Unit of parameters, a collection of embedding tables, either, the rank, ..."""
    uses: tuple[Use, ...] = ()
    handler: tuple[str, str] | None = None
    """Object and method that do the Action, resolved by engine/construction/handlers.py."""
    opens: Literal["", "brought", "gathered"] = ""
    """State of a Unit's weights that begins with the Action."""
    closes: Literal["", "brought", "gathered"] = ""
    """State of a Unit's weights that ends with the Action."""
    holds: tuple[str, ...] = ()
    """Results of earlier Actions of the Unit that the computation waits for before it goes on."""
    waits_for: tuple[str, ...] = ()
    """Results of earlier Actions of the Unit that the Action's moves wait for, while the computation goes on."""
    moves: tuple[Move, ...] | None = None
    """Work of the Action, one after another; empty if the Action takes the time of Python alone. None: no list has the
    Kind, so that it needs no price."""
    gives: str = ""
    """Result that is there after the moves, for the ``waits_for`` of other Actions."""
    memory: tuple[str, ...] = ()
    """Effects on the memory of a step, by their names in simulate/timeline.py."""
    sends: str = ""
    """What the Action sends to other ranks, by its name in simulate/sent.py; ``nothing`` if it sends nothing."""


def _once(fact: str) -> Callable[[Any], Times]:
    """Return a function that asks for a Kind once per step if ``fact`` is true."""
    return lambda facts: Times.STEP if getattr(facts, fact) else Times.NEVER


def _reduces(facts: UnitFacts) -> Times:
    if not facts.trains:
        return Times.NEVER
    return Times.MICROBATCH if facts.reduces_each else Times.LAST


def _arrives(facts: UnitFacts) -> Times:
    return Times.AT_MOST_REDUCED if facts.trains else Times.NEVER


def _windows(facts: UnitFacts) -> Times:
    return Times.WINDOW if facts.moves else Times.NEVER


def _brings(facts: UnitFacts) -> Times:
    return Times.WINDOW if facts.brings else Times.NEVER


def _recalls(facts: UnitFacts) -> Times:
    return Times.PASS if facts.recalls else Times.NEVER


def _offloads(facts: UnitFacts) -> Times:
    return Times.SAVED if facts.recalls else Times.NEVER


_WHOLE = "of a Unit whose weights every rank keeps whole"
_IN_MEMORY = "of a Unit whose state stays in memory"


class AnyKind(Enum):
    """Base of ``Kind``. Another set of Kinds, each a ``Definition``, derives from it too."""

    def __init__(self, row: Definition):
        self.row = row
        phases = {use.phase for use in row.uses}
        self.computes: bool = row.of == "pass"
        """True for the passes through a model, False for the Actions that serve a pass."""
        self.ends_step: bool = bool(phases) and "pass" not in phases
        """True for the Kinds that follow all passes of a step."""
        self.updates: bool = phases == {"update"}
        """True for the Kinds that follow NORM. A skipped step runs only SWAP_WEIGHT of these."""
        lanes = [move.lane for move in row.moves or (Move("compute", ""),)]
        self.lane: Lane = "exchange" if "exchange" in lanes else lanes[0]
        """Lane of the Action's own row in a trace: the exchange if it has one, or that of its first move."""
        if self.computes or self.ends_step:
            self.lane = "compute"
        self.is_announced: bool = self.computes or (row.of == "tables" and "pass" in phases)
        """True for the Kinds that the user's model reaches by itself inside a pass, as module hooks report."""

    __hash__ = object.__hash__  # Enum's own runs in Python, and a step looks up a handler for each Action

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (type(self), self.name)


class Kind(AnyKind):
    """The operation that an Action stands for."""

    F = Definition(
        "compute the forward pass of a stage or of a Unit",
        "forward",
        of="pass",
        handler=("passes", "forward"),
        holds=("updated", "gathered"),
        moves=(Move("exchange", "sent"), Move("compute", "work"), Move("down", "saved")),
        gives="saved",
        memory=("forward",),
        sends="pass",
    )
    B = Definition(
        "compute the backward pass of a stage or of a Unit (I and W together)",
        "backward",
        of="pass",
        handler=("passes", "backward"),
        holds=("updated", "gathered", "recalled"),
        moves=(Move("exchange", "sent"), Move("compute", "work"), Move("compute", "accumulated")),
        memory=("backward",),
        sends="pass",
    )
    I = Definition(  # noqa: E741 - the field's letter
        "compute the gradient of the input of a stage or of a Unit, and those of parameters that do not wait for W",
        "dgrad, backward for inputs",
        of="pass",
        handler=("passes", "backward"),
        holds=("updated", "gathered", "recalled"),
        moves=(Move("exchange", "sent"), Move("compute", "work"), Move("compute", "accumulated_in_i")),
        memory=("backward",),
        sends="pass",
    )
    W = Definition(
        "compute the gradients of the weights of a stage or of a Unit",
        "wgrad, backward for weights",
        of="pass",
        handler=("passes", "weights"),
        moves=(Move("exchange", "sent"), Move("compute", "work"), Move("compute", "accumulated_in_w")),
        memory=("weights",),
        sends="pass",
    )
    SEND = Definition(
        "send an activation or its gradient to another stage",
        "p2p",
        of="message",
        handler=("schedule", "send"),
        moves=(Move("exchange", "sent"),),
        sends="message",
    )
    RECV = Definition(
        "receive an activation or its gradient from another stage",
        "p2p",
        of="message",
        handler=("schedule", "receive"),
        moves=(Move("exchange", "sent"),),
        memory=("receive",),
        sends="nothing",
    )
    LOAD_WEIGHT = Definition(
        "copy a rank's shard of a Unit's weights from host memory or a disk to the device, ahead of its UNSHARD",
        "swap in, prefetch",
        uses=(Use("pass", _brings, "of a Unit whose shard lies on the device, or that is whole"),),
        handler=("windows", "load_weight"),
        opens="brought",
        waits_for=("updated",),
        moves=(Move("disk", "weights_read"), Move("up", "weights_brought")),
        gives="brought",
        memory=("take brought",),
        sends="nothing",
    )
    UNSHARD = Definition(
        "gather a Unit's weights from the ranks that hold a shard each",
        "all-gather, fetch",
        uses=(
            Use("pass", _windows, _WHOLE),
            Use(
                "update",
                _once("returns"),
                "at the end of the step, where nothing is to be gathered",
                "after its update: others would keep the old weights",
                order=(
                    OrderRule(
                        "STEP", True, "unit", ", which changes what is gathered", lambda f: not f.adopts
                    ),
                    OrderRule("SWAP_WEIGHT", True, "unit", ", which changes what is gathered"),
                    OrderRule(
                        "STEP", False, "units", ", which runs beside the next step", lambda f: f.adopts
                    ),
                ),
            ),
        ),
        handler=("windows", "unshard"),
        opens="gathered",
        closes="brought",
        waits_for=("updated", "brought"),
        moves=(Move("disk", "whole_read"), Move("up", "whole_brought"), Move("exchange", "sent")),
        gives="gathered",
        memory=("take brought", "take gathered"),
        sends="weights",
    )
    RESHARD = Definition(
        "release the memory of a Unit's gathered weights",
        "release, free",
        uses=(Use("pass", _windows, _WHOLE),),
        handler=("windows", "reshard"),
        closes="gathered",
        moves=(),
        memory=("free gathered",),
        sends="nothing",
    )
    OFFLOAD = Definition(
        "wait until host memory has a copy of what a Unit's forward saved, and release the device memory",
        "activation offload, swap out",
        uses=(
            Use("pass", _offloads, "of a Unit whose forward saves everything on the device", inside=("F",)),
        ),
        handler=("windows", "offload"),
        holds=("saved",),
        moves=(),
        memory=("offload",),
        sends="nothing",
    )
    RELOAD = Definition(
        "bring back what a Unit's forward saved in host memory, from all ranks that keep a part of it",
        "reload, swap in",
        uses=(
            Use(
                "pass", _recalls, "of a Unit whose forward saves everything on the device", inside=("B", "I")
            ),
        ),
        handler=("windows", "reload"),
        moves=(Move("up", "saved"), Move("exchange", "sent")),
        gives="recalled",
        memory=("recall",),
        sends="saved",
    )
    REDUCE = Definition(
        "sum a Unit's gradients over the data-parallel ranks",
        "reduce-scatter, gradient sync",
        uses=(
            Use(
                "pass",
                _reduces,
                "of a Unit in which nothing trains",
                inside=("B", "I", "W"),
                order=(OrderRule("B", True, "unit"),),
            ),
        ),
        handler=("windows", "reduce"),
        moves=(Move("exchange", "sent"),),
        gives="reduced",
        memory=("reduce",),
        sends="gradients",
    )
    ARRIVE = Definition(
        "wait for the sum of a Unit's gradients; a gradient that is updated on another tier leaves for it",
        "wait for reduce-scatter",
        uses=(
            Use(
                "pass",
                _arrives,
                "of a Unit in which nothing trains",
                inside=("B", "I", "W"),
            ),
        ),
        handler=("windows", "arrive"),
        holds=("reduced",),
        moves=(
            Move("exchange", "sent"),
            Move("down", "gradients_down"),
            Move("up", "gradients_brought", is_aside=True),
            Move("disk", "gradients_left", is_aside=True, is_limited=True),
        ),
        memory=("arrive",),
        sends="arrival",
    )
    INPUT_DIST = Definition(
        "send the keys of a batch to the owners of their rows, ahead of the batch's step",
        "input dist",
        of="tables",
        moves=(Move("compute", "keys_found"), Move("exchange", "sent")),
        sends="keys",
    )
    READ = Definition(
        "read the table rows that a batch uses from a disk into memory, ahead of the batch's step",
        "prefetch, cache fill",
        of="tables",
        moves=(Move("compute", "keys_found"), Move("disk", "missed")),
        sends="nothing",
    )
    FETCH = Definition(
        "gather the table rows that a batch uses",
        "lookup, output dist",
        of="tables",
        uses=(Use("pass", lambda facts: Times.MICROBATCH, inside=("F",)),),
        handler=("tables", "passed_by"),
        moves=(
            Move("compute", "keys_found"),
            Move("disk", "missed", is_aside=True, is_limited=True),
            Move("compute", "rows_read"),
            Move("exchange", "sent"),
        ),
        sends="vectors",
    )
    DELIVER = Definition(
        "send the gradients of table rows to the owners of the rows",
        "gradient dist",
        of="tables",
        uses=(
            Use(
                "sums",
                _once("has_rows"),
                missing="though the Unit's rows get gradients",
                order=(
                    OrderRule("SUM", False, "rank", ", which would leave out its gradients"),
                    OrderRule("NORM", False, "rank", ", which would leave out its gradients"),
                ),
            ),
        ),
        handler=("tables", "deliver"),
        moves=(Move("compute", "rows_merged"), Move("exchange", "sent")),
        sends="row gradients",
    )
    SUM = Definition(
        "sum the gradients that model-parallel ranks hold in common",
        "sequence-parallel all-reduce, embedding all-reduce",
        of="rank",
        uses=(
            Use(
                "sums",
                _once("sums"),
                "though they hold no gradient that other ranks of the model add to",
                "though they hold addends of gradients (registry: Partial, tied or copied)",
                order=(OrderRule("NORM", False, "rank", ", which would leave out what is summed"),),
            ),
        ),
        handler=("end", "sum"),
        moves=(Move("exchange", "sent"),),
        sends="shared gradients",
    )
    NORM = Definition(
        "compute the norm of all gradients and what all ranks derive from it: scale, clip, or skip",
        "grad norm, overflow check",
        of="rank",
        uses=(
            Use(
                "sums",
                lambda facts: Times.STEP,
                missing="; expected one after the last REDUCE",
                order=(
                    OrderRule(
                        "SUM",
                        True,
                        "rank",
                        ", but hold addends of gradients (registry: Partial, tied or copied)",
                    ),
                ),
            ),
        ),
        handler=("end", "norm"),
        moves=(Move("exchange", "sent"), Move("compute", "normed")),
        sends="numbers",
    )
    DIRECTION = Definition(
        "compute a Unit's moments and update directions, if the update needs more than its own element",
        "first half of an optimizer's step",
        uses=(
            Use(
                "update",
                _once("needs_directions"),
                "of a Unit whose updates look at each element alone",
                "though its updates need whole tensors (registry: needs)",
            ),
        ),
        handler=("end", "direction"),
        moves=(Move("compute", "directed"),),
        sends="nothing",
    )
    TRUST_RATIO = Definition(
        "compute the norms of whole tensors, of weights and of directions",
        "trust ratio, layer-wise norms",
        of="rank",
        uses=(
            Use(
                "update",
                _once("norms"),
                "though no update here needs it (registry: needs)",
                "though updates need it (registry: needs)",
                order=(OrderRule("DIRECTION", True, "units", ", whose directions it looks at"),),
            ),
        ),
        handler=("end", "trust_ratio"),
        moves=(Move("compute", "compared"), Move("exchange", "sent")),
        sends="norms",
    )
    ALL_TO_ALL = Definition(
        "send whole matrices of directions to one rank each, and receive the updates back",
        "distributed Muon",
        of="rank",
        uses=(
            Use(
                "update",
                _once("matrices"),
                "though no update here needs it (registry: needs)",
                "though updates need it (registry: needs)",
                order=(OrderRule("DIRECTION", True, "units", ", whose directions it looks at"),),
            ),
        ),
        handler=("end", "all_to_all"),
        moves=(Move("exchange", "sent"), Move("compute", "work")),
        sends="matrices",
    )
    BALANCE = Definition(
        "move the bias of each router by the number of tokens that its experts got in the step",
        "auxiliary-loss-free balancing",
        of="rank",
        uses=(
            Use(
                "update",
                _once("loads"),
                "though no buffer here follows the loads of experts (registry: needs)",
                "though buffers of routers follow the loads of experts (registry: needs)",
            ),
        ),
        handler=("experts", "balance"),
        moves=(Move("compute", "balanced"),),
        sends="nothing",
    )
    SCALE = Definition(
        "agree on the scales of the weights that are gathered in fp8, after their update",
        "precompute of float8 scales, amax reduction",
        of="rank",
        uses=(
            Use(
                "update",
                _once("scales"),
                "though no weight here is gathered in fp8",
                "though weights that are gathered in fp8 were updated",
                order=(OrderRule("STEP", True, "units", ", which changes the weights"),),
            ),
        ),
        handler=("scales", "scale"),
        moves=(Move("compute", "scaled"), Move("exchange", "sent")),
        sends="scales",
    )
    SWAP_WEIGHT = Definition(
        "replace a Unit's weights by the result of the previous step's update (delayed updates)",
        "delayed parameter update",
        uses=(
            Use(
                "update",
                _once("adopts"),
                "of a Unit whose updates count at once",
                "though its updates take effect one step late",
                order=(OrderRule("STEP", False, "units", ", which a skipped step leaves out"),),
            ),
        ),
        handler=("end", "swap_weight"),
        holds=("update",),
        moves=(Move("up", "adopted"),),
        memory=("drop late gradients",),
        sends="nothing",
    )
    LOAD = Definition(
        "read a Unit's masters and moments from a disk into host memory",
        "swap in of optimizer state",
        uses=(
            Use(
                "update",
                _once("loads"),
                _IN_MEMORY,
                "though its state lies on a disk",
                order=(OrderRule("STEP", False, "unit", ", which updates what it moves"),),
            ),
        ),
        handler=("end", "load"),
        moves=(Move("disk", "state_read"),),
        gives="loaded",
        sends="nothing",
    )
    STEP = Definition(
        "update a Unit's masters and moments where they lie",
        "optimizer step",
        of="any unit",
        uses=(
            Use(
                "update",
                _once("updates"),
                "of a Unit in which nothing trains",
                "though the Unit trains",
                order=(
                    OrderRule("LOAD", True, "unit", ", which brings what it updates"),
                    OrderRule("SWAP_WEIGHT", True, "unit", ", which takes what it writes over"),
                    OrderRule("DIRECTION", True, "unit", ", which computes what it applies"),
                    OrderRule(
                        "TRUST_RATIO", True, "rank", ", which computes what its update needs of whole tensors"
                    ),
                    OrderRule(
                        "ALL_TO_ALL", True, "rank", ", which computes what its update needs of whole tensors"
                    ),
                ),
            ),
        ),
        handler=("end", "step"),
        waits_for=("loaded",),
        moves=(
            Move("exchange", "sent"),
            Move("compute", "updated_on_device"),
            Move("compute", "rows_updated"),
            Move("update", "updated_on_host"),
            Move("up", "updated_up"),
        ),
        gives="update",
        sends="squares of rows",
    )
    STORE = Definition(
        "write a Unit's masters and moments to the disk after their update",
        "swap out of optimizer state",
        uses=(
            Use(
                "update",
                _once("loads"),
                _IN_MEMORY,
                "though its updated state belongs on a disk",
                order=(OrderRule("STEP", True, "unit", ", which updates what it moves"),),
            ),
        ),
        handler=("end", "store"),
        waits_for=("update",),
        moves=(Move("disk", "state_written"),),
        sends="nothing",
    )
    WAIT = Definition(
        "wait for a Unit's update on another tier (offload.step: at_end)",
        "synchronize",
        uses=(
            Use(
                "update",
                _once("waits"),
                "of a Unit whose update is waited for before its next use",
                "though its update ends with the step",
                order=(
                    OrderRule("STEP", True, "unit", ", which it waits for"),
                    OrderRule("STORE", True, "unit", ", which must not wait for it"),
                ),
            ),
        ),
        handler=("end", "wait"),
        holds=("update",),
        moves=(),
        sends="nothing",
    )
