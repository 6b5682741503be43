"""Jobs in an allocation of a real SLURM of two network namespaces: ``make soak``, as root, with slurm-wlm and munge."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.comm.rendezvous.besieged import SECRET
from tests.launch.curves import CURVES, TRAIN, check_curve, curve_alone
from tests.launch.cuts import DrawnFailure, drawn_failures, popen
from tests.launch.schedulers import ScheduledHosts
from tests.launch.test_ssh_hosts import HOSTILE, PROGRAM
from tests.namespaces import NamespaceHost, namespaces

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
_PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "munged")
_CONFIG = """
ClusterName=trial
SlurmctldHost=node1({one})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MpiDefault=none
KillWait=5
NodeName=node1 NodeAddr={one} CPUs=2 State=UNKNOWN
NodeName=node2 NodeAddr={two} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster(ScheduledHosts):
    """Two hosts under a SLURM controller that runs on the first."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of SLURM's programs."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str) -> list[str]:
        """Return the command that runs the program that was written."""
        allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
        launch = [sys.executable, "-m", "shardwise", "launch", "--launcher", "slurm"]
        return self.hosts[0].command(*allocation, *launch, str(self.folder / "program.py"), *words)

    def run(self, text: str, *words: str, code: int = 0) -> str:
        self.write(text)
        done = self.call(self.command(*words))
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def call(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, capture_output=True, text=True, timeout=150, cwd=self.folder, env=self.environment
        )

    def begin(self) -> "subprocess.Popen[str]":
        return popen(self.command(), cwd=self.folder, env=self.environment)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    search = f"/usr/sbin:{os.environ['PATH']}"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=search) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, of Debian's slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    started: list[subprocess.Popen[Any]] = []
    with namespaces(2, resolves="all") as hosts:
        (folder / "slurm.conf").write_text(
            _CONFIG.format(folder=folder, one=hosts[0].address, two=hosts[1].address)
        )
        # ``ip netns exec`` shows no cgroups, which slurmd looks for unless it is told which kind to expect.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for host in hosts:
            (folder / f"spool.{host.hostname}").mkdir()
        made = SlurmCluster(hosts, folder)

        def start(host: NamespaceHost, *words: str) -> None:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(host.start(*words, env=made.environment | {"PATH": search}, **quiet))

        try:
            start(hosts[0], "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
                  f"--socket={folder}/munge.socket", f"--log-file={folder}/munge.log",
                  f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed")  # fmt: skip
            time.sleep(1)
            start(hosts[0], "slurmctld", "-D")
            for host in hosts:
                start(host, "slurmd", "-D", "-N", host.hostname)
            end = time.monotonic() + 60
            while made.call(hosts[0].command("sinfo", "-h", "-o", "%t", "-N")).stdout[:4] != "idle":
                assert time.monotonic() < end, [path.read_text()[-2000:] for path in folder.glob("*.log")]
                time.sleep(0.2)
            yield made
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(20)


@pytest.mark.parametrize(("config", "crossing"), CURVES.values(), ids=CURVES)
def test_two_hosts_train_as_one_process(
    cluster: SlurmCluster, config: dict[str, Any], crossing: float
) -> None:
    said = cluster.run(TRAIN, json.dumps(config))
    check_curve(said, curve_alone(cluster.folder / "program.py"), crossing)


def test_arguments_arrive_byte_for_byte(cluster: SlurmCluster) -> None:
    cluster.run(PROGRAM + "(here / f'argv.{rank}').write_text(json.dumps(sys.argv[1:]))\n", *HOSTILE)
    for rank in range(4):
        assert json.loads((cluster.folder / f"argv.{rank}").read_text()) == HOSTILE
    assert not list(cluster.folder.rglob("BAD"))


def test_the_first_failure_of_another_host_is_shown_first(cluster: SlurmCluster) -> None:
    said = cluster.run(PROGRAM + "if rank == 3:\n    raise ValueError('the cause')\ntime.sleep(60)\n", code=1)
    assert "rank 3 on node2 failed: ValueError: the cause" in said and "Traceback" in said
    assert not cluster.left_over()


def test_a_thousand_strangers_do_not_stop_a_job(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_SECRET", SECRET)
    cluster.check_strangers()


@pytest.mark.parametrize("failure", [*drawn_failures(4, ["slurm"])], ids=lambda each: each.kind)
def test_a_drawn_failure_of_another_host_is_shown_first(cluster: SlurmCluster, failure: DrawnFailure) -> None:
    cluster.check_failure(failure, "node2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_launcher(cluster: SlurmCluster, number: signal.Signals) -> None:
    text = PROGRAM + "(here / f'launcher.{rank}').touch()\ntime.sleep(600)\n"
    job = cluster.start(text)
    found = subprocess.run(
        ["pgrep", "-f", f"launcher slurm {cluster.folder}"], capture_output=True, text=True
    )
    launchers = [int(pid) for pid in found.stdout.split() if _name(int(pid)) == "python"]
    assert len(launchers) == 1
    os.kill(launchers[0], number)
    cluster.check_gone()
    job.communicate(timeout=30)


def _name(pid: int) -> str:
    return os.path.basename(os.readlink(f"/proc/{pid}/exe")).rstrip("0123456789.")


def test_a_batch_script_saves_before_its_limit(cluster: SlurmCluster) -> None:
    """The rendered script runs, and SLURM's SIGTERM reaches the ranks, which save; the job exits with 143."""
    text = PROGRAM + (
        "def save(*_):\n    (here / f'saved.{rank}').touch()\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\ntime.sleep(600)\n"
    )
    rendered = cluster.call(
        [sys.executable, "-m", "shardwise", "launch", "--launcher", "slurm", "--render", "--num_nodes", "2"]
        + ["--ranks", "2", str(cluster.folder / "program.py")]
    )
    assert "#SBATCH --requeue" in rendered.stdout and "--signal=TERM@120" in rendered.stdout, rendered
    cluster.write(text)
    (cluster.folder / "batch.sh").write_text(rendered.stdout)
    sent = cluster.call(cluster.hosts[0].command("sbatch", "--parsable", "--output=batch.log", "batch.sh"))
    number = sent.stdout.strip()
    end = time.monotonic() + 60
    while len(list(cluster.folder.glob("rank.*"))) < 4:
        assert time.monotonic() < end, (sent, (cluster.folder / "batch.log").read_text())
        time.sleep(0.1)
    cluster.call(cluster.hosts[0].command("scancel", "--signal=TERM", number))
    while len(list(cluster.folder.glob("saved.*"))) < 4:
        assert time.monotonic() < end
        time.sleep(0.1)
    state = ""
    while "ExitCode=143:0" not in state:
        assert time.monotonic() < end, state
        state = cluster.call(cluster.hosts[0].command("scontrol", "show", "job", number)).stdout
        time.sleep(0.2)
    assert not cluster.left_over()


def test_no_rank_outlives_the_cable(cluster: SlurmCluster) -> None:
    """The last test: the controller has to find the node again."""
    cluster.check_cable("slurm", 1)
