"""Jobs on a cluster of Ray on two network namespaces: ``make soak``, as root, with the extra ``ray``."""

import importlib.util
import json
import os
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
from tests.namespaces import namespaces

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


class RayCluster(ScheduledHosts):
    """Two nodes of Ray with two processors each."""

    def command(self, *words: str, ranks: int = 2) -> list[str]:
        """Return the command that runs the program that was written."""
        launch = [sys.executable, "-m", "shardwise", "launch", "--launcher", "ray", "--ranks", str(ranks)]
        address = f"--launcher_args=--address {self.hosts[0].address}:6379"
        # On the second node, which is not Ray's head.
        return self.hosts[1].command(*launch, address, str(self.folder / "program.py"), *words)

    def run(self, text: str, *words: str, code: int = 0, ranks: int = 2) -> str:
        self.write(text)
        command = self.command(*words, ranks=ranks)
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=self.folder)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def begin(self) -> "subprocess.Popen[str]":
        return popen(self.command(), cwd=self.folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install ray")
    folder = tmp_path_factory.mktemp("ray")
    options = ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    with namespaces(2) as hosts:
        started = []
        for host in hosts:
            place = [f"--address={hosts[0].address}:6379"]
            if host is hosts[0]:
                place = [
                    "--head",
                    "--port=6379",
                    "--include-dashboard=false",
                    f"--temp-dir=/tmp/r{os.getpid()}",
                ]
            ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, *options]
            log = (folder / f"{host.hostname}.log").open("w")
            words = [*ray, f"--node-ip-address={host.address}"]
            started.append(host.start(*words, stdout=log, stderr=log, start_new_session=True))
            log.close()
            end = time.monotonic() + 90
            while "Ray runtime started" not in (folder / f"{host.hostname}.log").read_text():
                assert time.monotonic() < end, (folder / f"{host.hostname}.log").read_text()
                time.sleep(0.2)
        try:
            yield RayCluster(hosts, folder)
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(30)


def test_arguments_arrive_byte_for_byte(cluster: RayCluster) -> None:
    text = PROGRAM + "(here / f'argv.{rank}').write_text(json.dumps(sys.argv[1:]))\n"
    given = [word for word in HOSTILE if word != "\udcff"]
    cluster.run(text, *given)
    for rank in range(4):
        assert json.loads((cluster.folder / f"argv.{rank}").read_text()) == given
    assert "Ray takes no command with arguments that are not text" in cluster.run(text, "\udcff", code=2)
    assert not list(cluster.folder.rglob("BAD"))


@pytest.mark.parametrize(("config", "crossing"), CURVES.values(), ids=CURVES)
def test_two_nodes_train_as_one_process(cluster: RayCluster, config: dict[str, Any], crossing: float) -> None:
    said = cluster.run(TRAIN, json.dumps(config))
    check_curve(said, curve_alone(cluster.folder / "program.py"), crossing)


def test_the_first_failure_of_another_node_is_shown_first(cluster: RayCluster) -> None:
    said = cluster.run(PROGRAM + "if rank == 3:\n    raise ValueError('the cause')\ntime.sleep(60)\n", code=1)
    assert f"rank 3 on {cluster.hosts[1].address} failed: ValueError: the cause" in said
    assert "Traceback" in said and not cluster.left_over()


def test_a_thousand_strangers_do_not_stop_a_job(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_SECRET", SECRET)
    cluster.check_strangers()


@pytest.mark.parametrize("failure", [*drawn_failures(4, ["ray"])], ids=lambda each: each.kind)
def test_a_drawn_failure_of_another_node_is_shown_first(cluster: RayCluster, failure: DrawnFailure) -> None:
    cluster.check_failure(failure, cluster.hosts[1].address)


def test_no_rank_outlives_the_launcher(cluster: RayCluster) -> None:
    job = cluster.start(PROGRAM + "time.sleep(600)\n")
    job.kill()
    cluster.check_gone()
    job.communicate()


def test_more_ranks_than_a_node_has_are_refused(cluster: RayCluster) -> None:
    since = time.monotonic()
    assert "asked 3, have 2" in cluster.run(PROGRAM, code=2, ranks=3)
    assert time.monotonic() - since < 15


def test_no_rank_outlives_the_cable(cluster: RayCluster) -> None:
    """The last test: Ray takes a node that was away for lost."""
    cluster.check_cable("ray", 0)
