"""Jobs over real ssh servers, one in each of two network namespaces: ``make soak``, as root, with openssh-server.

By ssh alone, and by Open MPI and MPICH, which start their daemons by ssh.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.comm.rendezvous.besieged import SECRET, check_strangers
from tests.launch.curves import CURVES, TRAIN, check_curve, curve_alone
from tests.launch.cuts import (
    DrawnCut,
    check_failure,
    drawn_cuts,
    drawn_failures,
    popen,
    seconds_until_gone,
)
from tests.namespaces import NamespaceHost, namespaces

from shardwise.launch.processes import of_job

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(__file__).parent
(here / f"job.{os.environ['SHARDWISE_JOB']}").touch()
(here / f"rank.{rank}").write_text(str(os.getpid()))
while len(list(here.glob("rank.*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""


@dataclass
class SshCluster:
    """Two hosts with an ssh server each, and a folder with the configuration that reaches them."""

    hosts: list[NamespaceHost]
    folder: Path
    servers: list["subprocess.Popen[bytes]"]

    def command(self, *words: str, launcher: str = "ssh", hosts: str = "") -> list[str]:
        """A launch from the first host: ssh by names that its configuration alone knows, MPI by addresses."""
        if launcher != "ssh" and shutil.which(f"mpirun.{launcher}") is None:
            pytest.skip(f"needs mpirun.{launcher}, of Debian's openmpi-bin or mpich")
        options = ARGUMENTS[launcher].format(folder=self.folder)
        hosts = hosts or ("hosts" if launcher == "ssh" else "addresses")
        return [
            *self.hosts[0].command(
                sys.executable, "-m", "shardwise", "launch", "-H", str(self.folder / hosts)
            ),
            *("--launcher", launcher, f"--launcher_args={options}", *words),
        ]

    def run(self, text: str, *words: str, code: int = 0, launcher: str = "ssh", hosts: str = "") -> str:
        command = self.command(self.program(text), *words, launcher=launcher, hosts=hosts)
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=self.folder)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def start(self, text: str, launcher: str = "ssh") -> "subprocess.Popen[str]":
        """Start a program and return when all of its ranks run."""
        pipe = subprocess.PIPE
        command = self.command(self.program(text), launcher=launcher)
        started = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=self.folder)
        end = time.monotonic() + 60
        while len(list(self.folder.glob("rank.*"))) < 4:
            assert started.poll() is None and time.monotonic() < end, started.communicate()
            time.sleep(0.02)
        return started

    def program(self, text: str) -> str:
        for path in (*self.folder.glob("job.*"), *self.folder.glob("rank.*")):
            path.unlink()
        path = self.folder / "program.py"
        path.write_text(text)
        return str(path)

    def left_over(self) -> list[int]:
        """Processes of the program's jobs on any host: namespaces of this machine share the list of processes."""
        words = [path.name.removeprefix("job.") for path in self.folder.glob("job.*")]
        assert len(words) == 2, "one job's word a host"
        return [pid for word in words for pid in of_job(word)]

    def begin(self, program: str, launcher: str) -> "subprocess.Popen[str]":
        """Start the job of a program."""
        return popen(self.command(program, launcher=launcher), cwd=self.folder)

    def start_server(self, host: NamespaceHost) -> None:
        """Start the ssh server of a host, once more if it has ended."""
        server = host.start(
            "/usr/sbin/sshd", "-D", "-e", "-f", f"{self.folder}/sshd{host.number}", stderr=subprocess.DEVNULL
        )
        self.servers[host.number - 1 : host.number] = [server]
        time.sleep(0.5)
        assert server.poll() is None

    def lose(self, cut: DrawnCut, job: "subprocess.Popen[str]") -> None:
        """Carry out a drawn cut."""
        server = self.servers[cut.host]
        if cut.way == "launcher":
            job.send_signal(cut.number)
        elif cut.way == "cable":
            self.hosts[cut.host].cut()
        else:
            end = time.monotonic() + 20
            while not (sessions := _below(server.pid)):
                assert time.monotonic() < end, "no session of ssh has begun"
                time.sleep(0.02)
            for pid in (*([server.pid] if cut.way == "server" else []), *sessions):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, cut.number)
            if cut.way == "server":
                server.wait()
                self.start_server(self.hosts[cut.host])

    def wait_until_gone(self, seconds: float) -> float:
        since = time.monotonic()
        while self.left_over():
            assert time.monotonic() < since + seconds, self.left_over()
            time.sleep(0.02)
        return time.monotonic() - since


def _below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started, but for programs of users."""
    children = subprocess.run(["pgrep", "-P", str(pid), "sshd"], capture_output=True, text=True)
    found = [int(each) for each in children.stdout.split()]
    return found + [below for each in found for below in _below(each)]


ARGUMENTS = {
    "ssh": "-F {folder}/config",
    "openmpi": "--allow-run-as-root --mca plm_rsh_agent {folder}/with_config",
    "mpich": "-launcher ssh -launcher-exec {folder}/with_config",
}
CONFIG = """
Host *
    User root
    Port 2222
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
Host gpu1
    HostName {one}
