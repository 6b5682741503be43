"""Find the simplest sentence that says how a wrong tensor differs from the right one.

Explanations are tried in turn, and the first that fits is the answer:

    zero               the whole tensor is zero
    rounding           all elements are numbers of 16 or 32 bits, and differ by no more than rounding to them
    a factor           got = c · wanted; the numbers of the run that equal c are named
    an addend          got = wanted + (c - 1) · addends of some ranks or microbatches
    a missing sum      each rank along "tp" holds an addend, and the addends add up to wanted
    an update          got - before = c · (wanted - before), on a range of elements; or another decay, or step count
    a part             one block is zero, or c times the right one, and the rest is right
    order              blocks along a dim stand in another order, or one is a copy of another; the tensor is shifted
    a copy             got equals the tensor of another step, microbatch, or name
    a mask             other elements are zero, and those that are zero in neither are equal
    a constant         all elements are one number

An explanation fits if what it leaves unexplained is at most 10^-6 of the tensor and 10^-3 of the difference. A single
number equals any other times a factor, so a factor of it is named only if it is a number of the run.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_FITS = 1e-6
_OF_DIFFERENCE = 1e-3
_MOST_BLOCKS = 4
_MOST_SHIFTED = 4
_LEAST_ELEMENTS = 4
"""Elements that a tensor must have for a factor without a name to say anything."""
_LEAST_SHIFTED = 8
"""Elements that a shift must explain."""


@dataclass(frozen=True)
class AdamUpdate:
    """The numbers of one update of Adam or AdamW."""

    rate: float
    decay: float
    betas: tuple[float, float]
    eps: float
    step: int
    """Number of the update, from 1."""
    first: Tensor
    """The first moment after the update."""
    second: Tensor
    """The second moment after the update."""

    def weight(self, before: Tensor, decay: float, step: int) -> Tensor:
        """Return the weight after an update with decoupled decay.

        Args:
            before: The weight before.
            decay: The decay.
            step: The number of the update by which the moments are corrected.
        """
        one, two = self.betas
        second = (self.second / (1 - two**step)).sqrt() + self.eps
        return before * (1 - self.rate * decay) - self.rate * (self.first / (1 - one**step)) / second


@dataclass(frozen=True)
class Evidence:
    """Tensors and numbers from which a wrong tensor may have been made."""

    factors: Mapping[str, float] = field(default_factory=dict)
    """Numbers by which a sum may be wrong, by name, as ``{"tp": 2}``."""
    addends: Mapping[str, Tensor] = field(default_factory=dict)
    """Addends of the right tensor, by description of where they come from, as ``microbatch 1 of the global batch``."""
    pieces: Sequence[Tensor] = ()
    """What each rank along "tp" holds."""
    before: Tensor | None = None
    """The weight before the update."""
    update: AdamUpdate | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Other tensors that may have been taken in place of the right one, by description."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Other results of a single number, by description of what was counted."""


def explain(got: Tensor, wanted: Tensor, evidence: Evidence) -> str:
    """Return a sentence that explains ``got``; "" if none fits.

    Args:
        got: The wrong tensor.
        wanted: The right tensor.
        evidence: What ``got`` may have been made from.
    """
    if got.shape != wanted.shape:
        return f"its shape is {tuple(got.shape)} in place of {tuple(wanted.shape)}"
    got, wanted = got.double(), wanted.double()
    if got.isnan().any():
        return "it has elements that are not a number"
    return next(filter(None, _tried(got, wanted, evidence)), "")


def _tried(got: Tensor, wanted: Tensor, evidence: Evidence) -> Iterator[str]:
    yield "it is zero" if not got.any() and wanted.any() else ""
    if got.numel() == 1:
        yield _number(float(got), float(wanted), evidence)
        yield _copy(got, wanted, evidence.others)
        return
    if evidence.before is not None:
        yield _update(got, wanted, evidence.before.double(), evidence)
    yield _rounded(got, wanted)
    yield _factor(got, wanted, evidence.factors)
    yield _addend(got, wanted, evidence)
    yield _missing_sum(got, wanted, evidence.pieces)
    yield _copy(got, wanted, evidence.others)
    yield _part(got, wanted, evidence.factors)
    yield _order(got, wanted)
    yield _shift(got, wanted)
    yield _mask(got, wanted, evidence.others)
    yield (
        f"all its elements are {float(got.flatten()[0]):.6g}"
        if _is_constant(got) and not _is_constant(wanted)
        else ""
    )


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


