"""Rules by which an operation of torch hands on the placements of its operands, by class of operation.

    class               operands -> result
    any                 all whole -> whole
    linear, one input   the same, with the dim that is cut where the operation moves it
    sum over dims       over the dim that is cut -> addend; else the same
    elementwise         whole with slice -> slice; slices of one dim -> slice; slices of two dims -> own
    sum of operands     addends -> addend; addend with what is none -> problem
    product             addend times whole -> addend; addend times what differs by rank -> problem
    matrix product      contraction of a dim that is cut -> addend; else slice of rows, columns or matrices
    not linear          of an addend -> problem
    softmax, norm       over a dim that is cut -> problem; else the same
    lookup              places cut -> slice; gradient of the rows -> addend
    attention           slice of samples or heads -> the same

What none of them covers is unknown, if an operand differs by rank.

Shapes: of one rank, so that a dim that is cut has its size on the rank.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Kind = Literal["whole", "slice", "addend", "own", "zero", "mixed", "unknown"]


class Lie(NamedTuple):
    """Placement of one tensor on the ranks of one axis, with the factor of a dim that is cut."""

    kind: Kind
    dim: int = -1
    """Dim that is cut, of a slice."""
    factor: int = 1
    """Size on a rank of the factor of that dim that is cut."""
    inner: int = 1
    """Elements of the dim inside one place of the factor."""
    blocks: "tuple[tuple[int, Lie], ...]" = ()
    """Sizes on a rank and placements of the blocks of ``dim``, if they differ (placement_blocks.py)."""

    def __str__(self) -> str:
        return {
            "whole": "Replicate",
            "slice": f"Shard({self.dim})",
            "addend": "Partial",
            "own": "PerRank",
            "zero": "Replicate",
            "mixed": f"blocks of dim {self.dim}: " + " | ".join(str(lie) for _, lie in self.blocks),
            "unknown": "unknown",
        }[self.kind]


WHOLE, ADDEND, OWN, ZERO, UNKNOWN = (
    Lie("whole"),
    Lie("addend"),
    Lie("own"),
    Lie("zero"),
    Lie("unknown"),
)
BLANK = Lie("zero", factor=0)
"""Placement of memory to which nothing was written: neutral in sums as zeros are, but its product is not zero."""
UNMASKED = Lie("own", factor=0)
"""Placement of rows that each rank has looked up in its own part of a table, also for places of other ranks."""
Get = Callable[[Tensor], Lie]


def slice_of(dim: int, factor: int, inner: int = 1) -> Lie:
    """Return the form of a slice of ``dim``."""
    return Lie("slice", dim, factor, inner)


def beside_unit(lie: Lie, shape: Sequence[int]) -> Lie:
    """Return the placement of a rank's only head, which is the dim of size 1 in that place of an attention's tensor.

    Args:
        lie: A slice of one place.
        shape: Shape of the tensor on the rank.
    """
    dim = lie.dim
    if len(shape) < 4 or shape[dim] == 1:
        return lie
    if lie.inner == shape[dim] and dim > 0 and shape[dim - 1] == 1:
        return slice_of(dim - 1, 1)
    return slice_of(dim + 1, 1) if lie.inner == 1 and list(shape[dim + 1 : dim + 2]) == [1] else lie


class Mismatch(Exception):  # noqa: N818 - caught by the mode, never by a user
    """An operand does not lie as its operation needs it.

    Args:
        wanted: What the operation needs.
        found: How the operand lies.
        instead: Placement with which the pass goes on.
    """

    def __init__(self, wanted: str, found: str, instead: "Lie | list[Lie]" = WHOLE) -> None:
        super().__init__(wanted)
        self.wanted, self.found, self.instead = wanted, found, instead


def placements_of(func: Any, name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of each tensor in ``out``, or one for all.

    Args:
        func: The operation.
        name: Its name without namespace and overload.
        args: Its arguments.
        kwargs: Its named arguments.
        out: Its result.
        get: Function that returns the placement of a tensor.

    Raises:
        Mismatch: if an operand does not lie as the operation needs it.
    """
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if name in _FACTORIES:
        return WHOLE if name not in _EMPTY else BLANK if "empty" in name else ZERO
    if name in ("zero_", "fill_"):
        return _filled(name, args, get)
    if "out" in kwargs and isinstance(kwargs["out"], Tensor):
        kwargs = {key: each for key, each in kwargs.items() if key != "out"}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    lies = [get(each) for each in tensors]
    kinds = {lie.kind for lie in lies}
    if name == "copy_":
        return _copied(args, get)
    if "unknown" in kinds:
        return UNKNOWN
    if kinds == {"zero"} and (name in _LINEAR or name in _VIEWS or name in ("mul", "mul_", "add", "add_")):
        return BLANK if BLANK in lies else ZERO
    if ZERO in lies and (name in _BILINEAR or name in ("sum", "mean") or name in _VIEWS):
        return ZERO
    if kinds <= {"whole", "zero"}:
        return WHOLE
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    has_gradients = any(each.is_floating_point() or each.is_complex() for each in results)
    try:
        found = _by_class(func, base, args, kwargs, out, get, kinds)
    except Mismatch:
        if has_gradients:
            raise
        found = UNKNOWN
    return (
        OWN if found is UNKNOWN and not has_gradients else found
    )  # places and counts of what the rank holds


