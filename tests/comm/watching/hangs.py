"""Ranks that hang on purpose, for tests of the doctor: ways to hang, and a job of which one rank hangs that way."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import shardwise
from shardwise.base.errors import CommError
from shardwise.comm.rendezvous.handshake import identity
from shardwise.comm.rendezvous.process import has_ended
from shardwise.comm.watching import watch
from shardwise.comm.watching.inquiry import inquire
from shardwise.comm.watching.rings import RankRing, read_ring
from shardwise.comm.watching.verdict import JobVerdict
from shardwise.comm.world import World
from tests.namespaces import NamespaceHost, call_on
from tests.ranks import RankPool

HANGS_AT = 5
"""Step in which the rank hangs."""
NAMED_S = 30.0
"""Seconds after the beginning of a hang in which the doctor must name it."""
_FOREVER_S, _STARTED_S = 600, 180.0


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def holding_the_interpreter() -> None:
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def asleep() -> None:
    time.sleep(_FOREVER_S)


class Layer(nn.Linear):
    """A layer that calls ``hang`` in its forward pass."""

    hang: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hang is not None:
            self.hang()
        return super().forward(x)


class Numbers(Dataset[torch.Tensor]):
    """Rows of ones, whose reader calls ``hang``."""

    hang: Callable[[], None] | None = None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.hang is not None:
            self.hang()
        return torch.ones(4)


IN_FORWARD = {"stopped": stopped, "gil": holding_the_interpreter, "lock": in_a_lock}
WAYS = (*IN_FORWARD, "reader", "skipped", "shape")
CONFIGS: dict[str, dict[str, Any]] = {
    "gloo": {"comm": {"transport": "torch"}},
    "shared": {"comm": {"transport": "shared_memory"}},
    "zero3": {"comm": {"transport": "torch"}, "zero": {"stage": 3}},
    "pipeline": {"mesh": {"pp": 2}, "batch": {"accumulation": 2}},
}
CONFIGS_OF_HOSTS: dict[str, dict[str, Any]] = {
    "gloo": CONFIGS["gloo"],
    "levels": {},
    "zero3 in levels": {"zero": {"stage": 3}},
    "pipeline": CONFIGS["pipeline"],
}
"""Layouts of jobs on several hosts, in which ranks of one host share memory."""


def hanging(
    world: World | None, way: str, who: int, config: dict[str, Any], folder: str, mark: str, silent_s: float
) -> None:
    """Train until rank ``who`` hangs.

    Args:
        world: World of a pool of ranks, which the engine joins once more to write its records into ``folder``; None:
            the ranks join by their variables.
        way: Way to hang.
        who: Rank that hangs.
        config: Keys of the run.
        folder: Folder of the rings; "": the one that ranks have without any setting.
        mark: File that rank ``who`` makes just before it hangs.
        silent_s: Seconds after which the watch looks at a silent rank.
    """
    watch.SILENT_S = silent_s
    if folder:
        os.environ["SHARDWISE_FLIGHT"] = folder
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(Layer(4, 4), nn.Tanh(), Layer(4, 4), nn.Tanh(), Layer(4, 1))
    engine = shardwise.initialize(net, config, loss=lambda net, x: net(x).square().mean())
    data, count = Numbers(), engine.config.batch.accumulation or 1
    batches: Iterator[Any] = iter([])
    for step in range(1, HANGS_AT + 3):
        is_odd = step == HANGS_AT and engine.world.rank == who
        if is_odd:
            Path(mark).touch()
        if is_odd and way in IN_FORWARD:
            for layer in net:
                layer.hang = IN_FORWARD[way]
        elif is_odd and way == "reader":
            data.hang = asleep
        batches = (torch.stack([data[0], data[1]]) for _ in range(count))
        given = list(batches)
        try:
            if way == "shape" or (way == "skipped" and not is_odd):
                probe = torch.ones(4 if is_odd else 3)
                engine._parts.site.groups["world"].all_reduce(probe, "a user's sum").wait()
            engine.train_step(given)
        except CommError:
            os._exit(1)
    time.sleep(_FOREVER_S)


def hanging_by_variables(*given: Any) -> None:
    """Train until a rank hangs, in a process that finds its rank in its environment."""
    hanging(None, *given)


SCRIPT = """
import json
from pathlib import Path

from tests.comm.watching.hangs import hanging

