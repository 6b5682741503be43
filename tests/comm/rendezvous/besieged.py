"""Jobs on two hosts that go on while a thousand strangers try to reach their store, for every way to start a job.

The strangers come from both hosts, in equal numbers and of every kind (strangers.py). No process of the job listens on
every interface.
"""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm.policy import CommPolicy
from shardwise.comm.rendezvous import connection, gate
from shardwise.comm.world import join
from tests.comm.rendezvous.strangers import KINDS
from tests.namespaces import NamespaceHost

STRANGERS = Path(__file__).with_name("strangers.py")
SECRET = "of both"
_MARK = "SHARDWISE_BESIEGED"
_PROGRAM = """
import json, os, sys
from pathlib import Path

here = Path(__file__).parent
os.environ["{mark}"] = str(here)  # the gate inherits it
sys.path[:0] = {paths}

from tests.comm.rendezvous.besieged import steps_beside_strangers

rank = int(os.environ["RANK"])
(here / f"rank.{{rank}}").write_text(str(os.getpid()))
sums = steps_beside_strangers(str(here / "done"), here)
(here / f"sums.{{rank}}").write_text(json.dumps(sums))
"""


def steps_beside_strangers(done: str, told_in: Path | None = None) -> list[float]:
    """Join, and sum tensors while texts go through the store, until the file ``done`` is there; return the sums.

    Args:
        done: The file.
        told_in: Folder in which rank 0 writes the place of the gate; None: it writes nothing.
    """
    torch.set_num_threads(1)
    world = join(quiet=True, policy=CommPolicy(join_timeout_s=60, device="cpu"))
    if told_in is not None and world.rank == 0:
        (served,) = connection._SERVED.values()
        (told_in / "gate.new").write_text(json.dumps(served.place))
        (told_in / "gate.new").rename(told_in / "gate")
    sums: list[float] = []
    is_done = torch.zeros(1)
    while not is_done:
        tensor = torch.full((256,), float(len(sums) + world.rank))
        dist.all_reduce(tensor)
        sums.append(float(tensor[0]))
        world.post(f"step {len(sums)}", str(len(sums)))
        assert world.collect(f"step {len(sums)}", 20) == [str(len(sums))] * world.size
        is_done = torch.tensor([float(Path(done).exists())])
        dist.all_reduce(is_done)
        time.sleep(0.01)
    world.close()
    return sums


def sums_of(steps: int, ranks: int) -> list[float]:
    """Return the sums of a job that lost no step."""
    return [float(ranks * step + sum(range(ranks))) for step in range(steps)]


def besiege(hosts: Sequence[NamespaceHost], place: tuple[str, int]) -> Counter[tuple[str, str]]:
    """Let 500 strangers from each host try to come in at a gate, and return how often each kind got each answer."""
    own, other = random.Random(0).randbytes(32), random.Random(1).randbytes(32)
    recorded = gate.GREETING + own + gate.proof(SECRET.encode(), b"rank", own, other)
    words = [sys.executable, "-I", "-S", str(STRANGERS), "all", place[0], str(place[1]), "500"]
    env = os.environ | {"RECORDED": recorded.hex()}
    crowds = [host.start(*words, env=env, stdout=subprocess.PIPE, text=True) for host in hosts]
    said = [json.loads(crowd.communicate(timeout=120)[0]) for crowd in crowds]
    answers = Counter((kind, answer) for kind, answer in itertools.chain(*said))
    assert sum(answers.values()) == 500 * len(hosts) and {kind for kind, _ in answers} == set(KINDS)
    assert not [each for each in answers if each[1] == "accepted"], answers
    return answers


def listeners(folder: Path, pids: Sequence[int]) -> list[str]:
    """Return the addresses at which a job's ranks and gates listen, as the kernel spells them.

    Args:
        folder: Folder of the job's program.
        pids: The ranks.
    """
    mark, found = f"{_MARK}={folder}".encode(), []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not path.name.isdigit():
                continue
            if int(path.name) in pids or mark in (path / "environ").read_bytes().split(b"\0"):
                held = {os.readlink(each) for each in (path / "fd").iterdir()}
                tables = ((path / "net" / table).read_text() for table in ("tcp", "tcp6"))
                rows = [line.split() for text in tables for line in text.splitlines()[1:]]
                found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]
    return found


def check_strangers(
    hosts: Sequence[NamespaceHost],
    folder: Path,
    start: Callable[[str], Sequence["subprocess.Popen[str]"]],
    ranks: int = 4,
) -> None:
    """Check that a job on hosts takes no notice of a thousand strangers.

    Args:
        hosts: The hosts.
        folder: Folder that all hosts see.
        start: Function that starts the job of a program, with SHARDWISE_SECRET in its environment, and returns its
            launchers.
        ranks: Ranks of the job.
    """
    for pattern in ("rank.*", "sums.*", "gate*", "done"):
        for path in folder.glob(pattern):
            path.unlink()
    root = Path(__file__).parents[3]
    program = folder / "program.py"
    program.write_text(_PROGRAM.format(mark=_MARK, paths=[str(root), str(root / "src")]))
    jobs = start(str(program))
    end = time.monotonic() + 90
    while not (folder / "gate").exists() or len(list(folder.glob("rank.*"))) < ranks:
        assert time.monotonic() < end and not any(job.poll() for job in jobs), [
            job.communicate() for job in jobs
        ]
        time.sleep(0.05)
    address, port = json.loads((folder / "gate").read_text())
    assert address == hosts[0].address or address in {each.address for each in hosts}
    pids = [int((folder / f"rank.{rank}").read_text()) for rank in range(ranks)]
    try:
        answers = besiege(hosts, (address, port))
        found = listeners(folder, pids)
    finally:
        (folder / "done").touch()
        said = [job.communicate(timeout=60) for job in jobs]
    assert not any(job.returncode for job in jobs), said
    assert len(found) > ranks, "a relay or gate for each, and gloo"
    assert not [each for each in found if not each.partition(":")[0].strip("0")], found
    sums = [json.loads((folder / f"sums.{rank}").read_text()) for rank in range(ranks)]
    assert all(each == sums_of(len(sums[0]), ranks) for each in sums)
    print(f"{len(sums[0])} steps beside {sum(answers.values())} strangers: {dict(answers)}")
