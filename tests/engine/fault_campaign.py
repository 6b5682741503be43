"""Lives of engines with state on a disk, and what strikes them: every place ends with a named error, or not at all.

    life       build, load where there is something, four steps: train, leave and come back, save
    place      (row, seed): what strikes, on which rank, in which part of which step, at which of its requests
    holds      what was struck ends by itself within a step or two, and says which file; losses until then are those of
               a life that nothing struck. New processes resume from the last checkpoint with the other losses; weights,
               masters and moments at the end are the same to the bit, and no file is left

    python -m tests.engine.fault_campaign OUT [--only ROW] [--seeds N]

writes a line a place into OUT and leaves out those that are there, so that it goes on where it was stopped.
"""

import argparse
import errno
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardwise
from shardwise.base.errors import RankError
from shardwise.checkpoint.files import FileSystem
from shardwise.comm.policy import CommPolicy
from shardwise.comm.world import World, join
from shardwise.memory.direct_io import Bytes, DirectFile
from tests.accelerator import pretend
from tests.accelerator.crew import Crew
from tests.engine.test_offload import Case, batches, gpt, state_of

STEPS, HALF = 4, 2
SEEDS = 26
"""Places of a row."""
PATIENCE_S = 60


class Row(NamedTuple):
    """How an engine is built, beside its folder."""

    ranks: int
    case: Case
    offload: dict[str, Any] = {}
    config: dict[str, Any] = {}
    device: bool = False
    """Whether ranks have a pretended accelerator."""
    leaves: bool = False
    """State leaves between steps, to the same folder."""
    on_meta: bool = False
    on_disk: bool = True


ROWS = {
    "one rank": Row(1, Case(fraction=0.5, buffers=2)),
    "weights too": Row(1, Case(parameters="disk", precision="bf16", accumulation=2)),
    "stage 3, weights too": Row(2, Case(3, parameters="disk", precision="bf16", prefetch=1 << 20)),
    "stage 2, microbatches": Row(2, Case(2, accumulation=2, step="at_end")),
    "moments in 16 bits": Row(2, Case(3, parameters="disk"), {"state": "bf16"}),
    "moments in 8 bits": Row(1, Case(precision="bf16"), {"state": "int8"}),
    "one step late": Row(2, Case(2, precision="bf16", step="delayed")),
    "HSDP": Row(4, Case(3, replicate=2, accumulation=2)),
    "built on meta": Row(1, Case(parameters="disk"), on_meta=True),
    "state that leaves": Row(2, Case(3, precision="bf16"), leaves=True, on_disk=False),
    "activations": Row(1, Case(parameters="disk"), {"activations": "host"}, device=True),
    "a device, 2 ranks": Row(2, Case(3, parameters="disk", precision="bf16"), device=True),
}  # fmt: skip

READS = ("flip", "cut", "EIO read", "short read")
WRITES = ("EIO write", "ENOSPC write", "short write", "lost write", "torn write")
SAVES = ("ENOSPC save", "EIO save")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
HANDS = ("deleted", "replaced", "emptied")
STRIKES = READS + WRITES + SAVES + SIGNALS + HANDS


class Place(NamedTuple):
    """Where something strikes."""

    strike: str
    rank: int
    part: str
    """``build``, ``load``, ``train``, ``away`` or ``save``."""
    step: int
    """0 for ``build`` and ``load``."""
    request: int
    """Which of the rank's requests from there on, of those that such a strike meets."""
    seed: int

    @property
    def meets(self) -> str:
        """Kind of request: ``read``, ``write`` or ``save``."""
        if self.strike in READS:
            return "read"
        if self.strike in WRITES:
            return "write"
        if self.strike in SAVES or self.part == "save" and self.seed % 2:
            return "save"
        return "write" if self.part == "build" or self.seed % 3 == 0 else "read"


