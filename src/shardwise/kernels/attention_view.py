"""What a token sees: the earlier tokens of its own document, or the last of them, and a sink.

    documents   several documents that lie in one sequence, one behind the other; no token sees another document
    window      a token sees the last w tokens, itself included
    sink        one number per head that takes part in the softmax and has no value (Xiao et al. 2023, arXiv:2309.17453,
                in the form of gpt-oss)

An attention function gets an ``AttentionView`` as its argument ``view`` if a model or a batch has one of these; without
it a token sees all earlier tokens.

Cost:   of documents: one copy of B·T numbers to the host for each pass.
Shapes: B sequences, T tokens, H heads.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.base.errors import UsageError
from shardwise.kernels.attention_parts import RowGroup, Runs, TokenRun

Starts = tuple[tuple[int, ...], ...]
"""First token of each document, ascending and from 0 on, for each sequence."""


class PackedDocuments:
    """The documents of the sequences of one batch.

    The compiler guards on the numbers of a tuple and would compile a block again for each batch, but not on those of an
    object that compiled code only hands on.

    Args:
        starts: First token of each document, for each sequence.
        length: Tokens of a sequence.
    """

    __slots__ = ("length", "starts")

    def __init__(self, starts: Starts, length: int) -> None:
        self.starts = starts
        self.length = length

    def positions(self) -> Tensor:
        """Return the position of each token in its document: int64 [B, T], in host memory."""
        first = np.zeros((len(self.starts), self.length), dtype=np.int64)
        for row, each in zip(first, self.starts, strict=True):
            row[list(each)] = each
        return torch.from_numpy(np.arange(self.length) - np.maximum.accumulate(first, 1))


class AttentionView(NamedTuple):
    """The window, sink and documents of one attention layer, the argument ``view`` of its attention function."""

    window: int | None = None
    """Number of keys that a token sees at most, its own included; None: all earlier ones."""
    sink: Tensor | None = None
    """One number for each head, [H]; None: the weights of a token add up to 1."""
    documents: PackedDocuments | None = None
    """Documents of the batch; None: every sequence is one document."""

    def starts(self, sequences: int) -> Starts:
        """Return the first token of each document of each of ``sequences``."""
        return ((0,),) * sequences if self.documents is None else self.documents.starts

    def hides(self, keys: int) -> bool:
        """Return True if one of ``keys`` may be hidden from a later token."""
        is_packed = self.documents is not None and any(len(each) > 1 for each in self.documents.starts)
        return is_packed or (self.window is not None and self.window < keys)


@_disable_dynamo
def packed_documents(documents: Tensor, shape: Sequence[int]) -> PackedDocuments:
    """Return the documents of a batch.

    Args:
        documents: Number of each token's document, [B, T], whole numbers that never fall along T.
        shape: Shape of the tokens, (B, T).

    Raises:
        UsageError: if the numbers fall, or are not one for each token.
    """
    shape = tuple(shape)
    if tuple(documents.shape) != shape or documents.is_floating_point():
        raise UsageError(
            f"documents: the batch has tokens of the shape {list(shape)} and documents of the shape "
            f"{list(documents.shape)} in {documents.dtype}; expected the whole number of its document for each token"
        )
    if isinstance(documents, FakeTensor) or documents.is_meta:
        # Without numbers a pass is that of one document, which takes the most operations and as much memory.
        return PackedDocuments(((0,),) * shape[0], shape[1])
    numbers = documents.detach().cpu().numpy()
    steps = np.diff(numbers, axis=1)
    if (steps < 0).any():
        row, place = (int(each) for each in np.argwhere(steps < 0)[0])
        before, after = numbers[row, place : place + 2].tolist()
        raise UsageError(
            f"documents: the numbers of sequence {row} fall from {before} to {after} at token {place + 1}; expected "
            "numbers that never fall along a sequence, so that the tokens of a document follow one another"
        )
    starts = tuple((0, *(np.flatnonzero(each) + 1).tolist()) for each in steps)
    return PackedDocuments(starts, shape[1])


def takes_view(attention: Callable[..., Any]) -> bool:
    """Return whether an attention function takes an ``AttentionView`` as its argument ``view``."""
    try:
        inspect.signature(attention).bind(None, None, None, view=None)
    except (TypeError, ValueError):  # it takes none, or is a builtin whose signature is not known
        return False
    return True


def token_runs(ranges: Sequence[tuple[int, int]], starts: Sequence[int], length: int) -> Runs:
    """Return the runs of tokens that lie in memory range by range; padding behind ``length`` is in no run.

    Args:
        ranges: Ranges of tokens, in the order in which they lie in memory.
        starts: First token of each document, ascending.
        length: Tokens of the sequence, without padding.
    """
    found, place = [], 0
    for start, stop in ranges:
        ends = [each for each in starts if start < each < min(stop, length)]
        for first, last in zip([start, *ends], [*ends, min(stop, length)], strict=True):
            if first < last:
                document = sum(each <= first for each in starts)
                found.append(TokenRun(document, first, place + first - start, last - first))
        place += stop - start
    return tuple(found)


def seen_groups(
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    starts: Starts,
    length: int,
    window: int | None,
) -> tuple[RowGroup, ...]:
    """Return what queries see of keys, for the rows of a microbatch.

    Args:
        queries: Ranges of tokens of the queries, in the order in which they lie in memory.
        keys: Ranges of tokens of the keys.
        starts: First token of each document, for each sequence.
        length: Tokens of a sequence, without padding.
        window: Number of keys that a token sees at most, or None.
    """
    found: list[RowGroup] = []
    for row, each in enumerate(starts):
        if row and each == starts[row - 1]:
            found[-1] = replace(found[-1], rows=(found[-1].rows[0], row + 1))
            continue
        runs = token_runs(queries, each, length), token_runs(keys, each, length)
        found.append(RowGroup((row, row + 1), *runs, window))
    return tuple(found)


@lru_cache(maxsize=64)
def seen_by_last(queries: int, keys: int, starts: Starts, window: int | None) -> tuple[RowGroup, ...]:
    """Return what the last ``queries`` of ``keys`` tokens see of all of them; arguments as for ``seen_groups``."""
    return seen_groups(((keys - queries, keys),), ((0, keys),), starts, keys, window)
