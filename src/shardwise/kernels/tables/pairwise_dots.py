"""Dot products of all pairs of a sample's vectors, each pair once, beside the sample's first vector.

    dots[b, p(i, j)] = <z[b, i], z[b, j]>,   i > j,   p(i, j) = i (i - 1) / 2 + j
    dz = S z,    S[i, j] = S[j, i] = the gradient of dots[p(i, j)],  0 on the diagonal

    pairwise_dots(z)               dots                                        [B, n, D] -> [B, n (n - 1) / 2]
    dots_beside(first, rest)       [first, dots of (first, rest)]              [B, D], [B, n - 1, D] -> [B, D + ...]

On the CPU one loop reads a sample's vectors into a small buffer that stays in the cache, multiplies tiles of 4 rows by
16 columns whose sums stay in registers, and writes each pair where it belongs: no matrix of n·n products a sample
exists, and neither do the concatenations of ``dots_beside``. Its backward pass does the same with S. The sums of a tile
may contain fused multiplications and additions, as those of torch's products do, so the two agree to rounding.

On a device, in 16 bits and without numba, z zᵀ is one batched product, whose lower triangle one ``index_select`` over
flat columns takes out, which is twice as fast on a CPU as indexing with two tensors. The gradient of z zᵀ is symmetric,
so one product computes it where autograd would take two. A gradient of a gradient is refused by torch.

Paper:  Naumov et al. 2019, arXiv:1906.00091 (the interaction of DLRM).
Cost:   B·n²·D/2 multiplications forward, B·n²·D backward; n²·D numbers of buffers a thread. Elsewhere twice the
        multiplications forward, and B·n² numbers in between.
Shapes: B samples, n vectors, D width.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.operation import device_operation, operation
from shardwise.kernels.tables.blocks import BLOCK, block, each, each_at, multiplied_on, put
from shardwise.kernels.tables.compiled import array, loop, runs_compiled
from shardwise.kernels.threads import in_threads

_LEAST_SAMPLES = 256
"""Smallest number of samples for a thread."""


@operation("product")
def pairwise_dots(z: Tensor) -> Tensor:
    """Return the dot products of all pairs of vectors, each pair once: [B, n, D] -> [B, n (n - 1) / 2]."""
    if _is_one_loop(z):
        alone: Tensor = _Dots.apply(z, None)
        return alone
    dots: Tensor = _ProductDots.apply(z)
    return dots


@operation("product")
def dots_beside(first: Tensor, rest: Tensor) -> Tensor:
    """Return the first vector of each sample, then the dot products of all pairs of its vectors, each pair once.

    Args:
        first: first vector of each sample, [B, D].
        rest: the other vectors, [B, n - 1, D].

    Returns:
        [B, D + n (n - 1) / 2].

    Raises:
        ValueError: if the shapes do not go together; the compiled loops would read beyond the shorter tensor.
    """
    if first.shape != (rest.shape[0], rest.shape[2]):
        raise ValueError(
            f"first vectors are {[*first.shape]} beside others of {[*rest.shape]}; expected [B, D] and [B, n - 1, D]"
        )
    if _is_one_loop(first, rest):
        beside: Tensor = _Dots.apply(rest, first)
        return beside
    dots: Tensor = _ProductDots.apply(torch.cat([first[:, None], rest], 1))
    return torch.cat([first, dots], 1)


def pairwise_dots_plain(z: Tensor) -> Tensor:
    """Return the same as :func:`pairwise_dots` with torch's own differentiation, as a reference for tests."""
    row, column = _pairs(z.shape[1], z.device)
    return (z @ z.transpose(1, 2))[:, row, column]


def _is_one_loop(*tensors: Tensor) -> bool:
    """Return whether the compiled loops serve the tensors; a graph that is exported gets torch's own operations."""
    first = tensors[0]
    if first.device.type != "cpu" or torch.compiler.is_exporting() or torch.is_autocast_enabled("cpu"):
        return False
    if any(tensor.dtype != first.dtype for tensor in tensors):
        return False
    if torch.compiler.is_compiling():  # the operation itself looks for numba, which a compiler does not trace
        return first.dtype in (torch.float32, torch.float64)
    return runs_compiled(first)


