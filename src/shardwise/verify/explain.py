"""Find the simplest sentence that says how a wrong tensor differs from the right one.

Explanations are tried in turn, and the first that fits to 10^-6 is the answer:

    a factor           got = c · wanted, with c one of tp, dp, pp, the microbatches, or one over one of them
    an addend          got = wanted ± the gradient of one microbatch
    zero               the whole tensor, or one block along a dim, is zero
    order              blocks along a dim stand in another order; the tensor is rolled by some places
    a copy             got equals the tensor of another step, or of another name
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_FITS = 1e-6
_MOST_BLOCKS = 4
_MOST_ROLLED = 4


def explain(
    got: Tensor,
    wanted: Tensor,
    factors: Mapping[str, float],
    addends: Sequence[Tensor] = (),
    others: Mapping[str, Tensor] | None = None,
) -> str:
    """Return a sentence that explains ``got``; "" if none fits.

    Args:
        got: The wrong tensor.
        wanted: The right tensor.
        factors: Numbers by which a sum may be wrong, by name, as ``{"tp": 2}``.
        addends: Gradients of the microbatches that are summed up in ``wanted``.
        others: Other tensors that may have been taken in its place, by description.
    """
    if got.shape != wanted.shape:
        return f"its shape is {tuple(got.shape)} in place of {tuple(wanted.shape)}"
    got, wanted = got.double(), wanted.double()
    if got.isnan().any():
        return "it has elements that are not a number"
    for said in (
        _factor(got, wanted, factors),
        _addend(got, wanted, addends),
        _zero(got, wanted),
        _order(got, wanted),
        _copy(got, wanted, others or {}),
    ):
        if said:
            return said
    return ""


def wrong_slice(got: Tensor, wanted: Tensor, limit: float) -> str:
    """Return the smallest box around the wrong elements, as ``[0:4, 8:16]``; "" if shapes differ."""
    if got.shape != wanted.shape or not got.dim():
        return ""
    difference = (got.double() - wanted.double()).abs()
    largest = float(wanted.double().abs().max()) if wanted.numel() else 0.0
    wrong = (~(difference <= max(limit * largest, 1e-300))).nonzero()
    if not len(wrong):
        return ""
    ends = zip(wrong.amin(0).tolist(), wrong.amax(0).tolist(), strict=True)
    return "[" + ", ".join(f"{first}:{last + 1}" for first, last in ends) + "]"


def _fits(got: Tensor, wanted: Tensor) -> bool:
    return float((got - wanted).norm()) <= _FITS * max(float(wanted.norm()), 1e-300)


def _factor(got: Tensor, wanted: Tensor, factors: Mapping[str, float]) -> str:
    square = float((wanted * wanted).sum())
    if not square:
        return ""
    ratio = float((got * wanted).sum()) / square
    if ratio == 0 or abs(ratio - 1) < 1e-3 or not _fits(got, ratio * wanted):
        return ""
    for name, value in factors.items():
        for said, number in ((f"{name} = {value:g}", value), (f"1/{name} = 1/{value:g}", 1 / value)):
            if value not in (0, 1) and abs(ratio / number - 1) < 1e-3:
                return f"it is the right tensor times {said}"
    return f"it is the right tensor times {ratio:.6g}"


def _addend(got: Tensor, wanted: Tensor, addends: Sequence[Tensor]) -> str:
    for place, addend in enumerate(addends):
        addend = addend.double()
        if addend.shape != wanted.shape or float(addend.norm()) < 1e-3 * float(wanted.norm()):
            continue
        if _fits(got, wanted - addend):
            return f"the addend of microbatch {place} of the global batch is missing"
        if _fits(got, wanted + addend):
            return f"the addend of microbatch {place} of the global batch is counted twice"
    return ""


def _zero(got: Tensor, wanted: Tensor) -> str:
    if not got.any():
        return "it is zero"
    for dim in range(got.dim()):
        others = [each for each in range(got.dim()) if each != dim]
        empty = got.abs().amax(others) == 0 if others else got == 0
        empty &= (wanted.abs().amax(others) if others else wanted.abs()) != 0
        places = empty.nonzero().flatten().tolist()
        if not places or places != list(range(places[0], places[-1] + 1)):
            continue
        right = torch.ones_like(empty)
        right[places[0] : places[-1] + 1] = False
        rest = right.nonzero().flatten()
        if _fits(got.index_select(dim, rest), wanted.index_select(dim, rest)):
            return f"places {places[0]} to {places[-1]} of dim {dim} are zero, and the rest is right"
    return ""


def _order(got: Tensor, wanted: Tensor) -> str:
    for dim in range(got.dim()):
        size = got.shape[dim]
        for blocks in range(2, _MOST_BLOCKS + 1):
            if size % blocks:
                continue
            cut = wanted.chunk(blocks, dim)
            for order in itertools.permutations(range(blocks)):
                if list(order) != sorted(order) and _fits(got, torch.cat([cut[i] for i in order], dim)):
                    return f"its {blocks} blocks along dim {dim} stand in the order {list(order)}"
        for places in range(1, min(_MOST_ROLLED, size - 1) + 1):
            for shift in (places, -places):
                if _fits(got, wanted.roll(shift, dim)):
                    return f"it is shifted by {shift} places along dim {dim}"
        if size > 1 and (rows := _swapped_rows(got, wanted, dim)):
            return rows
    return ""


def _swapped_rows(got: Tensor, wanted: Tensor, dim: int) -> str:
    mine, right = (
        got.movedim(dim, 0).reshape(got.shape[dim], -1),
        wanted.movedim(dim, 0).reshape(got.shape[dim], -1),
    )
    scale = max(float(right.abs().max()), 1e-300)
    wrong = (
        ((mine - right).abs().amax(1) > _FITS * scale).nonzero().flatten().tolist() if mine.numel() else []
    )
    if len(wrong) != 2:
        return ""
    first, second = wrong
    is_swapped = _fits(mine[first], right[second]) and _fits(mine[second], right[first])
    return f"rows {first} and {second} along dim {dim} are swapped" if is_swapped else ""


def _copy(got: Tensor, wanted: Tensor, others: Mapping[str, Tensor]) -> str:
    for said, other in others.items():
        if other.shape == wanted.shape and other.any() and _fits(got, other.double()):
            return f"it is {said}"
    return ""
