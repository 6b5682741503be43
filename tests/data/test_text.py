"""Sources of text, their order, the cache, and what is refused."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.data import text
from shardwise.data.text import convert, find_files, open_source
from shardwise.data.token_file import TokenFile
from shardwise.data.tokenizer import ByteTokenizer


class CharacterTokenizer:
    """Not the byte tokenizer: its text goes through decoding and cutting. One token per character."""

    name = "characters"
    vocab_size = 0x110000
    end_of_document = None

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.pieces.append(text)
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def _decoded(file: TokenFile) -> str:
    return "".join(map(chr, file.read(0, len(file)).tolist()))


def _folder(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".txt").write_text(content)
    return root


def test_stdlib_is_python_source_in_one_order_without_tests() -> None:
    files = find_files("stdlib")
    names = {path.relative_to(files.root).as_posix() for path in files.paths}
    assert {"os.py", "json/decoder.py"} <= names
    assert not any("test" in name.split("/") or "site-packages" in name for name in names)
    assert all(name.endswith(".py") for name in names)
    assert find_files("stdlib").paths == files.paths
    assert files.size_bytes > 3_000_000


def test_folder_order_depends_on_the_paths_inside_alone(tmp_path: Path) -> None:
    contents = {f"sub{i % 3}__{i}": "x" for i in range(12)}
    one = _folder(tmp_path / "one", **contents)
    two = _folder(tmp_path / "two", **dict(reversed(contents.items())))
    relative = [[p.relative_to(f.root) for p in f.paths] for f in map(find_files, (str(one), str(two)))]
    assert relative[0] == relative[1]
    assert len(relative[0]) == 12


def test_pattern_and_hidden_files(tmp_path: Path) -> None:
    _folder(tmp_path, a="x", docs__b="x")
    (tmp_path / "c.md").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("x")
    (tmp_path / "empty.txt").write_text("")

    def names(pattern: str) -> set[str]:
        return {path.name for path in find_files(str(tmp_path), pattern).paths}

    assert names("*") == {"a.txt", "b.txt", "c.md"}
    assert names("*.txt") == {"a.txt", "b.txt"}
    assert names("docs/*") == {"b.txt"}


def test_bytes_are_taken_as_they_are_and_documents_end_in_nul(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(b"\xff\xfe\r\nx")
    file = convert(str(tmp_path / "raw.bin"), ByteTokenizer(), tmp_path / "out.tokens")
    assert bytes(file.read(0, len(file)).tolist()) == b"\xff\xfe\r\nx\0"


def test_text_is_decoded_over_the_borders_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PIECE_BYTES", 7)
    content = "äöü line one\nline two — long without blanks:xxxxxxxxxxxxxxxxxxx\r\n漢字漢字漢字 end"
    (tmp_path / "t.txt").write_bytes(content.encode())
    tokenizer = CharacterTokenizer()
    assert _decoded(convert(str(tmp_path / "t.txt"), tokenizer, tmp_path / "out.tokens")) == content
    assert max(map(len, tokenizer.pieces)) <= 14


def test_text_is_cut_after_lines_then_at_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PIECE_BYTES", 8)
    (tmp_path / "t.txt").write_text("one\ntwo three four fiv\nsix")
    tokenizer = CharacterTokenizer()
    convert(str(tmp_path / "t.txt"), tokenizer, tmp_path / "out.tokens")
    assert tokenizer.pieces == ["one\n", "two three", " four fiv\n", "six"]


def test_torn_utf8_becomes_the_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("ok ä".encode()[:-1])
    file = convert(str(tmp_path / "t.txt"), CharacterTokenizer(), tmp_path / "out.tokens")
    assert _decoded(file) == "ok \N{REPLACEMENT CHARACTER}"


def test_convert_reports_progress_in_bytes(tmp_path: Path) -> None:
    _folder(tmp_path / "in", a="x" * 10, b="y" * 20)
    seen: list[tuple[int, int]] = []
    convert(
        str(tmp_path / "in"),
        ByteTokenizer(),
        tmp_path / "out.tokens",
        progress=lambda *each: seen.append(each),
    )
    assert seen[-1] == (30, 30)
    assert len(seen) == 2


def test_convert_takes_several_sources(tmp_path: Path) -> None:
    _folder(tmp_path, a="first", b="second")
    file = convert(
        [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")], ByteTokenizer(), tmp_path / "out.tokens"
    )
    assert _decoded(file) == "second\0first\0"
    assert file.ends.tolist() == [7, 13]


def test_convert_overwrites_token_files_only(tmp_path: Path) -> None:
    _folder(tmp_path, a="first", b="precious")
    with pytest.raises(DataError, match="is not overwritten"):
        convert(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "b.txt")
    assert (tmp_path / "b.txt").read_text() == "precious"
    for _ in range(2):
        convert(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "a.tokens")
    with pytest.raises(DataError, match="is a folder"):
        convert(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path)
    with pytest.raises(DataError, match="is a token file already"):
        convert(str(tmp_path / "a.tokens"), ByteTokenizer(), tmp_path / "c.tokens")


def test_text_is_tokenised_once_and_anew_after_a_change(tmp_path: Path) -> None:
    _folder(tmp_path / "in", a="one", b="two")
    cache = tmp_path / "cache"
    calls: list[int] = []

    def opened() -> TokenFile:
        return open_source(
            str(tmp_path / "in"), ByteTokenizer(), cache, progress=lambda done, total: calls.append(done)
        )[0]

    first = opened()
    assert len(calls) == 2
    assert opened().path == first.path
    assert len(calls) == 2
    (tmp_path / "in" / "a.txt").write_text("longer")
    second = opened()
    assert second.path != first.path
    assert "longer\0" in _decoded(second)


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    _folder(tmp_path, a="some text")
    opened = open_source(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "cache")[0]
    whole = opened.path.read_bytes()
    for damaged in (whole[:50], whole[:4096] + b"X" + whole[4097:], b""):
        opened.path.unlink()  # a new file: the old one is still mapped
        opened.path.write_bytes(damaged)
        again = open_source(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "cache")[0]
        assert again.path.read_bytes() == whole


@contextmanager
def _no_lock(folder: Path) -> Iterator[bool]:
    yield False


@pytest.mark.parametrize("has_lock", [True, False])
def test_concurrent_readers_share_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_lock: bool
) -> None:
    _folder(tmp_path / "in", **{f"f{i}": f"text {i}\n" * 500 for i in range(20)})
    if not has_lock:
        monkeypatch.setattr(text, "locked", _no_lock)
    written: list[Path] = []
    write = text._write

    def counted(*args: object) -> None:
        written.append(args[2])  # type: ignore[arg-type]
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(text, "_write", counted)
    with ThreadPoolExecutor(6) as pool:
        opened = [
            pool.submit(open_source, str(tmp_path / "in"), ByteTokenizer(), tmp_path / "cache")
            for _ in range(6)
        ]
        files = [each.result()[0] for each in opened]
    assert len({file.path for file in files}) == 1
    assert all(np.array_equal(file.read(0, len(file)), files[0].read(0, len(file))) for file in files)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [files[0].path.name]
    if has_lock and os.name == "posix":
        assert len(written) == 1


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    _folder(tmp_path, a="some text")
    path = open_source(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "cache")[0].path
    path.rename(path.with_name(f".{path.name}.1.aa.tmp"))
    open_source(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "cache")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [path.name]


def test_token_files_are_opened_where_they_lie(tmp_path: Path) -> None:
    _folder(tmp_path, a="first", b="second")
    for name in "ab":
        convert(str(tmp_path / f"{name}.txt"), ByteTokenizer(), tmp_path / "shards" / f"{name}.tokens")
    one = open_source(str(tmp_path / "shards" / "a.tokens"), ByteTokenizer(), tmp_path / "cache")
    both = open_source(str(tmp_path / "shards"), ByteTokenizer(), tmp_path / "cache")
    assert [_decoded(file) for file in one] == ["first\0"]
    assert {_decoded(file) for file in both} == {"first\0", "second\0"}
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match=r"made with tokenizer 'bytes', but data.tokenizer is 'characters'"):
        open_source(str(tmp_path / "shards"), CharacterTokenizer(), tmp_path / "cache")
    _folder(tmp_path / "shards", c="text")
    with pytest.raises(DataError, match=r"token files and text files.*data\.pattern"):
        open_source(str(tmp_path / "shards"), ByteTokenizer(), tmp_path / "cache")
    assert len(open_source(str(tmp_path / "shards"), ByteTokenizer(), tmp_path, pattern="*.tokens")) == 2


def test_missing_and_empty_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"corpas.txt' does not exist; did you mean '.*corpus.txt'"):
        find_files(str(tmp_path / "corpas.txt"))
    with pytest.raises(DataError, match=r"no folder .*nowhere either"):
        find_files(str(tmp_path / "nowhere" / "x.txt"))
    with pytest.raises(DataError, match=r"empty.txt is empty"):
        find_files(str(tmp_path / "empty.txt"))
    with pytest.raises(DataError, match=r"folder is a folder without a file that matches '\*.py'"):
        find_files(str(tmp_path / "folder"), "*.py")
    (tmp_path / "folder" / "a.py").write_text("")
    with pytest.raises(DataError, match=r"all files that match '\*.py' are empty"):
        find_files(str(tmp_path / "folder"), "*.py")


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    _folder(tmp_path, a="x")
    (tmp_path / "cache").write_text("a file, no folder")
    with pytest.raises(DataError, match=r"cache folder .* cannot be made .*set data\.cache"):
        open_source(str(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "cache")
