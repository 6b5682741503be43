"""Windows: a map-style dataset of fixed-length samples over token files.

Window i of a span of n tokens starts at token i·T and holds T + 1 of them:

    tokens  = span[i·T     : i·T + T]                                                [T]
    targets = span[i·T + 1 : i·T + T + 1]                                            [T]

so every token but the first of a span is predicted exactly once an epoch; the (n - 1) mod T tokens at the end are not
used. No window extends from one span to the next.
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


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Samples ``{"tokens": [T], "targets": [T]}``, both int64, cut from spans of token files.

    Args:
        spans: ranges of token files; spans of at most ``context`` tokens are left out.
        context: tokens of a window, T.

    Raises:
        DataError: if no span holds a window.
    """

    def __init__(self, spans: Sequence[TokenSpan], context: int) -> None:
        if context < 1:
            raise DataError(f"context is {context}; a window needs at least one token")
        self.spans = [span for span in spans if span.tokens > context]
        self.context = context
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
        return {"tokens": window[:-1], "targets": window[1:]}

    def sample(self, index: int) -> dict[str, Tensor]:
        """Return ``self[index]``, under the name that other sources share."""
        return self[index]

    @property
    def tokens(self) -> int:
        """Number of tokens that one epoch predicts."""
        return len(self) * self.context

    @property
    def vocab_size(self) -> int:
        """Largest vocabulary of the token files."""
        return max(span.file.vocab_size for span in self.spans)

    def fingerprint(self) -> str:
        """Return a digest of the samples and their order, equal if the same tokens are cut in the same way."""
        digest = hashlib.sha256(f"context {self.context}\n".encode())
        for span in self.spans:
            digest.update(f"{span.file.fingerprint()} {span.start} {span.stop}\n".encode())
        return digest.hexdigest()[:16]


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
