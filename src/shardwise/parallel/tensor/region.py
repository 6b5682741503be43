"""Region: the state of the running pass, whose activations hold the whole sequence or this rank's part.

With sequence parallelism a training pass is cut: between the cut layers each rank holds T/tp tokens. A pass without
gradients is not cut: it keeps no activations, so a cut would save little, and it may have any length and a cache. Code
that runs inside a backward pass (a block computed again) belongs to the last pass with gradients, or to the pass that
its ``DrawReplay`` restores. A layer that is called past the root's forward is refused if gradients are enabled, because
its output may be cut. Without gradients such a layer works on the whole sequence.

[Note: a whole pass of a model that is made to be cut] A training pass stays whole if its tokens do not divide over the
ranks or if the model reads single positions of the sequence. The gradients of norms and row biases are summed over "tp"
after such a pass all the same, because the registry requires the sum in every pass. So between the cut layers each
rank's gradient is made an addend, 1/tp of its value: a scaling takes the place of every collective of a cut pass.

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

from shardwise.base.errors import UsageError
from shardwise.comm import duals
from shardwise.comm.collectives import Group
from shardwise.parallel.tensor.overlap import OFF, ForwardOverlap
from shardwise.passes.absent import place_of_use
from shardwise.passes.replay import DrawReplay
from shardwise.tiers.alike import AlikeStorages

_TOKENS = ("tokens", "input_ids", "inputs_embeds")
_LATEST_ONLY = ("cache", "past_key_values", "cache_params", "logits_to_keep")
"""Arguments with which a model reads single positions of the sequence, which a cut sequence may not hold."""


class ParallelRegion:
    """State of the running pass of one parallel model, which the model's cut layers read in their forward.

    Args:
        group: The "tp" ranks.
        sequence: True for sequence parallelism.
        replay: State that a block computed again restores; None makes a new one.
        alike: Record of the tensors that are equal on all ranks; None if nothing uses the record.
        overlap: Rule by which products of the forward pass overlap their exchanges.
    """

    def __init__(
        self,
        group: Group,
        sequence: bool,
        replay: DrawReplay | None = None,
        alike: AlikeStorages | None = None,
        overlap: ForwardOverlap = OFF,
    ) -> None:
        self.group = group
        self.sequence = sequence
        self.overlap = overlap
        self.replay = replay or DrawReplay()
        self.alike = alike
        """Record of the tensors that are equal on all ranks, or None if nothing uses the record."""
        self.model = ""
        """Name of the root's class."""
        self.logits_cut = False
        """True while the head returns this rank's part of the logits, because the loss after it takes cut logits."""
        self.keeps_cut_logits = False
        """True inside ``keep_cut_logits``: the logits of a pass without labels stay cut."""
        self.takes_cut_logits = False
        """True if the loss after the head gives the same result for cut logits."""
        self.knows_loss = False
        """True if the head's output goes to a known loss when labels are given."""
        self.loss_follows = False
        """True in a training pass with labels of a model whose head's output goes to a known loss."""
        self.tokens: int | None = None
        """Length of the whole sequence in the running pass, or None if unknown."""
        self._without_gradients = False
        self._running = 0
        """Number of running forward passes of the root, which may be nested."""

    @property
    def cut(self) -> bool:
        """True while activations between the cut layers hold this rank's part of the sequence.

        Raises:
            UsageError: If a layer is called past the root's forward with gradients.
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
        """True while activations hold the whole sequence, but gradients are addends.

        See [Note: a whole pass of a model that is made to be cut].
        """
        return self.sequence and not self._without_gradients and self.replay.whole_sequence

    def inward(self, x: Tensor, sees_whole: bool) -> Tensor:
        """Return an activation that enters cut layers without a gather, or that follows the end of the cut.

        Args:
            x: The activation.
            sees_whole: True if the layer works on whole sequences in every pass.

        Returns:
            ``x``, in a whole pass with its gradient divided by tp.
        """
        return duals.scale(x, 1 / self.group.size, self.group) if self.adds and not sees_whole else x

    def outward(self, y: Tensor, sees_whole: bool) -> Tensor:
        """Return an activation that leaves cut layers without a scatter, or that precedes the begin of the cut.

        Args:
            y: The activation.
            sees_whole: True if the layer works on whole sequences in every pass.

        Returns:
            ``y``, in a whole pass with its gradient multiplied by tp.
        """
        return duals.scale(y, self.group.size, self.group) if self.adds and not sees_whole else y

    @contextmanager
    def keep_cut_logits(self) -> Iterator[None]:
        """Keep logits cut inside the context: the head returns this rank's columns, and so does the model."""
        self.keeps_cut_logits = True
        try:
            yield
        finally:
            self.keeps_cut_logits = False

    def watch(self, model: nn.Module, knows_loss: bool) -> None:
        """Register hooks on the root, which set this state at the start of each pass.

        Args:
            model: The root.
            knows_loss: True if the model passes its logits to a known loss when labels are given.
        """
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
                # Without the stand-in a part of the vocabulary could be taken for the whole.
                output.logits = WithheldLogits()
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
    """A stand-in for an output whose whole value no rank has; any use raises UsageError.

    Args:
        reason: Text of the error.
    """

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
        """Raise the error of the stand-in among the arguments of a function of torch."""
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
    """A stand-in for the logits of a training pass with labels, which no rank has.

    Args:
        reason: Text of the error.
    """

    def __init__(self, reason: str = _CUT) -> None:
        super().__init__(reason)


class UnmadeLogits(WithheldLogits):
    """Logits by tiles, which are not computed yet: the loss calls the head again to compute them.

    A model may pass the stand-in to its loss after multiplying or dividing by numbers and after a tanh (a
    factor, a cap), which are recorded. Any other operation on the logits is refused by name.

    Args:
        x: Input of the head.
        head: The head.
        model: Name of the model's class in errors.
        changes: Operations recorded so far.
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
        """Return the loss of the logits, computed by tiles.

        Args:
            targets: Token ids [B, T].
            count: Divisor of the summed loss, or None for the mean over the counted targets.

        Returns:
            The loss.

        Raises:
            UsageError: If there is not one target for each token.
        """
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
        """Record a tanh of the logits."""
        return self._then(torch.tanh)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record torch's tanh, and refuse every other function of torch."""
        if function in (torch.tanh, Tensor.tanh) and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return super().__torch_function__(function, types, args, kwargs)

    def contiguous(self) -> "UnmadeLogits":
        """Return the stand-in itself, as ``float`` does too: the loss computes in fp32 anyway."""
        return self

    float = contiguous


def _in_backward() -> bool:
    """Return True inside a backward pass, where a block is computed again."""
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
