"""Placements of a dim whose blocks lie in several ways, such as a fused matrix of queries, keys and values.

If a model has fewer heads of keys than ranks, the queries of its fused matrix are cut and its keys are whole:

    [ queries: Shard | keys: Replicate | values: Replicate ]          the matrix and its product
    [ queries: Shard | keys: Partial   | values: Partial   ]          their gradients

Such a tensor is ``mixed``: a dim, and a placement for each of its blocks. An operation that treats the places of that
dim alike is applied to each block by itself, by the rule of its class (placement_rules.py). A sum over the dim adds the
blocks' results up: addends and zeros are an addend. The gradient of a range of a dim is mixed with zeros until the
gradients of the other ranges are added.

Cost: the rule of an operation once for each block.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from shardwise.simulate import placement_rules as rules
from shardwise.simulate.placement_rules import (
    ADDEND,
    OWN,
    UNKNOWN,
    WHOLE,
    ZERO,
    Get,
    Lie,
    Mismatch,
    part_of,
    slice_of,
)

Block = tuple[int, Lie]
"""(size along the dim on a rank, placement)."""


def mixed(dim: int, blocks: Sequence[Block]) -> Lie:
    """Return the placement of a tensor whose dim has these blocks, in the simplest form."""
    held = [(size, lie) for size, lie in blocks if size]
    kinds = {lie.kind for _, lie in held}
    if "unknown" in kinds or not held:
        return UNKNOWN
    if kinds == {"zero"}:
        return ZERO
    if kinds <= {"whole", "zero"}:
        return WHOLE
    if kinds == {"addend"}:
        return ADDEND
    if "own" in kinds:
        return OWN
    if kinds == {"slice"} and all(lie.factor == 1 for _, lie in held):
        return slice_of(dim, 1, sum(size for size, _ in held))
    forms = {lie[1:4] for _, lie in held}
    if kinds == {"slice"} and len(forms) == 1 and {size for size, _ in held} == {held[0][0]}:
        return held[0][1]
    return Lie("mixed", dim, blocks=tuple(held))


def as_one(lie: Lie, size: int) -> Lie:
    """Return the placement of a mixed tensor without its blocks: unknown if they lie in several ways.

    Args:
        lie: The placement.
        size: Size of the dim on a rank.
    """
    if lie.kind != "mixed":
        return lie
    kinds = {each.kind for _, each in lie.blocks} - {"zero"}
    if kinds == {"addend"}:
        return ADDEND
    return slice_of(lie.dim, size) if kinds == {"slice"} else UNKNOWN


def placements_of(func: Any, name: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie]":
    """Return the placement of each tensor in ``out``, or one for all; tensors may be mixed.

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
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    lies = [get(each) for each in tensors]
    if base in ("slice_backward", "cat", "index_put") or any(lie.kind == "mixed" for lie in lies):
        if not any(lie is UNKNOWN for lie in lies):
            found = _by_blocks(func, base, args, kwargs, out, get, tensors)
            if found is not None:
                return found
        if any(lie.kind == "mixed" for lie in lies):

            def simple(tensor: Tensor) -> Lie:
                lie = get(tensor)
                return as_one(lie, tensor.shape[lie.dim]) if lie.kind == "mixed" else lie

            return rules.placements_of(func, name, args, kwargs, out, simple)
    return rules.placements_of(func, name, args, kwargs, out, get)


def _by_blocks(
    func: Any, base: str, args: Any, kwargs: Any, out: Any, get: Get, tensors: Sequence[Tensor]
) -> "Lie | list[Lie] | None":
    """Return the placement of the result if the operation keeps the blocks apart, else None."""
    if base in ("copy", "zero", "fill", "index_select", "index_add"):
        return None
    if base == "slice_backward":
        return _unsliced(args, get)
    if base == "cat":
        return _joined(args, kwargs, out, get)
    if base in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return _viewed(get(args[0]), args[0].shape, out.shape)
    if base in ("slice", "split", "split_with_sizes", "unsafe_split"):
        return _sliced(base, args, kwargs, out, get)
    if base == "select":
        return _selected(args, get)
    if base == "index":
        return _indexed(args, out, get)
    if base == "index_put":
        return _put(args, get)
    return _block_by_block(func, base, args, kwargs, out, get, tensors)


