"""Text to numbers and back.

A tokenizer is anything with the five members of ``Tokenizer``. Two are built in:

    bytes            one token per byte of UTF-8, vocabulary 256; NUL, which text never holds, ends a document
    tokenizer.json   any tokenizer of the Hugging Face ``tokenizers`` library (extra ``hf``)

``name`` goes into every token file, so that text is never read with another tokenizer than it was written with; for
a tokenizer.json it carries the first digits of the file's SHA-256, so the file may move but not change.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.plan.errors import DataError, SourceError
from shardwise.plan.regular_files import expanded, read_small_file
from shardwise.plan.words import in_words

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
_LIMIT_BYTES = 64 << 20
_GAP_LIMIT = 65_536
"""Ids that no token has, beside three for each that one has."""


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per byte of the text's UTF-8; bytes that are no UTF-8 decode to the replacement character."""

    name = "bytes"
    vocab_size = 256
    end_of_document: int | None = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face ``tokenizer.json``; special tokens are not added by ``encode``."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"tokenizer {path} needs the package tokenizers, which is not installed; "
                "pip install tokenizers, or use tokenizer: bytes"
            ) from error
        self._path = path
        content = _read(path)
        try:
            self._inner: Any = tokenizers.Tokenizer.from_buffer(content)
        except (
            BaseException
        ) as error:  # the library raises bare Exception, and where it panics no Exception at all
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise SourceError(
                f"tokenizer {path} is no tokenizer.json of the tokenizers library ({str(error)[:400]}); "
                "a SentencePiece .model or a vocab.txt must be converted first"
            ) from error
        self.name = f"tokenizer.json:{hashlib.sha256(content).hexdigest()[:12]}"
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # Ids may have gaps; the embedding needs a row up to the largest.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not vocabulary or self.vocab_size > 4 * len(vocabulary) + _GAP_LIMIT:
            raise SourceError(
                f"tokenizer {path} has {len(vocabulary)} tokens and ids up to {self.vocab_size - 1}: an embedding "
                "would need a row for every id; renumber them without gaps"
            )
        self.end_of_document = next(
            (vocabulary[word] for word in _END_OF_DOCUMENT if word in vocabulary), None
        )

    def encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # the library raises bare Exception, and panics where a regex gives up
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f"tokenizer {self._path} cannot read a text ({str(error)[:400]}); is it whole, and does it know its "
                "own token for what it has no token for?"
            ) from error
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text


def _read(path: Path) -> bytes:
    """Return the whole of a file that may be a tokenizer: a stranger may have chosen its path."""
    try:
        return read_small_file(path, _LIMIT_BYTES)
    except OSError as error:
        raise SourceError(
            f"tokenizer {in_words(error)}; expected a tokenizer.json, a regular file of at most "
            f"{_LIMIT_BYTES >> 20} MiB"
        ) from error


def load_tokenizer(given: str) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names: ``bytes``, a tokenizer.json, or a folder that holds one."""
    if given == "bytes":
        return ByteTokenizer()
    path = expanded(given)
    try:
        path = path / "tokenizer.json" if path.is_dir() else path
        is_there = path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        is_there = False
    if not is_there:
        raise SourceError(
            f"data.tokenizer is {given!r}, but there is no file {path}; expected 'bytes' or the "
            "path of a tokenizer.json"
        )
    return JsonTokenizer(path)
