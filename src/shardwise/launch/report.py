"""Messages of the launcher when a rank failed: first the failure that caused the others, with its traceback."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardwise.base.regular_files import open_regular
from shardwise.base.words import printable
from shardwise.launch.failure import RankFailure, first

_TAIL_LINES = 20


def show_answer(console: Console, sentence: str, where: str = "") -> None:
    """Print one error whose message is complete without a traceback."""
    console.print(Text(f"error{where}: ", style="bold red") + Text(printable(sentence)), soft_wrap=True)


def show_failures(
    console: Console, failures: Iterable[RankFailure], log_of: Callable[[int], Path | None]
) -> RankFailure:
    """Print the failure that ended the job and a line for each that followed, and return the first.

    Args:
        console: Console to print to.
        failures: Failures of all ranks.
        log_of: Function that returns the log file of a rank, or None.
    """
    in_time = sorted(failures, key=lambda failure: failure.time_s)
    cause = first(in_time)
    followed = [f for f in in_time if f is not cause]
    log = log_of(cause.rank)
    if cause.is_answer:
        is_everywhere = all(f.headline == cause.headline for f in followed)
        show_answer(console, cause.headline, "" if is_everywhere else f" on {cause.place}")
    else:
        title = Text(f"{cause.place} failed: {printable(cause.headline)}", style="bold red")
        console.print(title, soft_wrap=True)
        if cause.traceback:
            console.print(Text(printable(cause.traceback.rstrip())), soft_wrap=True)
        elif log is not None and (tail := _tail(log)):
            console.print(Text(f"the last lines of {log}:\n{printable(tail)}"), soft_wrap=True)
    for failure in followed:
        if failure.headline != cause.headline:
            line = printable(failure.headline.partition("\n")[0])
            console.print(Text(f"{failure.place} failed too: {line}", style="dim"), soft_wrap=True)
    if log is not None and not cause.is_answer:
        console.print(Text(f"log of {cause.place}: {log}", style="dim"), soft_wrap=True)
    return cause


def _tail(log: Path) -> str:
    try:
        with open_regular(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join("    " + line for line in lines[-_TAIL_LINES:])


class JobReporter:
    """Receiver of what happens to the ranks of this host; prints it to the terminal.

    Args:
        console: Console to print to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str, style: str) -> None:
        """Print a sentence about the job."""
        self.console.print(text, style=style, highlight=False, soft_wrap=True)

    def listens_at(self, port: int) -> None:
        """Do nothing; the ranks of this host find the store's port in their environment."""

    def failed(self, failure: RankFailure) -> None:
        """Do nothing; :meth:`show` receives all failures after the first ones have settled."""

    def show(self, failures: Iterable[RankFailure], log_of: Callable[[int], Path | None]) -> RankFailure:
        """Print the failure that ended the job and those that followed, and return the first."""
        return show_failures(self.console, failures, log_of)
