"""Ranks on this host: start them, watch them, and leave no process behind.

    spawned ── all exit 0 ────────────────────────────────────────────► exit code 0
       │──── one fails ── its traceback ── SIGTERM ── grace ── SIGKILL ─► its exit code
       │──── Ctrl-C, SIGTERM, SIGUSR1 ── the same to every rank, which saves and stops ─► 0, or 128 + signal
       └──── a second one ── SIGKILL ──────────────────────────────────► 128 + signal

The ranks connect through a store on the loopback interface, or at the first host's address if other hosts take part.
The launcher binds the address, so that no other program can take the port between its choice and its use; rank 0
inherits the socket and listens on it. The launcher does not listen: a script that lets torch create the store by itself
can then still bind the same address.

Cost: one wait of 20 ms at a time for any number of ranks; from a failure to the end of all ranks at most
``_SETTLE_S + grace_s`` and the time to kill.
"""

import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import shardwise.launch.failure as failures
import shardwise.launch.processes as ending
import shardwise.launch.report as report
from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.words import in_words, named_ranks, printable
from shardwise.comm.rendezvous.address import family_of
from shardwise.launch.as_deepspeed import names_of_deepspeed
from shardwise.launch.environment import FLIGHT, SECRET, LaunchJob, cores, is_in_job, of_rank
from shardwise.launch.failure import RankFailure
from shardwise.launch.hosts import SLOT_LIMIT, HostRanks
from shardwise.launch.output import JobOutput
from shardwise.launch.terminal import lasting_console

_SETTLE_S = 0.5
"""Seconds after the first sign of failure in which other ranks may report theirs, to find the cause and not its
effects.
"""
_CAUSE_S = 1.5
"""Seconds after the first sign of failure if only effects have been seen."""
GRACE_S = 2.5
"""Seconds between SIGTERM and SIGKILL."""
_STOP_S = 30.0
"""Seconds for the other ranks after the first rank has stopped on request, and after a request for ranks that ignore
it.
"""
_SAVE_S = 1200.0
"""Seconds after a request for ranks that handle the signal, which may be saving."""


