"""Rows on disk: a row that is read is the row that was written last, or an error."""

import errno
import gc
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, DamagedError, TierError
from shardwise.kernels.tables import records
from shardwise.memory import page_reads
from shardwise.memory.direct_io import DirectFile
from shardwise.memory.leftovers import LEFTOVERS
from shardwise.tiers.row_segments import RowSegments
from tests.tiers.segment_faults import HONEST, LYING, campaign, killed_writer, limited

WIDTH, ROWS = 80, 5000
SMALL = {"segment_bytes": 4 * 4096, "block_bytes": 4096}
"""Segments of 176 rows of WIDTH bytes, so that a few thousand rows fill many."""


def segments(folder: Path, width: int = WIDTH, rows: int = ROWS, threads: int = 3) -> RowSegments:
    return RowSegments(folder, "table 'clicks'", width, rows, threads=threads, **SMALL)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[RowSegments]:
    made = segments(tmp_path)
    yield made
    made.close()
    assert os.listdir(tmp_path) == []


def drawn(rows: Tensor, turn: int = 0, width: int = WIDTH) -> Tensor:
    """Lines of rows that differ by row and turn."""
    found = np.random.default_rng(turn).integers(0, 256, (len(rows), width), np.uint8)
    found[:, :8] = rows.numpy().astype(np.int64).view(np.uint8).reshape(-1, 8)
    return torch.from_numpy(found)


def read(made: RowSegments, rows: Tensor) -> Tensor:
    out = torch.zeros(len(rows), made.line_bytes, dtype=torch.uint8)
    made.read(rows, out)
    return out


def without_numba(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "has_numba", lambda: False)
    patch.setattr(page_reads, "has_numba", lambda: False)


