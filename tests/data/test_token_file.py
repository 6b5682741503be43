"""Token files: every byte back, in little memory, and no damaged byte read."""

import errno
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.data.token_file import TokenFile, TokenWriter, dtype_for


def _write(path: Path, documents: list[Any], vocab_size: int = 256) -> TokenFile:
    with TokenWriter(path, "bytes", vocab_size) as writer:
        for document in documents:
            writer.append(np.asarray(document))
            writer.end_document()
    return TokenFile(path)


@pytest.mark.parametrize("vocab_size", [2, 256, 257, 65536, 65537, 1 << 32])
def test_round_trip_in_the_smallest_dtype(tmp_path: Path, vocab_size: int) -> None:
    tokens = np.random.default_rng(0).integers(0, vocab_size, 100_003)
    file = _write(tmp_path / "x.tokens", [tokens[:10], tokens[10:70_000], tokens[70_000:]], vocab_size)
    assert np.array_equal(file.read(0, len(file)), tokens)
    assert np.array_equal(file.read(65_000, 66_000), tokens[65_000:66_000])
    assert file.ends.tolist() == [10, 70_000, 100_003]
    assert file.dtype.itemsize == {"u8": 1, "u16": 2, "u32": 4}[dtype_for(vocab_size)]
    assert (file.vocab_size, file.tokenizer_name) == (vocab_size, "bytes")
    file.check()


def test_pieces_of_any_size_give_the_same_file(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 256, 200_000)
    whole = _write(tmp_path / "whole.tokens", [tokens])
    with TokenWriter(tmp_path / "pieces.tokens", "bytes", 256) as writer:
        for piece in np.split(tokens, [1, 2, 3, 65_536, 65_537, 190_000]):
            writer.append(piece)
    pieces = TokenFile(tmp_path / "pieces.tokens")
    assert pieces.path.read_bytes() == whole.path.read_bytes()
    assert pieces.fingerprint() == whole.fingerprint()


def test_documents_without_tokens_are_not_counted(tmp_path: Path) -> None:
    assert _write(tmp_path / "x.tokens", [[1, 2], [], [3]]).ends.tolist() == [2, 3]


def test_fingerprint_tells_contents_apart(tmp_path: Path) -> None:
    prints = {
        _write(tmp_path / f"{i}.tokens", documents).fingerprint()
        for i, documents in enumerate([[[1, 2, 3]], [[1, 2, 4]], [[1, 2], [3]], [[1, 2, 3, 0]]])
    }
    assert len(prints) == 4


@pytest.mark.parametrize("token", [-1, 256])
def test_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=f"token {token} is outside the vocabulary of 256"):
        _write(tmp_path / "x.tokens", [[1, token]])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TokenWriter(tmp_path / "x.tokens", "bytes", 256) as writer:
        writer.append(np.arange(200))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_stays_whole_until_the_new_one_is(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    _write(path, [[1, 2, 3]])
    with TokenWriter(path, "bytes", 256) as writer:
        writer.append(np.asarray([4, 5]))
        assert TokenFile(path).read(0, 3).tolist() == [1, 2, 3]
    assert TokenFile(path).read(0, 2).tolist() == [4, 5]


def test_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError, match=r"x\.tokens cannot be written \(No space left on device\); free space"
    ):
        _write(tmp_path / "x.tokens", [[1]])
    assert list(tmp_path.iterdir()) == []


def test_no_tokens_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokens"):
        _write(tmp_path / "x.tokens", [])
    assert list(tmp_path.iterdir()) == []


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    _write(path, [np.arange(256)] * 3)
    content = path.read_bytes()
    for size in [*range(0, 200, 7), 4095, 4096, 4097, len(content) - 9, len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"x\.tokens"):
            TokenFile(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(DataError, match="longer than it was written"):
        TokenFile(path)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    _write(path, [np.arange(256)] * 600, vocab_size=257)
    content = path.read_bytes()
    header_bytes = 20 + int.from_bytes(content[12:16], "little")
    draw = random.Random(0)
    where = [*draw.sample(range(header_bytes), 60), *draw.sample(range(4096, len(content)), 60)]
    for place in where:
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.tokens"):
            TokenFile(path).check()


def test_damage_is_found_when_its_block_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    _write(path, [np.arange(256)] * 1024)
    content = bytearray(path.read_bytes())
    content[4096 + 70_000] ^= 1
    path.write_bytes(content)
    file = TokenFile(path)
    file.read(0, 65_536)
    with pytest.raises(
        DataError, match=r"x\.tokens is damaged.*bytes 69632 to 135167 differs.*shardwise convert"
    ):
        file.read(65_536, 65_537)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    with pytest.raises(DataError, match="cannot be read"):
        TokenFile(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        TokenFile(path)
    path.write_text("plain text " * 1000)
    with pytest.raises(DataError, match="is no token file"):
        TokenFile(path)
    _write(path, [[1]])
    content = bytearray(path.read_bytes())
    content[8] = 9
    path.write_bytes(content)
    with pytest.raises(DataError, match="has version 9, this release reads version 1"):
        TokenFile(path)


def test_read_outside_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path / "x.tokens", [[1, 2, 3]])
    with pytest.raises(IndexError, match="holds 3"):
        file.read(2, 4)


def test_a_worker_process_maps_the_file_itself(tmp_path: Path) -> None:
    file = _write(tmp_path / "x.tokens", [np.arange(256)] * 4000)
    sent = pickle.dumps(file)
    assert len(sent) < 1000
    assert pickle.loads(sent).read(5, 8).tolist() == [5, 6, 7]
