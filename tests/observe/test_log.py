import io
import logging
from pathlib import Path

from rich.console import Console

from shardwise.observe.log import log_path, rank_log
from shardwise.observe.progress import ConsoleHandler


def test_a_rank_logs_into_its_own_file(tmp_path: Path) -> None:
    with rank_log(3, tmp_path / "logs"):
        logging.getLogger("shardwise.engine").info("gathered %d units", 4)
        logging.getLogger("another.library").warning("not ours")
    lines = (tmp_path / "logs" / "rank_00003.log").read_text().splitlines()
    assert len(lines) == 1 and lines[0].endswith("rank 3 INFO gathered 4 units")


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with rank_log(0, tmp_path):
            logging.getLogger("shardwise").info(text)
    assert [line.split()[-1] for line in log_path(tmp_path, 0).read_text().splitlines()] == [
        "first",
        "second",
    ]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    logger = logging.getLogger("shardwise")
    before = (list(logger.handlers), logger.level)
    with rank_log(0, tmp_path, logging.NullHandler()):
        assert len(logger.handlers) == len(before[0]) + 2
    assert (list(logger.handlers), logger.level) == before


def test_no_text_of_others_commands_a_terminal(tmp_path: Path) -> None:
    """A name out of a file, on the screen as in the log."""
    console = Console(file=io.StringIO(), width=200)
    handlers = [ConsoleHandler(console), ConsoleHandler(console, rank=0)]
    for handler in handlers:
        with rank_log(0, tmp_path, handler):
            logging.getLogger("shardwise").warning("tensor %s", "\x1b]0;owned\x07\x9b2J")
    plain, as_logged = console.file.getvalue().splitlines()
    assert plain == "warning: tensor \ufffd]0;owned\ufffd\ufffd2J"
    lines = log_path(tmp_path, 0).read_text().splitlines()
    assert all(
        line.endswith("rank 0 WARNING tensor \ufffd]0;owned\ufffd\ufffd2J") for line in [*lines, as_logged]
    )
