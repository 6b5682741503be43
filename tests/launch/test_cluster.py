"""Jobs on two hosts that are this one: agents are started by a program that stands for ssh. Nothing imports torch."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.launch.processes import of_job

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc"),
    pytest.mark.timeout(120),
]
_SSH = """#!/bin/sh
for command; do host=$last; last=$command; done
test "$host" = nowhere && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }
exec sh -c "$command"
"""
"""A program with ssh's way with words: the last is a command line for a shell."""
_PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(__file__).parent
(here / f"job.{os.environ['SHARDWISE_JOB']}").touch()
(here / f"rank.{rank}").write_text(str(os.getpid()))
while len(list(here.glob("rank.*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""
Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Starts a program on two hosts, of one rank and of two ranks."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(_SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)

    def start(
        text: str, *words: str, options: tuple[str, ...] = (), hosts: str = "one two"
    ) -> "subprocess.Popen[str]":
        names = hosts.split()
        (tmp_path / "hosts").write_text(f"{names[0]} slots=1\n{names[1]} slots=2  # two\n")
        (tmp_path / "program.py").write_text(_PROGRAM + text)
        command = [sys.executable, "-m", "shardwise", "launch", "-H", "hosts", "--master_addr", "127.0.0.1"]
        return subprocess.Popen(
            [*command, *options, "program.py", *words],
            cwd=tmp_path,
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def left_over(folder: Path) -> list[int]:
    return [pid for path in folder.glob("job.*") for pid in of_job(path.name.removeprefix("job."))]


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> float:
    since = time.monotonic()
    while not is_so():
        assert time.monotonic() < since + seconds
        time.sleep(0.02)
    return time.monotonic() - since


def test_ranks_of_both_hosts_get_arguments_and_variables_unchanged(launch: Launch, tmp_path: Path) -> None:
    given = [
        "",
        "a b",
        "'",
        '"',
        "$(touch BAD)",
        "`touch BAD`",
        "; touch BAD",
        "a\nb",
        "\\",
        "\udcff",
        "--ranks",
        "*",
    ]
    text = """
kept = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "XX", "MASTER_PORT")}
(here / f"kept.{rank}").write_text(json.dumps([sys.argv[1:], kept, os.environ["SHARDWISE_SECRET"]]))
print("said by", rank)
"""
    job = launch(text, *given, options=("--export", "XX=a b;$(touch BAD)"))
    said, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    found = [json.loads((tmp_path / f"kept.{rank}").read_text()) for rank in range(3)]
    assert all(arguments == given for arguments, _, _ in found)
    assert [kept["LOCAL_RANK"] for _, kept, _ in found] == ["0", "0", "1"]
    assert [kept["LOCAL_WORLD_SIZE"] for _, kept, _ in found] == ["1", "2", "2"]
    assert all(kept["WORLD_SIZE"] == "3" and kept["XX"] == "a b;$(touch BAD)" for _, kept, _ in found)
    assert len({kept["MASTER_PORT"] for _, kept, _ in found}) == 1
    secrets = {secret for _, _, secret in found}
    assert len(secrets) == 1 and len(secrets.pop()) == 64
    assert sorted(said.splitlines()) == ["[rank 1] said by 1", "[rank 2] said by 2", "said by 0"]
    assert not list(tmp_path.rglob("BAD"))


def test_the_first_failure_of_any_host_is_shown_first(launch: Launch, tmp_path: Path) -> None:
    """The first host's rank fails too, as a peer does, before the second host's is known here."""
    text = """
if rank == 2:
    raise ValueError("the cause")
if rank == 0:
    time.sleep(0.1)
    raise RuntimeError("/gloo/: connection closed by peer")
time.sleep(600)
"""
    job = launch(text)
    said = job.communicate(timeout=60)[1]
    lines = said.splitlines()
    assert job.returncode == 1
    assert lines[0] == "rank 2 on two failed: ValueError: the cause", said
    assert "Traceback (most recent call last):" in lines[1]
    assert any(line.startswith("rank 0 on one failed too") for line in lines)
    assert not left_over(tmp_path)


def test_no_rank_outlives_the_launcher(launch: Launch, tmp_path: Path) -> None:
    job = launch("time.sleep(600)")
    wait_until(lambda: len(list(tmp_path.glob("rank.*"))) == 3)
    assert left_over(tmp_path)
    job.kill()
    job.communicate()
    wait_until(lambda: not left_over(tmp_path), 8.0)


def test_a_stop_request_reaches_the_ranks_of_all_hosts(launch: Launch, tmp_path: Path) -> None:
    job = launch(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n(here / f'ready.{rank}').touch()\ntime.sleep(600)"
    )
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 3)
    job.terminate()
    said = job.communicate(timeout=30)[1]
    assert (job.returncode, said) == (0, "stopping the ranks; once more kills them\n")


def test_a_lost_host_ends_the_others(launch: Launch, tmp_path: Path) -> None:
    """The agent of the second host is killed, as a host that loses its power."""
    job = launch("(here / f'agent.{rank}').write_text(str(os.getppid()))\ntime.sleep(600)")
    wait_until(lambda: len([p for p in tmp_path.glob("agent.*") if p.read_text()]) == 3)
    os.kill(int((tmp_path / "agent.1").read_text()), signal.SIGKILL)
    said = job.communicate(timeout=30)[1]
    assert job.returncode == 1 and "rank 1 on two failed: the connection to two is lost" in said
    wait_until(lambda: not left_over(tmp_path), 8.0)


def test_a_host_that_is_not_reached_is_named_before_anything_runs(launch: Launch, tmp_path: Path) -> None:
    job = launch("", hosts="one nowhere")
    said = job.communicate(timeout=10)[1]
    assert job.returncode == 2
    assert "no agent answers on nowhere by ssh: ssh: Could not resolve hostname nowhere" in said
    assert "Traceback" not in said and not list(tmp_path.glob("rank.*"))


def test_render_shows_commands_without_secrets(launch: Launch) -> None:
    job = launch("", "a b", options=("--render", "--ssh_port", "2222", "--export", "WANDB_API_KEY=abc123"))
    said, errors = job.communicate(timeout=30)
    assert job.returncode == 0 and not errors
    assert "abc123" not in said and "WANDB_API_KEY" in said and "python program.py 'a b'" in said
    commands = [line for line in said.splitlines() if line.startswith("ssh ")]
    assert [command.split(" -- ")[1].split()[0] for command in commands] == ["one", "two"]
    assert all("-p 2222" in command for command in commands)
    assert shutil.which("sh")
