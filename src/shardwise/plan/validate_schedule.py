"""Proof of a schedule: the conditions on passes and messages of all stages before they may run.

    passes       every microbatch once per stage, on the stage's rank: F, and B or I and W
    dataflow     F after its activation arrived, B after its F and after its gradient arrived, W after its I
    messages     every result goes to the next stage; two ranks send and receive in one order
    progress     no deadlock if a SEND blocks until it is received

Cost: one look at each Action.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from shardwise.base.errors import PlanError
from shardwise.plan.action import RECV, SEND, Action, B, F, Kind
from shardwise.plan.dataflow import stages_of
from shardwise.plan.stage_places import StagePlaces

_Lists = Mapping[int, Sequence[Action]]


def validate_schedule(
    lists: _Lists,
    ranks: int,
    microbatches: int | None = None,
    forward_only: bool = False,
    folded: bool = False,
) -> None:
    """Check that the passes and messages of ``lists`` compute one step and cannot deadlock.

    Args:
        lists: Actions by the rank's index on "pp".
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of the step; None: as many as stage 0 runs.
        forward_only: True for lists without backward passes.
        folded: True if the stages lie on the ranks in a V (``StagePlaces``).

    Raises:
        PlanError: if the lists would hang or compute anything else; the message names rank and Action.
    """
    stages, places = stages_of(lists), StagePlaces(ranks, folded)
    _every_rank_has_its_stages(lists, places, stages)
    if microbatches is None:
        microbatches = sum(
            action.kind is Kind.F and action.unit < 0 for action in lists[0] if action.stage == 0
        )
    for rank, row in lists.items():
        _passes_once(rank, row, places.stages_of(rank, stages), microbatches, forward_only)
        _in_order(rank, row, places, stages)
    _channels(lists, places)
    _progress(lists, places)


def _every_rank_has_its_stages(lists: _Lists, places: StagePlaces, stages: int) -> None:
    ranks = places.ranks
    if set(lists) != set(range(ranks)):
        raise PlanError(
            f"schedule: lists for ranks {sorted(lists)}; expected one for each of 0 to {ranks - 1}"
        )
    if stages == 0 or stages % ranks:
        raise PlanError(
            f"schedule: {stages} stages on {ranks} ranks; expected as many on each: "
            f"{max(1, -(-stages // ranks)) * ranks}"
        )
    for rank, row in lists.items():
        for action in row:
            if action.stage >= 0 and places.place(action.stage) != rank:
                lies = places.place(action.stage)
                raise PlanError(
                    f"schedule: rank {rank} has {action}, but stage {action.stage} lives on rank {lies}"
                )
            if action.other >= 0 and places.place(action.other) == rank:
                raise PlanError(
                    f"schedule: {action} on rank {rank} is a message of the rank to itself; leave it out"
                )


def _passes_once(
    rank: int, row: Sequence[Action], own: Sequence[int], microbatches: int, forward_only: bool
) -> None:
    counts = Counter(action for action in row if action.kind.computes and action.unit < 0)
    for action, times in counts.items():
        if times > 1:
            raise PlanError(f"schedule: rank {rank} runs {action} {times} times; expected once")
        if not 0 <= action.microbatch < microbatches:
            raise PlanError(f"schedule: rank {rank} runs {action}; microbatches are 0 to {microbatches - 1}")
    for stage in own:
        for i in range(microbatches):
            has = {kind for kind in Kind if kind.computes and Action(kind, -1, i, stage) in counts}
            wanted = [{Kind.F}] if forward_only else [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}]
            if has not in wanted:
                found = ", ".join(sorted(kind.name for kind in has)) or "nothing"
                expected = " or ".join(" ".join(sorted(kind.name for kind in kinds)) for kinds in wanted)
                raise PlanError(
                    f"schedule: rank {rank}, stage {stage}, microbatch {i} has {found}; expected {expected}"
                )


def _in_order(rank: int, row: Sequence[Action], places: StagePlaces, stages: int) -> None:
    """Check that a pass or SEND comes after its inputs, and that every result for another rank is sent."""
    done: set[Action] = set()
    for action in row:
        for needed in _before(action, places, stages):
            halves = {needed, needed._replace(kind=Kind.I)} if needed.kind is Kind.B else {needed}
            if not halves & done:
                raise PlanError(f"schedule: rank {rank} has {action} without {needed} before it")
        if action.kind in (Kind.SEND, Kind.RECV) and action in done:
            raise PlanError(f"schedule: rank {rank} has {action} twice")
        if action.unit < 0:
            done.add(action)
    for action in list(done):
        if action.kind in (Kind.F, Kind.B, Kind.I):
            target = action.stage + (1 if action.kind is Kind.F else -1)
            sent = SEND(action.stage, action.microbatch, target)
            if 0 <= target < stages and places.place(target) != rank and sent not in done:
                raise PlanError(f"schedule: rank {rank} has {action} without {sent} after it")


def _before(action: Action, places: StagePlaces, stages: int) -> Iterator[Action]:
    """Yield the Actions that must stand before ``action`` in the same rank's list; an I may stand for its B."""
    kind, unit, i, stage, other = action
    if unit >= 0:
        return

    def is_here(neighbour: int) -> bool:
        return places.place(neighbour) == places.place(stage)

    if kind is Kind.SEND:
        yield B(stage, i) if action.carries_gradient else F(stage, i)
    elif kind is Kind.W:
        yield Action(Kind.I, -1, i, stage)
    elif kind is Kind.F and stage > 0:
        yield F(stage - 1, i) if is_here(stage - 1) else RECV(stage, i, stage - 1)
    elif kind is Kind.B or kind is Kind.I:
        yield F(stage, i)
        if stage < stages - 1:
            yield B(stage + 1, i) if is_here(stage + 1) else RECV(stage, i, stage + 1)


