"""Text: from a source to token files.

    source      what it is                                              documents
    stdlib      *.py of Python's own standard library, without tests    one per file
    a file      any file; the byte tokenizer reads its bytes unchanged  one
    a folder    its files that match ``pattern``, at any depth          one per file
    x.tokens    a token file, or a folder of nothing else               as written

Files are ordered by the SHA-256 of their path inside the source. That is the same everywhere, and makes the end of the
token file, which is held out for validation, a fair sample instead of the last letters of the alphabet.
Text is tokenised once into a folder of token files. The name contains a hash of paths, sizes, times and tokenizer, so
changed text is tokenised anew. Of several ranks on one host one rank works and the others wait. If the file system has
no locks, every rank works, which is harmless because each renames an equal file.
Memory: one piece of ``_PIECE_BYTES``, whatever the size of the text.
"""

import codecs
import difflib
import fnmatch
import hashlib
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DataError, SourceError
from shardwise.base.regular_files import expanded, open_regular
from shardwise.base.words import in_words
from shardwise.data.token_file import SUFFIX, TokenFile, TokenWriter, is_token_file
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer

STDLIB = "stdlib"
_PIECE_BYTES = 1 << 20
# A cached file up to this size is checked to the last byte before use and made again if it is damaged; a larger
# file is checked block by block as it is read, so that training starts at once.
_CHECK_FIRST_BYTES = 256 << 20
# Not part of the library's own source: installed packages, tests, and files that the build wrote for one machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

# Characters of a source's name in the name of its cached file: at most 4 bytes each, of 255 that a file name may have.
_LABEL_CHARACTERS = 50

Progress = Callable[[int, int], None]
"""Callback with (bytes tokenised, bytes in all)."""


class TextFiles(NamedTuple):
    """Files of one source, in the order in which they are read."""

    label: str
    root: Path
    paths: list[Path]

    @property
    def size_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(path.stat().st_size for path in self.paths)


