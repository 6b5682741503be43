"""Builds training and validation data from ``data:`` in the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError
from shardwise.base.regular_files import expanded
from shardwise.base.target import call_target
from shardwise.data.policy import DataPolicy
from shardwise.data.text import Progress, open_source
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.data.windows import TokenSpan, TokenWindows, hold_out


@dataclass(frozen=True)
class TextCorpus:
    """Training data and validation data of a run."""

    train: Any
    """``TokenWindows`` for text; for a target its result: a Dataset, an IterableDataset or a DataLoader."""
    validation: Any | None
    """Validation data of the same kinds; None if nothing is held out."""
    tokenizer: Tokenizer | None
    """Tokenizer of the text; None for a target, unless ``data.tokenizer`` is given beside it."""

    @property
    def vocab_size(self) -> int | None:
        """Number of ids that a model needs; None if the data has no tokens of ours."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    def fingerprint(self) -> str | None:
        """Return a digest that is equal on two ranks that read the same text; None for a target."""
        return self.train.fingerprint() if isinstance(self.train, TokenWindows) else None


def build(policy: DataPolicy, context: int, cache: Path, progress: Progress | None = None) -> TextCorpus:
    """Open the data that the policy names, and tokenise text if needed.

    Args:
        policy: the policy.
        context: tokens of a window.
        cache: folder for token files, unless the policy names a folder.
        progress: called with (bytes tokenised, bytes in all).
    """
    if policy.target is not None:
        return _from_target(policy)
    tokenizer = load_tokenizer(policy.tokenizer)
    cache = cache if policy.cache is None else expanded(policy.cache)
    sources = [policy.source] if isinstance(policy.source, str) else policy.source
    files = [
        file
        for source in sources
        for file in open_source(source, tokenizer, cache, pattern=policy.pattern, progress=progress)
    ]
    if isinstance(policy.validation, str):
        held_out = open_source(policy.validation, tokenizer, cache, pattern=policy.pattern, progress=progress)
        return TextCorpus(
            _windows([TokenSpan(file, 0, file.count) for file in files], context, policy),
            _windows([TokenSpan(file, 0, file.count) for file in held_out], context, policy),
            tokenizer,
        )
    cuts = [hold_out(file, policy.validation, context) for file in files]
    train = _windows([cut[0] for cut in cuts], context, policy)
    validation = _windows([cut[1] for cut in cuts], context, policy) if policy.validation else None
    return TextCorpus(train, validation, tokenizer)


def _windows(spans: Sequence[TokenSpan], context: int, policy: DataPolicy) -> TokenWindows:
    return TokenWindows(spans, context, policy.documents)


def _from_target(policy: DataPolicy) -> TextCorpus:
    assert policy.target is not None, "called for a policy with a target"
    made = call_target("data.target", policy.target, policy.arguments)
    train, validation = made, None
    if isinstance(made, tuple):
        if len(made) != 2:
            raise DataError(
                f"data.target {policy.target!r} returned {len(made)} things; expected one dataset, or a pair of them "
                "(training, validation)"
            )
        train, validation = made
    if train is None:
        raise DataError(f"data.target {policy.target!r} returned None; expected a Dataset or a DataLoader")
    tokenizer = load_tokenizer(policy.tokenizer) if "tokenizer" in policy.model_fields_set else None
    return TextCorpus(train, validation, tokenizer)
