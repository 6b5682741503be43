"""One damaged or hostile file, read in a process of its own that may take little memory and little processor time.

    kind = Kind("vectors", make, read, damage)
    for case in kind.cases(100): ...                  # the same cases in every run
    verdict = trial(kind, case, folder)               # what the child did

What must come out of each: an answer (one of our errors, one printable sentence), or the numbers of the good file.
Never a traceback, other numbers, 300 MB or 5 seconds of processor time.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.base.errors import ShardwiseError
from shardwise.base.words import printable

CPU_SECONDS = 5.0
_HANGS_SECONDS = 120.0
"""Of the clock: for what waits instead of working."""
GROWTH_BYTES = 300 * 2**20
_ADDRESS_SPACE_BYTES = 3 * 2**30
"""Room beyond what the process has: whoever asks for more is refused by the system, which is a traceback."""
_ANSWER_CHARACTERS = 4000
_SPECIAL_FILES = 4


class Case(NamedTuple):
    """One way to damage a file."""

    name: str
    damage: Callable[[Path], None]
    """Changes the good file, or folder, in place."""
    may_differ: bool = False
    """It makes another lawful file: what is read may be other numbers, if it is read at all."""


class Kind(NamedTuple):
    """One kind of file."""

    name: str
    make: Callable[[Path], Path]
    """Writes a good one into an empty folder; returns what ``damage`` and ``read`` are given."""
    read: Callable[[Path], Any]
    """Reads it as a user's call would; what it returns stands for its numbers, as anything that has a repr."""
    cases: Callable[[int], Iterable[Case]]
    """At least about so many."""


class Verdict(NamedTuple):
    """What became of one case."""

    outcome: str
    """``same``, ``other``, ``answer``, ``traceback``, ``killed``, ``slow`` or ``large``."""
    said: str
    cpu_seconds: float
    growth_bytes: int

    @property
    def is_bad(self) -> bool:
        return self.outcome not in ("same", "answer")


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _child(kind: Kind, place: Path, sink: int) -> None:
    """Read, and tell how it went; never returns."""
    # After the fork: of mapped files a child has no pages yet.
    before_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    os.close(1)
    os.open(os.devnull, os.O_WRONLY)
    limit = _address_space_bytes() + _ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(4 * CPU_SECONDS), int(4 * CPU_SECONDS)))
    try:
        told = ["read", hashlib.sha256(repr(kind.read(place)).encode("utf-8", "replace")).hexdigest()]
    except ShardwiseError as error:
        said = str(error)
        is_fit = said and len(said) <= _ANSWER_CHARACTERS
        told = ["answer" if is_fit else "traceback", printable(said) or "an empty answer"]
    except BaseException:
        told = ["traceback", traceback.format_exc()[-4000:]]
    used = resource.getrusage(resource.RUSAGE_SELF)
    grown_bytes = max(0, 1024 * used.ru_maxrss - before_bytes)
    os.write(sink, json.dumps([*told, used.ru_utime + used.ru_stime, grown_bytes]).encode())
    os._exit(0)


def _in_child(kind: Kind, place: Path) -> Verdict:
    """Fork, read there, and say what became of it; the outcome ``read`` comes with the sum of what was read."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        _child(kind, place, sink)
    os.close(sink)
    until = time.monotonic() + _HANGS_SECONDS
    done = 0
    while not done and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(source, "rb") as stream:
        text = stream.read()
    if not done or not text:
        return Verdict("killed" if done else "slow", f"status {status}", 0, 0)
    return Verdict(*json.loads(text))


def _replaced(inside: Path, way: str, root: Path) -> None:
    """Put something else in the place of a file."""
    path = root / inside
    path.unlink()
    if way == "fifo":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    elif way == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to("/dev/zero" if way == "zero" else path.name)


class Trials:
    """The trials of one kind: the good file is made once and copied for every case."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        (folder / "good").mkdir(parents=True)
        self._inside = kind.make(folder / "good").relative_to(folder / "good")
        good = _in_child(kind, folder / "good" / self._inside)
        assert good.outcome == "read", f"{kind.name}: the good file is not read: {good}"
        self._expected = good.said
        self._number = 0

    def special_cases(self) -> list[Case]:
        """Each file of the good one as something that is no regular file, or that has no end."""
        inside = self._folder / "good" / self._inside
        files = [inside] if inside.is_file() else sorted(path for path in inside.rglob("*") if path.is_file())
        return [
            Case(f"{path.name} as {way}", partial(_replaced, path.relative_to(inside), way), may_differ=True)
            for path in files[:_SPECIAL_FILES]
            for way in ("fifo", "zero", "folder", "loop", "sparse")
        ]

    def run(self, case: Case) -> Verdict:
        """Damage a copy and read it."""
        self._number += 1
        folder = self._folder / f"case{self._number}"
        shutil.copytree(self._folder / "good", folder, symlinks=True)
        try:
            case.damage(folder / self._inside)
            found = _in_child(self.kind, folder / self._inside)
        finally:
            shutil.rmtree(folder)
        if found.outcome == "read":
            is_same = found.said == self._expected or case.may_differ
            found = found._replace(outcome="same" if is_same else "other")
        if found.growth_bytes > GROWTH_BYTES:
            return found._replace(outcome="large", said=f"then {found.outcome}: {found.said}")
        if found.cpu_seconds > CPU_SECONDS and not found.is_bad:
            return found._replace(outcome="slow")
        return found


