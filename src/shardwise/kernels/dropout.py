"""Dropout whose mask is a function of the element's position in the global batch: the same on every layout.

    bits(e)  = 16 bits, number e of Philox's substream (call, sample, step) under the layer's key
    keep(e)  = bits(e) >= round(2^16 p) - 2^15                              as a signed number
    y        = x · keep / (1 - p')                  p' = round(2^16 p) / 2^16, so that the mean is exact

``e`` counts the elements of one sample of the uncut tensor in row-major order. A rank that holds some samples, some
tokens or some features draws only their bits: the mask does not depend on how batch, sequence or features are cut, nor
on the device. Rules for what is a sample:

    x [B, ...]          row b is sample ``first_sample + b``
    x [B·m, ...]        with ``samples`` = B given, m rows in turn belong to one sample ([B·T, D], say)
    x [B, D], x [B]     sample b is elements [b·D, (b + 1)·D) of one substream: a substream takes microseconds to set up
    anything else       (a first dim that B does not divide) is one sample: the first one's bits

A model that counts tokens in the first dim gets a good mask too, but a different one when its batch is cut.

Cost:  the mask, 1 byte an element, is kept for backward. Nanoseconds an element of fp32 [8, 256, 384], one Zen 5 core:
       forward 1.8 (1.0 of them the bits), with backward 3.1; torch's own 6.5 and 7.1. Each sample of a tensor of
       three or more dims adds 4 microseconds. On a device with Triton one kernel each way, which draws the bits
       again in backward and keeps nothing; without, 60 integer operations an element in 410 kernels (neither is
       measured yet).
       A cut of any but the leading dim of a sample draws the bits of the whole dim.
Shapes: B samples of this rank, T sequence, D width; x any shape with a first dim.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwise.kernels import philox
from shardwise.kernels.choice import fused
from shardwise.kernels.operation import device_operation

_LANES = 4
"""Number of elements that one 64-bit word serves."""

_LEVELS = 1 << 16

_ROWS = (1 << 64) - 1
"""Value in place of the sample if all samples share a substream."""


class EqualPart(NamedTuple):
    """Position of a rank's tensor in the whole: equal part ``part`` of ``parts`` along ``dim``."""

    dim: int
    """Dim of the cut."""
    parts: int
    """Number of equal parts."""
    part: int
    """Index of this rank's part."""


class MaskKey(NamedTuple):
    """Name of the mask of one call of one layer on one microbatch."""

    key: int
    """Key of seed and layer: ``philox.key_of``."""
    step: int
    """Optimizer step."""
    first_sample: int
    """Index of this rank's first row in the global batch."""
    samples: int | None = None
    """Number of samples of this rank; None if there are as many as rows."""
    call: int = 0
    """Number of calls of the layer before this one in the same pass."""


class TileRows(NamedTuple):
    """Rows [C, F] of a larger tensor [..., F], in which all dims but the last count rows."""

    first: int
    """Index of the tile's first row in the larger tensor."""
    lead: tuple[int, ...]
    """Sizes of all dims but the last of the larger tensor."""


TokenRanges = Sequence[tuple[int, int]]
"""Ranges of tokens of the whole sequence, in the order in which they lie in a rank's tensor."""


def keyed_dropout(
    x: Tensor,
    p: float,
    draw: MaskKey,
    cut: EqualPart | None = None,
    rows: TileRows | None = None,
    tokens: TokenRanges | None = None,
) -> Tensor:
    """Return ``x`` with a share ``p`` of its elements zeroed and the others scaled up: [...] -> [...].

    Args:
        x: input.
        p: share of zeroed elements.
        draw: name of the mask.
        cut: position of ``x`` in the whole tensor; None if ``x`` is whole.
        rows: rows of a larger tensor of which ``x`` [C, F] is a tile, with the mask that the larger tensor gives them;
            a ``cut`` must then be along the last dim.
        tokens: tokens of the whole sequence that ``x`` [B, t, F] has, if it is cut into ranges; a ``cut`` must then be
            along the last dim.

    Raises:
        ValueError: if ``p`` is not between 0 and 1.
    """
    if type(x) is not Tensor and has_torch_function_unary(x):
        noted: Tensor = handle_torch_function(keyed_dropout, (x,), x, p, draw, cut)
        return noted
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p is {p}; expected a share between 0 and 1")
    dropped = round(p * _LEVELS)
    if dropped == 0:
        return x
    if dropped == _LEVELS:
        return x * 0.0
    scale = _LEVELS / (_LEVELS - dropped)
    if tokens is not None:
        return _Dropout.apply(x, _keep_tokens(x.detach(), dropped, draw, cut, tokens), scale)
    if rows is not None:
        return _Dropout.apply(x, _keep_rows(x, dropped, draw, cut, rows), scale)
    if fused(x):
        return _DeviceDropout.apply(x, dropped, *_numbers(draw, cut))
    if torch.compiler.is_compiling():
        return x * _keep_in_graph(x.detach(), dropped, *_numbers(draw, cut)).to(x.dtype) * scale
    return dropped_by(x, keep(x.shape, dropped, draw, cut, x.device), scale)


