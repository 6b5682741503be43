"""Outputs of a pass whose sequences are cut: joined over the ranks in the order of the tokens, or withheld.

    output                                  tensors [B, t, ...] with a row for each of a rank's tokens
    with a number, in a pass with targets   withheld: the number is the loss of this rank's targets, and a part of the
                                            tokens could be taken for the whole
    otherwise                               joined: [B, T, ...], alike on all ranks

The backward pass of a join sums the gradients of all ranks and gives each rank those of its tokens,

    dy_r = Σ_s dY_s[tokens of r]

so a loss that every rank computes from the whole counts by the sum of the ranks' factors, whatever each of them is.

Cost:   a join sends (c - 1)/c of the whole each way, over c ranks.
Shapes: B sequences, T tokens, t tokens of this rank, padding included.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.base.errors import UsageError
from shardwise.base.pytree import rebuilt, tensors_by_path
from shardwise.comm.collectives import Group
from shardwise.comm.duals import joined
from shardwise.parallel.context.layout import ContextLayout

_IGNORE = -100
_WITHHELD = (
    "in a pass with targets under context parallelism each rank has those of its own tokens, in the order of its part. "
    "For whole ones call the model without targets, or set mesh.cp: 1"
)


class TokenOutputs:
    """Outputs of single tokens that the cut passes of a model return.

    Args:
        group: The ranks that share a sequence.
        stand_in: Makes a stand-in for an output, whose use raises the error with a given text; None keeps outputs.
    """

    def __init__(self, group: Group, stand_in: Callable[[str], Any] | None) -> None:
        self._group = group
        self._stand_in = stand_in
        self._layout: ContextLayout | None = None
        self._has_targets = self._keeps_parts = self._trains = False
        self.loss_is_whole = False
        """True if the last pass with gradients gave every rank the whole, of which a loss is the same on all."""

    def begin(self, layout: ContextLayout | None, has_targets: bool) -> None:
        """Begin a pass.

        Args:
            layout: The cut of its sequences; None if they are whole.
            has_targets: True if the model gets its targets.
        """
        self._layout, self._has_targets, self._trains = layout, has_targets, torch.is_grad_enabled()
        self._notes_loss(layout is None)

    def of(self, output: Any) -> Any:
        """Return a model's output with tensors of single tokens joined over the ranks, or withheld."""
        assert self._layout is not None, "a whole pass has whole outputs"
        if self._has_targets and has_number(output):
            stand_in = self._stand_in
            return output if stand_in is None else withheld_outputs(output, self._layout, stand_in, _WITHHELD)
        self._notes_loss(True)
        return output if self._keeps_parts else joined_outputs(output, self._layout, self._group)

    def _notes_loss(self, is_whole: bool) -> None:
        if self._trains:
            self.loss_is_whole = is_whole

    def own_targets(self, targets: Tensor) -> Tensor:
        """Return the targets [B, T] of this rank's tokens in the last pass; all of them if the pass was whole."""
        if self._layout is None or targets.shape[1:] != (self._layout.length,):
            return targets
        return own_tokens(targets, self._layout, self._group.index, _IGNORE)

    def join(self, x: Tensor) -> Tensor:
        """Return what all ranks have of the last pass, in the order of the tokens: [B, t, ...] -> [B, T, ...]."""
        return x if self._layout is None else join_tokens(x, self._layout, self._group)

    @contextmanager
    def keep_parts(self) -> Iterator[None]:
        """Keep outputs of single tokens as this rank's part inside the context, in the order of its part."""
        self._keeps_parts = True
        try:
            yield
        finally:
            self._keeps_parts = False


def has_number(output: Any) -> bool:
    """Return True if a model's output has a tensor of one number, such as a loss."""
    return any(tensor.numel() == 1 and tensor.dim() < 2 for _, tensor in tensors_by_path(output))


def joined_outputs(output: Any, layout: ContextLayout, group: Group) -> Any:
    """Return a model's output whose tensors [B, t, ...] are joined over the ranks: [B, T, ...].

    Raises:
        UsageError: if a tensor of the output has no row for each token.
    """
    for path, tensor in tensors_by_path(output):
        if tensor.dim() < 2 or tensor.shape[1] != layout.tokens:
            raise UsageError(
                f"mesh.cp: output {path or 'of the model'} of a pass without targets has the shape "
                f"{list(tensor.shape)}; expected [samples, tokens, ...] with the {layout.tokens} tokens of a rank's "
                "part, because other outputs cannot be joined over the ranks that share a sequence; give the model "
                "its targets, or set mesh.cp: 1"
            )
    return _replaced(output, lambda tensor: join_tokens(tensor, layout, group))


def withheld_outputs(output: Any, layout: ContextLayout, stand_in: Callable[[str], Any], why: str) -> Any:
    """Return a model's output in which stand-ins take the place of tensors [B, t, ...]; any use raises an error.

    Args:
        output: The output.
        layout: The cut of the sequences.
        stand_in: Function from the text of an error to a stand-in.
        why: End of the error.
    """
    names = {
        id(tensor): path
        for path, tensor in tensors_by_path(output)
        if path and tensor.dim() >= 2 and tensor.shape[1] == layout.tokens
    }
    return _replaced(
        output, lambda tensor: stand_in(f"{names[id(tensor)]}: {why}") if id(tensor) in names else tensor
    )


def _replaced(value: Any, of: Callable[[Tensor], Any]) -> Any:
    return of(value) if isinstance(value, Tensor) else rebuilt(value, lambda inner: _replaced(inner, of))


def own_tokens(x: Tensor, layout: ContextLayout, rank: int, fill: float | None = 0) -> Tensor:
    """Return the tokens of ``rank`` of a tensor [B, T, ...]; its padding is ``fill``: [B, t, ...].

    None fills with the last token.
    """
    places = layout.places(rank)
    part = x.index_select(1, places.clamp(max=layout.length - 1).to(x.device))
    if layout.padded > layout.length and fill is not None:
        outside = (places >= layout.length).to(x.device)
        part = part.masked_fill(outside.view(1, -1, *[1] * (x.dim() - 2)), fill)
    return part


def join_tokens(x: Tensor, layout: ContextLayout, group: Group) -> Tensor:
    """Return the tokens of all ranks in the order of the sequence: [B, t, ...] -> [B, T, ...]."""
    found: Tensor = _JoinTokens.apply(x, layout, group)
    return found


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: ContextLayout, group: Group) -> Tensor:
        ctx.cut = layout, group
        own = x.contiguous()
        parts = own.new_empty(group.size, *own.shape)
        group.all_gather(parts.view(-1), own.view(-1), "outputs of the model", "activations").wait()
        order = torch.cat([layout.places(rank) for rank in range(group.size)]).argsort()[: layout.length]
        return joined(parts, 1).index_select(1, order.to(x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        layout, group = ctx.cut
        parts = torch.stack([own_tokens(grad, layout, rank) for rank in range(group.size)])
        own = torch.empty_like(parts[0])
        group.reduce_scatter(
            own.view(-1), parts.view(-1), "gradients of outputs of the model", "activations"
        ).wait()
        return own, None, None
