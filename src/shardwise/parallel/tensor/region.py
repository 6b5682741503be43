"""Region: whether the activations of the running pass hold the whole sequence or this rank's part.

With sequence parallelism a training pass is cut: between the cut layers each rank holds T/tp tokens. A pass without
gradients is not: it keeps no activations, so a cut would save little, and it may have any length and a cache. What
lies inside a backward pass (a block computed again) belongs to the last pass with gradients, or to the pass that its
``Replay`` brings back. A layer that is called past the root's forward is refused where gradients are asked for: what
leaves it may be cut. Without gradients it works on the whole.

[Note: a whole pass of a model that is made to be cut] A training pass whose tokens do not divide over the ranks, or in
which the model reads single places of the sequence, stays whole. The gradients of norms and row biases are summed over
"tp" after it all the same, because the registry says so of every pass. So between the cut layers each rank's gradient
is made an addend, 1/tp of what it would be: a number to multiply by where a cut pass would send something.

                          cut pass                  whole pass
    into the cut layers   gather                    identity, gradient summed over the ranks and divided by tp
    out of them           scatter of the sum        sum; gradient times tp
    begin of the cut      slice                     identity; gradient times tp
    end of the cut        join                      identity; gradient divided by tp

Shapes: T global sequence, tp ranks.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.comm import duals
from shardwise.comm.collectives import Group
from shardwise.memory.absent import place_of_use
from shardwise.memory.alike import Alike
from shardwise.memory.replay import Replay
from shardwise.plan.errors import UsageError

_TOKENS = ("tokens", "input_ids", "inputs_embeds")
_LATEST_ONLY = ("cache", "past_key_values", "logits_to_keep")
"""Arguments with which a model reads single places of the sequence, which a cut one may not hold."""


class Region:
    """One per model made parallel; its layers ask it in forward."""

    def __init__(
        self, group: Group, sequence: bool, replay: Replay | None = None, alike: Alike | None = None
    ) -> None:
        self.group = group
        self.sequence = sequence
        self.replay = replay or Replay()
        self.alike = alike
        """Who is told what the ranks have in common; None where nobody asks."""
        self.model = ""
        """The root's class."""
        self.logits_cut = False
        """True while the head's output goes to a loss that takes this rank's part of the vocabulary."""
        self.keeps_cut_logits = False
        """True while a caller asks for a pass whose logits stay cut, without labels."""
        self.takes_cut_logits = False
        """Whether what follows the head works on part of the vocabulary as on all of it."""
        self.knows_loss = False
        """Whether the head's output goes to a loss that is known, where labels are given."""
        self.loss_follows = False
        """True in a training pass with labels of a model whose head's output goes to a loss that is known."""
        self.tokens: int | None = None
        """The length of the whole sequence in the running pass; None where it is not known."""
        self._without_gradients = False
        self._running = 0
        """Forward passes of the root that run now, one in another perhaps."""

    @property
    def cut(self) -> bool:
        """True while activations between the cut layers hold this rank's part of the sequence.

        Errors: UsageError in a layer that is called past the root's forward with gradients.
        """
        if not self.sequence:
            return False
        inside = self._running or self.replay.runs_again or _in_backward()
        if not inside and self._is_whole_outside():
            return False
        return not self._without_gradients and not self.replay.whole_sequence

    def _is_whole_outside(self) -> bool:
        if not torch.is_grad_enabled() or self.replay.stays_whole:
            return True
        raise UsageError(
            f"tensor: a layer inside the model is called past the model's own forward, at {place_of_use().line}. "
            "Under sequence parallelism that forward decides where the sequence is cut, and such a call may return "
            "this rank's tokens alone; call the model itself (a class around it may do this in its forward), or set "
            "tensor.sequence_parallel: false"
        )

    @property
    def adds(self) -> bool:
        """True while they hold all of it, but gradients are addends: see the note."""
        return self.sequence and not self._without_gradients and self.replay.whole_sequence

    def inward(self, x: Tensor, sees_whole: bool) -> Tensor:
        """An activation on its way into cut layers that do not gather it, or behind the end of the cut."""
        return duals.scale(x, 1 / self.group.size) if self.adds and not sees_whole else x

    def outward(self, y: Tensor, sees_whole: bool) -> Tensor:
        """One that has left cut layers without being scattered, or in front of the begin of the cut."""
        return duals.scale(y, self.group.size) if self.adds and not sees_whole else y

    @contextmanager
    def keep_cut_logits(self) -> Iterator[None]:
        """In passes inside, the head gives this rank's columns, and so does the model."""
        self.keeps_cut_logits = True
        try:
            yield
        finally:
            self.keeps_cut_logits = False

    def watch(self, model: nn.Module, knows_loss: bool) -> None:
        """Decide at the start of each pass of ``model``, the root; ``knows_loss``: of what is done with its logits
        where labels are given."""
        signature = inspect.signature(model.forward)
        self.model = type(model).__name__
        self.knows_loss = knows_loss
        self.takes_cut_logits = knows_loss and self.group.size > 1

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            given |= given.get("kwargs", {})
            training = torch.is_grad_enabled()
            self._running += 1
            self.tokens = _tokens(given)
            self._without_gradients = not training
            if training:
                self.replay.whole_sequence = self.replay.stays_whole or not _can_cut(given, self.group.size)
            self.loss_follows = knows_loss and training and given.get("labels") is not None
            self.logits_cut = (self.loss_follows and self.takes_cut_logits) or self.keeps_cut_logits

        def end(module: nn.Module, args: Any, output: Any) -> None:
            logits = None if isinstance(output, WithheldValue) else getattr(output, "logits", None)
            if type(logits) is UnmadeLogits:
                output.logits = WithheldLogits(_BY_TILES)
            elif self.logits_cut and not self.keeps_cut_logits and logits is not None:
                output.logits = WithheldLogits()  # A part of the vocabulary must not pass for the whole.
            self._without_gradients = self.logits_cut = self.loss_follows = False
            self._running = max(self._running - 1, 0)

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)


