"""Tokenizers: from text to numbers and back.

A tokenizer is any object with the five members of ``Tokenizer``. Two are built in:

    bytes            one token per byte of UTF-8, vocabulary 256; NUL, which text never holds, ends a document
    tokenizer.json   any tokenizer of the Hugging Face ``tokenizers`` library (extra ``hf``)

``name`` is stored in every token file, so that text is never read with another tokenizer than it was written with. For
a tokenizer.json the name contains the first digits of the file's SHA-256, so the file may move but not change.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.base.errors import DataError, SourceError
from shardwise.base.regular_files import expanded, read_small_file
from shardwise.base.words import in_words

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
_LIMIT_BYTES = 64 << 20
_GAP_LIMIT = 65_536
"""Largest number of ids without a token, beside three for each id that has one."""


class Tokenizer(Protocol):
    """Interface of a tokenizer in this package."""

    @property
    def name(self) -> str:
        """Name that identifies the tokenizer in token files."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """Id that ends a document; None if there is no such token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids."""
        ...


class ByteTokenizer:
    """Tokenizer with one token per byte of UTF-8; bytes that are no UTF-8 decode to the replacement character."""

    name = "bytes"
    vocab_size = 256
    end_of_document: int | None = 0

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes in UTF-8."""
        return bytes(tokens).decode("utf-8", errors="replace")


class JsonTokenizer:
    """Tokenizer from a Hugging Face ``tokenizer.json``; ``encode`` adds no special tokens.

    Args:
        path: path of the file.

    Raises:
        DataError: if the package ``tokenizers`` is not installed.
        SourceError: if the file is no tokenizer, or if its ids have large gaps.
    """

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
        except BaseException as error:  # the library raises bare Exception, and a BaseException if it panics
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise SourceError(
                f"tokenizer {path} is no tokenizer.json of the tokenizers library ({str(error)[:400]}); "
                "a SentencePiece .model or a vocab.txt must be converted first"
            ) from error
        self.name = f"tokenizer.json:{hashlib.sha256(content).hexdigest()[:12]}"
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # Ids may have gaps; the embedding needs a row for every id up to the largest.
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
        """Return the ids of a text.

        Raises:
            DataError: if the library fails on the text.
        """
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # the library raises bare Exception, and panics if a regex fails
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f"tokenizer {self._path} cannot read a text ({str(error)[:400]}); is it whole, and does it know its "
                "own token for what it has no token for?"
            ) from error
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        text: str = self._inner.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text


def _read(path: Path) -> bytes:
    """Return the content of a file that may be a tokenizer; its path may come from an untrusted configuration."""
    try:
        return read_small_file(path, _LIMIT_BYTES)
    except OSError as error:
        raise SourceError(
            f"tokenizer {in_words(error)}; expected a tokenizer.json, a regular file of at most "
            f"{_LIMIT_BYTES >> 20} MiB"
        ) from error


def load_tokenizer(given: str) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names: ``bytes``, a tokenizer.json, or a folder that holds one.

    Raises:
        SourceError: if there is no such file.
    """
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