class _ProductDots(torch.autograd.Function):
    """Dot products by one batched product of all vectors of a sample."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return _product_dots(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return _product_gradients(z, grad)


def _product_dots(z: Tensor) -> Tensor:
    n = z.shape[1]
    row, column = _pairs(n, z.device)
    return torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, row * n + column)


def _product_gradients(z: Tensor, grad: Tensor) -> Tensor:
    samples, n, _ = z.shape
    row, column = _pairs(n, z.device)
    pair = torch.arange(row.numel(), device=z.device)
    place = torch.full((n, n), row.numel(), device=z.device)  # the diagonal reads the column of zeros
    place[row, column] = pair
    place[column, row] = pair
    padded = torch.cat([grad, grad.new_zeros(samples, 1)], 1)
    symmetric = padded.index_select(1, place.flatten()).view(samples, n, n)
    return torch.bmm(symmetric, z)


def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.tril_indices(n, n, -1, device=device)
    return row, column


class _Dots(torch.autograd.Function):
    """Dot products by the compiled loops."""

    @staticmethod
    def forward(ctx: Any, rest: Tensor, first: Tensor | None) -> Tensor:
        ctx.save_for_backward(rest, first)
        dots: Tensor = _dots_of(rest, first)
        return dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rest, first = ctx.saved_tensors
        of_rest, of_first = _dots_gradients(rest, first, grad)
        return of_rest, None if first is None else of_first


def _columns(rest: Tensor, first: Tensor | None) -> int:
    n = rest.shape[1] + (first is not None)
    return n * (n - 1) // 2 + (0 if first is None else rest.shape[2])


@device_operation(
    "pairwise_dots(Tensor rest, Tensor? first) -> Tensor",
    lambda rest, first: rest.new_empty(rest.shape[0], _columns(rest, first)),
)
def _dots_of(rest: Tensor, first: Tensor | None) -> Tensor:
    if not runs_compiled(rest):
        dots = _product_dots(rest if first is None else torch.cat([first[:, None], rest], 1))
        return dots if first is None else torch.cat([first, dots], 1)
    out = torch.empty(rest.shape[0], _columns(rest, first), dtype=rest.dtype)
    given, into = (_first(first, rest), array(rest)), out.numpy()
    in_threads(lambda start, stop: _dots(*given, start, stop, into), rest.shape[0], _LEAST_SAMPLES)
    return out


@device_operation(
    "pairwise_dots_gradients(Tensor rest, Tensor? first, Tensor grad) -> (Tensor, Tensor)",
    lambda rest, first, grad: (
        rest.new_empty(rest.shape),
        rest.new_empty(rest.shape[0] if first is not None else 0, rest.shape[2]),
    ),
)
def _dots_gradients(rest: Tensor, first: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    if not runs_compiled(rest):
        if first is None:
            return _product_gradients(rest, grad), rest.new_empty(0, rest.shape[2])
        width = rest.shape[2]
        found = _product_gradients(torch.cat([first[:, None], rest], 1), grad[:, width:])
        return found[:, 1:].contiguous(), found[:, 0] + grad[:, :width]
    of_rest = torch.empty(rest.shape, dtype=rest.dtype)
    of_first = torch.empty(0 if first is None else len(rest), rest.shape[2], dtype=rest.dtype)
    given = (_first(first, rest), array(rest), array(grad))
    into = (of_rest.numpy(), of_first.numpy())
    in_threads(lambda start, stop: _gradients(*given, start, stop, *into), rest.shape[0], _LEAST_SAMPLES)
    return of_rest, of_first


def _first(first: Tensor | None, rest: Tensor) -> np.ndarray:
    """Return the first vectors; none has no rows."""
    return array(rest.new_empty(0, rest.shape[2]) if first is None else first)


@loop
def _tile(
    left: np.ndarray,
    i: int,
    right: np.ndarray,
    c: int,
    count: int,
    out: np.ndarray,
    place: int,
    apart: int,
    growth: int,
) -> None:
    """Write rows i to i + 3 and columns c to c + 15 of the product of ``left`` and ``right`` into ``out[0]``.

    The first row goes to ``place``, the next to ``place + apart``; the distance grows by ``growth`` from row to row.
    """
    zero = left.dtype.type(0)
    a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = each(zero)
    for k in range(count):
        x, y = block(right, k, c), block(right, k, c + BLOCK)
        f = each_at(left, i, k)
        a0, a1 = multiplied_on(a0, f, x), multiplied_on(a1, f, y)
        f = each_at(left, i + 1, k)
        b0, b1 = multiplied_on(b0, f, x), multiplied_on(b1, f, y)
        f = each_at(left, i + 2, k)
        c0, c1 = multiplied_on(c0, f, x), multiplied_on(c1, f, y)
        f = each_at(left, i + 3, k)
        d0, d1 = multiplied_on(d0, f, x), multiplied_on(d1, f, y)
    put(out, 0, place, a0)
    put(out, 0, place + BLOCK, a1)
    place += apart
    put(out, 0, place, b0)
    put(out, 0, place + BLOCK, b1)
    place += apart + growth
    put(out, 0, place, c0)
    put(out, 0, place + BLOCK, c1)
    place += apart + 2 * growth
    put(out, 0, place, d0)
    put(out, 0, place + BLOCK, d1)


@loop
def _dots(first: np.ndarray, rest: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
    others, width = rest.shape[1], rest.shape[2]
    lead = 1 if first.shape[0] > 0 else 0
    n, begin = others + lead, lead * width
    rows, lanes = -(-n // 4) * 4, -(-n // 16) * 16
    pairs = n * (n - 1) // 2
    z, turned = np.zeros((rows, width), rest.dtype), np.zeros((width, lanes), rest.dtype)
    # A tile writes 16 columns of a row even where fewer belong to it. What it writes beyond the row lies in rows that
    # are written later: rows ascend, and the first 16 columns of four rows are written after their other columns.
    line = np.empty((1, rows * (rows - 1) // 2 + lanes), rest.dtype)
    for sample in range(start, stop):
        for j in range(begin):
            z[0, j] = first[sample, j]
        for i in range(others):
            for j in range(width):
                z[lead + i, j] = rest[sample, i, j]
        for i in range(n):
            for j in range(width):
                turned[j, i] = z[i, j]
        for i in range(0, n, 4):
            p = i * (i - 1) // 2
            for c in range((i + 2) // 16 * 16, -1, -16):
                _tile(z, i, turned, c, width, line, p + c, i, 1)
        for j in range(begin):
            out[sample, j] = first[sample, j]
        for j in range(pairs):
            out[sample, begin + j] = line[0, j]


@loop
def _gradients(
    first: np.ndarray,
    rest: np.ndarray,
    grad: np.ndarray,
    start: int,
    stop: int,
    of_rest: np.ndarray,
    of_first: np.ndarray,
) -> None:
    others, width = rest.shape[1], rest.shape[2]
    lead = 1 if first.shape[0] > 0 else 0
    n, begin = others + lead, lead * width
    rows, columns = -(-n // 4) * 4, -(-width // 16) * 16
    z, dz = np.zeros((rows, columns), rest.dtype), np.empty((1, rows * columns), rest.dtype)
    symmetric = np.zeros((rows, rows), rest.dtype)
    for sample in range(start, stop):
        for j in range(begin):
            z[0, j] = first[sample, j]
        for i in range(others):
            for j in range(width):
                z[lead + i, j] = rest[sample, i, j]
        place = begin
        for i in range(1, n):
            for j in range(i):
                g = grad[sample, place + j]
                symmetric[i, j] = g
                symmetric[j, i] = g
            place += i
        for i in range(0, n, 4):
            for c in range(0, width, 16):
                _tile(symmetric, i, z, c, n, dz, i * columns + c, columns, 0)
        for j in range(begin):
            of_first[sample, j] = grad[sample, j] + dz[0, j]
        for i in range(others):
            for j in range(width):
                of_rest[sample, i, j] = dz[0, (lead + i) * columns + j]