# Damage that fits any file ---------------------------------------------------------------------------------------


def edited(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage to the bytes of one file."""

    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def of_bytes(draws: random.Random, what: Callable[[Path], Path] = lambda path: path) -> Case:
    """A bit flip, a cut, bytes more, a block of zeros, noise: in the file that ``what`` finds."""
    way = draws.choice(["flip", "cut", "longer", "zeros", "noise", "empty"])
    at, size, seed = draws.random(), draws.randint(1, 200), draws.getrandbits(32)

    def change(data: bytes) -> bytes:
        place = int(at * len(data))
        if way == "flip" and data:
            return data[:place] + bytes([data[place] ^ (1 << seed % 8)]) + data[place + 1 :]
        if way == "cut":
            return data[:place]
        if way == "longer":
            return data + random.Random(seed).randbytes(size)
        if way == "empty":
            return b""
        new = bytes(size) if way == "zeros" else random.Random(seed).randbytes(size)
        return data[:place] + new + data[place + size :]

    return Case(f"{way} at {at:.3f} {size} {seed}", lambda path: edited(change)(what(path)))


HOSTILE_VALUES: Sequence[Any] = (
    None, True, -1, 0, 2**31, 2**53 + 1, 2**62, 2**63, 10**30, 10**400, -(2**63), 0.5, 1e308, float("nan"),
    float("inf"), "", "x" * 300, "\x1b]0;title\x07\x1b[2J", "../../etc/passwd", "/dev/zero", "a\x00b", "\ud800",
    [], {}, [[]], [1, 2, 3], {"a": 1}, [0] * 2000, "9" * 5000,
)  # fmt: skip
"""What a header may say where a number, a text or a list is expected."""


def paths_in(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON object lie, the object itself left out."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*above, key)
        yield from paths_in(inner, (*above, key))


def of_json(draws: random.Random, content: Any) -> tuple[str, Any]:
    """(what was done, a copy of ``content``): a value replaced, removed, doubled or moved, at any depth."""
    copy = json.loads(json.dumps(content))
    places = list(paths_in(copy))
    *outer, last = draws.choice(places)
    target = copy
    for key in outer:
        target = target[key]
    way = draws.choice(["replace", "replace", "replace", "remove", "number", "wrap", "copy"])
    told = f"{way} {'.'.join(map(str, (*outer, last)))[:80]}"
    if way == "replace":
        new = draws.choice(HOSTILE_VALUES)
        target[last] = new
        told += f" {new!r:.40}"
    elif way == "remove":
        del target[last]
    elif way == "number" and isinstance(target[last], int | float):
        target[last] = target[last] + draws.choice([-1, 1, 7, 4096])
        told += f" {target[last]}"
    elif way == "copy":
        value: Any = copy
        for key in draws.choice(places):
            value = value[key]
        target[last] = json.loads(json.dumps(value))
    else:
        target[last] = [target[last]]
    return told, copy


RAW_JSON = (
    b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe{}", b'{"a":1,"a":2}', b"[" * 100_000, b'{"a":' * 50_000,
    b'{"x":' + b"9" * 6000 + b"}", b'{"x":NaN}', b'{"x":-Infinity}', b'{"x":1e999}', b'{"x":"\\ud800"}', b"{}" * 3,
    b'{"x":[' + b"0," * 300_000 + b"0]}", b" " * 100_000 + b"{}", b'{"x":"' + b"\\u0041" * 100_000 + b'"}',
)  # fmt: skip
"""Instead of a JSON object."""
