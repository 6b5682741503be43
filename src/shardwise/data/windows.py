"""Windows: a map-style dataset of fixed-length samples over token files.

Window i of a span of n tokens starts at token i·T and holds T + 1 of them:

    tokens  = span[i·T     : i·T + T]                                                [T]
    targets = span[i·T + 1 : i·T + T + 1]                                            [T]

so every token but the first of a span is predicted exactly once an epoch; the (n - 1) mod T tokens at the end are not
used. No window extends from one span to the next.

With ``documents`` a window also holds the number of each token's document, counted from 0 in the window, and the last
token of a document predicts nothing, because the next token belongs to another document:

    documents[t] = ends of documents in [start + 1, start + t]                       [T]
    targets[t]   = -100 where a document ends behind token t                         [T]

Cost: one read of T + 1 tokens per sample; memory does not grow with the corpus.
Shapes: T context.
"""

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.base.errors import DataError
from shardwise.data.token_file import TokenFile


class TokenSpan(NamedTuple):
    """Range ``[start, stop)`` of tokens of one token file."""

    file: TokenFile
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


_IGNORED = -100
"""Target that no loss counts."""


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Samples ``{"tokens": [T], "targets": [T]}``, both int64, cut from spans of token files.

    Args:
        spans: ranges of token files; spans of at most ``context`` tokens are left out.
        context: tokens of a window, T.
        documents: True for samples that also have ``"documents": [T]``, int64.

    Raises:
        DataError: if no span holds a window.
    """

    def __init__(self, spans: Sequence[TokenSpan], context: int, documents: bool = False) -> None:
        if context < 1:
            raise DataError(f"context is {context}; a window needs at least one token")
        self.spans = [span for span in spans if span.tokens > context]
        self.context = context
        self.documents = documents
        self._ends = list(itertools.accumulate((span.tokens - 1) // context for span in self.spans))
        if not self.spans:
            names = ", ".join(sorted({str(span.file.path) for span in spans})) or "no file"
            raise DataError(
                f"the longest piece of {names} holds {max((span.tokens for span in spans), default=0)} tokens, but one "
                f"window of context {context} takes {context + 1}; give more text or a smaller model.context"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect.bisect_right(self._ends, index)
        span = self.spans[which]
        start = span.start + (index - (self._ends[which - 1] if which else 0)) * self.context
        window = torch.from_numpy(span.file.read(start, start + self.context + 1))
        sample = {"tokens": window[:-1], "targets": window[1:]}
        return _apart(sample, span.file, start) if self.documents else sample

    def sample(self, index: int) -> dict[str, Tensor]:
        """Return ``self[index]``, under the name that other sources share."""
        return self[index]

    @property
    def tokens(self) -> int:
        """Number of tokens that one epoch predicts, with ``documents`` less those that end a document."""
        if not self.documents:
            return len(self) * self.context
        ends = 0
        for span in self.spans:
            used = (span.tokens - 1) // self.context * self.context
            ends += len(_ends_in(span.file, span.start, span.start + used))
        return len(self) * self.context - ends

    @property
    def vocab_size(self) -> int:
        """Largest vocabulary of the token files."""
        return max(span.file.vocab_size for span in self.spans)

    def fingerprint(self) -> str:
        """Return a digest of the samples and their order, equal if the same tokens are cut in the same way."""
        apart = " documents" if self.documents else ""
        digest = hashlib.sha256(f"context {self.context}{apart}\n".encode())
        for span in self.spans:
            digest.update(f"{span.file.fingerprint()} {span.start} {span.stop}\n".encode())
        return digest.hexdigest()[:16]


def _ends_in(file: TokenFile, start: int, stop: int) -> NDArray[np.int64]:
    """Return the ends of documents behind token ``start`` and up to ``stop``."""
    # With numbers of another type numpy would convert the whole table.
    first, last = np.searchsorted(file.ends, np.array([start, stop], dtype=np.uint64), side="right")
    return file.ends[first:last].astype(np.int64)


def _apart(sample: dict[str, Tensor], file: TokenFile, start: int) -> dict[str, Tensor]:
    """Return a sample whose first token is token ``start`` of a file, with the documents of its tokens."""
    context = len(sample["tokens"])
    ends = _ends_in(file, start, start + context) - start  # in (0, context]
    documents = np.zeros(context + 1, dtype=np.int64)
    documents[ends] = 1
    targets = sample["targets"].clone()  # shares its memory with the tokens
    targets[torch.from_numpy(ends) - 1] = _IGNORED
    return {**sample, "targets": targets, "documents": torch.from_numpy(documents[:-1].cumsum())}


def hold_out(file: TokenFile, fraction: float, context: int) -> tuple[TokenSpan, TokenSpan]:
    """Cut a file into training and validation spans; the end, of at least one window, is held out.

    The cut moves to the nearest end of a document if that changes the held-out size by no more than half.

    Args:
        file: the token file.
        fraction: share of the tokens to hold out; 0 holds out nothing.
        context: tokens of a window.

    Raises:
        DataError: if the file is shorter than two windows.
    """
    if fraction == 0:
        return TokenSpan(file, 0, file.count), TokenSpan(file, file.count, file.count)
    window = context + 1
    if file.count < 2 * window:
        raise DataError(
            f"{file.path} holds {file.count} tokens; training and validation take one window of context "
            f"{context} each, {2 * window} tokens; give more text, a smaller model.context, or data.validation: 0"
        )
    wanted = min(max(round(file.count * fraction), window), file.count - window)
    cut = file.count - wanted
    place = int(np.searchsorted(file.ends, cut))
    near = [int(end) for end in file.ends[max(place - 1, 0) : place + 1]]
    fitting = [
        end for end in near if abs(end - cut) * 2 <= wanted and end >= window and file.count - end >= window
    ]
    cut = min(fitting, key=lambda end: abs(end - cut), default=cut)
    return TokenSpan(file, 0, cut), TokenSpan(file, cut, file.count)
