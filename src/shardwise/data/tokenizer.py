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

from shardwise.plan.errors import DataError

_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


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
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"tokenizer {path} cannot be read ({error.strerror}); expected a tokenizer.json"
            ) from error
        try:
            self._inner: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"tokenizer {path} is no tokenizer.json of the tokenizers library ({error}); "
                "a SentencePiece .model or a vocab.txt must be converted first"
            ) from error
        self.name = f"tokenizer.json:{hashlib.sha256(content).hexdigest()[:12]}"
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # Ids may have gaps; the embedding needs a row up to the largest.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = next(
            (vocabulary[word] for word in _END_OF_DOCUMENT if word in vocabulary), None
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text


def load_tokenizer(given: str) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names: ``bytes``, a tokenizer.json, or a folder that holds one."""
    if given == "bytes":
        return ByteTokenizer()
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.exists():
        raise DataError(
            f"data.tokenizer is {given!r}, but there is no file {path}; expected 'bytes' or the "
            "path of a tokenizer.json"
        )
    return JsonTokenizer(path)
