"""Lives of engines whose tables lie in tiers, and what strikes them: no run ends with other numbers.

    life       build, load where there is something, six steps, each with a save
    place      (row, seed): what strikes, on which rank, in which part of which step, at which of its requests
    holds      losses until then are those of tables that fit. What was struck ends by itself, and all ranks say one
               sentence, which names the folder; or it ends with the bits of tables that fit, because no row needed what
               was struck. New processes resume from the last checkpoint with the other losses and the same rows

    python -m tests.engine.tiers_campaign OUT [--seeds N] [--first N]

prints a line a place into OUT.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardwise
from shardwise.base.errors import RankError, ShardwiseError
from shardwise.comm.policy import CommPolicy
from shardwise.comm.world import World, join
from tests.engine.fault_campaign import SIGNALS, Place, Striker
from tests.engine.tiers_net import build, small_segments, state_of, train
from tests.ranks import PRELOADED

STEPS = 6
PATIENCE_S = 90
SAVES = ("ENOSPC save", "EIO save")
TOLD = ("EIO read", "short read", "EIO write", "ENOSPC write", "short write", "limited")
"""Strikes that the system reports to the rank."""
SILENT = ("flip", "cut", "lost write", "torn write", "deleted", "emptied", "vanished")
STRIKES = TOLD + SILENT + SAVES + SIGNALS


class Row(NamedTuple):
    """How the tables lie."""

    ranks: int
    placement: str


ROWS = (Row(1, "auto"), Row(2, "row"), Row(2, "data_parallel"), Row(2, "column"), Row(2, "table"))


class TierStriker(Striker):
    """A striker of the files of rows."""

    def _by_hand(self, path: Path) -> None:
        if self.place.strike == "vanished":
            shutil.rmtree(self.folder / "disk", ignore_errors=True)
        elif self.place.strike == "limited":
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        else:
            super()._by_hand(path)


def place_of(seed: int) -> tuple[Row, Place]:
    """Strikes and rows take turns, the rest is drawn."""
    row, strike = ROWS[seed % len(ROWS)], STRIKES[seed % len(STRIKES)]
    draw = random.Random(f"tiers {seed}")
    part = draw.choice(("train", "train", "save"))
    number = seed
    if strike in SAVES:
        part = "save"
    elif part == "save" and strike not in SIGNALS:
        number += number % 2  # only what strikes a save itself meets requests of the checkpoint's files
    return row, Place(
        strike, draw.randrange(row.ranks), part, draw.randrange(1, 5), draw.choice((0, 1, 2, 5)), number
    )


def live(row: Row, folder: Path, place: Place | None) -> str:
    """Return a digest of this rank's state at the end."""
    world = join(quiet=True, policy=CommPolicy(join_timeout_s=30))
    with small_segments():
        try:
            return life(world, row, folder, place)
        except ShardwiseError as error:
            (folder / f"said {world.rank}").write_text(f"{type(error).__name__} {error}")
            raise


def life(world: World, row: Row, folder: Path, place: Place | None) -> str:
    """Train, and save each step; rank 0 writes a line a step."""
    striker = None
    if place is not None and place.rank == world.rank:
        striker = TierStriker(place, folder)
        striker.install()
    disk = folder / "disk"
    # A save that fails ends the life: what is read at the end is read by each rank alone, and no rank tells the others.
    told = {"tolerate_failures": 0}
    engine = build(world, row.placement, disk if disk.exists() else None, checkpoint=told)
    if (folder / "steps").exists():
        engine.load(folder / "steps")
    for step in range(engine.step_count, STEPS):
        if striker is not None:
            striker.at("train", step)
        loss = train(engine, step)
        if world.rank == 0:
            with open(folder / "losses", "a") as lines:
                lines.write(f"{step} {loss.hex()}\n")
        if striker is not None:
            striker.at("save", step)
        engine.save(folder / "steps")
    found = hashlib.sha256()
    for name, tensor in sorted(state_of(engine).items()):
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    (folder / f"end {world.rank}").write_text(found.hexdigest())
    engine.close(whole=False)
    return found.hexdigest()


