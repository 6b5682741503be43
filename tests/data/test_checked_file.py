"""Files with a prefix, a header and blocks with a CRC-32 each: published whole or not at all."""

import errno
import zlib
from pathlib import Path

from shardwise.data.checked_file import PREFIX, CheckedFormat, CheckedWriter, cannot_write


def test_checksums_are_those_of_blocks_however_the_bytes_come(tmp_path: Path) -> None:
    data = bytes(range(23))
    for cuts in ([23], [1] * 23, [8, 0, 7, 8]):
        writer = CheckedWriter(tmp_path / "x", 8)
        position = 0
        for length in cuts:
            writer.write(data[position : position + length])
            position += length
        assert writer.checksums() == [zlib.crc32(data[i : i + 8]) for i in (0, 8, 16)]
        assert writer.size == 23
        writer.close()


def test_whole_blocks_have_no_empty_one_behind_them(tmp_path: Path) -> None:
    writer = CheckedWriter(tmp_path / "x", 4)
    writer.write(bytes(8))
    assert len(writer.checksums()) == 2
    writer.close()


def test_a_file_is_there_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x"
    writer = CheckedWriter(path, 4, start=PREFIX.size + 2)
    writer.write(b"abc")
    assert not path.exists()
    writer.publish(CheckedFormat(b"MAGIC", 3, "test file", False), b"{}")
    writer.close()
    content = path.read_bytes()
    assert PREFIX.unpack(content[: PREFIX.size]) == (b"MAGIC\0\0\0", 3, 2, zlib.crc32(b"{}"))
    assert content[PREFIX.size :] == b"{}abc"
    assert [file.name for file in path.parent.iterdir()] == ["x"]


def test_a_file_that_is_given_up_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    writer = CheckedWriter(path, 4)
    writer.write(b"new")
    writer.close()
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path]


def test_a_full_disk_and_another_fault_are_told_apart() -> None:
    full = str(cannot_write("the file x", OSError(errno.ENOSPC, "No space left")))
    assert full == "the file x cannot be written (No space left); free space there or choose another place"
    other = str(cannot_write("the file x", OSError(errno.EACCES, "Permission denied")))
    assert other.endswith("(Permission denied); choose another place")