hanging(None, *json.loads(Path(__file__).with_name("given.json").read_text()))
"""
"""Program of a user, for other launchers. Its arguments are in a file, because DeepSpeed's launcher puts quotes around
those of the command line.
"""


def trial(
    pool: RankPool,
    way: str,
    who: int,
    config: dict[str, Any],
    folder: Path,
    after_s: float,
    silent_s: float = watch.SILENT_S,
) -> tuple[JobVerdict, JobVerdict]:
    """Return the verdicts on the job while it hangs and after all of its ranks are killed; the pool is lost."""
    mark = folder.with_suffix(".hangs")
    given = (way, who, config, str(folder), str(mark), silent_s)
    caller = threading.Thread(target=lambda: _ignored(pool, *given), daemon=True)
    caller.start()
    rings_of(folder, pool.size)
    found = verdicts(folder, identity("").host, mark, after_s, lambda: kill(pool.pids))
    caller.join(10)
    return found


def verdicts(
    folder: Path, host: str, mark: Path, after_s: float, end: Callable[[], None]
) -> tuple[JobVerdict, JobVerdict]:
    """Return the verdicts on a job that hangs, and on the same job after ``end`` has killed its ranks.

    Args:
        folder: Folder of the rings.
        host: Host on which the doctor runs, as in ``RankIdentity.host``.
        mark: File that the rank makes just before it hangs.
        after_s: Seconds after that at which the doctor is asked. It is asked again while it sees nothing, and must
            have seen the hang ``NAMED_S`` seconds after the hang began.
        end: Function that kills the ranks.
    """
    until_s = time.monotonic() + _STARTED_S
    while not mark.exists():
        assert time.monotonic() < until_s, f"no rank hangs after {_STARTED_S} s"
        time.sleep(0.05)
    since_s = time.monotonic()
    time.sleep(after_s)
    alive = inquire(folder, host, {})
    while alive.state in ("running", "slow") and time.monotonic() < since_s + NAMED_S:
        alive = inquire(folder, host, {})
    end()
    return alive, inquire(folder, host, {})


def kill(pids: Sequence[int]) -> None:
    """Kill processes, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        if all(has_ended(pid) for pid in pids if pid):
            break
        time.sleep(0.05)


def rings_of(folder: Path, ranks: int, patience_s: float = _STARTED_S) -> list[RankRing]:
    """Wait until all ranks of a job have rings, and return these."""
    end = time.monotonic() + patience_s
    while len(list(folder.glob("rank_*.ring"))) < ranks:
        assert time.monotonic() < end, f"{list(folder.glob('*'))} after {patience_s} s"
        time.sleep(0.1)
    time.sleep(0.2)  # the last one is written
    return [read_ring(path) for path in sorted(folder.glob("rank_*.ring"))]


def trial_on_hosts(
    hosts: Sequence[NamespaceHost],
    way: str,
    who: int,
    config: dict[str, Any],
    folder: Path,
    after_s: float,
    asked_on: int,
    port: int,
) -> tuple[JobVerdict, JobVerdict]:
    """Return the verdicts on a job of two ranks on each host, while it hangs and after all ranks are killed.

    Args:
        hosts: The hosts.
        way: Way to hang.
        who: Rank that hangs.
        config: Keys of the run.
        folder: Folder of the rings.
        after_s: Seconds after which the doctor is asked.
        asked_on: Number of the host on which the doctor runs; one more than there are: a host without ranks.
        port: Port of the job's store.
    """
    mark = folder.with_suffix(".hangs")
    given = (way, who, config, str(folder), str(mark), watch.SILENT_S)
    env = {"SHARDWISE_SECRET": "of all hosts", "MASTER_PORT": str(port)}
    caller = threading.Thread(
        target=lambda: call_on(hosts, hanging_by_variables, *given, each=2, **env), daemon=True
    )
    caller.start()
    rings = rings_of(folder, 2 * len(hosts))
    names = [*dict.fromkeys(ring.host for ring in rings), "a host without ranks"]
    assert len(names) == len(hosts) + 1
    found = verdicts(folder, names[asked_on], mark, after_s, lambda: kill([ring.pid for ring in rings]))
    caller.join(20)
    return found


def trial_by(
    command: Sequence[str], way: str, who: int, config: dict[str, Any], runtime: Path, after_s: float
) -> tuple[JobVerdict, JobVerdict]:
    """Return the verdicts on a job of two ranks that another launcher starts, and that has no folder of records.

    Args:
        command: Command of the launcher, without the program.
        way: Way to hang.
        who: Rank that hangs.
        config: Keys of the run.
        runtime: Folder of the user's runtime files.
        after_s: Seconds after which the doctor is asked.
    """
    runtime.mkdir(mode=0o700)
    script = runtime / "train.py"
    script.write_text(SCRIPT)
    mark = runtime / "hangs"
    (runtime / "given.json").write_text(json.dumps([way, who, config, "", str(mark), watch.SILENT_S]))
    root = Path(__file__).parents[3]
    paths = [str(root), str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "XDG_RUNTIME_DIR": str(runtime),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    with (runtime / "output").open("w") as output:
        job = subprocess.Popen(
            [*command, str(script)], env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        places = runtime / "shardwise" / "flight"
        end = time.monotonic() + _STARTED_S
        while not any(places.glob("*/rank_*.ring")):
            assert job.poll() is None and time.monotonic() < end, (runtime / "output").read_text()
            time.sleep(0.1)
        (folder,) = places.iterdir()
        rings = rings_of(folder, 2)
        # The launcher first: it would end the ranks by itself.
        pids = [job.pid, *(ring.pid for ring in rings)]
        return verdicts(folder, identity("").host, mark, after_s, lambda: kill(pids))
    finally:
        job.kill()
        job.wait()


def _ignored(pool: RankPool, *given: Any) -> None:
    try:
        pool.run(hanging, *given)
    except Exception:
        return


def is_right(found: JobVerdict, way: str, who: int) -> bool:
    """Return whether a verdict names the rank and the place."""
    if way in ("skipped", "shape"):
        return found.state == "mismatch" and found.rank == who and "hangs.py" in (found.where or "")
    if found.state != "hung" or found.rank != who:
        return False
    if way == "stopped":
        return found.step == HANGS_AT and (found.action or "").startswith("F(")
    name = {"gil": "holding_the_interpreter", "lock": "in_a_lock", "reader": "asleep"}[way]
    return name in (found.where or "") and found.phase == ("reading" if way == "reader" else "computing")