Host gpu2
    HostName {two}
Host gpu9
    HostName 10.213.7.99
"""
SERVER = """
Port 2222
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshCluster]:
    if shutil.which("sshd", path="/usr/sbin:/usr/bin") is None or shutil.which("ssh") is None:
        pytest.skip("needs Debian's openssh-server and openssh-client")
    folder = tmp_path_factory.mktemp("ssh")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with namespaces(2) as hosts:
        (folder / "hosts").write_text("gpu1 slots=2\ngpu2 slots=2\n")
        (folder / "config").write_text(
            CONFIG.format(folder=folder, one=hosts[0].address, two=hosts[1].address)
        )
        (folder / "addresses").write_text("".join(f"{host.address} slots=2\n" for host in hosts))
        (folder / "with_config").write_text(f'#!/bin/sh\nexec ssh -F {folder}/config "$@"\n')
        (folder / "with_config").chmod(0o755)
        made = SshCluster(hosts, folder, [])
        try:
            for host in hosts:
                (folder / f"sshd{host.number}").write_text(SERVER.format(folder=folder, address=host.address))
                made.start_server(host)
            yield made
        finally:
            for server in made.servers:
                server.terminate()
                server.wait()


LAUNCHERS = pytest.mark.parametrize("launcher", list(ARGUMENTS))


@LAUNCHERS
@pytest.mark.parametrize(("config", "crossing"), CURVES.values(), ids=CURVES)
def test_two_hosts_train_as_one_process(
    cluster: SshCluster, launcher: str, config: dict[str, Any], crossing: float
) -> None:
    said = cluster.run(TRAIN, json.dumps(config), launcher=launcher)
    check_curve(said, curve_alone(cluster.folder / "program.py"), crossing)


HOSTILE = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "''",
    '"a"',
    "\\",
    "a\\",
    ";",
    "; touch BAD",
    "$(touch BAD)",
    "`touch BAD`",
]
HOSTILE += [
    "a\nb",
    "\n",
    "\r\n",
    "\t",
    "$HOME",
    "${HOME}",
    "*",
    "?",
    "~",
    "#",
    "&",
    "&& touch BAD",
    "| touch BAD",
]
HOSTILE += [
    "> BAD",
    "< BAD",
    "!",
    "!!",
    "%s",
    "--ranks",
    "-n",
    "--",
    "-",
    "=",
    "a=b",
    "é",
    "日本",
    "\u2028",
    "\x7f",
]
HOSTILE += [chr(code) for code in range(1, 32)] + ["\udcff", "x" * 5000]
HOSTILE += [f"{a}{b}" for a in ("'", '"', "\\") for b in ("'", '"', "$(touch BAD)", ";", "\n", " ", "`")]


@LAUNCHERS
def test_arguments_arrive_byte_for_byte(cluster: SshCluster, launcher: str) -> None:
    text = PROGRAM + "(here / f'argv.{rank}').write_text(json.dumps(sys.argv[1:]))\n"
    assert len(HOSTILE) >= 100 - 8
    cluster.run(text, *HOSTILE, launcher=launcher)
    for rank in range(4):
        assert json.loads((cluster.folder / f"argv.{rank}").read_text()) == HOSTILE
    assert not list(cluster.folder.rglob("BAD")) and not (Path.home() / "BAD").exists()


@LAUNCHERS
@pytest.mark.parametrize("kind", ["raised", "killed", "exited"])
def test_the_first_failure_of_another_host_is_shown_first(
    cluster: SshCluster, kind: str, launcher: str
) -> None:
    fault = {
        "raised": "raise ValueError('the cause')",
        "killed": "os.kill(os.getpid(), signal.SIGKILL)",
        "exited": "os._exit(7)",
    }[kind]
    text = PROGRAM + f"if rank == 3:\n    time.sleep(0.2)\n    {fault}\ntime.sleep(60)\n"
    since = time.monotonic()
    said = cluster.run(text, code={"raised": 1, "killed": 137, "exited": 7}[kind], launcher=launcher)
    assert time.monotonic() - since < 20
    first = next(line for line in said.splitlines() if "failed" in line)
    assert f"rank 3 on {'gpu2' if launcher == 'ssh' else cluster.hosts[1].address} failed" in first
    if kind == "raised":
        assert "ValueError: the cause" in first and "Traceback" in said
    assert cluster.wait_until_gone(1.0) < 1.0


@LAUNCHERS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_launcher(cluster: SshCluster, number: signal.Signals, launcher: str) -> None:
    job = cluster.start(PROGRAM + "time.sleep(600)\n", launcher)
    job.send_signal(number)
    print(f"{number.name}: gone after {cluster.wait_until_gone(8.0):.2f} s")
    job.communicate(timeout=20)