def without_direct(patch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    patch.setattr(os, "open", refuse)


@pytest.mark.parametrize(
    ("width", "change"),
    [*((width, None) for width in (2, 80, 81, 272, 1040, 5000)), (81, without_numba), (272, without_direct)],
)
def test_rows_that_are_read_were_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    change: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    if change is not None:
        change(monkeypatch)
    count = min(600, 600_000 // width)
    block = {"segment_bytes": 2**16, "block_bytes": 2**13}
    made = RowSegments(tmp_path, "table 't'", width, ROWS, threads=2, **block)
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:count]
    lines = torch.randint(
        0, 256, (count, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    for begin in range(0, count, 250):
        made.write(rows[begin : begin + 250], lines[begin : begin + 250])
    for some in (
        torch.arange(count),
        torch.arange(count).flip(0)[::7],
        torch.tensor([5, 5, 3]),
        torch.arange(0),
    ):
        assert torch.equal(read(made, rows[some]), lines[some])
    assert made.rows_held() == count
    assert torch.equal(
        made.holds(torch.arange(ROWS)), torch.zeros(ROWS, dtype=torch.bool).scatter(0, rows, True)
    )
    made.close()
    made.close()
    assert os.listdir(tmp_path) == []


def play(made: RowSegments, seed: int, operations: int) -> int:
    """Run drawn writes, reads, removals, compactions and snapshots against a dictionary; return the rows of all."""
    draw, held, done, turn = random.Random(seed), {}, 0, 0
    while done < operations:
        turn += 1
        rows = torch.tensor(draw.sample(range(ROWS), draw.choice((1, 7, 60, 400))))
        what = draw.choices(("write", "read", "remove", "compact", "snapshot"), (5, 5, 1, 2, 0.3))[0]
        if what == "snapshot" and not held:
            continue
        if what == "write":
            lines = drawn(rows, seed * 1_000_003 + turn)
            made.write(rows, lines)
            held.update(zip(rows.tolist(), lines, strict=True))
        elif what == "read":
            known = torch.tensor([row in held for row in rows.tolist()])
            assert torch.equal(made.holds(rows), known)
            rows = rows[known]
            if len(rows):
                assert torch.equal(read(made, rows), torch.stack([held[row] for row in rows.tolist()]))
        elif what == "remove":
            made.remove(rows)
            for row in rows.tolist():
                held.pop(row, None)
        elif what == "compact":
            made.compact(draw.choice((1, 5000, 10**6)))
        else:
            check_snapshot(made, held)
        done += len(rows)
        assert made.figures().rows == made.rows_held() == len(held)
    while made.compact(10**6):
        pass
    assert_little_waste(made)
    check_snapshot(made, held)
    return done


def assert_little_waste(made: RowSegments) -> None:
    figures = made.figures()
    assert figures.disk_bytes <= 2 * figures.live_bytes + 2 * made.shape.segment_bytes


def check_snapshot(made: RowSegments, held: dict[int, Tensor]) -> None:
    """Records are read at their positions when half of their rows have been written again, or removed."""
    snapshot = made.snapshot()
    rows = torch.arange(ROWS)
    positions = snapshot.positions(rows)
    rows = rows[positions >= 0]
    assert rows.tolist() == sorted(held)
    lines = torch.stack([held[row] for row in rows.tolist()])
    made.write(rows[::2], drawn(rows[::2], 7))
    made.remove(rows[1::4])
    assert made.compact(10**6) == 0, "the files of a snapshot stay"
    out = torch.zeros_like(lines)
    snapshot.read(rows, positions[rows], out)
    assert torch.equal(out, lines)
    snapshot.close()
    made.write(rows, lines)


def test_drawn_operations_match_a_dictionary(made: RowSegments) -> None:
    assert play(made, 0, 20_000) >= 20_000
    assert made.figures().bytes_compacted > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_drawn_operations_match_a_dictionary(made: RowSegments, seed: int) -> None:
    assert play(made, seed, 100_000) >= 100_000


def test_reads_run_beside_writes_and_compaction(made: RowSegments) -> None:
    """Each line holds its row and a turn, twice; a reader never sees a turn go back, nor a line of two turns."""
    rows, over = torch.arange(1500), threading.Event()
    turns = np.zeros(1500, np.int64)

    def lines(turn: int, some: Tensor) -> Tensor:
        found = np.zeros((len(some), WIDTH // 8), np.int64)
        found[:, 0], found[:, 1:] = some.numpy(), turn
        return torch.from_numpy(found.view(np.uint8))

    made.write(rows, lines(0, rows))
    errors: list[BaseException] = []

    def look() -> None:
        draw = np.random.default_rng(0)
        try:
            while not over.is_set():
                some = torch.from_numpy(draw.permutation(1500)[:200])
                found = read(made, some).numpy().view(np.int64)
                assert (found[:, 0] == some.numpy()).all()
                assert (found[:, 1:] == found[:, 1:2]).all()
                assert (found[:, 1] >= turns[some]).all()
                turns[some] = found[:, 1]
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    draw = np.random.default_rng(1)
    for turn in range(1, 60):
        some = torch.from_numpy(draw.permutation(1500)[:300])
        made.write(some, lines(turn, some))
        made.compact(20_000)
    over.set()
    reader.join()
    assert not errors, errors
    assert made.figures().bytes_compacted > 0
    assert turns.max() > 0


def test_records_of_a_snapshot_stay(made: RowSegments) -> None:
    """Also those in the block that is not full when the snapshot begins, and on the disk when they are read."""
    rows = torch.arange(1000)
    first = drawn(rows)
    made.write(rows, first)
    with pytest.raises(AssertionError, match="is in no segment"):
        read(made, torch.tensor([1000]))
    snapshot = made.snapshot()
    positions = snapshot.positions(torch.arange(1001))
    assert int(positions[-1]) == -1
    for turn in range(1, 4):
        made.write(rows[:600], drawn(rows[:600], turn))
    made.remove(rows[500:])
    assert made.compact(10**9) == 0, "the files of a snapshot stay"
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    out = torch.zeros_like(first)
    snapshot.read(order, positions[order], out)
    assert torch.equal(out, first[order])
    other = made.snapshot()
    snapshot.close()
    snapshot.close()
    assert made.compact(10**9) == 0, "another snapshot is open"
    held = made.figures().disk_bytes
    other.close()
    made.compact(10**9)
    assert made.figures().disk_bytes < held
    assert torch.equal(read(made, rows[:500]), drawn(rows[:600], 3)[:500])


def damage(path: Path, draw: random.Random) -> str:
    """Change a file as a failing disk would, and return what was done."""
    size = path.stat().st_size
    what = draw.choice(("bit", "bit", "cut", "zeros", "moved"))
    with open(path, "r+b") as file:
        at = draw.randrange(size)
        if what == "cut":
            file.truncate(at)
            return f"cut at {at}"
        if what == "bit":
            file.seek(at)
            byte = file.read(1)[0] ^ (1 << draw.randrange(8))
            file.seek(at)
            file.write(bytes([byte]))
            return f"bit at {at}"
        page = at // 4096 * 4096
        file.seek(draw.randrange(size // 4096) * 4096)
        other = file.read(4096) if what == "moved" else bytes(4096)
        file.seek(page)
        file.write(other)
        return f"{what} at {page}"


def fault(folder: Path, seed: int) -> bool:
    """Damage one file of drawn segments; return whether anybody noticed. Other bytes are an assertion error."""
    draw = random.Random(seed)
    made = segments(folder)
    try:
        rows = torch.arange(1200)
        made.write(rows, drawn(rows))
        some = torch.tensor(draw.sample(range(1200), 500))
        made.write(some, drawn(some, 1))
        held = drawn(rows)
        held[some] = drawn(some, 1)
        done = damage(draw.choice(sorted(folder.glob("*.segment_*"))), draw)
        noticed = False
        for turn in range(12):
            part = torch.tensor(draw.sample(range(1200), 150))
            try:
                if turn == 6:
                    made.remove(rows[part])
                    held[part] = 0
                    made.compact(draw.choice((30_000, 10**7)))
                elif turn == 9:
                    snapshot = made.snapshot()
                    part = part[made.holds(part)]
                    lines = torch.empty(len(part), WIDTH, dtype=torch.uint8)
                    snapshot.read(part, snapshot.positions(part), lines)
                    assert torch.equal(lines, held[part]), done
                    snapshot.close()
                else:
                    part = part[made.holds(part)]
                    assert torch.equal(read(made, part), held[part]), done
            except DamagedError as error:
                noticed = True
                assert "table 'clicks': segment /" in str(error)
                assert "resume from the last checkpoint" in str(error)
        return noticed
    finally:
        made.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_an_error_or_does_not_matter(tmp_path: Path, seed: int) -> None:
    fault(tmp_path, seed)


@pytest.mark.soak
def test_many_damaged_files_are_errors_or_do_not_matter(tmp_path: Path) -> None:
    noticed = sum(fault(tmp_path, seed) for seed in range(8, 400))
    assert noticed > 200, "most faults hit a row that is read"


@pytest.mark.parametrize("seed", range(4))
def test_a_failing_disk_gives_right_bytes_or_an_error(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, seed)


@pytest.mark.soak
def test_many_failing_disks_give_right_bytes_or_errors(tmp_path: Path) -> None:
    happened = sum((campaign(tmp_path, seed) for seed in range(4, 320)), Counter[str]())
    assert min(happened[each] for each in (*HONEST, *LYING, "damaged", "failed")) > 20, happened


@pytest.mark.parametrize("seed", range(2))
def test_files_of_a_killed_writer_go(tmp_path: Path, seed: int) -> None:
    killed_writer(tmp_path, seed)


@pytest.mark.soak
def test_files_of_many_killed_writers_go(tmp_path: Path) -> None:
    for seed in range(2, 60):
        killed_writer(tmp_path, seed)


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    limited(tmp_path, 0)


def test_a_missing_write_is_noticed(made: RowSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that confirms a write and does not do it leaves zeros, or the record of another time."""
    rows = torch.arange(600)
    monkeypatch.setattr(DirectFile, "write", lambda self, data, offset, spare: None)
    made.write(rows, drawn(rows))
    with pytest.raises(DamagedError, match="segment .*shardwise.rank0.segment_1, row .* bytes are not those"):
        read(made, rows)


def test_a_short_read_names_the_segment(made: RowSegments, tmp_path: Path) -> None:
    rows = torch.arange(600)
    made.write(rows, drawn(rows))
    os.truncate(tmp_path / "shardwise.rank0.segment_2", 4096)
    with pytest.raises(DamagedError, match="table 'clicks': segment .*segment_2.*cut short"):
        read(made, rows)


def test_a_failing_disk_is_not_called_damage(made: RowSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(600)
    made.write(rows, drawn(rows))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "_read", fail)
        patch.setattr(page_reads, "has_numba", lambda: False)
        with pytest.raises(
            TierError, match="segment_.*: read of .*Input/output error; look to the disk"
        ) as found:
            read(made, rows)
    assert not isinstance(found.value, DamagedError)
    assert torch.equal(read(made, rows), drawn(rows))


@pytest.mark.parametrize("where", ["file", "block"])
@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EMFILE])
def test_nothing_is_lost_on_a_full_disk(
    made: RowSegments, monkeypatch: pytest.MonkeyPatch, where: str, reason: int
) -> None:
    rows = torch.arange(ROWS)
    old, new = drawn(rows), drawn(rows, 1)
    made.write(rows[:1000], old[:1000])

    def full(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "__init__" if where == "file" else "write", full)
        for _ in range(2):
            with pytest.raises(TierError, match=f"{os.strerror(reason)}.*no row is lost"):
                made.write(rows, new)
            found = read(made, rows[:1000])
            is_new = (found == new[:1000]).all(1)
            assert (is_new | (found == old[:1000]).all(1)).all(), "a row is as it was, or as it was given"
    made.write(rows, new)
    assert torch.equal(read(made, rows), new)


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    """Files stay open, so rows that were written can be read; a further segment cannot be made, and that is said."""
    folder = tmp_path / "folder"
    folder.mkdir()
    made = segments(folder)
    rows = torch.arange(ROWS)
    made.write(rows[:1000], drawn(rows)[:1000])
    shutil.rmtree(folder)
    with pytest.raises(
        TierError, match="cannot hold a further segment.*No such file or directory.*no row is lost"
    ):
        made.write(rows, drawn(rows))
    assert torch.equal(read(made, rows[:1000]), drawn(rows)[:1000])
    made.close()


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="tables.defaults.tiers.disk: .*/none does not exist; give a folder"
    ):
        segments(tmp_path / "none")
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="tables.defaults.tiers.disk: no files can be made there"):
            segments(tmp_path)


def test_a_closed_one_refuses(tmp_path: Path) -> None:
    made = segments(tmp_path)
    made.close()
    for call in (
        lambda: made.write(torch.arange(1), drawn(torch.arange(1))),
        lambda: read(made, torch.arange(1)),
        lambda: made.compact(1),
    ):
        with pytest.raises(TierError, match="table 'clicks': its rows on disk were closed"):
            call()


def test_files_of_dropped_segments_go(tmp_path: Path) -> None:
    made = segments(tmp_path)
    made.write(torch.arange(600), drawn(torch.arange(600)))
    del made
    gc.collect()
    LEFTOVERS.end_dropped()
    assert os.listdir(tmp_path) == []