def _fits(got: Tensor, told: Tensor, wanted: Tensor | None = None) -> bool:
    """Return True if ``told`` explains ``got``; with ``wanted`` also nearly all of its difference from ``wanted``."""
    left = float((got - told).norm())
    is_near = left <= _FITS * max(float(told.norm()), float(got.norm()), 1e-300)
    return is_near and (wanted is None or left <= _OF_DIFFERENCE * float((got - wanted).norm()))


def _rounded(got: Tensor, wanted: Tensor) -> str:
    """Return an explanation if all elements are numbers of a smaller dtype, near the right ones, which are not."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        is_held, eps = torch.equal(got.to(dtype).double(), got), torch.finfo(dtype).eps
        is_told = is_held and got.any() and not torch.equal(wanted.to(dtype).double(), wanted)
        if is_told and float((got - wanted).norm()) <= eps * float(wanted.norm()):
            return f"it is rounded to {str(dtype).removeprefix('torch.')}"
    return ""


def _is_constant(tensor: Tensor) -> bool:
    return tensor.numel() >= _LEAST_ELEMENTS and float(tensor.max() - tensor.min()) <= _FITS * float(
        tensor.abs().max()
    )


# Factors -----------------------------------------------------------------------------------------------------------


def named_factor(ratio: float, factors: Mapping[str, float], precision: float = _FITS) -> str:
    """Return all names of a factor, as ``dp = ep = 2``; "" if the factor is no number of the run."""
    found: dict[str, str] = {}
    for name, value in factors.items():
        if value in (0, 1) or not math.isfinite(value):
            continue
        if abs(ratio / value - 1) < precision:
            found[name] = f"{value:.6g}"
        elif abs(ratio * value - 1) < precision:
            found[f"1/{name}" if name.isidentifier() else f"1/({name})"] = f"{1 / value:.6g}"
    if not found:
        return ""
    number = next(iter(found.values()))
    if ratio < 1 and abs(1 / ratio - round(1 / ratio)) < precision:
        number = f"1/{round(1 / ratio)}"
    return f"{' = '.join(found)} = {number}"


def _ratio(got: Tensor, wanted: Tensor) -> float | None:
    """Return c if got = c · wanted with c other than 0 and 1."""
    square = float((wanted * wanted).sum())
    if not square:
        return None
    ratio = float((got * wanted).sum()) / square
    if ratio == 0 or abs(ratio - 1) < _FITS or not _fits(got, ratio * wanted, wanted):
        return None
    return ratio


def _factor(got: Tensor, wanted: Tensor, factors: Mapping[str, float]) -> str:
    ratio = _ratio(got, wanted)
    if ratio is None:
        return ""
    named = named_factor(ratio, factors)
    if not named and int((wanted != 0).sum()) < _LEAST_ELEMENTS:
        return ""
    return f"it is the right tensor times {named or f'{ratio:.6g}'}"


def _number(got: float, wanted: float, evidence: Evidence) -> str:
    """Return the explanation of a single number."""
    for said, value in evidence.sums.items():
        if value and abs(got / value - 1) < _FITS < abs(value / wanted - 1):
            return said
    if not wanted or not got:
        return ""
    named = named_factor(got / wanted, evidence.factors)
    return f"it is the right number times {named}" if named else ""


# Sums --------------------------------------------------------------------------------------------------------------


def _addend(got: Tensor, wanted: Tensor, evidence: Evidence) -> str:
    difference = got - wanted
    for said, addend in evidence.addends.items():
        addend = addend.double()
        square = float((addend * addend).sum()) if addend.shape == wanted.shape else 0.0
        if not square or square < 1e-6 * float((difference * difference).sum()):
            continue
        times = 1 + float((difference * addend).sum()) / square
        if not _fits(got, wanted + (times - 1) * addend, wanted):
            continue
        if abs(times) < _FITS:
            return f"{said}: missing in the sum"
        if abs(times - 2) < _FITS:
            return f"{said}: counted twice in the sum"
        named = named_factor(times, evidence.factors)
        if named or int((addend != 0).sum()) >= _LEAST_ELEMENTS:
            return f"{said}: counted times {named or f'{times:.6g}'} in the sum"
    return ""


def _missing_sum(got: Tensor, wanted: Tensor, pieces: Sequence[Tensor]) -> str:
    if len(pieces) < 2 or any(each.shape != wanted.shape for each in pieces):
        return ""
    total = torch.stack([each.double() for each in pieces]).sum(0)
    if _fits(total, wanted) and not _fits(got, wanted):
        return (
            f"each of the {len(pieces)} ranks along tp holds an addend: the sum over these ranks is missing"
        )
    if _fits(total / len(pieces), wanted) and not _fits(got, wanted):
        return "the ranks along tp hold unlike tensors whose mean is right"
    return ""


# Updates -----------------------------------------------------------------------------------------------------------


def _update(got: Tensor, wanted: Tensor, before: Tensor, evidence: Evidence) -> str:
    moved, right = got - before, wanted - before
    if not moved.any() and right.any():
        return "it is the weight before the step"
    ratio = _ratio(moved, right)
    if ratio is not None:
        named = named_factor(ratio, evidence.factors)
        return f"its update is the right one times {named or f'{ratio:.6g}'}"
    if part := _part(moved, right, evidence.factors, "the update"):
        return part
    update = evidence.update
    if update is None or update.first.shape != got.shape:
        return ""
    if not _fits(wanted - before, update.weight(before, update.decay, update.step) - before):
        return ""
    decays = {0.0: "without weight decay", 2 * update.decay: "with twice the weight decay"}
    for step in (update.step, *range(1, update.step), update.step + 1):
        for decay in (update.decay, *decays):
            if step == update.step and decay == update.decay:
                continue
            if _fits(moved, update.weight(before, decay, step) - before, right):
                said = [] if decay == update.decay else [decays[decay]]
                said += [] if step == update.step else [f"with moments corrected as in update {step}"]
                return f"its update is one {' and '.join(said)}; this is update {update.step}"
    square = float((before * before).sum())
    more = -float(((got - wanted) * before).sum()) / square / update.rate if square else 0.0
    if abs(more) > _FITS and _fits(moved, right - update.rate * more * before, right):
        return f"its update has a weight decay of {update.decay + more:.6g} in place of {update.decay:.6g}"
    return ""


# Parts, order and places -------------------------------------------------------------------------------------------


def _part(got: Tensor, wanted: Tensor, factors: Mapping[str, float], whose: str = "") -> str:
    """Return an explanation if one block, or one range of the flattened tensor, is a multiple and the rest is right."""
    scale = max(float(wanted.abs().max()), 1e-300)
    wrong = (got - wanted).abs() > 1e-9 * scale
    if not wrong.any():
        return ""
    places = wrong.nonzero()
    box = tuple(slice(int(a), int(b) + 1) for a, b in zip(places.amin(0), places.amax(0), strict=True))
    flat = wrong.flatten().nonzero().flatten()
    first, last = int(flat[0]), int(flat[-1]) + 1
    words = ", ".join(f"{each.start}:{each.stop}" for each in box)
    choices = [(f"[{words}]", got[box], wanted[box])]
    if got.dim() > 1:
        choices.append(
            (
                f"elements [{first}, {last}) of the flattened tensor",
                got.flatten()[first:last],
                wanted.flatten()[first:last],
            )
        )
    of = f"{whose} of " if whose else ""
    for said, mine, right in choices:
        if mine.numel() == got.numel() or mine.numel() < _LEAST_ELEMENTS:
            continue
        if not mine.any() and right.any():
            verb = "is" if whose or said.startswith("[") else "are"
            return f"{of}{said} {verb} {'missing' if whose else 'zero'}, and the rest is right"
        ratio = _ratio(mine, right)
        if ratio is not None:
            named = named_factor(ratio, factors)
            right_one = "is the right one" if whose or said.startswith("[") else "are the right ones"
            return f"{of}{said} {right_one} times {named or f'{ratio:.6g}'}, and the rest is right"
    return _zero_places(got, wanted, whose)


def _zero_places(got: Tensor, wanted: Tensor, whose: str) -> str:
    """Return an explanation if some elements are zero and all others are right."""
    zero = (got == 0) & (wanted != 0)
    share = float(zero.double().mean())
    if whose and 0 < share < 1 and _fits(got[~zero], wanted[~zero]):
        return f"{whose} of {int(zero.sum())} elements is missing, and the rest is right"
    return ""


def _order(got: Tensor, wanted: Tensor) -> str:
    for dim in range(got.dim()):
        if said := _blocks(got, wanted, dim, f"along dim {dim}"):
            return said
        if got.shape[dim] > 1 and (rows := _swapped_rows(got, wanted, dim)):
            return rows
    if got.dim() > 1:
        return _blocks(got.flatten(), wanted.flatten(), 0, "of the flattened tensor")
    return ""


def _blocks(got: Tensor, wanted: Tensor, dim: int, where: str) -> str:
    size = got.shape[dim]
    for count in range(2, min(_MOST_BLOCKS, size) + 1):
        if size % count:
            continue
        mine, right = got.chunk(count, dim), wanted.chunk(count, dim)
        if any(not each.any() for each in right):
            continue
        if any(_fits(a, b) for a, b in itertools.combinations(right, 2)):
            continue  # equal blocks have no order
        order = [next((j for j in range(count) if _fits(each, right[j])), -1) for each in mine]
        if -1 in order or order == list(range(count)):
            continue
        if sorted(order) == list(range(count)):
            return f"its {count} blocks {where} stand in the order {order}"
        copies = ", ".join(f"block {i} is a copy of block {j}" for i, j in enumerate(order) if i != j)
        return f"of {count} blocks {where} {copies}"
    return ""


def _swapped_rows(got: Tensor, wanted: Tensor, dim: int) -> str:
    mine = got.movedim(dim, 0).reshape(got.shape[dim], -1)
    right = wanted.movedim(dim, 0).reshape(got.shape[dim], -1)
    scale = max(float(right.abs().max()), 1e-300) if right.numel() else 0.0
    wrong = (
        ((mine - right).abs().amax(1) > _FITS * scale).nonzero().flatten().tolist() if mine.numel() else []
    )
    if len(wrong) != 2:
        return ""
    first, second = wrong
    is_swapped = _fits(mine[first], right[second]) and _fits(mine[second], right[first])
    return f"rows {first} and {second} along dim {dim} are swapped" if is_swapped else ""


def _shift(got: Tensor, wanted: Tensor) -> str:
    for dim in range(got.dim()):
        for places in range(1, min(_MOST_SHIFTED, got.shape[dim] - 1) + 1):
            for shift in (places, -places):
                if _fits(got, wanted.roll(shift, dim), wanted):
                    return f"it is shifted by {shift} places along dim {dim}"
    mine, right = got.flatten(), wanted.flatten()
    scale = max(float(right.abs().max()), 1e-300)
    wrong = ((mine - right).abs() > 1e-9 * scale).nonzero().flatten()
    if len(wrong) < _LEAST_SHIFTED:
        return ""
    first, last = int(wrong[0]), int(wrong[-1]) + 1
    for shift in (s for n in range(1, _MOST_SHIFTED + 1) for s in (n, -n)):
        start, stop = max(first, first + shift, 0), min(last, last + shift, len(mine))
        told = right[start - shift : stop - shift]
        off = (mine[start:stop] - told).abs() > 1e-9 * scale
        is_said = ((told - right[start:stop]).abs() > 1e-9 * scale) & ~off
        # The elements at the ends of a rank's range come from the next range.
        if int(is_said.sum()) >= _LEAST_SHIFTED and int(off.sum()) <= min(2 * abs(shift), 0.1 * len(off)):
            return f"elements [{first}, {last}) of the flattened tensor are shifted by {shift} places"
    return ""


# Other tensors -----------------------------------------------------------------------------------------------------


def _copy(got: Tensor, wanted: Tensor, others: Mapping[str, Tensor]) -> str:
    for said, other in others.items():
        if other.shape == wanted.shape and other.any() and _fits(got, other.double(), wanted):
            return f"it is {said}"
    return ""


def _mask(got: Tensor, wanted: Tensor, others: Mapping[str, Tensor]) -> str:
    dropped, right = got == 0, wanted == 0
    both = ~dropped & ~right
    if not (dropped != right).any() or not dropped.any() or int(both.sum()) < _LEAST_SHIFTED:
        return ""
    if not _fits(got[both], wanted[both]):
        return ""
    for said, other in others.items():
        if other.shape == wanted.shape and torch.equal(other == 0, dropped):
            return (
                f"other elements are zero, those of {said}; the elements that are zero in neither are right"
            )
    return (
        f"{int((dropped & ~right).sum())} other elements are zero than in the right tensor; the elements that are zero "
        "in neither are right"
    )