def _channels(lists: _Lists, places: StagePlaces) -> None:
    """Check that messages between two ranks are received in the order in which they are sent."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in lists.items():
        for action in row:
            if action.kind is Kind.SEND:
                sent.setdefault((rank, places.place(action.other)), []).append(action)
            elif action.kind is Kind.RECV:
                received.setdefault((places.place(action.other), rank), []).append(action)
    for source, target in sorted({*sent, *received}):
        pairs = zip_longest(sent.get((source, target), ()), received.get((source, target), ()))
        for number, (send, receive) in enumerate(pairs):
            if send is None or receive is None or send != _other_end(receive):
                raise PlanError(
                    f"schedule: message {number} from rank {source} to rank {target} is {send or 'nothing'} at its "
                    f"sender and {receive or 'nothing'} at its receiver; a channel keeps its order, so both lists must "
                    "have the same"
                )


def _other_end(action: Action) -> Action:
    kind = Kind.SEND if action.kind is Kind.RECV else Kind.RECV
    return Action(kind, -1, action.microbatch, action.other, action.stage)


def _progress(lists: _Lists, places: StagePlaces) -> None:
    """Check for deadlocks by running only the messages.

    A SEND and its RECV take place together, when both ranks have reached them.
    """
    rows = {rank: [a for a in row if a.kind in (Kind.SEND, Kind.RECV)] for rank, row in lists.items()}
    position = dict.fromkeys(rows, 0)
    free = list(rows)
    while free:
        rank = free.pop()
        while position[rank] < len(rows[rank]):
            action = rows[rank][position[rank]]
            peer = places.place(action.other)
            if position[peer] == len(rows[peer]) or rows[peer][position[peer]] != _other_end(action):
                break
            position[rank] += 1
            position[peer] += 1
            free.append(peer)
    stuck = {rank: row[position[rank]] for rank, row in rows.items() if position[rank] < len(row)}
    if stuck:
        stands = "; ".join(f"rank {rank} before {action}" for rank, action in stuck.items())
        raise PlanError(
            f"schedule: deadlock where a SEND blocks until it is received: {stands}. A rank of the ring must "
            "receive before it sends"
        )
