"""Products of cut layers in pieces, so that the exchange of one piece runs beside the product of another.

    column, cut sequence   exchange   gather 0 | gather 1  | gather 2
                           compute             | product 0 | product 1 | product 2
    row                    exchange               sum 0     | sum 1     | sum 2
                           compute    product 0 | product 1 | product 2

A piece holds the same rows of every rank's activation: whole samples if there are at least as many samples as pieces,
else some tokens of every sample. All gathers start at once and arrive in order; each sum (or scatter) starts with the
end of its product. So of an exchange that takes as long as the product, one piece is waited for.

A product of some rows has the numbers of the whole product's rows, up to rounding: a library may add up in another
order for another number of rows. The sums over the ranks are those of the whole activation.

The number of pieces depends only on the size of the whole activation, which is equal on all ranks; matrices are not,
if "tp" does not divide a vocabulary.

With ``symmetric_memory`` the products of a cut sequence are operators of torch (comm/symmetric.py), in which ranks read
one another's memory; sums of a whole sequence, for which torch has no such operator, are cut into pieces.

Paper: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023.
Cost:   bytes as in one piece; k calls instead of one. Pieces of tokens write the outputs of a column layer and the
        inputs of a row layer once more; with several samples a row layer's outputs too.
Shapes: B samples, T tokens, t tokens of a piece and rank, D inputs, F outputs, N ranks; weight [F, D].
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import duals, symmetric
from shardwise.comm.collectives import Group
from shardwise.comm.operators import ExchangeSite

Wanted = Literal["auto", "off", "symmetric_memory"] | int
"""Values of the key ``tensor.overlap``."""

_MOST_PIECES = 4
_LEAST_BYTES = 8 << 20
"""Fewest bytes of a piece: a smaller collective does not fill the links between devices."""
_LEAST_ROWS = 1024
"""Fewest rows of a piece: a product of fewer rows does not fill a device."""


@dataclass(frozen=True)
class ForwardOverlap:
    """The rule by which the products of a model's forward pass are cut into pieces."""

    wanted: Wanted = "off"
    """Value of ``tensor.overlap``; "auto" is that of devices, because CPU ranks resolve "auto" to "off"."""

    def pieces(self, rows: int, features: int, itemsize: int, cut: bool) -> int:
        """Return the number of pieces of an activation.

        Args:
            rows: Rows of the whole activation on one rank.
            features: Features that travel with each row.
            itemsize: Bytes of a feature.
            cut: True for a cut sequence.
        """
        if self.wanted == "off" or (cut and self.wanted == "symmetric_memory"):
            return 1
        if isinstance(self.wanted, int):
            return self.wanted
        return max(1, min(_MOST_PIECES, rows * features * itemsize // _LEAST_BYTES, rows // _LEAST_ROWS))

    def is_fused(self, group: Group) -> bool:
        """Return True if torch's operators over symmetric memory multiply what the ranks of ``group`` exchange."""
        return self.wanted == "symmetric_memory" and symmetric.is_real(group)


OFF = ForwardOverlap()


class ProductSite(ExchangeSite):
    """The site of a cut layer, with the rule by which its products overlap their exchanges.

    Args:
        group: The ranks.
        what: Name of the layer in errors and traces.
        overlap: The rule.
    """

    def __init__(self, group: Group, what: str, overlap: ForwardOverlap = OFF) -> None:
        super().__init__(group, what)
        self.overlap = overlap


def gathered_product(site: ProductSite, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of the gathered sequence: [B, T/N, D] -> [B, T, F]."""
    group, what, (samples, tokens, *inner, features) = site.group, site.what, x.shape
    if site.overlap.is_fused(group):
        return symmetric.gathered_product(group, x, weight, bias, what)
    rows = x.shape[:-1].numel() * site.size
    pieces = site.overlap.pieces(rows, features, x.itemsize, cut=True)
    dim, pieces = _cut_of(samples, tokens, pieces)
    if pieces == 1:
        return F.linear(duals.start_gather(x, group, what)(), weight, bias)
    y = x.new_empty(samples, tokens * site.size, *inner, weight.shape[0])
    if dim == 0:
        arriving = [duals.start_gather(piece, group, what) for piece in x.tensor_split(pieces)]
        for arrived, into in zip(arriving, y.tensor_split(pieces), strict=True):
            _multiply_into(into, arrived(), weight, bias)
        return y
    by_rank = y.unflatten(1, (site.size, tokens)).movedim(1, 0)  # [N, B, T/N, F]
    arriving = [duals.start_gather(piece, group, what, dim=0) for piece in x.tensor_split(pieces, 1)]
    for arrived, into in zip(arriving, by_rank.tensor_split(pieces, 2), strict=True):
        into.copy_(F.linear(arrived(), weight, bias).view(into.shape))  # [N B, t, D] -> [N, B, t, F]
    return y


def product_over_ranks(site: ProductSite, x: Tensor, weight: Tensor, cut: bool) -> Tensor:
    """Return the sum over the ranks of the products: [..., D] -> [..., F], or [B, T, D] -> [B, T/N, F] if ``cut``."""
    if cut and site.overlap.is_fused(site.group):
        return symmetric.scattered_product(site.group, x, weight, site.what)
    rows = x.shape[:-1].numel()
    pieces = site.overlap.pieces(rows, weight.shape[0], x.itemsize, cut)
    return _scattered_product(site, x, weight, pieces) if cut else _summed_product(site, x, weight, pieces)


def _summed_product(site: ProductSite, x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    group, what, pieces = site.group, site.what, min(pieces, x.shape[:-1].numel())
    if pieces < 2:
        return duals.start_sum(F.linear(x, weight).contiguous(), group, what)()
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    pairs = zip(*(each.flatten(0, -2).tensor_split(pieces) for each in (x, y)), strict=True)
    _finish([duals.start_sum(_multiply_into(into, piece, weight), group, what) for piece, into in pairs])
    return y


def _scattered_product(site: ProductSite, x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    group, what, (samples, tokens) = site.group, site.what, (x.shape[0], x.shape[1] // site.size)
    dim, pieces = _cut_of(samples, tokens, pieces)
    if pieces == 1:
        return duals.start_scatter(F.linear(x, weight), group, what)()
    y = x.new_empty(samples, tokens, *x.shape[2:-1], weight.shape[0])
    sums = []
    if dim == 0:
        for piece, into in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            sums.append(duals.start_scatter(F.linear(piece, weight), group, what, into=into))
        _finish(sums)
        return y
    by_rank = x.unflatten(1, (site.size, tokens)).movedim(1, 0)  # [N, B, T/N, D]
    for piece, into in zip(by_rank.tensor_split(pieces, 2), y.tensor_split(pieces, 1), strict=True):
        # A copy, because a strided input would become one small product for each sample and rank.
        addend = F.linear(piece.contiguous(), weight).flatten(0, 1)  # [N, B, t, D] -> [N B, t, F]
        sums.append(duals.start_scatter(addend, group, what, dim=0, into=into))
    _finish(sums)
    return y


def _cut_of(samples: int, tokens: int, pieces: int) -> tuple[int, int]:
    """Return the dim that is cut into pieces, and the number of pieces: samples if there are enough, else tokens."""
    return (0, pieces) if samples >= pieces else (1, max(1, min(pieces, tokens)))


def _multiply_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Write the product of the rows of ``x`` into the contiguous ``y``, and return ``y``."""
    rows, into = x.flatten(0, -2), y.view(-1, y.shape[-1])
    if bias is None:
        torch.mm(rows, weight.mT, out=into)
    else:
        torch.addmm(bias, rows, weight.mT, out=into)
    return y


def _finish(exchanges: Iterable[Callable[[], Tensor]]) -> None:
    """Wait for each exchange in the order in which the exchanges began."""
    for finish in exchanges:
        finish()
