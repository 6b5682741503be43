"""Small files: regular ones within a bound alone, and no link followed by a write."""

import os
from pathlib import Path

import pytest

from shardwise.base.regular_files import (
    open_regular,
    read_small_file,
    read_small_text,
    write_small_file,
)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "to_fifo").symlink_to("fifo")
    for name in ("fifo", "zero", "to_fifo", ".", "absent", "a\0b", "x" * 300):
        with pytest.raises(OSError) as caught:
            read_small_file(tmp_path / name)
        assert caught.value.strerror and caught.value.filename, name


def test_the_bound_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 100)
    assert read_small_file(path, 100) == b"a" * 100
    with pytest.raises(OSError, match="more than 99 bytes"):
        read_small_file(path, 99)
    assert read_small_file("/proc/self/stat", 1 << 16), "the size of this file is 0"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than"):
        read_small_file(path)


def test_text_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes("Zürich".encode())
    assert read_small_text(path) == "Zürich"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(OSError, match=r"not text in UTF-8 \(byte 3 is 0xe9\)"):
        read_small_text(path)


def test_links_are_followed_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"data")
    (tmp_path / "link").symlink_to("x")
    assert read_small_file(tmp_path / "link") == b"data"
    with pytest.raises(OSError):
        read_small_file(tmp_path / "link", follows_links=False)
    with pytest.raises(OSError):
        open_regular(tmp_path / "link", follows_links=False)


def test_a_write_follows_no_link(tmp_path: Path) -> None:
    """A link under the name of the fresh file had the file behind it overwritten."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "config.yaml.new").symlink_to("precious")
    (tmp_path / "config.yaml").symlink_to("precious")
    write_small_file(tmp_path / "config.yaml", b"new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "config.yaml").is_symlink() and (tmp_path / "config.yaml").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "precious"]
    os.mkfifo(tmp_path / "config.yaml.new")
    write_small_file(tmp_path / "config.yaml", b"newer")
    assert (tmp_path / "config.yaml").read_bytes() == b"newer"
