"""Hostfiles and records of failures: what the launcher reads."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError
from shardwise.launch import failure
from shardwise.launch.hosts import choose, read_hostfile

from .trial import RAW_JSON, Case, Kind, edited, of_bytes, of_json

HOSTS = "# two racks\n" + "".join(f"gpu{i}.rack{i % 2} slots={1 + i % 8}\n" for i in range(20))


def make_hosts(folder: Path) -> Path:
    (folder / "hosts").write_text(HOSTS)
    return folder / "hosts"


def read_hosts(path: Path) -> Any:
    return [(host.name, len(host.slots)) for host in choose(read_hostfile(path), "", "gpu1.rack1")]


def cases_hosts(count: int) -> Iterator[Case]:
    for name, data in {
        "10^9 slots": b"a slots=1000000000\n", "5,000 digits": b"a slots=" + b"9" * 5000, "many": b"a slots=4096\n" * 9,
        "full": b"".join(b"h%d slots=4096\n" % i for i in range(3000)), "a long line": b"x" * (1 << 20),
        "long": b"".join(b"h%d slots=1\n" % i for i in range(200_000)), "comments": b"#\n" * 1_000_000,
        "zeros": bytes(9999),
        "digits of another script": "a slots=\u0663\n".encode(), "commands": b"\x1b[2J slots=1\n",
    }.items():  # fmt: skip
        yield Case(name, lambda path, data=data: path.write_bytes(data), may_differ=True)
    for number in range(count):
        yield of_bytes(random.Random(f"hosts {number}"))._replace(may_differ=True)  # text without a sum


def make_failure(folder: Path) -> Path:
    failure.write(failure.of_exception(1, ValueError("bad")), folder / "rank_00001.json")
    return folder / "rank_00001.json"


def read_failure(path: Path) -> Any:
    found = failure.read(path, 1, 5.0)
    assert isinstance(found.headline, str) and isinstance(found.code, int) and found.rank == 1
    if "cannot be read" in found.headline:
        raise DataError(found.headline)
    return found


def cases_failure(count: int) -> Iterator[Case]:
    for number, raw in enumerate(RAW_JSON):
        yield Case(f"raw {number}", lambda path, raw=raw: path.write_bytes(raw), may_differ=True)
    for number in range(count):
        draws = random.Random(f"failure {number}")
        if number % 3 == 0:
            yield of_bytes(draws)._replace(may_differ=True)
            continue

        def change(data: bytes, draws: random.Random = draws) -> bytes:
            return json.dumps(of_json(draws, json.loads(data))[1]).encode()

        yield Case(f"edit {number}", edited(change), may_differ=True)


KINDS = (
    Kind("hostfiles", make_hosts, read_hosts, cases_hosts),
    Kind("failures", make_failure, read_failure, cases_failure),
)
