"""Two hosts under a scheduler, SLURM's or Ray's, on which our launcher starts jobs: what their tests have in common."""

import signal
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path

from tests.comm.rendezvous.besieged import check_strangers
from tests.launch.cuts import DrawnCut, DrawnFailure, check_failure, seconds_until_gone, wait_for
from tests.namespaces import NamespaceHost

from shardwise.launch.processes import of_job


class ScheduledHosts(ABC):
    """Two hosts, and a folder that both see, for one job at a time."""

    def __init__(self, hosts: list[NamespaceHost], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    @abstractmethod
    def begin(self) -> "subprocess.Popen[str]":
        """Start the job of the program that was written."""

    def write(self, text: str) -> None:
        """Write the program of a job, and remove the files of the job before."""
        for path in (*self.folder.glob("job.*"), *self.folder.glob("rank.*")):
            path.unlink()
        (self.folder / "program.py").write_text(text)

    def start(self, text: str) -> "subprocess.Popen[str]":
        """Start a program and return when all of its ranks run."""
        self.write(text)
        job = self.begin()
        wait_for(self.folder, "rank.*", 4, job)
        return job

    def left_over(self) -> list[int]:
        """Return the processes of the program's jobs on any host."""
        return [pid for path in self.folder.glob("job.*") for pid in of_job(path.name.removeprefix("job."))]

    def check_gone(self) -> None:
        """Check that no process is left within eight seconds."""
        since = time.monotonic()
        while self.left_over():
            assert time.monotonic() < since + 8, self.left_over()
            time.sleep(0.02)
        print(f"gone after {time.monotonic() - since:.2f} s")

    def check_strangers(self) -> None:
        """Check that a job takes no notice of a thousand strangers."""
        check_strangers(self.hosts, self.folder, lambda _: [self.begin()])

    def check_failure(self, failure: DrawnFailure, host_name: str) -> None:
        """Check that a failure of the second host is shown first."""
        print(f"{check_failure(self, failure, lambda _: self.begin(), host_name):.2f} s")

    def check_cable(self, launcher: str, host: int) -> None:
        """Check that no rank outlives the cable of a host, while the ranks train."""
        cut = DrawnCut(launcher, "cable", host, signal.SIGKILL, "step", 0.5)
        took = seconds_until_gone(
            self, cut, lambda _: self.begin(), lambda cut, _: self.hosts[cut.host].cut()
        )
        print(f"gone after {took:.2f} s")