def _by_class(
    func: Any, base: str, args: Any, kwargs: Any, out: Any, get: Get, kinds: set[Kind]
) -> "Lie | list[Lie]":
    rule = _RULES.get(base)
    if rule is not None:
        return rule(base, args, kwargs, out, get)
    if base.startswith("_scaled_dot_product") and "attention" in base:
        return _attention(base, args, kwargs, out, get)
    if torch.Tag.pointwise in func.tags or base in _POINTWISE:
        return _pointwise(base, args, out, get)
    if kinds <= {"whole", "zero", "own"}:
        return OWN
    return UNKNOWN


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, int | float) and value == number


def _first(out: Any) -> Tensor:
    found: Tensor = next(each for each in tree_leaves(out) if isinstance(each, Tensor))
    return found


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _filled(name: str, args: Any, get: Get) -> Lie:
    """Return the placement of memory after one value was written to all of a tensor, perhaps a part of the memory."""
    before = get(args[0])
    value = args[1] if len(args) > 1 else 0
    lie = get(value) if isinstance(value, Tensor) else ZERO if value == 0 else WHOLE
    if _covers(args[0]):
        return lie
    if lie.kind == "zero" or (lie.kind == "whole" and before.kind in ("slice", "own")):
        return before
    return lie if before.kind in ("zero", lie.kind) else UNKNOWN


def _copied(args: Any, get: Get) -> Lie:
    target, source = args[0], args[1]
    lie = get(source)
    if lie.kind == "slice" and source.dim() != target.dim():
        lie = lie._replace(dim=lie.dim + target.dim() - source.dim())
    if _covers(target):
        return lie
    before = get(target)
    if {before.kind, lie.kind} == {"own", "addend"}:
        return OWN
    if lie.kind == "zero":
        return before
    return lie if before.kind in ("zero", lie.kind) else UNKNOWN


# Views and other linear operations of one tensor -------------------------------------------------------------------