def place_of(row: Row, seed: int) -> Place:
    """Strikes take turns, the rest is drawn."""
    draw = random.Random(f"{row.ranks}{row.case}{seed}")
    strike = STRIKES[seed % len(STRIKES)]
    parts = ["train", "train", "save"]
    if row.leaves:
        parts = ["away", "away", "save"]
    elif strike not in SAVES:
        parts += ["build", "load"] if strike not in READS else ["load"]
    part = "save" if strike in SAVES else draw.choice(parts)
    step = draw.randrange(STEPS - 1) if part not in ("build", "load") else 0
    return Place(strike, draw.randrange(row.ranks), part, step, draw.choice((0, 1, 2, 3, 5, 8, 13)), seed)


class Striker:
    """In the process of a rank: counts requests, and strikes once."""

    def __init__(self, place: Place, folder: Path):
        self.place = place
        self.folder = folder
        self.is_armed = False
        self.where = ("build", 0)
        self._left = place.request
        self._lock = threading.Lock()
        self._written: set[Path] = set()

    def at(self, part: str, step: int) -> None:
        """The life has come there."""
        self.where = (part, step)
        begun = step > self.place.step or (part, step) == (self.place.part, self.place.step)
        self.is_armed = self.is_armed or begun

    def _fires(self, kind: str, path: Path) -> bool:
        with self._lock:
            if kind == "write":
                self._written.add(path)
            if not self.is_armed or kind != self.place.meets:
                return False
            if kind != "save" and f".rank{self.place.rank}" not in path.name:
                return False
            if kind == "read" and path not in self._written:  # a new file's first read has nobody's bytes
                return False
            self._left -= 1
            return self._left == -1

    def _note(self, path: Path) -> None:
        note = {"path": str(path), "part": self.where[0], "step": self.where[1]}
        (self.folder / "struck").write_text(json.dumps(note))

    def _by_hand(self, path: Path) -> None:
        """What needs no wrong answer of the disk."""
        strike = self.place.strike
        if strike in SIGNALS:
            os.kill(os.getpid(), getattr(signal, strike))
            time.sleep(0.05)
        elif strike == "emptied":
            for each in path.parent.iterdir():
                each.unlink(missing_ok=True)
        elif strike in HANDS:
            path.unlink()
            if strike == "replaced":
                path.write_bytes(b"somebody else's")

    def install(self) -> None:
        """For the rest of this process."""
        read, write, before = DirectFile._read, DirectFile._write, FileSystem.before
        first = DirectFile._try_direct
        strike, draw = self.place.strike, random.Random(self.place.seed)

        def reads(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
            if not self._fires("read", file.path):
                return read(file, parts, offset)
            self._note(file.path)
            size = sum(part.nbytes for part in parts)
            if strike == "EIO read":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if strike == "short read":
                return 0
            if strike == "cut":
                os.truncate(file.path, offset)
            elif strike == "flip":
                # A page's first bytes are some owner's; behind its last one the padding begins.
                with open(file.path, "r+b") as opened:
                    opened.seek(offset + draw.randrange(size // 4096) * 4096)
                    found = opened.read(1)[0]
                    opened.seek(-1, 1)
                    opened.write(bytes([found ^ 1 << draw.randrange(8)]))
            else:
                self._by_hand(file.path)
            return read(file, parts, offset)

        def writes(file: DirectFile, parts: Sequence[Bytes], offset: int) -> int:
            if not self._fires("write", file.path):
                return write(file, parts, offset)
            self._note(file.path)
            size = sum(part.nbytes for part in parts)
            if strike in ("EIO write", "ENOSPC write"):
                number = getattr(errno, strike.split()[0])
                raise OSError(number, os.strerror(number))
            if strike == "short write":
                return write(file, [parts[0][:4096]], offset) if size > 4096 else 0
            if strike == "lost write":
                return size
            if strike == "torn write":
                torn = parts[0][: parts[0].nbytes // 8192 * 4096]
                if torn.nbytes:
                    write(file, [torn], offset)
                return size
            self._by_hand(file.path)
            return write(file, parts, offset)

        def begins(file: DirectFile) -> None:
            self._written.discard(file.path)
            first(file)

        def saves(files: FileSystem, operation: str, path: Path) -> None:
            before(files, operation, path)
            if self._fires("save", path):
                self._note(path)
                if strike in SAVES:
                    number = getattr(errno, strike.split()[0])
                    raise OSError(number, os.strerror(number), str(path))
                if strike in SIGNALS:
                    self._by_hand(path)
                else:  # what a hand does to state on the disk, while a checkpoint is written
                    self._by_hand(next(iter(sorted(self.folder.glob("disk/shardwise.rank*.master")))))

        DirectFile._read, DirectFile._write, FileSystem.before = reads, writes, saves  # type: ignore[method-assign]
        DirectFile._try_direct = begins  # type: ignore[method-assign]


# A life, in the processes of its ranks -----------------------------------------------------------------------------


def config_of(row: Row, folder: Path) -> dict[str, Any]:
    config = row.case.config(str(folder / "disk") if row.on_disk else None)
    config["offload"] = config.get("offload", {}) | row.offload
    return config | row.config


def model_of(row: Row) -> torch.nn.Module:
    with torch.device("meta" if row.on_meta else "cpu"):
        return gpt()


def live(row: Row, folder: Path, place: Place | None, steps: int) -> str:
    """Returns what the state of the end comes to. Ranks with a pretended device are threads of one process."""
    if not row.device:
        return life(join(quiet=True, policy=CommPolicy(join_timeout_s=30)), row, folder, place, steps)
    device = pretend.register()
    with pretend.Bench():
        return str(Crew(row.ranks, device).run(life, row, folder, place, steps)[0])


def life(world: World, row: Row, folder: Path, place: Place | None, steps: int) -> str:
    """Of one rank; rank 0 writes a line a step."""
    striker = None
    if place is not None and place.rank == world.rank:
        striker = Striker(place, folder)
        striker.install()

    def at(part: str, step: int = 0) -> None:
        if striker is not None:
            striker.at(part, step)

    at("build")
    engine = shardwise.initialize(model_of(row), config_of(row, folder), world=world)
    if (folder / "steps").exists():
        at("load")
        engine.load(folder / "steps")
    for step in range(engine.step_count, steps):
        at("train", step)
        result = engine.train_step(batches(engine._parts.dp.index, step, row.case.accumulation))
        if world.rank == 0:
            with open(folder / "losses", "a") as lines:
                lines.write(f"{step} {result.loss.hex()} {result.grad_norm.hex()}\n")
        if row.leaves:
            at("away", step)
            engine.offload_states("disk", folder / "disk")
            engine.reload_states()
        at("save", step)
        engine.save(folder / "steps")
    at("end", STEPS)
    found = hashlib.sha256()
    for name, tensor in sorted(state_of(engine).items()):
        found.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    engine.close(whole=False)
    return found.hexdigest()


def lived(row: Row, folder: Path, place: Place | None = None, steps: int = STEPS) -> tuple[str | None, str]:
    """(the state of its end, what it failed with)."""
    (folder / "disk").mkdir(parents=True, exist_ok=True)
    shardwise.initialize  # noqa: B018  imported once, and not in every rank, as what torch's optimizers import
    importlib.import_module("torch._dynamo")

    def late(*_: Any) -> None:
        raise TimeoutError(f"it did not end within {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_S)
    try:
        processes = 1 if row.device else row.ranks
        return shardwise.launch(live, row, folder, place, steps, ranks=processes), ""
    except RankError as error:
        return None, str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def losses_of(folder: Path) -> dict[int, str]:
    lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    return {int(line.split()[0]): line for line in lines}


class Untouched(NamedTuple):
    """What a life comes to that nothing strikes."""

    losses: dict[int, str]
    end: str
    folder: Path


@cache
def untouched(name: str, home: Path, steps: int = STEPS) -> Untouched:
    folder = home / f"{name} of {steps} steps"
    end, said = lived(ROWS[name], folder, steps=steps)
    assert end is not None, f"{name}: {said}"
    assert left_in(folder) == []
    return Untouched(losses_of(folder), end, folder)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "disk").iterdir() if path.name != "shardwise.lock")


def is_harmless(row: Row, place: Place, path: str) -> bool:
    """What nobody reads may be lost; a step that is committed stays so, whatever happens to those that it replaces; a
    save behind training may fail, and the next one tries again (``checkpoint.tolerate_failures``)."""
    is_told = place.strike in SAVES and (".tmp-" not in path or not row.on_disk)
    return place.strike in (*HANDS, "lost write", "torn write") or is_told


def one_place(name: str, seed: int, home: Path) -> dict[str, Any]:
    """What happened. Errors: AssertionError where anything but what is promised did."""
    row, plain = ROWS[name], untouched(name, home)
    place = place_of(row, seed)
    folder = home / f"{name} {seed}"
    if place.part == "load" or place.part == "build" and seed % 2:
        shutil.copytree(untouched(name, home, HALF).folder, folder)
    try:
        before, end, said, struck = losses_of(folder), None, "", folder / "struck"
        end, said = lived(row, folder, place)
        found = {"row": name, "seed": seed, **place._asdict(), "struck": struck.exists(), "said": said}
        for step, line in losses_of(folder).items():
            assert line == plain.losses[step], f"other numbers in step {step}"
        if struck.exists():
            found |= {"at": json.loads(struck.read_text())}
        if end is not None:
            found["ended"] = True
            assert end == plain.end, "it ended with other numbers"
            assert not struck.exists() or is_harmless(row, place, found["at"]["path"]), "nobody has seen it"
        else:
            assert struck.exists(), f"nothing struck it: {said}"
            assert place.strike not in HANDS, f"it failed by what does not harm it: {said}"
            where = found["at"]
            last = max(losses_of(folder), default=0)
            assert last <= max(where["step"], len(before)) + 1, f"it went on to step {last} after {where}"
            aborts = (
                row.device and "SIGABRT" in said
            )  # torch, of any error in a backward pass of such a device
            if place.strike not in SIGNALS and not aborts:
                assert where["path"] in said, f"{where['path']} is not named: {said}"
                assert "Traceback" not in said, f"no answer but a defect: {said}"
        if end is None:
            end, said = lived(row, folder)
            assert end == plain.end, f"resumed it ended with other numbers: {said}"
            for step, line in losses_of(folder).items():
                assert line == plain.losses[step], f"other numbers in step {step} after it was resumed"
            assert len(losses_of(folder)) == STEPS
        left = left_in(folder)
        assert not left or place.strike == "replaced", f"left behind: {left}"
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    done = {(each["row"], each["seed"]) for each in map(json.loads, lines)}
    torch.set_num_threads(1)

    home, failed = Path(tempfile.mkdtemp(prefix="campaign_")), 0
    for seed in range(given.first, given.first + given.seeds):
        for name in ROWS:
            if given.only not in name or (name, seed) in done:
                continue
            began = time.monotonic()
            try:
                found = one_place(name, seed, home) | {"passed": True}
            except (AssertionError, TimeoutError):
                place = place_of(ROWS[name], seed)
                found = {"row": name, "seed": seed, **place._asdict(), "passed": False}
                found["why"] = traceback.format_exc()
                failed += 1
            found["seconds"] = round(time.monotonic() - began, 2)
            with open(given.out, "a") as out:
                out.write(json.dumps(found) + "\n")
    shutil.rmtree(home, ignore_errors=True)
    counts: dict[str, Counter[str]] = {}
    for each in map(json.loads, given.out.read_text().splitlines()):
        row = counts.setdefault(each["row"], Counter())
        row["places"] += bool(each.get("struck", True))
        row["passed"] += bool(each["passed"] and each["struck"])
        row["not met"] += not each.get("struck", True)
    for name, row in counts.items():
        print(f"| {name} | {row['places']} | {row['passed']} | {row['not met']} |")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