def _block_by_block(
    func: Any, base: str, args: Any, kwargs: Any, out: Any, get: Get, tensors: Sequence[Tensor]
) -> "Lie | list[Lie] | None":
    """Apply the rule of an operation to each block by itself."""
    parted = [each for each in tensors if get(each).kind == "mixed"]
    sizes = {each.shape[get(each).dim] for each in parted}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    ends = sorted({end for each in parted for end in accumulate(n for n, _ in get(each).blocks)})
    ids = {id(each) for each in parted}

    def rule(of: Get) -> Lie | None:
        found = rules.placements_of(func, base, args, kwargs, out, of)
        if isinstance(found, list):
            return found[0] if len(found) == 1 else None
        return found

    where = rule(lambda each: slice_of(get(each).dim, size) if id(each) in ids else get(each))
    if where is None or where.kind not in ("slice", "addend"):
        return None
    found: list[Block] = []
    for start, stop in pairwise([0, *ends]):

        def of(each: Tensor, start: int = start, stop: int = stop) -> Lie:
            lie = get(each)
            return _at(lie, start, stop) if id(each) in ids else lie

        lie = rule(of)
        if lie is None:
            return None
        found.append((stop - start, lie))
    if where.kind == "slice":
        return mixed(where.dim, found)
    return _added([lie for _, lie in found])


def _at(lie: Lie, start: int, stop: int) -> Lie:
    """Return the placement of the places [start, stop) of a mixed dim, which lie in one block."""
    first = 0
    for size, each in lie.blocks:
        if first <= start < first + size:
            return part_of(each, stop - start) if each.kind == "slice" else each
        first += size
    raise AssertionError("the blocks fill the dim")


def _added(lies: Sequence[Lie]) -> Lie:
    kinds = {lie.kind for lie in lies}
    if "unknown" in kinds:
        return UNKNOWN
    if "own" in kinds:
        return OWN
    if "addend" in kinds and "whole" in kinds:
        raise Mismatch("a sum of addends alone", "Partial plus Replicate", WHOLE)
    return ADDEND if "addend" in kinds else ZERO if kinds == {"zero"} else WHOLE


def _unsliced(args: Any, get: Get) -> Lie | None:
    """Return the placement of the gradient of a range of a dim, with zeros in front and behind."""
    lie, sizes, dim = get(args[0]), args[1], args[2] % len(args[1])
    size, step = sizes[dim], args[5]
    start = min(args[3] + size if args[3] < 0 else args[3], size)
    length = args[0].shape[dim]
    if step != 1 or lie.kind in ("whole", "own", "zero") or (lie.kind == "slice" and lie.dim != dim):
        return None
    if lie.kind == "mixed" and lie.dim != dim:
        return lie
    own: Sequence[Block] = lie.blocks if lie.kind == "mixed" else ((length, lie),)
    return mixed(dim, [(start, ZERO), *own, (size - start - length, ZERO)])


