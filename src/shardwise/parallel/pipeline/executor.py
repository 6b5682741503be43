"""The executor of a schedule: the handlers of F, B, SEND and RECV of a stage, and the end of a walk on all ranks.

    F(s, i)        received activation -> forward of stage s -> activation to send, or the loss
    B(s, i)        received gradient   -> backward            -> gradient to send
    I(s, i)        the same as B(s, i), without the gradients of weights, which W(s, i) computes
    SEND, RECV     exchange with the neighbouring stages

The message of a gradient may carry a number of the microbatch's last stage: the factor of its loss, if a stage has loss
terms of its own that are multiplied by the same factor. The number is one more tensor behind the gradients, which no
host reads.

A stage's input is detached from the received value and requires gradients if its sender's tensor did. Two neighbouring
stages of one rank hand activations and gradients over without a message, and the input is detached in the same way. Of
the stage's output only the edge of the graph is kept for the backward pass: the numbers are dropped once they are sent,
unless autograd saved them. The Actions inside a stage (a Unit's gathers and reductions) stand in the same list, and the
hooks on the stage's modules walk it; the executor handles only stages.

An error on one rank ends the walk on all ranks with the same text (messages.py): a rank that raises or receives an
error sends it to every neighbour that it exchanges messages with, and reads what the ranks that wait for it have sent,
until they have sent the error too. The next walk begins with empty channels. Ranks that no remaining Action sends to
would not get the error. So each rank confirms at its end that it and all ranks that end after it have ended well: with
B from the first rank to the last, without B from the last to the first.

Between devices messages are posted ahead and contain no text, so an error ends the exchange for good: the watch reports
the error to all ranks, and their engines end too.

Cost: one message per edge between stages, microbatch and direction, and one empty message per rank.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import CommError
from shardwise.comm.peers import PointToPoint, ReceivedMessage
from shardwise.parallel.pipeline.messages import (
    PackedValue,
    check_refusal,
    is_lasting,
    is_refusal,
    pack,
    refusal,
    unpack,
)
from shardwise.parallel.pipeline.stand_in import tensors_of
from shardwise.plan.action import Action, Kind
from shardwise.plan.exchange_calls import Purpose
from shardwise.plan.stage_places import StagePlaces
from shardwise.plan.trace import Trace, recorded
from shardwise.plan.walker import Walker


class StageRunner(Protocol):
    """Interface of the object that computes the stages."""

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """Run the forward pass of a stage.

        Args:
            stage: Number of the stage.
            microbatch: Index of the microbatch.
            received: Output of the stage before, or None on the first stage.

        Returns:
            The stage's output; on the last stage the value that ``backward`` begins with.
        """

    def backward(
        self, stage: int, microbatch: int, run: Callable[[Tensor | None], None], said: Tensor | None
    ) -> Tensor | None:
        """Run the backward pass of a stage around ``run``.

        Args:
            stage: Number of the stage.
            microbatch: Index of the microbatch.
            run: Function that calls autograd. Its argument is the gradient of the output on the last stage, and
                None on the others.
            said: The number that the stage behind returned, or None; None on the last stage.

        Returns:
            A number for the stage before, or None.
        """

    def weights(self, stage: int, microbatch: int) -> None:
        """Compute the gradients of weights that the backward pass of a stage has left.

        Args:
            stage: Number of the stage.
            microbatch: Index of the microbatch.
        """


class _PlacedStages(NamedTuple):
    """The number of stages and their placement on the ranks."""

    stages: int
    ranks_of: StagePlaces

    def share_a_rank(self, stage: int, neighbour: int) -> bool:
        """Return whether a rank holds both stages, which then exchange no messages."""
        return self.ranks_of.place(stage) == self.ranks_of.place(neighbour)


class ScheduleExecutor:
    """Runs the list of one rank.

    Args:
        peers: Channels to the ranks of the pipeline.
        stages: Number of stages.
        folded: True if the stages lie on the ranks in a V (``StagePlaces``).
    """

    def __init__(self, peers: PointToPoint, stages: int, folded: bool = False):
        self._peers = peers
        self._placed = _PlacedStages(stages, StagePlaces(peers.group.size, folded))

    def run(
        self, walker: Walker, runner: StageRunner, trains: bool = True, likes: Sequence[int | None] = ()
    ) -> dict[int, Any]:
        """Walk the passes of the walker's list.

        Args:
            walker: The walker of the rank's list.
            runner: The object that computes the stages.
            trains: True if the list contains B.
            likes: Likeness of each microbatch, which is the same on all ranks (``messages.likeness``).

        Returns:
            The last stage's outputs by microbatch, detached.

        Raises:
            ShardwiseError: If this or another rank failed; other errors of this rank's own are raised as they
                are.
        """
        self._walker, self._runner, self._trains = walker, runner, trains
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        self._received: dict[tuple[int, int], Any] = {}
        self._outputs: dict[tuple[int, int], list[GradientEdge]] = {}
        self._to_send: dict[tuple[int, int], PackedValue] = {}
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}
        self._results: dict[int, Any] = {}
        self._told_by: int | None = None
        self._likes = likes
        self._to_come = deque(action for action in walker.left if action.kind in (Kind.SEND, Kind.RECV))
        self._posted = 0
        try:
            self._look_ahead()
            walker.run(until=_ends_step)
            self._confirm()
        except CommError as error:
            check_refusal(str(error))
            raise
        except Exception as error:
            self._tell(walker.left, error)
            raise
        self._peers.flush()
        return self._results

    @property
    def trace(self) -> Trace:
        """The trace of the list that is running."""
        return self._walker.trace

    def _confirm(self) -> None:
        """Confirm to the rank that ends earlier that the walk has ended well on this rank and all later ones."""
        later, earlier = self._around()
        told = ""
        if later is not None:
            told = self._take(later, _END).text
            check_refusal(told)
            self._peers.check_tally(told)
        if earlier is not None:
            self._peers.send(self._peers.tally(told), [], earlier, _END, "control")

    def _around(self) -> tuple[int | None, int | None]:
        """Return the neighbouring ranks that end later and earlier than this rank, or None for a missing one."""
        group = self._peers.group
        before = group.index - 1 if group.index else None
        behind = group.index + 1 if group.index < group.size - 1 else None
        # In a V the first rank has the last stage too, and ends last in both directions.
        return (before, behind) if self._trains or self._placed.ranks_of.folded else (behind, before)

    def _look_ahead(self) -> None:
        """Post the receives that precede this rank's next send.

        Messages keep the one order of all ranks.
        """
        if not self._peers.agrees:
            return
        for action in islice(self._to_come, self._posted, _AHEAD):
            if action.kind is not Kind.RECV:
                return
            source = self._placed.ranks_of.place(action.other)
            if not self._peers.expect(source, _name(action), self._like(action)):
                return
            self._posted += 1

    def _passed(self) -> None:
        """Remove the next message from the list, because it was sent or received."""
        self._to_come.popleft()
        self._posted = max(self._posted - 1, 0)
        self._look_ahead()

    def _like(self, action: Action) -> int | None:
        return self._likes[action.microbatch] if action.microbatch < len(self._likes) else None

    def _take(self, source: int, what: str, like: int | None = None) -> ReceivedMessage:
        message = self._peers.receive(source, what, like)
        if is_refusal(message.text):
            self._told_by = source
        return message

    def _tell(self, left: Sequence[Action], error: Exception) -> None:
        """Send the error to each neighbour in place of its next message.

        Without the error the neighbours would wait for the message.
        """
        group = self._peers.group
        text = refusal(error, group.ranks[group.index])
        if self._peers.agrees:  # a posted receive cannot take a refusal; the watch reports the error
            self._peers.condemn(text)
            return
        waiting: dict[int, tuple[str, Purpose]] = {}
        sending = set() if self._told_by is None else {self._told_by}
        for action in left:
            other = self._placed.ranks_of.place(action.other)
            if action.kind is Kind.SEND:
                waiting.setdefault(
                    other, (_name(action), "gradients" if action.carries_gradient else "activations")
                )
            elif action.kind is Kind.RECV:
                sending.add(other)
        later, earlier = self._around()
        if earlier is not None:
            waiting.setdefault(earlier, (_END, "control"))
        if later is not None:
            sending.add(later)
        with contextlib.suppress(CommError):  # of a rank that has failed itself
            for to, (what, purpose) in waiting.items():
                self._peers.send(text, [], to, what, purpose)
            for to in sending - {*waiting}:
                self._peers.send(text, [], to, "a refusal", "control")
            for source in {*waiting} - {self._told_by}:
                while not is_refusal(self._peers.receive(source, None).text):
                    pass
            self._peers.flush()

    @recorded
    def forward(self, action: Action) -> None:
        """Run F of a stage."""
        key = (action.stage, action.microbatch)
        output = self._runner.forward(*key, self._received.pop(key, None))
        if action.stage < self._placed.stages - 1:
            packed = pack(output)
            tensors = packed.tensors
            if self._placed.share_a_rank(action.stage, action.stage + 1):
                self._hand_over((action.stage + 1, action.microbatch), packed)
            else:
                self._to_send[key] = packed
        else:
            tensors = list(tensors_of(output))
            self._results[action.microbatch] = tree_map_only(Tensor, Tensor.detach, output)
        if self._trains:
            self._outputs[key] = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]

    @recorded
    def backward(self, action: Action) -> None:
        """Run B or I of a stage."""
        key = (action.stage, action.microbatch)
        edges = self._outputs.pop(key)
        inputs = self._inputs.pop(key, [])
        received = self._gradients.pop(key, [])
        said = received[len(edges)] if len(received) > len(edges) else None

        def run(first: Tensor | None) -> None:
            gradients = received[: len(edges)] if first is None else [first]
            if edges:
                torch.autograd.backward(edges, gradients)  # type: ignore[arg-type]

        says = self._runner.backward(*key, run, said)
        if action.stage:
            gradients = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs
            ]
            gradients += [] if says is None else [says]
            if self._placed.share_a_rank(action.stage, action.stage - 1):
                self._gradients[action.stage - 1, action.microbatch] = gradients
            else:
                self._to_send[key] = PackedValue("", gradients)

    def _hand_over(self, key: tuple[int, int], packed: PackedValue) -> None:
        """Give an output to the next stage of this rank, cut from its graph as a received value is."""
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in packed.tensors]
        self._received[key] = unpack(packed.text, tensors)
        self._inputs[key] = [tensor for tensor in tensors if tensor.requires_grad]

    @recorded
    def weights(self, action: Action) -> None:
        """Run W of a stage."""
        self._runner.weights(action.stage, action.microbatch)

    @recorded
    def send(self, action: Action) -> None:
        """Run SEND: send an activation or a gradient to a neighbouring stage."""
        text, tensors = self._to_send.pop((action.stage, action.microbatch))
        to = self._placed.ranks_of.place(action.other)
        purpose: Purpose = "gradients" if action.carries_gradient else "activations"
        lasting = self._peers.agrees and is_lasting(text)
        self._peers.send(text, tensors, to, _name(action), purpose, self._like(action), lasting)
        self._passed()

    @recorded
    def receive(self, action: Action) -> None:
        """Run RECV: receive an activation or a gradient from a neighbouring stage."""
        key = (action.stage, action.microbatch)
        message = self._take(self._placed.ranks_of.place(action.other), _name(action), self._like(action))
        self._passed()
        if action.carries_gradient:
            check_refusal(message.text)
            self._gradients[key] = message.tensors
            return
        self._received[key] = unpack(message.text, message.tensors)
        self._inputs[key] = [tensor for tensor in message.tensors if tensor.requires_grad]


def _ends_step(action: Action) -> bool:
    return action.kind.ends_step


_END = "the end of a walk"
_AHEAD = 2
"""Number of receives that may be posted before their turn; each holds an activation's memory."""


def _name(action: Action) -> str:
    """Return the name of a message, which is the same on both ends."""
    sender = action.stage if action.kind is Kind.SEND else action.other
    what = "gradient" if action.carries_gradient else "activation"
    return f"{what} of stage {sender}, microbatch {action.microbatch}"