class Ended(NamedTuple):
    """How a life ended."""

    digests: list[str]
    """Digests of the state by rank; empty if the life failed."""
    said: str
    """The error of the job."""
    sentences: dict[int, str]
    """The error of each rank that raised one of the package."""


def lived(row: Row, folder: Path, place: Place | None = None) -> Ended:
    """Run a life in processes of its own."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it did not end within {PATIENCE_S} s")

    for each in (*folder.glob("said *"), *folder.glob("end *")):
        each.unlink()
    before, said = signal.signal(signal.SIGALRM, late), ""
    signal.alarm(PATIENCE_S)
    try:
        shardwise.launch(live, row, folder, place, ranks=row.ranks)
    except RankError as error:
        said = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    sentences = {int(each.name.split()[1]): each.read_text() for each in folder.glob("said *")}
    digests = [] if said else [(folder / f"end {rank}").read_text() for rank in range(row.ranks)]
    return Ended(digests, said, sentences)


def losses_of(folder: Path) -> dict[int, str]:
    """Losses by step, of the last life that had the step."""
    lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    return {int(line.split()[0]): line for line in lines}


@cache
def untouched(row: Row, home: Path) -> tuple[dict[int, str], list[str]]:
    """Losses and digests of tables that fit."""
    folder = home / f"plain {row.ranks} {row.placement}"
    folder.mkdir()
    ended = lived(row, folder)
    assert ended.digests, ended.said
    return losses_of(folder), ended.digests


def one_place(seed: int, home: Path) -> dict[str, Any]:
    """What happened at one place. Raises AssertionError where anything but what is promised did."""
    row, place = place_of(seed)
    losses, digests = untouched(row, home)
    folder = home / f"life {seed}"
    (folder / "disk").mkdir(parents=True)
    try:
        ended = lived(row, folder, place)
        struck = (folder / "struck").exists()
        found = {
            "seed": seed,
            **row._asdict(),
            **place._asdict(),
            "struck": struck,
            "said": ended.said[:500],
        }
        for step, line in losses_of(folder).items():
            assert line == losses[step], f"other numbers in step {step}"
        if ended.digests:
            assert ended.digests == digests, "it ended with other numbers"
            return found | {"ended": True}
        assert struck, f"nothing struck it: {ended.said}"
        if place.strike not in SIGNALS:
            assert "Traceback" not in ended.said, f"no answer but a defect: {ended.said}"
            assert len(ended.sentences) == row.ranks, (
                f"ranks {sorted(ended.sentences)} have an error: {ended.said}"
            )
            assert len(set(ended.sentences.values())) == 1, f"several sentences: {ended.sentences}"
            said = ended.sentences[0]
            assert str(folder) in said, f"no file is named: {said}"
        (folder / "disk").mkdir(exist_ok=True)
        again = lived(row, folder)
        assert again.digests == digests, f"resumed it ended with other numbers: {again.said}"
        for step, line in losses_of(folder).items():
            assert line == losses[step], f"other numbers in step {step} after it was resumed"
        assert len(losses_of(folder)) == STEPS
        left = sorted(each.name for each in (folder / "disk").iterdir() if each.name != "shardwise.lock")
        assert not left, f"left behind: {left}"
        return found | {"ended": False}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=120)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in PRELOADED:  # a life is a fork of this process, and would import them for three seconds
        importlib.import_module(name)
    home, failed = Path(tempfile.mkdtemp(prefix="tiers_campaign_")), 0
    counts: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.seeds):
        began = time.monotonic()
        try:
            found = one_place(seed, home) | {"passed": True}
            counts["met" if found["struck"] else "not met"] += 1
            counts["ended" if found["ended"] else "failed and resumed"] += found["struck"]
        except (AssertionError, TimeoutError):
            row, place = place_of(seed)
            found = {"seed": seed, **row._asdict(), **place._asdict(), "passed": False}
            found["why"] = traceback.format_exc()
            failed += 1
        found["seconds"] = round(time.monotonic() - began, 2)
        with open(given.out, "a") as out:
            out.write(json.dumps(found) + "\n")
    shutil.rmtree(home, ignore_errors=True)
    print(f"{given.seeds} places, {failed} failed: {dict(counts)}", os.linesep, sep="")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