def _joined(args: Any, kwargs: Any, out: Any, get: Get) -> Lie | None:
    """Return the placement of tensors that are joined along the dim that is cut in one of them."""
    tensors = [each for each in args[0] if each.numel()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    lies = [get(each) for each in tensors]
    if any(lie.kind == "mixed" and lie.dim != dim for lie in lies):
        return None
    if not any(lie.kind == "mixed" or (lie.kind == "slice" and lie.dim == dim) for lie in lies):
        return None
    if any(lie.kind == "slice" and lie.dim != dim for lie in lies):
        return None
    found: list[Block] = []
    for each, lie in zip(tensors, lies, strict=True):
        found += lie.blocks if lie.kind == "mixed" else [(each.shape[dim], lie)]
    return mixed(dim, found)


def _viewed(lie: Lie, before: Sequence[int], after: Sequence[int]) -> Lie | None:
    """Return the placement after a view that keeps, splits or completes the mixed dim; None for others."""
    inner = math.prod(before[lie.dim + 1 :])
    group = inner * before[lie.dim]
    for dim, size in enumerate(after):
        stride = math.prod(after[dim + 1 :])
        if size == 1 or stride * size != group or any(n * inner % stride for n, _ in lie.blocks):
            continue
        return mixed(
            dim, [(n * inner // stride, _scaled(each, dim, inner, stride)) for n, each in lie.blocks]
        )
    return None


def _scaled(lie: Lie, dim: int, inner: int, stride: int) -> Lie:
    if lie.kind != "slice":
        return lie
    elements = lie.inner * inner
    if stride <= elements:
        return slice_of(dim, lie.factor, elements // stride)
    return slice_of(dim, max(lie.factor * elements // stride, 1))


def _range(lie: Lie, dim: int, start: int, length: int) -> Lie:
    """Return the placement of a range of a mixed dim."""
    found: list[Block] = []
    first = 0
    for size, each in lie.blocks:
        begin, end = max(first, start), min(first + size, start + length)
        if begin < end:
            found.append((end - begin, part_of(each, end - begin) if each.kind == "slice" else each))
        first += size
    return found[0][1] if len(found) == 1 else mixed(dim, found)


def _sliced(base: str, args: Any, kwargs: Any, out: Any, get: Get) -> "Lie | list[Lie] | None":
    lie = get(args[0])
    given = args[1] if base == "slice" and len(args) > 1 else args[2] if len(args) > 2 else 0
    dim = kwargs.get("dim", given) % args[0].dim()
    parts = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    if dim != lie.dim:
        return [lie] * len(parts)
    if base == "slice":
        start, step = (args[2] if len(args) > 2 else 0) or 0, args[4] if len(args) > 4 else 1
        size = args[0].shape[dim]
        start = min(start + size if start < 0 else start, size)
        return _range(lie, dim, start, out.shape[dim]) if step == 1 else None
    starts = accumulate((each.shape[dim] for each in parts), initial=0)
    return [_range(lie, dim, start, each.shape[dim]) for start, each in zip(starts, parts, strict=False)]


def _selected(args: Any, get: Get) -> Lie | None:
    lie, dim = get(args[0]), args[1] % args[0].dim()
    if dim != lie.dim:
        return lie._replace(dim=lie.dim - (dim < lie.dim), blocks=_moved(lie, -(dim < lie.dim)))
    place = args[2] + args[0].shape[dim] if args[2] < 0 else args[2]
    held = _range(lie, dim, place, 1)
    return OWN if held.kind == "slice" else held


def _moved(lie: Lie, by: int) -> tuple[Block, ...]:
    return tuple(
        (size, each._replace(dim=each.dim + by) if each.kind == "slice" else each)
        for size, each in lie.blocks
    )


def _indexed(args: Any, out: Any, get: Get) -> Lie | None:
    """Return the placement of places of a mixed dim that are written in the model's code as numbers."""
    lie = get(args[0])
    given = [(i, each) for i, each in enumerate(args[1]) if each is not None]
    if len(given) != 1 or given[0][0] != lie.dim:
        return None
    places = numbers_of(given[0][1])
    if places is None:
        return None
    size = args[0].shape[lie.dim]
    return mixed(lie.dim, [(1, _range(lie, lie.dim, place % size, 1)) for place in places])


def _put(args: Any, get: Get) -> Lie | None:
    """Return the placement of zeros with values in places that are written in the model's code as numbers."""
    given = [(i, each) for i, each in enumerate(args[1]) if each is not None]
    values = get(args[2])
    if get(args[0]).kind != "zero" or len(given) != 1 or values.kind not in ("addend", "slice"):
        return None
    dim, places = given[0][0], numbers_of(given[0][1])
    if places is None or (values.kind == "slice" and values.dim != dim) or args[2].dim() != args[0].dim():
        return None
    size = args[0].shape[dim]
    chosen = {place % size for place in places}
    lie = values if values.kind == "addend" else slice_of(dim, 1)
    return mixed(dim, [(1, lie if place in chosen else ZERO) for place in range(size)])


def numbers_of(index: Tensor) -> list[int] | None:
    """Return the numbers of an index that the pass knows, although its tensors have no numbers; None if it does not."""
    held = getattr(index, "constant", None)
    if not isinstance(held, Tensor) or held.dim() != 1 or held.dtype not in (torch.int64, torch.int32):
        return None
    with no_dispatch():
        found: list[int] = held.tolist()
    return found
