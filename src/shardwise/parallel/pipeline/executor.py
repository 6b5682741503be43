"""The executor of a schedule: what F, B, SEND and RECV of a stage do, and the words that end a walk on all ranks.

    F(s, i)        received activation -> forward of stage s -> activation to send, or the loss
    B(s, i)        received gradient   -> backward            -> gradient to send
    SEND, RECV     what the two exchange with the stages beside them

Beside the gradient of a microbatch travels what its last stage says of it: what its loss was multiplied by, where a
stage has terms of its own that are multiplied alike. It is one more tensor behind the gradients, which no host reads.

A stage's input is detached from what was received and asks for gradients where its sender's tensor did. Of its output
only the edge of the graph is kept for the backward pass: the numbers themselves are dropped once they are sent, unless
autograd saved them. What runs inside a stage (a Unit's gathers and reductions) stands in the same list, and the hooks
on its modules walk it; what is here knows stages alone.

An error of one rank ends the walk of all with the same words (messages.py): whoever meets or hears of it tells every
neighbour that it has business with, and reads what those who wait for it have sent until they have told it too. The
next walk begins with nothing in between. Those that the last Actions send nothing to would not hear: so each rank says
at its end that it and all that end after it have ended well, with B from the first rank to the last, without from the
last to the first.

Between devices messages are posted ahead and have no words in them, so there an error ends the exchange for good: the
watch tells it to all ranks, and their engines with it.

Cost: one message per edge between stages, microbatch and direction, and one empty message per rank.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from shardwise.comm.peers import Message, Peers
from shardwise.comm.trace import Purpose
from shardwise.parallel.pipeline.messages import (
    Packed,
    check_refusal,
    is_lasting,
    is_refusal,
    pack,
    refusal,
    unpack,
)
from shardwise.parallel.pipeline.stand_in import tensors_of
from shardwise.plan.action import Action, Kind
from shardwise.plan.errors import CommError
from shardwise.plan.walker import Walker


class Runner(Protocol):
    """What computes the stages."""

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """The stage's output; of the last stage what ``backward`` begins with."""

    def backward(
        self, stage: int, microbatch: int, run: Callable[[Tensor | None], None], said: Tensor | None
    ) -> Tensor | None:
        """Call ``run`` inside whatever a backward pass needs around it: with the gradient that the last stage's output
        begins with, with None on the others. ``said``: what the stage behind returned, a number or nothing; None on the
        last one."""


class ScheduleExecutor:
    """Runs lists of one rank. ``stages`` of the pipeline lie round robin on ``ranks``; ``peers`` reaches the others."""

    def __init__(self, peers: Peers, stages: int):
        self._peers = peers
        self._stages = stages

    def run(
        self, walker: Walker, runner: Runner, trains: bool = True, likes: Sequence[int | None] = ()
    ) -> dict[int, Any]:
        """Walk the passes of the walker's list; returns the last stage's outputs by microbatch, detached. ``trains``:
        with B. ``likes``: what all ranks know of each microbatch (``messages.likeness``)."""
        self._runner, self._trains = runner, trains
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        self._received: dict[tuple[int, int], Any] = {}
        self._outputs: dict[tuple[int, int], list[GradientEdge]] = {}
        self._to_send: dict[tuple[int, int], Packed] = {}
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

    def _confirm(self) -> None:
        """This walk has ended well here and on those that end later."""
        later, earlier = self._around()
        told = ""
        if later is not None:
            told = self._take(later, _END).text
            check_refusal(told)
            self._peers.check_tally(told)
        if earlier is not None:
            self._peers.send(self._peers.tally(told), [], earlier, _END, "control")

    def _around(self) -> tuple[int | None, int | None]:
        """The ranks beside this one that end later and earlier than it, where there are any."""
        group = self._peers.group
        before = group.index - 1 if group.index else None
        behind = group.index + 1 if group.index < group.size - 1 else None
        return (before, behind) if self._trains else (behind, before)

    def _look_ahead(self) -> None:
        """Post what this rank receives next, before it sends again: messages keep the one order of all ranks."""
        if not self._peers.agrees:
            return
        for action in islice(self._to_come, self._posted, _AHEAD):
            if action.kind is not Kind.RECV:
                return
            source = action.other % self._peers.group.size
            if not self._peers.expect(source, _name(action), self._like(action)):
                return
            self._posted += 1

    def _passed(self) -> None:
        """The next message of the list is through."""
        self._to_come.popleft()
        self._posted = max(self._posted - 1, 0)
        self._look_ahead()

    def _like(self, action: Action) -> int | None:
        return self._likes[action.microbatch] if action.microbatch < len(self._likes) else None

    def _take(self, source: int, what: str, like: int | None = None) -> Message:
        message = self._peers.receive(source, what, like)
        if is_refusal(message.text):
            self._told_by = source
        return message

    def _tell(self, left: Sequence[Action], error: Exception) -> None:
        """In the place of the next message to each neighbour: why there is none. They would wait for it."""
        group = self._peers.group
        text = refusal(error, group.ranks[group.index])
        if self._peers.agrees:  # what others have posted cannot become a refusal
            self._peers.condemn(text)
            return
        waiting: dict[int, tuple[str, Purpose]] = {}
        sending = set() if self._told_by is None else {self._told_by}
        for action in left:
            other = action.other % group.size
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
        with contextlib.suppress(CommError):  # of one that has given up itself
            for to, (what, purpose) in waiting.items():
                self._peers.send(text, [], to, what, purpose)
            for to in sending - {*waiting}:
                self._peers.send(text, [], to, "a refusal", "control")
            for source in {*waiting} - {self._told_by}:
                while not is_refusal(self._peers.receive(source, None).text):
                    pass
            self._peers.flush()

    def forward(self, action: Action) -> None:
        """F of a stage."""
        key = (action.stage, action.microbatch)
        output = self._runner.forward(*key, self._received.pop(key, None))
        if action.stage < self._stages - 1:
            packed = self._to_send[key] = pack(output)
            tensors = packed.tensors
        else:
            tensors = list(tensors_of(output))
            self._results[action.microbatch] = tree_map_only(Tensor, Tensor.detach, output)
        if self._trains:
            self._outputs[key] = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]

    def backward(self, action: Action) -> None:
        """B of a stage."""
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
            self._to_send[key] = Packed("", gradients if says is None else [*gradients, says])

    def send(self, action: Action) -> None:
        """SEND."""
        text, tensors = self._to_send.pop((action.stage, action.microbatch))
        to = action.other % self._peers.group.size
        purpose: Purpose = "gradients" if action.carries_gradient else "activations"
        lasting = self._peers.agrees and is_lasting(text)
        self._peers.send(text, tensors, to, _name(action), purpose, self._like(action), lasting)
        self._passed()

    def receive(self, action: Action) -> None:
        """RECV."""
        key = (action.stage, action.microbatch)
        message = self._take(action.other % self._peers.group.size, _name(action), self._like(action))
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
"""Receives that may be posted before their turn; each holds an activation's memory."""


def _name(action: Action) -> str:
    """The same words on both ends."""
    sender = action.stage if action.kind is Kind.SEND else action.other
    what = "gradient" if action.carries_gradient else "activation"
    return f"{what} of stage {sender}, microbatch {action.microbatch}"
