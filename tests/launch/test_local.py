"""The launcher against programs that fail, hang, ignore signals and leave children. None of them imports torch."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.base.errors import UsageError
from shardwise.launch.local import RankProgram, run
from shardwise.launch.processes import of_job

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
    pytest.mark.timeout(90),
]

_DRIVER = """
import sys
from pathlib import Path
from shardwise.launch.local import RankProgram, run
sys.exit(run(RankProgram("script", sys.argv[1], tuple(sys.argv[3:])), int(sys.argv[2]), Path("logs")))
"""


class Scripts:
    """Writes programs, runs them under the launcher, and remembers which processes they were."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str) -> str:
        """A program; ``note(name)`` leaves this process's number, ``wait_for(name)`` waits for such a note."""
        head = """
            import os, signal, subprocess, sys, time
            from pathlib import Path
            rank, here = int(os.environ["RANK"]), Path(__file__).parent
            def note(name, pid=None):
                fresh = here / (name + ".new")
                fresh.write_text(str(pid or os.getpid()))
                fresh.rename(here / name)
            def wait_for(name):
                while not (here / name).exists():
                    time.sleep(0.01)
            note(f"job.{rank}", os.environ["SHARDWISE_JOB"])
        """
        path = self.folder / "program.py"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
        return str(path)

    def pid(self, name: str) -> int:
        self.wait_for(name)
        return int((self.folder / name).read_text())

    def wait_for(self, *names: str) -> None:
        end = time.monotonic() + 30
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"{names} did not come"
            time.sleep(0.01)

    def left_over(self) -> list[int]:
        words = {path.read_text() for path in self.folder.glob("job.*") if path.suffix != ".new"}
        assert len(words) == 1, "all ranks are of one job"
        return of_job(words.pop())

    def run(self, text: str, ranks: int = 2, *arguments: str, logs: Path | None = None) -> int:
        return run(RankProgram("script", self.write(text), arguments), ranks, logs)

    def start(self, text: str, before: str = "", ranks: int = 2) -> subprocess.Popen[str]:
        """In a process of its own, to be sent signals, after the statements ``before``."""
        command = [sys.executable, "-c", before + _DRIVER, self.write(text), str(ranks)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.setattr("shardwise.launch.local.cores", lambda: 64)  # no warning about this machine
    made = Scripts(tmp_path)
    yield made
    assert made.left_over() == [], "a process of the job was left behind"


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_every_rank_gets_its_place_and_all_meet_on_loopback(scripts: Scripts) -> None:
    text = """
        import json
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                 "SHARDWISE_LAUNCHER", "SHARDWISE_STORE_FD", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
        seen = {name: os.environ.get(name) for name in names}
        if "SHARDWISE_STORE_FD" in os.environ:
            import socket
            store = socket.socket(fileno=int(os.environ["SHARDWISE_STORE_FD"]))
            assert not store.get_inheritable()
            seen["bound"] = store.getsockname()
        (here / f"seen.{rank}").write_text(json.dumps(seen))
    """
    assert scripts.run(text, 3) == 0
    seen = [json.loads((scripts.folder / f"seen.{rank}").read_text()) for rank in range(3)]
    assert [s["RANK"] for s in seen] == [s["LOCAL_RANK"] for s in seen] == ["0", "1", "2"]
    assert {s["WORLD_SIZE"] for s in seen} == {s["LOCAL_WORLD_SIZE"] for s in seen} == {"3"}
    assert {s["MASTER_ADDR"] for s in seen} == {"127.0.0.1"}
    assert {s["GLOO_SOCKET_IFNAME"] for s in seen} == {"lo"}
    assert {s["SHARDWISE_LAUNCHER"] for s in seen} == {"1"}
    assert all(int(s["OMP_NUM_THREADS"]) >= 1 for s in seen)
    assert [s["SHARDWISE_STORE_FD"] is not None for s in seen] == [True, False, False]
    assert seen[0]["bound"] == ["127.0.0.1", int(seen[0]["MASTER_PORT"])]


def test_arguments_arrive_byte_by_byte(scripts: Scripts) -> None:
    weird = [
        "",
        " ",
        "a b",
        "--ranks",
        "--",
        "$HOME `id` ; &",
        "'\"\\",
        "new\nline",
        "ünïcödé",
        "bad\udcffbyte",
        "*",
    ]
    text = """
        (here / f"arguments.{rank}").write_bytes(b"\\0".join(os.fsencode(a) for a in sys.argv[1:]))
    """
    assert scripts.run(text, 2, *weird) == 0
    for rank in range(2):
        got = (scripts.folder / f"arguments.{rank}").read_bytes()
        assert got == b"\0".join(os.fsencode(argument) for argument in weird)


def test_a_crash_shows_its_traceback_before_its_peers_and_ends_all(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        def broken():
            raise ValueError("the weights are gone")
        if rank == 1:
            wait_for("waiting.0"), wait_for("waiting.2")
            note("crashed")
            broken()
        note(f"waiting.{rank}")
        if rank == 0:
            wait_for("crashed")
            raise RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")
        time.sleep(60)
    """
    started = time.monotonic()
    assert scripts.run(text, 3) == 1
    assert time.monotonic() - started < 30, "the last rank would have slept for a minute"
    error = capfd.readouterr().err
    assert error.startswith(
        "rank 1 failed: ValueError: the weights are gone\nTraceback (most recent call last):\n"
    )
    assert 'in broken\n    raise ValueError("the weights are gone")' in error
    assert "launch/child.py" not in error and "runpy" not in error, "the launcher's own frames are no help"
    assert error.index("the weights are gone") < error.index("rank 0 failed too: RuntimeError")
    assert "rank 2" not in error, "it did not fail, it was stopped"


def test_the_cause_is_shown_although_a_peer_noticed_before_it_was_reported(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        if rank == 0:
            raise RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")
        wait_for("job.0")
        time.sleep(0.2)
        raise KeyError("the cause")
    """
    assert scripts.run(text) == 1
    assert capfd.readouterr().err.startswith("rank 1 failed: KeyError: 'the cause'")


def test_an_answer_of_ours_is_one_line_with_its_own_exit_code(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        from shardwise.base.errors import ConfigError
        raise ConfigError("zero.stage: 4 was given, expected 0 to 3")
    """
    assert scripts.run(text) == 2
    assert capfd.readouterr().err == "error: zero.stage: 4 was given, expected 0 to 3\n"


def test_a_rank_that_is_killed_is_named_with_the_signal(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    assert scripts.run(text) == 128 + signal.SIGKILL
    assert capfd.readouterr().err.startswith(
        "rank 1 failed: killed by SIGKILL, as the kernel does when memory"
    )


def test_the_last_lines_of_a_rank_that_died_in_native_code_are_shown(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        if rank == 1:
            print("about to fall")
            import ctypes
            ctypes.string_at(0)
        time.sleep(60)
    """
    logs = scripts.folder / "logs"
    assert scripts.run(text, logs=logs) == 128 + signal.SIGSEGV
    error = capfd.readouterr().err
    assert error.startswith("rank 1 failed: killed by SIGSEGV")
    assert "about to fall" in error and "Segmentation fault" in error and "program.py" in error


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os._exit(7)", 7), ("sys.exit('no more')", 1)]
)
def test_an_exit_code_is_handed_on(scripts: Scripts, end: str, code: int) -> None:
    assert scripts.run(f"if rank == 1:\n    {end}\ntime.sleep(60)\n") == code


def test_a_failed_rank_whose_threads_never_end_does_not_hold_the_job(scripts: Scripts) -> None:
    text = """
        import threading
        if rank == 0:
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError("with a thread still running")
        time.sleep(60)
    """
    started = time.monotonic()
    assert scripts.run(text) == 1
    assert time.monotonic() - started < 30


def test_ranks_that_ignore_sigterm_are_killed_with_their_children(scripts: Scripts) -> None:
    text = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        note(f"worker.{rank}", subprocess.Popen(sleeper).pid)
        note(f"daemon.{rank}", subprocess.Popen(sleeper, start_new_session=True).pid)
        if rank == 0:
            wait_for("worker.1"), wait_for("daemon.1")
            raise ValueError("end")
        time.sleep(60)
    """
    started = time.monotonic()
    assert scripts.run(text) == 1
    assert time.monotonic() - started < 30, "rank 1 would have slept for a minute"
    for name in ("worker.0", "worker.1", "daemon.0", "daemon.1"):
        assert not is_alive(scripts.pid(name)), name


def test_workers_that_outlive_a_clean_end_are_ended_too(scripts: Scripts) -> None:
    text = """
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note(f"worker.{rank}", worker.pid)
    """
    assert scripts.run(text) == 0
    assert not is_alive(scripts.pid("worker.0")) and not is_alive(scripts.pid("worker.1"))


def test_the_first_signal_lets_the_ranks_finish(scripts: Scripts) -> None:
    text = """
        wanted = []
        signal.signal(signal.SIGINT, lambda number, frame: wanted.append(number))
        note(f"ready.{rank}")
        while not wanted:
            time.sleep(0.01)
        time.sleep(0.3)
        note(f"saved.{rank}")
    """
    job = scripts.start(text)
    scripts.wait_for("ready.0", "ready.1")
    job.send_signal(signal.SIGINT)
    _, error = job.communicate(timeout=30)
    assert job.returncode == 0, error
    assert "once more kills them" in error
    scripts.wait_for("saved.0", "saved.1")


def test_the_second_signal_kills(scripts: Scripts) -> None:
    text = """
        signal.signal(signal.SIGINT, lambda *_: note(f"asked.{rank}"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"ready.{rank}")
        while True:
            time.sleep(1)
    """
    job = scripts.start(text)
    scripts.wait_for("ready.0", "ready.1")
    job.send_signal(signal.SIGINT)
    scripts.wait_for("asked.0", "asked.1")
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGINT


def test_the_warning_of_slurm_is_a_request_to_stop(scripts: Scripts) -> None:
    """``--signal=USR1@120`` ended the job unsaved. A rank without a handler for SIGUSR1 gets SIGTERM."""
    text = """
        def stop(number, frame):
            note(f"saved.{rank}.{signal.Signals(number).name}")
            sys.exit(128 + number)
        signal.signal(signal.SIGUSR1 if rank == 0 else signal.SIGTERM, stop)
        note(f"ready.{rank}")
        time.sleep(60)
    """
    job = scripts.start(text)
    scripts.wait_for("ready.0", "ready.1")
    job.send_signal(signal.SIGUSR1)
    _, error = job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGUSR1 and "failed" not in error, error
    scripts.wait_for("saved.0.SIGUSR1", "saved.1.SIGTERM")


@pytest.mark.parametrize(("way", "constant"), [("SIG_IGN", "_STOP_S"), ("lambda *_: None", "_SAVE_S")])
def test_ranks_that_do_not_stop_are_killed_after_a_while(scripts: Scripts, way: str, constant: str) -> None:
    """Ranks that were deaf to SIGTERM kept the launcher for ever."""
    text = f"""
        signal.signal(signal.SIGTERM, {way.replace("SIG_IGN", "signal.SIG_IGN")})
        note(f"ready.{{rank}}")
        while True:
            time.sleep(1)
    """
    patched = "import shardwise.launch.local as local\nlocal._STOP_S = 0.2\n"
    patched += f"local.{constant} = 0.5\n" if constant == "_SAVE_S" else ""
    job = scripts.start(text, patched)
    scripts.wait_for("ready.0", "ready.1")
    job.send_signal(signal.SIGTERM)
    _, error = job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGTERM, error
    assert re.search(r"ranks 0, 1 did not stop within \d s of SIGTERM: killing all", error), error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_programs_without_a_handler_end_at_the_first_signal(scripts: Scripts, number: signal.Signals) -> None:
    job = scripts.start('note(f"ready.{rank}")\ntime.sleep(60)\n')
    scripts.wait_for("ready.0", "ready.1")
    job.send_signal(number)
    _, error = job.communicate(timeout=30)
    assert job.returncode == 128 + number
    assert "failed" not in error, "that they ended is what was asked"


def test_a_failure_while_stopping_is_still_a_failure(scripts: Scripts) -> None:
    text = """
        def stop(number, frame):
            if rank == 1:
                raise OSError("no space left for the checkpoint")
            sys.exit(128 + number)
        signal.signal(signal.SIGTERM, stop)
        note(f"ready.{rank}")
        time.sleep(60)
    """
    job = scripts.start(text)
    scripts.wait_for("ready.0", "ready.1")
    job.send_signal(signal.SIGTERM)
    _, error = job.communicate(timeout=30)
    assert job.returncode == 1
    assert "rank 1 failed: OSError: no space left for the checkpoint" in error


def test_the_ranks_die_with_a_launcher_that_is_killed(scripts: Scripts) -> None:
    job = scripts.start('note(f"pid.{rank}")\ntime.sleep(60)\n')
    pids = [scripts.pid("pid.0"), scripts.pid("pid.1")]
    job.kill()
    job.communicate(timeout=30)
    end = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def test_with_logs_the_terminal_shows_rank_0_and_each_rank_has_a_file(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        print("out of", rank)
        print("err of", rank, file=sys.stderr)
        if rank == 1:
            raise ValueError("last words")
        wait_for("job.1")
        time.sleep(60)
    """
    logs = scripts.folder / "logs"
    assert scripts.run(text, logs=logs) == 1
    captured = capfd.readouterr()
    assert captured.out == "out of 0\n"
    assert "err of 0\n" in captured.err and "err of 1" not in captured.err
    assert f"log of rank 1: {logs / 'rank_00001.log'}" in captured.err
    assert sorted((logs / "rank_00000.log").read_text().splitlines()) == ["err of 0", "out of 0"]
    of_1 = (logs / "rank_00001.log").read_text()
    assert "out of 1" in of_1 and "err of 1" in of_1 and of_1.endswith("ValueError: last words\n")


def test_without_logs_every_line_of_the_other_ranks_is_tagged(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        print("one\\ntwo of", rank)
        print("no end", end="", file=sys.stderr)
    """
    assert scripts.run(text) == 0
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["[rank 1] one", "[rank 1] two of 1", "one", "two of 0"]
    assert captured.err.count("no end") == 2 and "[rank 1] no end\n" in captured.err


def test_more_output_than_a_pipe_holds_is_passed_on(
    scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        scripts.run(
            'if rank == 1:\n    print("x" * 99 + "\\n", end="")\n    sys.stdout.write("y" * 300_000)\n'
        )
        == 0
    )
    assert capfd.readouterr().out.count("y") == 300_000


def test_a_script_sees_what_it_would_see_under_python(scripts: Scripts) -> None:
    (scripts.folder / "beside.py").write_text("value = 41\n")
    text = """
        import multiprocessing
        import beside
        def twice(x):
            return 2 * x
        if __name__ == "__main__":
            assert sys.argv[0] == __file__
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.map(twice, [beside.value]) == [82]
    """
    assert scripts.run(text, 1) == 0


def test_a_module_runs_as_under_dash_m(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts.run("pass", 1)
    package = scripts.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "job.py").write_text("import sys\nassert sys.argv[1:] == ['a'] and __package__ == 'package'\n")
    monkeypatch.chdir(scripts.folder)
    assert run(RankProgram("module", "package.job", ("a",)), 1) == 0


def no_program(folder: Path) -> RankProgram:
    return RankProgram("script", str(folder / "missing.py"))


@pytest.mark.parametrize(
    ("ranks", "match"),
    [
        (0, "0 ranks were requested; at least 1"),
        (-2, "-2 ranks"),
        (10**6, "at most 4096 are started"),
        (1, r"no script .*missing\.py"),
    ],
)
def test_what_cannot_start_is_refused(tmp_path: Path, ranks: int, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        run(no_program(tmp_path), ranks)


def test_a_job_inside_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_LAUNCHER", "1")
    with pytest.raises(UsageError, match="itself a rank"):
        run(no_program(tmp_path), 1)


def test_more_ranks_than_cores_are_warned_of(
    scripts: Scripts, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.launch.local.cores", lambda: 1)
    assert scripts.run("pass", 2) == 0
    assert "warning: 2 ranks share 1 cores" in capfd.readouterr().err


def test_signals_are_handled_as_before_when_the_job_is_over(scripts: Scripts) -> None:
    before: list[Callable[..., object] | int | None] = [
        signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)
    ]
    scripts.run("pass", 1)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