def test_no_rank_outlives_its_ssh_session(cluster: SshCluster) -> None:
    job = cluster.start(PROGRAM + "time.sleep(600)\n")
    theirs = subprocess.run(["pgrep", "-P", str(cluster.servers[1].pid)], capture_output=True, text=True)
    for pid in theirs.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    print(f"gone after {cluster.wait_until_gone(8.0):.2f} s")
    assert "gpu2" in job.communicate(timeout=20)[1] and job.returncode == 1


@LAUNCHERS
def test_no_rank_outlives_the_cable(cluster: SshCluster, launcher: str) -> None:
    job = cluster.start(PROGRAM + "time.sleep(600)\n", launcher)
    cluster.hosts[1].cut()
    try:
        print(f"gone after {cluster.wait_until_gone(8.0):.2f} s")
        said = job.communicate(timeout=20)[1]
        assert job.returncode == 1 and "the connection to " in said and " is lost" in said
    finally:
        cluster.hosts[1].ip("link", "set", cluster.hosts[1].interface, "up")


CUTS = {
    "ssh": ("launcher", "session", "server", "cable"),
    "openmpi": ("launcher", "cable"),
    "mpich": ("launcher", "cable"),
}
"""What is lost, by back end. MPI's daemons do not end with the ssh sessions that have started them."""


@pytest.mark.timeout(3600)
def test_no_rank_outlives_fifty_drawn_cuts(cluster: SshCluster) -> None:
    took: dict[str, list[float]] = {}
    for cut in drawn_cuts(50, CUTS):
        seconds = seconds_until_gone(
            cluster, cut, lambda program, by=cut.launcher: cluster.begin(program, by), cluster.lose
        )
        print(f"{seconds:.2f} s: {cut}", flush=True)
        took.setdefault(cut.way, []).append(seconds)
    print({way: (len(each), max(each)) for way, each in took.items()})


@pytest.mark.timeout(3600)
def test_twenty_drawn_failures_of_another_host_are_shown_first(cluster: SshCluster) -> None:
    took = []
    for failure in drawn_failures(20, list(ARGUMENTS)):
        name = "gpu2" if failure.launcher == "ssh" else cluster.hosts[1].address
        seconds = check_failure(
            cluster, failure, lambda program, by=failure.launcher: cluster.begin(program, by), name
        )
        print(f"{seconds:.2f} s: {failure}", flush=True)
        took.append(seconds)
    print(f"20 failures shown after at most {max(took):.1f} s")


@LAUNCHERS
def test_a_thousand_strangers_do_not_stop_a_job(
    cluster: SshCluster, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_SECRET", SECRET)
    check_strangers(cluster.hosts, cluster.folder, lambda program: [cluster.begin(program, launcher)])


@LAUNCHERS
def test_an_unreachable_host_is_named_with_the_words_of_ssh(cluster: SshCluster, launcher: str) -> None:
    names = ("gpu1", "gpu9") if launcher == "ssh" else (cluster.hosts[0].address, "10.213.7.99")
    (cluster.folder / "wrong").write_text("".join(f"{name} slots=2\n" for name in names))
    since = time.monotonic()
    said = cluster.run(PROGRAM, hosts="wrong", code=2, launcher=launcher)
    print(f"{time.monotonic() - since:.1f} s: {said}")
    assert (
        f"no agent answers on {names[1]} by {launcher}: ssh: connect to host 10.213.7.99 port 2222: " in said
    )
    assert time.monotonic() - since < 10 and "Traceback" not in said


def test_a_configuration_trains_on_all_hosts(cluster: SshCluster) -> None:
    """``train`` has the flags of hosts; its metrics are those of the same run on one host."""
    small = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32", "train.steps=2"]
    small += ["batch.global_size=8", "batch.micro_size=2", "data.workers=0", "comm.device=cpu"]
    words = [word for each in small for word in ("--set", each)]
    found = []
    for where, options in (("several", ["-H", str(cluster.folder / "hosts")]), ("one", ["--ranks", "4"])):
        output = cluster.folder / where
        command = [sys.executable, "-m", "shardwise", "train", "gpt_stdlib", *words, *options]
        command += ["--set", f"output_dir={output}"]
        if where == "several":
            command = cluster.hosts[0].command(*command, f"--launcher_args=-F {cluster.folder}/config")
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cluster.folder)
        assert done.returncode == 0, done.stderr
        rows = (output / "metrics.csv").read_text().splitlines()
        at = rows[0].split(",").index("loss")
        found.append([float(row.split(",")[at]) for row in rows[1:]])
        if where == "several":
            hosts = json.loads((output / "run.json").read_text())["starts"][-1]["hosts"]
            assert len(hosts) == 2
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=1e-5)