class RankProgram(NamedTuple):
    """The program that every rank runs."""

    kind: Literal["script", "module", "program"]
    """Kind of program: a Python script, a module, or any program."""
    name: str
    arguments: tuple[str, ...] = ()
    wants_local_rank: bool = False
    """True if ``--local_rank=N`` precedes the arguments, as scripts for older launchers expect."""

    def words(self) -> list[str]:
        """Return the program as the last words of the command line of ``shardwise launch``."""
        flags = {"script": [], "module": ["-m"], "program": ["--no_python"]}[self.kind]
        return [*flags, self.name, *self.arguments]

    def arguments_of(self, place: int) -> list[str]:
        """Return the arguments of the rank with local rank ``place``."""
        return [*([f"--local_rank={place}"] if self.wants_local_rank else []), *self.arguments]


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to save and stop.

    Ctrl-C, a scheduler's SIGTERM, the SIGUSR1 that Slurm sends before the time limit (``--signal=USR1@120``), and the
    SIGHUP of a terminal that closes, unless SIGHUP is ignored, as under nohup.
    """
    asked = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*asked, signal.SIGHUP]


class StopSignals:
    """Collector of Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP while the ranks run."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.end_within_s: float | None = None
        """Seconds between SIGTERM and SIGKILL, once the job has to end at once; None before that."""

    def grace_s(self, usual_s: float) -> float:
        """Return the seconds between SIGTERM and SIGKILL; ``usual_s`` if nobody has asked for a faster end."""
        if len(self.received) > 1:
            return 0.0
        return usual_s if self.end_within_s is None else self.end_within_s

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Collect the signals inside the ``with`` block instead of ending; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = stop_signals()
        before = {n: signal.signal(n, lambda n, _: self.received.append(signal.Signals(n))) for n in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class JobChannel(NamedTuple):
    """Origin of the orders to the launcher of this host, and receiver of what happens to its ranks."""

    requests: StopSignals
    reporter: report.JobReporter
    has_terminal: bool = True
    """True if the first rank of this host writes to the terminal as if it ran alone; False if its lines are tagged."""


class RankProcesses:
    """The processes of one job's ranks, from their start to their end."""

    def __init__(self, job: LaunchJob, output: JobOutput, reporter: report.JobReporter) -> None:
        self.job, self.output, self.reporter = job, output, reporter
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failures: dict[int, RankFailure] = {}
        self.stopped: set[int] = set()
        """Ranks that ended because of a stop request."""
        self._looked_at_s = time.monotonic()

    def spawn(self, program: RankProgram, store: socket.socket) -> None:
        """Start all ranks, each in a session of its own.

        Args:
            program: Program of every rank.
            store: Socket that rank 0 inherits for the store; this process closes its own handle.

        Raises:
            ConfigError: if a rank cannot be started.
        """
        command = [sys.executable, "-m", "shardwise.launch.child", program.kind, program.name]
        self.output.check_room(len(self.job.ranks))
        for rank in self.job.ranks:
            store_fd = store.fileno() if rank == 0 else None
            try:
                with self.output.streams(rank) as streams:
                    process = subprocess.Popen(
                        [*command, *program.arguments_of(rank - self.job.here.first)],
                        env=of_rank(self.job, rank, store_fd),
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=streams.stdout,
                        stderr=streams.stderr,
                        pass_fds=() if store_fd is None else (store_fd,),
                        start_new_session=True,
                    )
            except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or a variable
                why = in_words(error) if isinstance(error, OSError) else str(error)
                raise ConfigError(f"launch: rank {rank} cannot be started: {why}") from None
            self.processes.append(process)
        store.close()

    def look(self, asked: signal.Signals | None) -> None:
        """Record which ranks failed since the last look, and how; ``asked`` is the signal of a stop request."""
        # A rank without a handler for SIGUSR1 gets SIGTERM instead.
        numbers = [] if asked is None else [asked, signal.SIGTERM] if asked == signal.SIGUSR1 else [asked]
        wanted = {0, *(-n for n in numbers), *(128 + n for n in numbers)}
        now = time.monotonic()
        for rank, process in zip(self.job.ranks, self.processes, strict=True):
            if rank in self.failures or rank in self.stopped:
                continue
            # Polled before the file is read, because a rank writes the file and then ends.
            ended = process.poll()
            path = self.job.failure_path(rank)
            if os.path.lexists(path):
                self._record(failures.read(path, rank, self._looked_at_s))
            elif ended is not None and ended not in wanted:
                # The rank ended at some moment since the last look; the earliest is the safe guess for a cause.
                self._record(failures.of_exit(rank, self._looked_at_s, ended))
            elif ended is not None and ended != 0:
                self.stopped.add(rank)
        self._looked_at_s = now

    def _record(self, failure: RankFailure) -> None:
        self.failures[failure.rank] = failure
        self.reporter.failed(failure)

    def is_over(self) -> bool:
        """Return True if no rank runs any more."""
        return all(process.poll() is not None for process in self.processes)

    def fail(self) -> int:
        """Show the first failure and return the exit code of the job."""
        since_s = time.monotonic()
        # If all failures are of communication, the cause is in another rank, which may be about to write it.
        while not self.is_over():
            only_effects = all(failure.is_of_peers for failure in self.failures.values())
            if time.monotonic() > since_s + (_SETTLE_S if not only_effects else _CAUSE_S):
                break
            time.sleep(ending.POLL_S)
            self.look(None)
        self.look(None)
        cause = self.reporter.show(self.failures.values(), self.output.log_of)
        for failure in self.failures.values():
            self._keep(failure)
        return cause.code

    def _keep(self, failure: RankFailure) -> None:
        """Append a failure to its rank's log, and keep its record beside the log, for ``shardwise doctor``."""
        log = self.output.log_of(failure.rank)
        if log is not None:
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(failure.traceback or failure.headline + "\n")
            with contextlib.suppress(OSError):  # a full disk: the log has it
                failures.write(failure, failures.kept_path(log))

    def _finish_stop(self, asked: signal.Signals) -> int:
        """Wait, after the first rank has stopped on request, for the others, which may still be writing."""
        ending.wait(self.processes, time.monotonic() + _STOP_S)
        self.look(asked)
        # The loss of a rank that stopped on request is not a failure of the others.
        self.failures = {rank: f for rank, f in self.failures.items() if not f.is_of_peers}
        return self.fail() if self.failures else 128 + asked

    def _deaf(self, asked: signal.Signals, asked_s: float) -> list[int]:
        """Return the ranks whose time to stop is over; ranks that ignore the signal have less time."""
        running = [r for r, p in zip(self.job.ranks, self.processes, strict=True) if p.poll() is None]
        if time.monotonic() > asked_s + _SAVE_S:
            return running
        first = self.job.here.first
        return [rank for rank in running if ending.ignores(self.processes[rank - first].pid, asked)]

    def run(self, requests: StopSignals) -> int:
        """Wait for the ranks and return the exit code of the job."""
        asked: signal.Signals | None = None
        asked_s = math.inf
        while True:
            is_over = self.is_over()
            self.look(asked)
            if asked is None and requests.received:
                asked = requests.received[0]
                asked_s = time.monotonic()
                self.reporter.say("stopping the ranks; once more kills them", "bold")
                for process in self.processes:
                    if process.poll() is None:
                        ending.ask(process, asked)
            if len(requests.received) > 1:
                return 128 + requests.received[0]
            if requests.end_within_s is not None:
                return 1
            if self.stopped:
                return self._finish_stop(asked or signal.SIGTERM)
            if self.failures:
                return self.fail()
            if is_over:
                return 0
            if (
                asked is not None
                and time.monotonic() > asked_s + _STOP_S
                and (deaf := self._deaf(asked, asked_s))
            ):
                waited_s = time.monotonic() - asked_s
                self.reporter.say(
                    f"{named_ranks(deaf)} did not stop within {waited_s:.0f} s of {asked.name}: killing all",
                    "bold red",
                )
                return 128 + asked
            time.sleep(ending.POLL_S)

    def stop(self, grace_s: float) -> None:
        """End all processes of the job on this host.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL.
        """
        if not ending.stop(self.processes, self.job.word, grace_s):
            pids = [process.pid for process in self.processes if process.poll() is None]
            self.reporter.say(f"processes {pids} do not end: the kernel holds them", "bold red")
        if sys.stdout is not None and sys.stdout.isatty():
            self.reporter.console.show_cursor()  # a rank that was killed while it drew leaves the cursor hidden


def check_ranks(ranks: int) -> None:
    """Check that ``ranks`` ranks can be started on this host.

    Raises:
        UsageError: if there are too few or too many, or this process is a rank itself.
    """
    if ranks < 1:
        raise UsageError(f"launch: {ranks} ranks were requested; at least 1 is needed")
    if ranks > SLOT_LIMIT:
        raise UsageError(
            f"launch: {ranks} ranks were requested on this host; at most {SLOT_LIMIT} are started, and a host with "
            f"{cores()} cores has work for about as many"
        )
    if is_in_job():
        raise UsageError(
            "launch: this process is itself a rank that the launcher started; start the inner job from outside, "
            "or let the script use the ranks that it has"
        )


def run(
    program: RankProgram,
    ranks: int | HostRanks,
    logs: str | os.PathLike[str] | None = None,
    grace_s: float = GRACE_S,
    cores_of: Sequence[Sequence[int]] = (),
    exports: Mapping[str, str] | None = None,
    says: Callable[[Sequence[int]], None] | None = None,
    as_deepspeed: bool = False,
    channel: JobChannel | None = None,
) -> int:
    """Run ``program`` on ranks of this host, wait for their end, and leave no process of the job on this host.

    Args:
        program: Program of every rank.
        ranks: Number of ranks on this host, or this host's ranks of a larger job.
        logs: Folder for the ranks' logs; None: no logs.
        grace_s: Seconds between SIGTERM and SIGKILL.
        cores_of: Cores that each rank binds itself to, by local rank.
        exports: More environment variables for every rank.
        says: Function that is called with the ranks' process numbers.
        as_deepspeed: Let ``import deepspeed`` in the ranks import Shardwise.
        channel: Origin of orders and receiver of failures; None: signals, and standard error.

    Returns:
        The exit code of the job.

    Raises:
        UsageError: if the ranks or the script cannot be used.
        ConfigError: if the store's address cannot be used or a rank cannot be started.
    """
    here = HostRanks(ranks, ranks) if isinstance(ranks, int) else ranks
    check_ranks(here.local)
    check_script(program)
    channel = channel or JobChannel(StopSignals(), report.JobReporter(lasting_console(stderr=True)))
    requests, reporter = channel.requests, channel.reporter
    _warn_of_few_cores(reporter, here.local)
    _flush_output()
    output = JobOutput(None if logs is None else Path(logs), here.first if channel.has_terminal else None)
    folder = tempfile.mkdtemp(prefix="shardwise_")  # readable only by this user
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store = stack.enter_context(socket.socket(family_of(here.address), socket.SOCK_STREAM))
        if here.first == 0:
            here = here._replace(port=_bind(store, here))
            reporter.listens_at(here.port)
        job = _job_of(here, Path(folder), cores_of, _flight_of(logs) | dict(exports or {}), as_deepspeed)
        watch = RankProcesses(job, output, reporter)
        stack.enter_context(requests.listening())
        stack.callback(output.close, 1.0)
        try:
            watch.spawn(program, store)
            if says is not None:
                says([process.pid for process in watch.processes])
            return watch.run(requests)
        except BaseException:
            grace_s = 0
            raise
        finally:
            watch.stop(requests.grace_s(grace_s))


def check_script(program: RankProgram) -> None:
    """Raise UsageError if the program is a script that does not exist."""
    if program.kind == "script" and not os.path.exists(program.name):
        raise UsageError(f"launch: there is no script {program.name!r} here, in {os.getcwd()}")


def _flight_of(logs: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the variable that names the folder of the ranks' records, beside their logs; none without logs."""
    return {} if logs is None else {FLIGHT: str(Path(logs).resolve() / "flight")}


def _flush_output() -> None:
    """Write the earlier output of this process, which must precede the ranks' output."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # standard output is closed
            sys.stdout.flush()


def _warn_of_few_cores(reporter: report.JobReporter, ranks: int) -> None:
    """Print a warning if this host has fewer cores than ranks."""
    if ranks > cores():
        reporter.say(
            f"warning: {ranks} ranks share {cores()} cores: expect them to wait for one another", "yellow"
        )


def _job_of(
    here: HostRanks,
    folder: Path,
    cores_of: Sequence[Sequence[int]],
    exports: dict[str, str],
    as_deepspeed: bool,
) -> LaunchJob:
    """Return a job with a word and, if the job is on one host, a secret of its own."""
    secret = secrets.token_hex(32) if here.is_one_host else os.environ.get(SECRET, "")
    if as_deepspeed:
        inherited = exports.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        exports |= names_of_deepspeed(folder, inherited)
    return LaunchJob(secrets.token_hex(16), here, folder, secret, cores_of, exports)


def _bind(store: socket.socket, here: HostRanks) -> int:
    """Bind the store's address only, and return the port; raise ConfigError if this host does not have the address."""
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        store.bind((here.address, here.port))
    except (
        OSError,
        ValueError,
        TypeError,
    ) as error:  # the last two: no name of a host, such as one with a NUL
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"launch: cannot listen at {printable(here.address)}:{here.port}: {why}; the host with rank 0 needs "
            " an address of its own as --master_addr, and a free --master_port"
        ) from None
    return int(store.getsockname()[1])
