"""One rank of one contender: a process that sleeps until it is told to run some steps.

    {"do": "ready"}                imports, and meets its peers
    {"do": "build"}                builds the contender
    {"do": "steps", "count": k}    runs k steps -> seconds, losses, sent_bytes, one entry per step
    {"do": "look"}                 -> state, notes, samples
    {"do": "sleep"}                gives freed memory back

Lines of JSON on stdin and stdout; what a library prints goes to stderr, which the parent keeps in a file.
"""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import torch
import torch.distributed as dist
from contender import Case, Contender, Running, part
from measure import give_back_free_memory, keep_freed_memory, sent_bytes

OWN_HEAP = "BENCH_OWN_HEAP"
"""Variable of the environment with which each contender's heap is as users have it (``run.py --own-heap``)."""


class Rank:
    """State of this process between commands."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.case = Case(**setting["workload"])
        self.rank, self.folder = setting["rank"], Path(setting["folder"])
        self.part = part(self.case.part)
        found: list[Contender] = self.part.contenders(self.case)
        self.contender = next(each for each in found if each.name == setting["contender"])
        self.running: Running | None = None
        self.steps_done = 0
        self.page_faults = 0.0
        """Minor page faults a step of the last steps, among them those of what is counted here."""

    def ready(self) -> dict[str, Any]:
        """Everything before the model: what this costs is not the contender's."""
        torch.set_num_threads(1)
        if OWN_HEAP not in os.environ:
            keep_freed_memory()
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        if self.case.ranks > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(self.folder / "store"), self.case.ranks),
                rank=self.rank,
                world_size=self.case.ranks,
                timeout=datetime.timedelta(seconds=300),
            )
            dist.all_reduce(torch.ones(1))
        return {}

    def build(self) -> dict[str, Any]:
        """Build the contender on this rank's part of the job."""
        self.running = self.part.build(self.contender, self.case, self.rank)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Run ``count`` steps; data is made before the clock starts."""
        assert self.running is not None, "steps before build"
        given = [self.running.data(self.steps_done + number) for number in range(count)]
        seconds, losses, sent = [], [], []
        other, last, faults = self.running.other_bytes(), sent_bytes(), _page_faults()
        begin = time.perf_counter()
        for data in given:
            losses.append(self.running.step(data))
            now = time.perf_counter()
            seconds.append(now - begin)
            sent.append(sent_bytes() - last)
            last += sent[-1]
            begin = time.perf_counter()
        self.steps_done += count
        self.page_faults = (_page_faults() - faults) / count
        other = self.running.other_bytes() - other
        return {"seconds": seconds, "losses": losses, "sent_bytes": sent, "other_bytes": other}

    def look(self) -> dict[str, Any]:
        """What it has come to."""
        assert self.running is not None, "a look before build"
        return {
            "state": self.running.state(),
            "notes": self.running.notes() | {"page faults a step": self.page_faults},
            "samples": self.running.samples,
        }

    def sleep(self) -> dict[str, Any]:
        """Make room for the contender that runs next."""
        gc.collect()
        give_back_free_memory()
        return {}


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Obey the commands on stdin until it closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rank = Rank(json.loads(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command.pop("do"))(**command)
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # the measurement is over; some libraries wait for each other at a normal exit


if __name__ == "__main__":
    main()