def _reshaped(
    lie: Lie, before: Sequence[int], after: Sequence[int], given: Sequence[int], origin: Lie | None = None
) -> Lie:
    """Return the placement after a reshape: the dim that contains the largest stride of the factor that is cut.

    A rank that holds one head has a dim of size 1 there, which such a stride does not show: then a dim of size 1 in
    that place is the one that is cut. In the backward pass, the tensor of the forward pass tells whether it was cut.

    Args:
        lie: The placement before.
        before: The shape before.
        after: The shape after.
        given: The sizes as the call gave them, -1 for one that it left open.
        origin: Placement of the tensor whose gradient this is; None in the forward pass.
    """
    if lie.kind != "slice":
        return lie
    inner = math.prod(before[lie.dim + 1 :]) * lie.inner
    stop = inner * lie.factor
    strides = [math.prod(after[dim + 1 :]) for dim in range(len(after))]
    units = [dim for dim, size in enumerate(after) if size == 1 and strides[dim] == stop]
    if origin is not None:
        units = [dim for dim in units if origin.kind == "slice" and origin.dim == dim]
    is_open = [dim for dim in units if dim < len(given) and given[dim] == -1]
    if units and (lie.factor == 1 or origin is not None):
        return slice_of((is_open or units)[-1], 1)
    grown = [dim for dim, size in enumerate(given) if size == -1 and strides[dim] == stop]
    if before[lie.dim] == 1 and grown:
        return slice_of(grown[0], 1)  # the dim of size 1 becomes part of the dim in front of it
    kept = [dim for dim, size in enumerate(after) if size > 1 and strides[dim] == stop]
    if lie.factor == lie.inner == 1 < before[lie.dim] and kept:
        return slice_of(kept[0], 1)  # the cut stays between the same elements
    for dim, (size, stride) in enumerate(zip(after, strides, strict=True)):
        if size > 1 and stride < stop <= stride * size:
            start = max(inner, stride)
            return slice_of(dim, stop // start, start // stride)
    return UNKNOWN if lie.factor > 1 else OWN


def viewed_back(args: Any, out: Tensor, get: Get, origin: Lie) -> Lie:
    """Return the placement of a gradient that goes back through a view.

    Args:
        args: Arguments of the view of the gradient.
        out: Its result.
        get: Function that returns the placement of a tensor.
        origin: Placement of the tensor that was viewed in the forward pass.
    """
    return _reshaped(get(args[0]), args[0].shape, out.shape, args[1], origin)


def in_memory(lie: Lie, form: tuple[Sequence[int], Sequence[int]], tensor: Tensor) -> Lie:
    """Return the placement of a tensor whose memory was written through another view as a slice.

    Args:
        lie: Placement of the other view.
        form: Shape and strides of the other view.
        tensor: The tensor.
    """
    inner = form[1][lie.dim] * lie.inner
    stop = inner * lie.factor
    units = [dim for dim, size in enumerate(tensor.shape) if size == 1 and tensor.stride(dim) == stop]
    if lie.factor == 1 and units:
        return slice_of(units[-1], 1)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride < stop <= stride * size:
            start = max(inner, stride)
            return slice_of(dim, stop // start, start // stride)
    return UNKNOWN


def _view(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return _reshaped(get(args[0]), args[0].shape, _first(out).shape, given)


def _same(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    return get(args[0])


def _permuted(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    lie, dims = get(args[0]), args[0].dim()
    if lie.kind != "slice":
        return lie
    if name == "t":
        order = [1, 0] if dims == 2 else [0]
    elif name == "transpose":
        order = list(range(dims))
        one, other = args[1] % dims, args[2] % dims
        order[one], order[other] = other, one
    else:
        order = [dim % dims for dim in args[1]]
    return lie._replace(dim=order.index(lie.dim))


def _complex(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of pairs of the last dim as complex numbers, and back."""
    lie = get(args[0])
    if name == "view_as_complex" and lie.kind == "slice" and lie.dim == args[0].dim() - 1:
        return OWN
    return lie


def _convolved(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of a convolution [B, C, ..] with a weight [O, C/groups, ..]."""
    x, weight = get(args[0]), get(args[1])
    groups = args[8]
    bias = get(args[2]) if isinstance(args[2], Tensor) else ZERO
    kinds = {x.kind, weight.kind, bias.kind}
    if kinds & {"own", "mixed"}:
        return OWN if "mixed" not in kinds else UNKNOWN
    if "addend" in kinds:
        product = _product([x, weight], [args[0], args[1]], out)
        return product if bias.kind == "zero" else _sum([product, bias], [out, out], out)
    if x.kind == "slice" and x.dim == 0 and weight.kind == "whole":
        return x
    if x.kind == "slice" and x.dim == 1 and weight.kind == "slice":
        if groups == args[0].shape[1] == args[1].shape[0] and weight.dim == 0:
            return x
        if weight.dim == 1 and groups == 1:
            return ADDEND if bias.kind in ("zero", "addend") else UNKNOWN
    if x.kind == "whole" and weight.kind == "slice" and weight.dim == 0 and groups == 1:
        return slice_of(1, weight.factor, weight.inner)
    return UNKNOWN


def _convolution_gradients(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placements of the gradients of a convolution's input, weight and bias."""
    grad, x, weight = (get(each) for each in args[:3])
    groups, wanted = args[9], args[10]
    each: list[Lie] = [UNKNOWN] * 3
    if grad.kind == "addend" and x.kind == weight.kind == "whole":
        each = [ADDEND] * 3
    elif grad.kind == "slice" and grad.dim == 0 and x == grad and weight.kind == "whole":
        each = [x, ADDEND, ADDEND]
    elif grad.kind == "slice" and grad.dim == 1 and weight.kind == "slice" and weight.dim == 0:
        of_weight = slice_of(0, grad.factor, grad.inner)
        if groups == args[1].shape[1] == args[2].shape[0] and x.kind == "slice" and x.dim == 1:
            each = [x, of_weight, of_weight]
        elif groups == 1 and x.kind == "whole":
            each = [ADDEND, of_weight, of_weight]
    elif grad.kind == "whole" and weight.kind == "slice" and weight.dim == 1 == x.dim and groups == 1:
        each = [x, weight, WHOLE]
    return [lie for lie, is_wanted in zip(each, wanted, strict=True) if is_wanted]


def _unsqueezed(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    lie, dim = get(args[0]), args[1] % (args[0].dim() + 1)
    return lie._replace(dim=lie.dim + (dim <= lie.dim)) if lie.kind == "slice" else lie


def _squeezed(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    lie, shape = get(args[0]), args[0].shape
    if lie.kind != "slice":
        return lie
    given = args[1] if len(args) > 1 else list(range(len(shape)))
    dims = {dim % len(shape) for dim in ([given] if isinstance(given, int) else given)}
    dims = {dim for dim in dims if shape[dim] == 1}
    return OWN if lie.dim in dims else lie._replace(dim=lie.dim - sum(dim < lie.dim for dim in dims))


def _expanded(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    lie = get(args[0])
    return lie._replace(dim=lie.dim + out.dim() - args[0].dim()) if lie.kind == "slice" else lie


def _selected(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of one place of a dim; of a dim that is cut, values of each rank's own."""
    lie, dim = get(args[0]), (args[1] if len(args) > 1 else 0) % args[0].dim()
    if lie.kind != "slice":
        return lie
    if lie.dim == dim:
        if lie.inner * lie.factor < args[0].shape[dim]:
            return UNKNOWN
        return OWN
    return lie._replace(dim=lie.dim - (dim < lie.dim))


def part_of(lie: Lie, size: int) -> Lie:
    """Return the placement of ``size`` places of the dim that is cut: whole blocks, heads, or features of one head."""
    if size % max(lie.factor * lie.inner, 1) == 0:
        return lie
    if lie.factor == 1:
        return slice_of(lie.dim, 1, size)
    return (
        slice_of(lie.dim, size // lie.inner, lie.inner) if size % lie.inner == 0 else slice_of(lie.dim, size)
    )


def _sliced(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of a range of a dim; a range of a rank's slice is cut as the slice is."""
    lie = get(args[0])
    if lie.kind != "slice":
        return lie
    whole, parts = args[0].shape[lie.dim], [each.shape[lie.dim] for each in tree_leaves(out)]
    return [lie if part == whole else part_of(lie, part) for part in parts]


def _unsliced(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of the gradient of a range or of one place."""
    lie, sizes = get(args[0]), args[1]
    if name == "select_backward":
        dim = args[2] % len(sizes)
        return lie._replace(dim=lie.dim + (dim <= lie.dim)) if lie.kind == "slice" else lie
    if lie.kind == "slice" and sizes[lie.dim] != args[0].shape[lie.dim]:
        size = sizes[lie.dim]
        return slice_of(lie.dim, 1, size) if lie.factor == 1 else slice_of(lie.dim, size)
    return lie


def _padded(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    lie = get(args[0])
    if lie.kind == "addend" and len(args) > 2 and not _is_number(args[2], 0):
        raise Mismatch("a tensor that is not an addend", str(lie))
    if lie.kind == "slice" and out.shape[lie.dim] != args[0].shape[lie.dim]:
        return slice_of(lie.dim, out.shape[lie.dim])
    return lie


def _dims(given: Any, count: int) -> set[int]:
    if given is None or (isinstance(given, list | tuple) and not given):
        return set(range(count))
    return {dim % max(count, 1) for dim in ([given] if isinstance(given, int) else given)}


def _reduced(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of a reduction: the sum over a dim that is cut is an addend, its largest value is not."""
    source = args[0]
    lie, result = get(source), _first(out)
    if lie.kind == "addend":
        if name in ("sum", "mean"):
            return lie
        raise Mismatch("a tensor that is not an addend", str(lie))
    if lie.kind == "own":
        return lie
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    if name.startswith("var") and isinstance(given, bool):
        given = None
    dims = _dims(given, source.dim())
    if lie.dim in dims:
        return ADDEND if name == "sum" else OWN
    if result.dim() == source.dim():
        return lie
    return lie._replace(dim=lie.dim - sum(dim < lie.dim for dim in dims))


def _along(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of an operation along one dim, such as a softmax."""
    lie, dims = get(args[0]), args[0].dim()
    given = (
        args[-2] if name.endswith("_backward_data") else args[1] if len(args) > 1 else kwargs.get("dim", -1)
    )
    if name in ("topk",):
        given = args[2] if len(args) > 2 else -1
    dim = given % dims
    if name.endswith("_backward_data"):
        found = _product([lie, get(args[1])], [args[0], args[1]], out)
    elif lie.kind == "addend" and name != "cumsum":
        raise Mismatch("a tensor that is not an addend", str(lie))
    else:
        found = lie
    if found.kind == "slice" and found.dim == dim:
        raise Mismatch(f"dim {dim} uncut", str(found), found)
    return found


# Operations of several tensors -------------------------------------------------------------------------------------


def _aligned(lie: Lie, tensor: Tensor, out: Tensor) -> Lie:
    return lie._replace(dim=lie.dim + out.dim() - tensor.dim()) if lie.kind == "slice" else lie


def _united(lies: Sequence[Lie], tensors: Sequence[Tensor], out: Tensor) -> Lie:
    """Return the placement of an elementwise operation of tensors that are not addends."""
    pairs = zip(lies, tensors, strict=True)
    found = [_aligned(lie, each, out) for lie, each in pairs if lie.kind not in ("whole", "zero")]
    if not found:
        return WHOLE
    if any(lie.kind == "own" for lie in found):
        slices = [lie for lie in found if lie.kind == "slice"]
        return slices[0] if slices else OWN
    dims = {lie.dim for lie in found}
    if len(dims) == 1:
        return min(found, key=lambda lie: lie.factor * lie.inner)
    places = {math.prod(out.shape[lie.dim + 1 :]) * lie.inner for lie in found}
    if len(places) == 1 and all(lie.factor == 1 for lie in found):
        return found[0]  # one head on a rank, whose dim of size 1 a view has hidden
    return OWN


def _product(lies: Sequence[Lie], tensors: Sequence[Tensor], out: Tensor) -> Lie:
    """Return the placement of a product, which is linear in each operand."""
    addends = [lie for lie in lies if lie.kind == "addend"]
    if not addends:
        return _united(lies, tensors, out)
    others = [lie for lie in lies if lie.kind not in ("whole", "zero", "addend")]
    if len(addends) > 1:
        raise Mismatch("a product with at most one addend", "Partial times Partial", WHOLE)
    if others:
        raise Mismatch("an addend times a whole tensor", f"Partial times {others[0]}", others[0])
    return ADDEND


def _sum(lies: Sequence[Lie], tensors: Sequence[Tensor], out: Tensor, numbers: bool = False) -> Lie:
    """Return the placement of a sum of operands."""
    if not any(lie.kind == "addend" for lie in lies):
        return _united(lies, tensors, out)
    others = [lie for lie in lies if lie.kind not in ("addend", "zero")]
    if others:
        raise Mismatch("a sum of addends alone", f"Partial plus {others[0]}", others[0])
    if numbers:
        raise Mismatch("a sum of addends alone", "Partial plus a number", WHOLE)
    return ADDEND


def _pointwise(name: str, args: Any, out: Any, get: Get) -> Lie:
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    lies, result = [get(each) for each in tensors], _first(out)
    if name == "masked_fill" and lies[0] == UNMASKED and _is_number(args[2], 0):
        return ADDEND  # each row is counted by the rank that holds it
    if not any(lie.kind == "addend" for lie in lies):
        return _united(lies, tensors, result)
    if name in _LINEAR:
        return _product(lies, tensors, result)
    if name in ("mul", "mul_"):
        return _product(lies, tensors, result)
    if name in ("add", "sub", "rsub", "lerp"):
        number = next((each for each in args[:2] if not isinstance(each, Tensor)), 0)
        return _sum(lies, tensors, result, numbers=not _is_number(number, 0))
    if name in ("div", "true_divide") and lies[0].kind == "addend":
        return _product(lies, tensors, result)
    if name in _LINEAR_IN_FIRST and lies[0].kind == "addend":
        return _product(lies, tensors, result)
    if name == "where" and lies[0].kind in ("whole", "zero"):
        kinds = {lie.kind for lie in lies[1:]}
        if kinds <= {"addend", "zero"}:
            return ADDEND
    if (
        name == "masked_fill"
        and lies[0].kind == "addend"
        and lies[1].kind == "whole"
        and _is_number(args[2], 0)
    ):
        return ADDEND
    if name == "addcmul":
        return _sum([lies[0], _product(lies[1:], tensors[1:], result)], [tensors[0], result], result)
    raise Mismatch(
        "a tensor that is not an addend", "Partial", _united_without_addends(lies, tensors, result)
    )


def _united_without_addends(lies: Sequence[Lie], tensors: Sequence[Tensor], out: Tensor) -> Lie:
    return _united([WHOLE if lie.kind == "addend" else lie for lie in lies], tensors, out)


def _joined(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    tensors = list(args[0])
    lies = [get(each) for each in tensors]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if name == "stack":
        dim %= out.dim()
        lies = [lie._replace(dim=lie.dim + (dim <= lie.dim)) if lie.kind == "slice" else lie for lie in lies]
        tensors = [each.unsqueeze(dim) for each in tensors]
    if any(lie.kind == "addend" for lie in lies):
        return _sum(lies, tensors, out)
    found = _united(lies, tensors, out)
    if found.kind == "slice" and found.dim == dim % out.dim():
        smallest = min(
            (each for each, lie in zip(tensors, lies, strict=True) if lie.kind == "slice"), key=Tensor.numel
        )
        return slice_of(found.dim, smallest.shape[found.dim])
    return found


def _contracted(one: Lie, other: Lie, row: int, column: int, batch: int) -> Lie:
    """Return the placement of a matrix product [.., M, K] x [.., K, N] with ``batch`` dims in front."""
    if "addend" in (one.kind, other.kind):
        if one.kind == other.kind:
            raise Mismatch("a product with at most one addend", "Partial times Partial", WHOLE)
        rest = other if one.kind == "addend" else one
        if rest.kind not in ("whole", "zero"):
            raise Mismatch("an addend times a whole tensor", f"Partial times {rest}", ADDEND)
        return ADDEND
    if "own" in (one.kind, other.kind):
        return OWN
    slices = [each for each in (one, other) if each.kind == "slice"]
    if len(slices) == 2 and batch and all(each.dim < batch or each.factor == 1 for each in slices):
        return slice_of(0, 1) if max(one.dim, other.dim) >= batch else slices[0]  # a rank's only head
    if (one.kind == "slice" and one.dim == column) or (other.kind == "slice" and other.dim == row):
        both = one.kind == other.kind == "slice"
        if both and not (one.dim == column and other.dim == row):
            raise Mismatch("factors cut along the same dim", f"{one} times {other}", OWN)
        return ADDEND
    if len({each.dim for each in slices}) > 1 or (len(slices) == 2 and slices[0].dim >= batch):
        raise Mismatch("at most one factor cut, or both along one dim", f"{one} times {other}", OWN)
    return slices[0] if slices else WHOLE


def _multiplied(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    start = name in ("addmm", "baddbmm", "addmv")
    one, other = args[start : start + 2]
    batch = one.dim() - 2
    if name in ("mv", "addmv"):
        batch = 0
    found = _contracted(get(one), get(other), batch, batch + 1, batch)
    if not start:
        return found
    if kwargs.get("beta", 1) == 0 or get(args[0]).kind == "zero":
        return found
    return _sum([get(args[0]), found], [args[0], out], out)


def _looked_up(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    weight, ids = get(args[0]), get(args[1])
    if weight.kind == "addend":
        return ADDEND
    if weight.kind == "slice" and weight.dim == 0:
        return UNMASKED
    if weight.kind == "slice":
        return weight._replace(dim=out.dim() - 1) if ids.kind == "whole" else OWN
    return ids


def _rows_gradient(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    grad, ids = get(args[0]), get(args[1])
    if ids.kind == "own":
        return slice_of(0, out.shape[0])
    if grad.kind == "addend":
        return ADDEND
    if grad.kind == "slice" and grad.dim == args[0].dim() - 1 and ids.kind in ("whole", "zero"):
        return slice_of(1, out.shape[1])
    if grad.kind == "slice" or ids.kind == "slice":
        return ADDEND
    return grad


def _normed(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    lie, dims = get(args[0]), args[0].dim() - len(args[1])
    parameters = [get(each) for each in args[2:4] if isinstance(each, Tensor)]
    if any(each.kind == "addend" for each in (lie, *parameters)):
        raise Mismatch("a tensor that is not an addend", "Partial")
    if lie.kind == "slice" and lie.dim >= dims:
        raise Mismatch("the dims of a norm uncut", str(lie), lie)
    return lie


def _norm_gradient(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    grad, x = get(args[0]), get(args[1])
    found = _product([grad, x], [args[0], args[1]], args[1])
    summed = ADDEND if found.kind == "slice" else found
    count = len([each for each in tree_leaves(out) if isinstance(each, Tensor)])
    has_x = bool(args[-1][0])
    return [found if has_x and i == 0 else summed for i in range(count)]


def _attention(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.dim() == 4]
    lies = [get(each) for each in tensors]
    is_backward = "backward" in name
    addends = [lie for lie in lies if lie.kind == "addend"]
    if addends:
        linear = is_backward and lies[0].kind == "addend" and len(addends) == 1
        if not linear or any(lie.kind not in ("whole", "zero", "addend") for lie in lies):
            raise Mismatch("attention of tensors that are not addends", "Partial")
        return ADDEND
    cut = [lie for lie in lies if lie.kind == "slice"]
    if not cut:
        return OWN if any(lie.kind == "own" for lie in lies) else WHOLE
    if len({lie.dim for lie in cut}) > 1 or cut[0].dim > 1:
        raise Mismatch(
            "samples or heads cut alike, and whole sequences", " and ".join(map(str, cut[:3])), OWN
        )
    made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    if not is_backward:
        return [cut[0] if each.dim() > cut[0].dim else WHOLE for each in made]
    inputs = lies[1:4]
    return [cut[0] if i >= len(inputs) or inputs[i].kind == "slice" else ADDEND for i in range(len(made))]


def _row_loss(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    lie, target = get(args[0]), get(args[1])
    if lie.kind == "addend":
        raise Mismatch("a tensor that is not an addend", str(lie))
    if lie.kind == "slice" and lie.dim == args[0].dim() - 1:
        raise Mismatch("classes uncut", str(lie))
    if lie.kind == "slice" or target.kind == "slice":
        reduction = args[3]
        rows = lie if lie.kind == "slice" else target
        return [rows if reduction == 0 else ADDEND if reduction == 2 else OWN, OWN]
    return OWN


def _row_loss_gradient(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    grad, x = get(args[0]), get(args[1])
    return _product([grad, x], [args[0], args[1]], out)


def _picked(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of ``gather`` along a dim, and of what scatters or adds into places of it."""
    tensors = [each for each in (args[0], *args[2:]) if isinstance(each, Tensor)]
    lies, dim = [get(each) for each in tensors], args[1] % args[0].dim()
    if any(lie.kind == "addend" for lie in lies):
        return (
            _sum([lies[0], *lies[2:]], [tensors[0], *tensors[2:]], out)
            if lies[1].kind == "whole"
            else UNKNOWN
        )
    found = _united(lies, [out] * len(lies), out)
    if found.kind == "own" and {lie.kind for lie in lies} == {"zero", "own", "slice"}:
        found = lies[-1]
    if found.kind != "slice" or found.dim != dim:
        return found
    if name == "gather":
        return OWN
    if lies[0].kind == "slice":
        return lies[0]  # values in places of a rank's own slice
    if lies[0].kind == "zero" and name == "scatter_add" and lies[1].kind == "slice":
        return ADDEND
    return found if lies[0].kind == "zero" and name == "scatter" and lies[1].kind == "own" else UNKNOWN


def _indices(given: Sequence[Any], get: Get) -> tuple[int, int, int] | None:
    """Return the first dim that indices replace, how many they replace, and how many dims come in their place.

    None if the indices differ by rank, or do not replace neighbouring dims.
    """
    places = [(i, each) for i, each in enumerate(given) if each is not None]
    first = places[0][0]
    if any(get(each).kind not in ("whole", "zero") for _, each in places):
        return None
    if [i for i, _ in places] != list(range(first, first + len(places))):
        return None
    masks = [each for _, each in places if each.dtype == torch.bool]
    if masks:
        return (first, masks[0].dim(), 1) if len(places) == 1 else None
    return first, len(places), max(each.dim() for _, each in places)


def _own_places(given: Sequence[Any], dim: int, get: Get) -> bool:
    """Return True if the only index has places among the rank's own slice of ``dim``."""
    places = [(i, each) for i, each in enumerate(given) if each is not None]
    return (
        len(places) == 1
        and places[0][0] == dim
        and places[0][1].dim() == 1
        and get(places[0][1]).kind in ("own", "slice")
    )


def _chosen(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of ``index``, whose indices replace some dims.

    Places among a rank's own slice choose a slice again: rows of the rank's own, in another order.
    """
    lie, replaced = get(args[0]), _indices(args[1], get)
    if lie.kind == "slice" and _own_places(args[1], lie.dim, get):
        return slice_of(lie.dim, max(out.shape[lie.dim], 1))
    if lie.kind in ("whole", "own") and any(each is not None and get(each).kind == "own" for each in args[1]):
        return OWN
    if replaced is None:
        return UNKNOWN
    if lie.kind in ("addend", "own"):
        return lie
    first, gone, come = replaced
    if lie.kind == "slice" and not first <= lie.dim < first + gone:
        return lie._replace(dim=lie.dim + (come - gone if lie.dim >= first + gone else 0))
    return UNKNOWN


def _put(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of ``index_put``: values in places of a tensor, or added to them."""
    target, values, replaced = get(args[0]), get(args[2]), _indices(args[1], get)
    are_rows = values.kind == "slice" and target.kind in ("zero", "slice") and args[2].dim() == args[0].dim()
    if are_rows and _own_places(args[1], values.dim, get):
        return slice_of(values.dim, args[0].shape[values.dim])
    if replaced is None:
        return UNKNOWN
    first, gone, come = replaced
    if values.kind == "slice" and args[2].dim() == args[0].dim() - gone + come:
        if first <= values.dim < first + come:
            return UNKNOWN
        values = values._replace(dim=values.dim - (come - gone if values.dim >= first + come else 0))
    elif values.kind == "slice":
        return UNKNOWN
    if values.kind == "addend" or target.kind == "addend":
        return _sum([target, values], [args[0], args[0]], out)
    if target.kind == "slice" and first <= target.dim < first + gone:
        return UNKNOWN
    if target.kind == "whole" and values.kind == "slice":
        return UNKNOWN
    return _united([target, values], [args[0], args[0]], out)


def _rows(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of ``index_select``, and of ``index_add`` into rows, along one dim."""
    indices = [None] * (args[1] % args[0].dim()) + [args[2]]
    if name == "index_select":
        return _chosen(name, [args[0], indices], kwargs, out, get)
    return _put(name, [args[0], indices, args[3]], kwargs, out, get)


def _bags(name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placements of sums of rows: of a rank's own rows, a slice again."""
    rows, places = get(args[0]), get(args[1])
    results = [each for each in out if isinstance(each, Tensor)]
    if rows.kind == "slice" and rows.dim == 0 and places.kind in ("own", "slice"):
        return [slice_of(0, max(results[0].shape[0], 1)), *[OWN] * (len(results) - 1)]
    return UNKNOWN


_EMPTY = frozenset(
    [
        "empty",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "zeros",
        "new_zeros",
        "zeros_like",
        "empty_like",
    ]
)
_FACTORIES = _EMPTY | frozenset(
    ["ones", "ones_like", "full", "full_like", "new_full", "new_ones", "arange", "scalar_tensor"]
)
_VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "detach",
        "alias",
        "clone",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
    }
)
_BILINEAR = frozenset(["mm", "bmm", "mv", "mul", "mul_"])
_LINEAR = frozenset(
    {
        "neg",
        "clone",
        "_to_copy",
        "contiguous",
        "detach",
        "alias",
        "positive",
        "real",
        "conj",
        "lift_fresh",
        "tril",
        "triu",
    }
)
_LINEAR_IN_FIRST = frozenset(
    {
        "gelu_backward",
        "silu_backward",
        "tanh_backward",
        "sigmoid_backward",
        "threshold_backward",
        "native_dropout_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "elu_backward",
        "leaky_relu_backward",
        "softplus_backward",
        "mish_backward",
    }
)
_POINTWISE = frozenset(["native_dropout", "masked_fill", "where"]) | _LINEAR_IN_FIRST

Rule = Callable[[str, Any, Any, Any, Get], "Lie | list[Lie]"]
_CLASSES: dict[str, Rule] = {
    "view _unsafe_view reshape _reshape_alias": _view,
    "clone _to_copy detach alias contiguous lift_fresh tril triu flip roll": _same,
    "t transpose permute": _permuted,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "view_as_complex view_as_real": _complex,
    "convolution": _convolved,
    "convolution_backward": _convolution_gradients,
    "expand": _expanded,
    "select unbind": _selected,
    "slice split split_with_sizes unsafe_split": _sliced,
    "slice_backward select_backward": _unsliced,
    "constant_pad_nd": _padded,
    "sum mean amax amin max min logsumexp var var_mean std linalg_vector_norm norm any all argmax prod": _reduced,
    "_softmax _log_softmax cumsum sort topk _softmax_backward_data _log_softmax_backward_data": _along,
    "cat stack": _joined,
    "mm bmm addmm baddbmm mv": _multiplied,
    "embedding": _looked_up,
    "embedding_dense_backward": _rows_gradient,
    "native_layer_norm _fused_rms_norm": _normed,
    "native_layer_norm_backward _fused_rms_norm_backward": _norm_gradient,
    "nll_loss_forward": _row_loss,
    "nll_loss_backward": _row_loss_gradient,
    "gather scatter scatter_add": _picked,
    "index": _chosen,
    "index_put _unsafe_index_put": _put,
    "index_select index_add": _rows,
    "_embedding_bag _embedding_bag_forward_only": _bags,
}
_RULES: dict[str, Rule] = {name: rule for names, rule in _CLASSES.items() for name in names.split()}
