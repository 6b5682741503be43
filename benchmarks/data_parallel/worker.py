"""One rank of one contender: a process that sleeps until it is told to run some steps.

Commands and answers are lines of JSON on stdin and stdout:

    {"do": "ready"}                imports and meets its peers, exercises torch once on a toy model
    {"do": "build"}                builds the contender
    {"do": "steps", "count": k}    runs k steps -> seconds, losses, sent_bytes, one entry per step
    {"do": "sleep"}                gives freed memory back

Everything a library prints goes to stderr, which the parent keeps in a file.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import give_back_free_memory, sent_bytes
from rows import ROWS
from setting import Running, Setting
from torch import Tensor
from workload import Workload, batch, build_model


class Rank:
    """State of this process between commands."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.row = self.find_row()
        self.running: Running | None = None
        self.steps_done = 0

    def find_row(self) -> Any:
        """The contender that this rank belongs to."""
        return next(row for row in ROWS if row.name == self.setting.contender)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """What this rank is given in step ``number``."""
        return batch(self.setting.workload, number, self.setting.rank)

    def ready(self) -> dict[str, Any]:
        """Everything before the model: what this costs is not the contender's."""
        torch.set_num_threads(1)
        module_name, self.function_name = self.row.build.split(":")
        self.module = importlib.import_module(module_name)
        if self.row.package != "torch":
            importlib.import_module(self.row.package)
        store = dist.FileStore(str(Path(self.setting.folder) / "store"), self.setting.world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.setting.rank,
            world_size=self.setting.world_size,
            timeout=datetime.timedelta(seconds=300),
        )
        dist.all_reduce(torch.ones(1))
        self._exercise()
        return {}

    def _exercise(self) -> None:
        """One step of a toy model, so that lazily loaded parts of torch are in memory beforehand."""
        toy = Workload.tiny()
        model = build_model(toy)
        if self.setting.dtype == "bf16":
            model = model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(*batch(toy, 0, 0)).backward()
        optimizer.step()
        del model, optimizer
        gc.collect()
        give_back_free_memory()

    def build(self) -> dict[str, Any]:
        """Build the contender on this rank's part of the job."""
        self.running = getattr(self.module, self.function_name)(self.row, self.setting)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Run ``count`` steps; data is made before the clock starts."""
        assert self.running is not None, "steps before build"
        numbers = range(self.steps_done, self.steps_done + count)
        batches = [self.batch(number) for number in numbers]
        seconds, losses, sent = [], [], []
        other, last = self.running.other_bytes(), sent_bytes()
        begin = time.perf_counter()
        for tokens, targets in batches:
            losses.append(self.running.step(tokens, targets))
            now = time.perf_counter()
            seconds.append(now - begin)
            sent.append(sent_bytes() - last)
            last += sent[-1]
            begin = time.perf_counter()
        self.steps_done += count
        other = self.running.other_bytes() - other
        return {"seconds": seconds, "losses": losses, "sent_bytes": sent, "other_bytes": other}

    def sleep(self) -> dict[str, Any]:
        """Make room for the contender that runs next."""
        gc.collect()
        give_back_free_memory()
        return {}


def serve(kind: type[Rank]) -> None:
    """Obey the commands on stdin until it closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rank = kind(Setting.from_json(json.loads(sys.argv[1])))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command.pop("do"))(**command)
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # the measurement is over; some libraries wait for each other at a normal exit


if __name__ == "__main__":
    serve(Rank)