def find_files(source: str, pattern: str = "*") -> TextFiles:
    """Return the non-empty files of one source.

    Args:
        source: ``stdlib``, a file or a folder.
        pattern: glob for the files of a folder.

    Raises:
        SourceError: if there is no file, or if the source cannot be read.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in _walk(root, _NOT_STDLIB) if path.suffix == ".py" and _is_portable(path)]
        if not paths:
            raise SourceError(
                f"source stdlib: no *.py under {root} in this Python; give a file or a folder of text"
            )
        return TextFiles(STDLIB, root, _in_order(root, paths))
    try:
        return _files_at(source, expanded(source), pattern)
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(f"data source {source!r} cannot be read: {in_words(error)}") from None
    except ValueError as error:
        raise SourceError(f"data source {source[:200]!r} is no path: {error}") from None


def _files_at(source: str, root: Path, pattern: str) -> TextFiles:
    if root.is_file():
        if root.stat().st_size == 0:
            raise SourceError(f"data source {source} is empty; give a file that holds text")
        return TextFiles(root.stem, root.parent, [root])
    if root.resolve() == Path(root.anchor or "/"):
        raise SourceError(
            f"data source {source!r} is the whole file system; give the folder that holds the text"
        )
    if root.exists() and not root.is_dir():
        raise SourceError(
            f"data source {source!r} is a device, a pipe or a socket; expected a file or a folder"
        )
    if not root.is_dir():
        raise SourceError(f"data source {source!r} does not exist{_close_to(root)}")
    paths = [path for path in _walk(root, set()) if _matches(path, root, pattern)]
    if not paths:
        raise SourceError(
            f"data source {source} is a folder without a file that matches {pattern!r}; set data.pattern"
        )
    paths = [path for path in paths if path.stat().st_size > 0]
    if not paths:
        raise SourceError(f"data source {source}: all files that match {pattern!r} are empty")
    return TextFiles(root.resolve().name or "root", root, _in_order(root, paths))


def _walk(root: Path, left_out: set[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_portable(path: Path) -> bool:
    return not path.name.startswith("_sysconfigdata") and not path.parent.name.startswith("config-")


def _matches(path: Path, root: Path, pattern: str) -> bool:
    inside = path.relative_to(root).as_posix()
    return fnmatch.fnmatch(path.name, pattern) or fnmatch.fnmatch(inside, pattern)


def _in_order(root: Path, paths: list[Path]) -> list[Path]:
    def key(path: Path) -> bytes:
        return hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()

    return sorted(paths, key=key)


def _close_to(missing: Path) -> str:
    """Return the advice for a path that does not exist."""
    folder = missing.parent
    if not folder.is_dir():
        return f"; there is no folder {folder} either (the current folder is {Path.cwd()})"
    close = difflib.get_close_matches(missing.name, [entry.name for entry in folder.iterdir()], n=1)
    hint = (
        f"did you mean {(folder / close[0]).as_posix()!r}?"
        if close
        else "expected stdlib, a file or a folder"
    )
    return f"; {hint} (the current folder is {Path.cwd()})"


class TextPiece(NamedTuple):
    """Tokens of ``size_bytes`` more bytes of a file."""

    tokens: npt.NDArray[Any]
    size_bytes: int


def _pieces(path: Path, tokenizer: Tokenizer) -> Iterator[TextPiece]:
    """Yield one file piece by piece. Text is cut after a line end, so that no token within a line is torn."""
    with open_regular(path) as file:
        if isinstance(tokenizer, ByteTokenizer):
            while read := file.read(_PIECE_BYTES):
                yield TextPiece(np.frombuffer(read, dtype=np.uint8), len(read))
            return
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text, is_last = "", False
        while not is_last:
            read = file.read(_PIECE_BYTES)
            is_last = len(read) < _PIECE_BYTES
            text += decoder.decode(read, final=is_last)
            cut = len(text) if is_last else _last_cut(text)
            if cut > 0:
                yield TextPiece(np.asarray(tokenizer.encode(text[:cut]), dtype=np.int64), len(read))
                text = text[cut:]


def _last_cut(text: str) -> int:
    """Return the index after the last line end, else before the last blank, else the length of ``text``."""
    after_line = text.rfind("\n") + 1
    before_blank = max(text.rfind(" "), 0)
    return after_line or before_blank or len(text)


def _write(files: TextFiles, tokenizer: Tokenizer, out: Path, progress: Progress | None) -> None:
    total, done = files.size_bytes, 0
    end = tokenizer.end_of_document
    with TokenWriter(out, tokenizer.name, tokenizer.vocab_size) as writer:
        for path in files.paths:
            try:
                for piece in _pieces(path, tokenizer):
                    writer.append(piece.tokens)
                    done += piece.size_bytes
                    if progress is not None:
                        progress(done, total)
            except OSError as error:
                raise DataError(f"data file {path} cannot be read ({error.strerror})") from error
            if end is not None:
                writer.append(np.asarray([end]))
            writer.end_document()


def convert(
    source: str | Sequence[str],
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    pattern: str = "*",
    progress: Progress | None = None,
) -> TokenFile:
    """Tokenise a source, or several one after the other, into the token file ``out``.

    Args:
        source: ``stdlib``, a file, a folder, or a list of these.
        tokenizer: the tokenizer.
        out: path of the token file.
        pattern: glob for the files of a folder.
        progress: called with (bytes tokenised, bytes in all).

    Raises:
        DataError: if ``out`` exists and is no token file, if a source is a token file, or if text cannot be read.
    """
    out = Path(out)
    if out.is_dir():
        raise DataError(
            f"{out} is a folder; expected the path of the token file to write, such as {out / 'text'}{SUFFIX}"
        )
    if out.exists() and not is_token_file(out):
        raise DataError(f"{out} exists and is not a token file; it is not overwritten, give another path")
    parts = [find_files(each, pattern) for each in ([source] if isinstance(source, str) else source)]
    paths = [path for part in parts for path in part.paths]
    for path in paths:
        if is_token_file(path):
            raise DataError(
                f"{path} is a token file already; give it as data.source, or give the text it was made of"
            )
    _write(TextFiles(out.stem, out.parent, paths), tokenizer, out, progress)
    return TokenFile(out)


def open_source(
    source: str, tokenizer: Tokenizer, cache: Path, *, pattern: str = "*", progress: Progress | None = None
) -> list[TokenFile]:
    """Open the token files of one source; text is tokenised into ``cache`` if that has not been done before.

    Args:
        source: ``stdlib``, a file, a folder or a token file.
        tokenizer: the tokenizer; token files must have been made with it.
        cache: folder for the token files of text.
        pattern: glob for the files of a folder.
        progress: called with (bytes tokenised, bytes in all).

    Raises:
        DataError: if token files do not fit the tokenizer, or if the source mixes text and token files.
    """
    files = find_files(source, pattern)
    are_tokens = [is_token_file(path) for path in files.paths]
    if all(are_tokens):
        opened = [TokenFile(path) for path in files.paths]
        for file in opened:
            if file.tokenizer_name != tokenizer.name:
                raise DataError(
                    f"token file {file.path} was made with tokenizer {file.tokenizer_name!r}, but data.tokenizer is "
                    f"{tokenizer.name!r}; set data.tokenizer to that one, or convert the text again"
                )
            if file.vocab_size != tokenizer.vocab_size:
                raise DataError(
                    f"token file {file.path} has a vocabulary of {file.vocab_size} tokens, its tokenizer "
                    f"{tokenizer.name!r} one of {tokenizer.vocab_size}; convert the text again"
                )
        return opened
    if any(are_tokens):
        raise DataError(
            f"data source {source} holds token files and text files, such as {files.paths[are_tokens.index(True)]}; "
            f"set data.pattern so that it matches one kind ('*{SUFFIX}')"
        )
    return [_cached(files, tokenizer, cache, progress)]


def _cached(files: TextFiles, tokenizer: Tokenizer, cache: Path, progress: Progress | None) -> TokenFile:
    digest = hashlib.sha256(tokenizer.name.encode() + b"\n")
    for path in files.paths:
        state = path.stat()
        inside = os.fsencode(path.relative_to(files.root).as_posix())
        digest.update(inside + f"\0{state.st_size} {state.st_mtime_ns}\n".encode())
    out = cache / f"{files.label[:_LABEL_CHARACTERS]}-{digest.hexdigest()[:16]}{SUFFIX}"
    if (found := _open_whole(out)) is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cache folder {cache} cannot be made ({error.strerror}); set data.cache") from error
    with locked(cache) as is_locked:
        if (found := _open_whole(out)) is not None:
            return found
        if is_locked:
            for leftover in cache.glob(f".{out.name}.*.tmp"):  # left by a process that was killed
                leftover.unlink(missing_ok=True)
        _write(files, tokenizer, out, progress)
    return TokenFile(out)


def _open_whole(path: Path) -> TokenFile | None:
    """Open a cached file, or return None if it is missing or damaged and must be made again."""
    if not path.exists():
        return None
    try:
        file = TokenFile(path)
        if path.stat().st_size <= _CHECK_FIRST_BYTES:
            file.check()
    except DataError:
        return None
    return file


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder; yield False if the system or the file system has no locks.

    The lock is on the folder itself, so that no lock file stays behind, and ends with the process that holds it.
    """
    try:
        flock = importlib.import_module("fcntl")  # Unix only
        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    try:
        try:
            flock.flock(descriptor, flock.LOCK_EX)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)
