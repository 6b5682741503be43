"""What the launcher prints of failures."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.launch.failure import RankFailure
from shardwise.launch.report import show_failures


def failure(rank: int, time_s: float, headline: str, **more: Any) -> RankFailure:
    return RankFailure(**{"rank": rank, "time_s": time_s, "headline": headline, "code": 1, **more})


def printed(*failures: RankFailure, log: Path | None = None) -> tuple[RankFailure, list[str]]:
    text = io.StringIO()
    cause = show_failures(Console(file=text, width=200), failures, lambda rank: log)
    return cause, text.getvalue().splitlines()


def test_the_cause_comes_first_with_its_traceback() -> None:
    late, early = (
        failure(0, 2.0, "CommError: rank 1 is gone"),
        failure(1, 1.0, "ValueError: bad", traceback="Trace\n"),
    )
    cause, lines = printed(late, early)
    assert cause is early
    assert lines == [
        "rank 1 failed: ValueError: bad",
        "Trace",
        "rank 0 failed too: CommError: rank 1 is gone",
    ]


def test_the_last_lines_of_a_log_stand_for_a_traceback(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("".join(f"line {number}\n" for number in range(30)))
    _, lines = printed(failure(1, 1.0, "killed by SIGKILL"), log=log)
    assert lines[:3] == ["rank 1 failed: killed by SIGKILL", f"the last lines of {log}:", "    line 10"]
    assert lines[-2:] == ["    line 29", f"log of rank 1: {log}"]
    _, lines = printed(failure(1, 1.0, "killed"), log=tmp_path / "none.log")
    assert lines == ["rank 1 failed: killed", f"log of rank 1: {tmp_path / 'none.log'}"]


def test_an_answer_is_one_line(tmp_path: Path) -> None:
    same = [failure(rank, float(rank), "the file is missing", is_answer=True) for rank in (0, 1)]
    assert printed(*same, log=tmp_path)[1] == ["error: the file is missing"]
    other = failure(1, 1.0, "another\nand more", is_answer=True)
    assert printed(same[0], other)[1] == [
        "error on rank 0: the file is missing",
        "rank 1 failed too: another",
    ]