_CUT = (
    "logits: in a training pass with labels under tensor parallelism each rank holds a part of the vocabulary, "
    "and the whole is never made. For log-probabilities of given tokens call engine.log_probs(batch, targets); "
    "for whole logits call the model without labels, engine.predict(batches) where no gradients are needed, or "
    "set tensor.gather_logits: true"
)
_BY_TILES = (
    "logits: in a training pass with labels head and loss work by tiles of tokens, and whole logits are never made. "
    "For log-probabilities of given tokens call engine.log_probs(batch, targets); for whole logits call the model "
    "without labels, engine.predict(batches) where no gradients are needed, or set tiles.logits: off"
)


class WithheldValue:
    """A stand-in for an output whose whole value no rank has. Any use is an error that says ``reason``."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(self._reason)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """In a function of torch."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, WithheldValue):
                each._refuse()
        raise UsageError(_CUT)

    __getitem__ = __len__ = __iter__ = __array__ = __float__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = (
        _refuse
    )
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __repr__(self) -> str:
        return "<withheld>"


class WithheldLogits(WithheldValue):
    """A stand-in for the logits of a training pass with labels, which no rank has."""

    def __init__(self, reason: str = _CUT) -> None:
        super().__init__(reason)


class UnmadeLogits(WithheldLogits):
    """What a head by tiles returns to a model that hands it on to its loss, which calls the head with it again.

    Numbers that they are multiplied or divided by on the way, and a tanh, are noted: a factor, a cap. Whatever else the
    model does with its logits is refused by name.
    """

    def __init__(
        self, x: Tensor, head: Any, model: str, changes: Sequence[Callable[[Tensor], Tensor]] = ()
    ) -> None:
        super().__init__(
            f"tiles.logits: a {model} changes its logits between its head and its loss, which works by tiles on "
            "such as are multiplied by a number or go through a tanh at most; leave tiles.logits out"
        )
        self.x = x
        self.head = head
        self._model = model
        self._changes = tuple(changes)

    def loss(self, targets: Tensor, count: Tensor | None) -> Tensor:
        """Mean over the targets [B, T] that count, or their sum over ``count``."""
        if targets.numel() != self.x.shape[:-1].numel() * (
            self.head.region.group.size if self.head.cut else 1
        ):
            raise UsageError(
                f"tiles.logits: the head was given {list(self.x.shape)} and its loss targets {list(targets.shape)}; "
                "expected one target for each token: leave logits_to_keep out, or tiles.logits"
            )
        found: Tensor = self.head(self.x, targets, count, self._change if self._changes else None)
        return found

    def _change(self, logits: Tensor) -> Tensor:
        for change in self._changes:
            logits = change(logits)
        return logits

    def _then(self, change: Callable[[Tensor], Tensor]) -> "UnmadeLogits":
        return UnmadeLogits(self.x, self.head, self._model, (*self._changes, change))

    def __mul__(self, number: Any) -> "UnmadeLogits":  # type: ignore[override]
        if type(number) not in (int, float):
            self._refuse()
        return self._then(lambda z: z * number)

    def __truediv__(self, number: Any) -> "UnmadeLogits":  # type: ignore[override]
        if type(number) not in (int, float):
            self._refuse()
        return self._then(lambda z: z / number)

    __rmul__ = __mul__  # type: ignore[assignment]

    def tanh(self) -> "UnmadeLogits":
        """As torch's."""
        return self._then(torch.tanh)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch's tanh; see ``WithheldValue`` of all others."""
        if function in (torch.tanh, Tensor.tanh) and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return super().__torch_function__(function, types, args, kwargs)

    def contiguous(self) -> "UnmadeLogits":
        """Itself, as ``float`` does: the loss computes in fp32 anyway."""
        return self

    float = contiguous


def _in_backward() -> bool:
    """Where a block that is computed again runs."""
    return torch._C._current_graph_task_id() >= 0


def _can_cut(given: dict[str, Any], ranks: int) -> bool:
    if any(not (given.get(name) is None or _is_zero(given[name])) for name in _LATEST_ONLY):
        return False
    tokens = _tokens(given)
    return tokens is None or tokens % ranks == 0


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _tokens(given: dict[str, Any]) -> int | None:
    named = [given[name] for name in _TOKENS if isinstance(given.get(name), Tensor)]
    rest = [value for value in given.values() if isinstance(value, Tensor) and value.dim() >= 2]
    found = named or rest
    return found[0].shape[1] if found and found[0].dim() >= 2 else None
