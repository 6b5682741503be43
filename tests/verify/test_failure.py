"""A refusal, a hang and unequal copies are told apart, with the ranks and with what the error names."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardwise.base.errors import UsageError
from shardwise.comm.flights import DONE
from shardwise.engine.engine import Engine
from shardwise.parallel.zero.gradient import Gradient
from shardwise.verify import run
from shardwise.verify.failure import FAILURE, diverged_copies, failure_of
from shardwise.verify.record import LayoutJob, run_rank
from tests.verify.test_run import CONFIG, Net, example

ALARM = (
    "step 2: ranks that hold the same state do not hold the same bytes: weight of blocks.0.out.weight, elements "
    "[0, 256) of the flattened piece: its holders, ranks 0, 1, do not agree, and none of them is in the majority"
)


def write(folder: Path, rank: int, kind: str, text: str) -> None:
    said = json.dumps({"type": kind, "text": text, "rank": rank})
    Path(folder, f"{rank}.{FAILURE}").write_text(said, encoding="utf-8")


def test_an_alarm_of_the_guard_names_the_tensor_and_its_holders() -> None:
    found = diverged_copies(ALARM)
    assert (found.kind, found.name, found.module) == ("replica", "blocks.0.out.weight", "blocks.0.out")
    assert found.ranks == [0, 1]


def test_a_refusal_on_one_rank_is_no_hang_of_the_others(tmp_path: Path) -> None:
    write(
        tmp_path,
        0,
        "DeadlineError",
        "rank 0: all_reduce of the norm in step 1 over 2 ranks of axis 'dp': late",
    )
    write(tmp_path, 1, "UsageError", "the module blocks.1 cannot be used so")
    found = failure_of(tmp_path, "", {"blocks.1", "blocks.2"})
    assert (found.kind, found.name, found.ranks) == ("refused", "blocks.1", [1])


def test_a_hang_names_the_collective_in_which_ranks_waited(tmp_path: Path) -> None:
    write(
        tmp_path,
        0,
        "CommError",
        "rank 0: all_reduce of other in step 2 over 2 ranks of axis 'dp' failed: gone",
    )
    write(
        tmp_path,
        1,
        "DeadlineError",
        "rank 1: reduce_scatter of Unit first in step 2 over 2 ranks of axis 'dp'",
    )
    found = failure_of(tmp_path, "")
    assert (found.kind, found.name, found.ranks) == ("hang", "Unit first", [0, 1])
    assert failure_of(tmp_path / "empty", "rank 1 ended by SIGALRM").kind == "hang"


def _leaves_out_a_collective(job: LayoutJob, folder: str) -> int:
    """Run a rank; rank 1 does not join the sum of one gradient in the second step."""
    right, train_step = Gradient._reduce_scatter, Engine.train_step
    steps, left_out = [], []

    def impatient(self: Engine, *args: Any) -> Any:
        steps.append(self)
        self.clock._timeout_s = 0.3
        return train_step(self, *args)

    def wrong(self: Gradient, *args: Any, **keys: Any) -> Any:
        if len(steps) == 2 and steps[0].world.rank == 1 and not left_out:
            left_out.append(self)
            return DONE
        return right(self, *args, **keys)

    with patch.object(Gradient, "_reduce_scatter", wrong), patch.object(Engine, "train_step", impatient):
        return run_rank(job, folder)


def _refuses(job: LayoutJob, folder: str) -> int:
    """Run a rank; rank 1 refuses its second step."""
    train_step, steps = Engine.train_step, []

    def refuses(self: Engine, *args: Any) -> Any:
        steps.append(self)
        if len(steps) == 2 and self.world.rank == 1:
            raise UsageError("the module second cannot be used so")
        self.clock._timeout_s = 0.3
        return train_step(self, *args)

    with patch.object(Engine, "train_step", refuses):
        return run_rank(job, folder)


def test_a_rank_that_leaves_out_a_collective_is_a_hang() -> None:
    with patch.object(run, "run_rank", _leaves_out_a_collective):
        found = run.verify(Net, CONFIG, example(), layout="dp=2,zero=2", steps=2)
    assert found.verdict == "fail" and found.first is not None and found.first.kind == "hang", found.lines()
    assert found.first.ranks and found.first.name


def test_a_rank_that_refuses_is_named() -> None:
    with patch.object(run, "run_rank", _refuses):
        found = run.verify(Net, CONFIG, example(), layout="dp=2,zero=2", steps=2)
    assert found.first is not None and found.first.kind == "refused", found.lines()
    assert (found.first.name, found.first.ranks) == ("second", [1])