def dropped_by(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Return ``x`` times ``scale`` where ``kept`` (uint8, of its shape) is 1, and 0 elsewhere."""
    out: Tensor = _Dropout.apply(x, kept, scale)
    return out


def plain_keyed_dropout(x: Tensor, p: float, draw: MaskKey, cut: EqualPart | None = None) -> Tensor:
    """Return ``keyed_dropout`` element by element: the reference."""
    dropped = round(p * _LEVELS)
    here = _SamplePart.of(x.shape, draw, cut)
    out = torch.zeros_like(x)
    for place in np.ndindex(*x.shape):
        sample, row = divmod(place[0], here.shape[0])
        at = [row, *place[1:]]
        at[here.cut.dim] += here.cut.part * here.shape[here.cut.dim]
        whole = [size * (here.cut.parts if dim == here.cut.dim else 1) for dim, size in enumerate(here.shape)]
        e, sample = int(np.ravel_multi_index(at, whole)), draw.first_sample + sample
        if here.is_row:
            e, sample = e + sample * math.prod(whole), _ROWS
        word = philox.words_of(draw.key, 0, e // _LANES + 1, [(draw.call, sample, draw.step)])[0, -1]
        if (int(word) >> 16 * (e % _LANES) & 0xFFFF ^ 0x8000) >= dropped:
            out[place] = x[place] * _LEVELS / (_LEVELS - dropped)
    return out


class _SamplePart(NamedTuple):
    """Part of each sample that a tensor of this rank has."""

    samples: int
    shape: tuple[int, ...]
    """Shape of a sample's part; the first dim counts the rows of one sample."""
    cut: EqualPart
    is_row: bool
    """True if a sample is one row of features, so that all samples share a substream."""

    @classmethod
    def of(cls, shape: Sequence[int], draw: MaskKey, cut: EqualPart | None) -> "_SamplePart":
        samples = draw.samples or shape[0]
        if shape[0] % samples:
            samples = 1
        dim, parts, part = cut or (0, 1, 0)
        cut = EqualPart(dim % len(shape), parts, part)
        rows = shape[0] // samples
        is_row = len(shape) <= 2 and rows * (parts if cut.dim == 0 else 1) == 1
        return cls(samples, (rows, *shape[1:]), cut, is_row)


def keep(
    shape: Sequence[int], dropped: int, draw: MaskKey, cut: EqualPart | None, device: torch.device
) -> Tensor:
    """Return the mask of the elements that stay, with ``dropped`` of 2^16 elements 0: uint8 ``shape``.

    Args:
        shape: shape of the tensor.
        dropped: share of the zeros, in 2^-16.
        draw: name of the mask.
        cut: position of the tensor in the whole; None if the tensor is whole.
        device: device of the mask.
    """
    if math.prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=torch.uint8, device=device)
    samples, local, (dim, parts, part), is_row = _SamplePart.of(shape, draw, cut)
    first, last = draw.first_sample, draw.first_sample + samples
    before, inside = math.prod(local[:dim]), math.prod(local[dim:])
    if is_row:
        before = samples
        whole = inside * parts
        start, stop, substream, count = first * whole, last * whole, (draw.call, _ROWS, draw.step), 1
    else:
        start, stop = (part * inside, (part + 1) * inside) if before == 1 else (0, before * inside * parts)
        substream, count = (draw.call, first, draw.step), samples
    kept = _kept(draw.key, start, stop, substream, count, dropped - _LEVELS // 2, device)
    if parts > 1 and (is_row or before > 1):
        kept = kept.view(-1, before, parts, inside)[:, :, part]
    return kept.reshape(tuple(shape))


@_disable_dynamo  # the ranges change from pass to pass, and the bits are drawn by numpy
def _keep_tokens(
    x: Tensor, dropped: int, draw: MaskKey, cut: EqualPart | None, tokens: TokenRanges
) -> Tensor:
    """Return the part of the whole sequence's mask that belongs to ``tokens``: uint8 [B, t, F]."""
    samples, count, features = x.shape
    _, parts, part = cut or (-1, 1, 0)
    assert (draw.samples or samples) == samples, "a sequence that is cut is one row of the batch"
    assert sum(stop - start for start, stop in tokens) == count, "the ranges are those of the tensor's tokens"
    whole, threshold = features * parts, dropped - _LEVELS // 2
    substream = (draw.call, draw.first_sample, draw.step)
    kept = [
        _kept(draw.key, start * whole, stop * whole, substream, samples, threshold, x.device)
        for start, stop in tokens
    ]
    return torch.cat(kept, 1).view(samples, count, parts, features)[:, :, part].contiguous()


def _keep_rows(x: Tensor, dropped: int, draw: MaskKey, cut: EqualPart | None, rows: TileRows) -> Tensor:
    """Return the part of the larger tensor's mask that belongs to the tile ``x`` [C, F]: uint8 [C, F]."""
    count, features = x.shape
    _, local, (dim, parts, part), is_row = _SamplePart.of((*rows.lead, features), draw, cut)
    assert parts == 1 or dim == len(rows.lead), "a tile of rows is cut along features alone"
    whole, of_sample = features * parts, math.prod(local[:-1])
    threshold, pieces = dropped - _LEVELS // 2, []
    first, last = rows.first, rows.first + count
    if is_row:
        first, last, of_sample = first + draw.first_sample, last + draw.first_sample, 1 << 62
    while first < last:
        sample, row = divmod(first, of_sample)
        stop = min(of_sample, row + last - first)
        substream = (draw.call, _ROWS if is_row else draw.first_sample + sample, draw.step)
        pieces.append(_kept(draw.key, row * whole, stop * whole, substream, 1, threshold, x.device)[0])
        first += stop - row
    return torch.cat(pieces).view(count, parts, features)[:, part]


def _rows(shape: Sequence[int], draw: MaskKey, cut: EqualPart | None) -> tuple[int, int, int, int, int, int]:
    """Describe a tensor as rows of consecutive elements of substreams; see ``fused.dropout.DrawnRows``.

    Returns (rows, elements of a row, rows that share a substream, distance of the first elements of two rows, start of
    the first row, second word of its substream).
    """
    samples, local, (dim, parts, part), is_row = _SamplePart.of(shape, draw, cut)
    before, inside = math.prod(local[:dim]), math.prod(local[dim:])
    if is_row:
        whole = inside * parts
        return samples, inside, samples, whole, draw.first_sample * whole + part * inside, _ROWS - (1 << 64)
    return samples * before, inside, before, inside * parts, part * inside, draw.first_sample


def _kept(
    key: int,
    start: int,
    stop: int,
    substream: philox.Substream,
    count: int,
    threshold: int,
    device: torch.device,
) -> Tensor:
    """Return the mask of elements [start, stop) of ``count`` samples' substreams: uint8 [count, stop - start]."""
    first, last = start // _LANES, -(-stop // _LANES)
    lanes = slice(start - first * _LANES, stop - first * _LANES)
    if device.type == "cpu":
        call, sample, step = substream
        words = philox.words_of(key, first, last, [(call, sample + i, step) for i in range(count)])
        bits = words.astype("<u8", copy=False).view("<i2")[:, lanes]
        return torch.from_numpy((bits >= threshold).view(np.uint8))
    words_there = philox.words_on(device, key, first, last, substream, count)
    return (words_there.view(torch.int16)[:, lanes] >= threshold).to(torch.uint8)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale  # type: ignore[attr-defined]
        return torch.mul(x, kept).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.mul(grad, kept).mul_(ctx.scale), None, None  # type: ignore[attr-defined]


class _DeviceDropout(torch.autograd.Function):
    """Dropout on a device: the backward pass drops the gradient by the same kernel."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dropped: int, *numbers: int) -> Tensor:
        ctx.numbers = (dropped, *numbers)  # type: ignore[attr-defined]
        out: Tensor = _dropped(x, dropped, *numbers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        numbers = ctx.numbers  # type: ignore[attr-defined]
        return _dropped(grad, *numbers), *(None for _ in numbers)


# In a compiled graph the draw is one operation whose numbers are inputs: a new step needs no new graph.


def _numbers(draw: MaskKey, cut: EqualPart | None) -> tuple[int, int, int, int, int, int, int, int]:
    key = draw.key - (1 << 64) if draw.key >> 63 else draw.key  # integers of operations are signed
    dim, parts, part = cut or (0, 1, 0)
    return key, draw.step, draw.first_sample, draw.samples or 0, draw.call, dim, parts, part


def _drawn(
    key: int, step: int, first_sample: int, samples: int, call: int, dim: int, parts: int, part: int
) -> tuple[MaskKey, EqualPart]:
    return MaskKey(key % (1 << 64), step, first_sample, samples or None, call), EqualPart(dim, parts, part)


@device_operation(
    "dropped(Tensor x, SymInt dropped, SymInt key, SymInt step, SymInt first_sample, SymInt samples, SymInt call, "
    "SymInt dim, SymInt parts, SymInt part) -> Tensor",
    lambda x, *numbers: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
def _dropped(x: Tensor, dropped: int, *numbers: int) -> Tensor:
    draw, cut = _drawn(*numbers)
    scale = _LEVELS / (_LEVELS - dropped)
    if not fused(x):
        return torch.mul(x, keep(x.shape, dropped, draw, cut, x.device)).mul_(scale)
    from shardwise.kernels.fused import dropout as kernels

    rows, signed_key = kernels.DrawnRows(*_rows(x.shape, draw, cut)), numbers[0]
    threshold = dropped - _LEVELS // 2
    return kernels.dropped(x.contiguous(), rows, signed_key, draw.call, draw.step, threshold, scale)


@torch.library.custom_op("shardwise::keep", mutates_args=())
def _keep_in_graph(
    x: Tensor,
    dropped: int,
    key: int,
    step: int,
    first_sample: int,
    samples: int,
    call: int,
    dim: int,
    parts: int,
    part: int,
) -> Tensor:
    draw, cut = _drawn(key, step, first_sample, samples, call, dim, parts, part)
    return keep(x.shape, dropped, draw, cut, x.device)


@_keep_in_graph.register_fake
def _(x: Tensor, *numbers: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device)
