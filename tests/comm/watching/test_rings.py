"""Hostile bytes in a ring are a DamagedError that names the file, never another error."""

import random
import struct
import zlib
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import DamagedError, DataError
from shardwise.comm.watching import rings
from shardwise.comm.watching.answers import RankAnswer
from shardwise.comm.watching.recorder import (
    HEADER,
    PART,
    SNAPSHOT_BYTES,
    STRINGS_AT,
    Recorder,
    RingOwner,
    ring_path,
)
from shardwise.comm.watching.rings import (
    _RECORDS_FROM,
    parse_ring,
    read_answer,
    read_ring,
    remove_old,
    silent_seconds,
)
from shardwise.plan.action import F

WHERE = Path("rank_00001.ring")


def written() -> bytes:
    made = Recorder(None, RingOwner(1, 4, "host"))
    group = made.group("ranks 0-3")
    for step in range(20):
        made.action(F(0, step))
        made.wait("all_reduce", "x", made.start(group, "all_reduce", torch.float32, 4, f"tensor {step}"))
        made.waited()
    made.snapshot(RankAnswer(waits="rank 1: all_reduce", waited_s=3.0).model_dump_json().encode())
    return made.data()


WRITTEN = written()
HOT = (*range(HEADER.size + 4), *range(512, 540), *range(STRINGS_AT, STRINGS_AT + 200))
"""Places of bytes that mean something, at the beginning; records follow."""


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def test_a_whole_ring_is_read() -> None:
    found = parse_ring(WRITTEN, WHERE)
    assert len(found.records) == 80 and found.answer is not None and found.answer.waited_s == 3.0
    assert len(parse_ring(WRITTEN, WHERE, last=5).records) == 5


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_damage_or_harmless(seed: int) -> None:
    rng = random.Random(seed)
    strings = STRINGS_AT + 2 * SNAPSHOT_BYTES
    for _ in range(40):
        at = rng.choice(
            [rng.choice(HOT), _RECORDS_FROM + rng.randrange(80 * 64), strings + rng.randrange(300)]
        )
        data = with_bytes(WRITTEN, at, rng.randbytes(rng.choice([1, 2, 8])))
        if rng.random() < 0.3:  # whoever can write the file can write its checksum
            data = with_bytes(data, HEADER.size, zlib.crc32(data[: HEADER.size]).to_bytes(4, "little"))
        try:
            parse_ring(data, WHERE)
        except DamagedError as error:
            assert str(WHERE) in str(error)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a ring"),
        (WRITTEN[:-1], "not a ring"),
        (b"\x80\x04pickle" + WRITTEN[8:], "not a ring"),
        (with_bytes(WRITTEN, 8, struct.pack("<I", 9)), "checksum"),
        (with_bytes(WRITTEN, STRINGS_AT + 2 * SNAPSHOT_BYTES + 2, b"\xff\xff"), "no recorder writes"),
        (with_bytes(WRITTEN, _RECORDS_FROM + 20, b"\xee"), "record 1 contains"),
    ],
)
def test_damage_is_named(data: bytes, said: str) -> None:
    with pytest.raises(DamagedError, match=said):
        parse_ring(data, WHERE)


def test_a_snapshot_that_is_no_answer_is_damage() -> None:
    body = b'{"waited_s": "long"}'
    data = with_bytes(WRITTEN, STRINGS_AT, PART.pack(9, len(body), zlib.crc32(body)) + body)
    with pytest.raises(DamagedError, match="snapshot"):
        parse_ring(data, WHERE)


def test_a_snapshot_cut_by_a_kill_gives_way_to_the_one_before() -> None:
    made = Recorder(None, RingOwner(0, 2, "host"))
    for step in (1, 2):
        made.snapshot(RankAnswer(waited_s=float(step)).model_dump_json().encode())
    data = with_bytes(made.data(), STRINGS_AT + PART.size, b"\0\0\0")  # the place of turn 2
    found = parse_ring(data, WHERE).answer
    assert found is not None and found.waited_s == 1.0


def test_folders_of_jobs_that_were_killed_long_ago_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        Recorder(ring_path(tmp_path / name, 0), RingOwner(0, 1, "host")).beat()
    (tmp_path / "another's").mkdir()
    remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another's", "new", "old"]
    monkeypatch.setattr(rings, "_OLD_S", 0.0)
    remove_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["another's"]
    remove_old(tmp_path / "none")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = ring_path(tmp_path, 0)
    with pytest.raises(DataError, match="cannot be read"):
        read_ring(path)
    assert silent_seconds(path) == 0.0
    path.write_bytes(b"short")
    assert read_answer(path) is None and silent_seconds(path) == 0.0
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(DataError):
        read_ring(path)
