"""The verdict on a run that gave no numbers: a refusal, a hang, or copies that differ between ranks.

Each rank that fails writes its error into a file. The errors say which it was:

    replica    a DivergedError: the guard found copies that differ
    hang       errors of collectives alone, or the deadline of the run: a rank did not arrive
    refused    any other error of the engine, of the model, or of a batch
"""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from shardwise.verify.verdict import FirstWrong

FAILURE = "failure.json"
_COLLECTIVE = re.compile(
    r"rank [^:]*: [a-z_\- ]+ of (?P<what>.+?)(?: in step \d+| over \d+ ranks| from rank \d+)"
)
_DIVERGED = re.compile(r"(?:weight|master|moment|\w+) of (?P<name>[\w.]+), elements \[\d+, \d+\)")
_HOLDERS = re.compile(r"ranks? (?P<ranks>\d+(?:, \d+)*(?: and \d+)?)(?:,? do|,? differ)")
_WAITS = ("CommError", "DeadlineError")


def failure_of(folder: Path, said: str, names: Collection[str] = ()) -> FirstWrong:
    """Return the verdict on ranks that ended with an error.

    Args:
        folder: The folder into which the ranks wrote their errors.
        said: The error of the launcher, for a run in which no rank wrote anything.
        names: Names of modules and parameters, one of which an error may mention.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"*{FAILURE}"))]
    ranks = sorted({each["rank"] for each in records if each["rank"] >= 0})
    diverged = [each["text"] for each in records if each["type"] == "DivergedError"]
    if diverged:
        return diverged_copies(diverged[0], ranks)
    own = [each for each in records if each["type"] not in _WAITS]
    waits = [each for each in records if each["type"] in _WAITS]
    if not own and (waits or "SIGALRM" in said):
        return _hang(waits, ranks, said)
    text = own[0]["text"] if own else said
    module = _mentioned(text, names)
    refusing = sorted({each["rank"] for each in own if each["rank"] >= 0}) or _ranks_of(said)
    return FirstWrong(module, "refused", module, ranks=refusing, explanation=text)


def diverged_copies(text: str, ranks: Sequence[int] = ()) -> FirstWrong:
    """Return the verdict on copies that differ, from the message of the guard.

    Args:
        text: The message.
        ranks: The ranks that raised it; taken if the message names no ranks.
    """
    found, holders = _DIVERGED.search(text), _HOLDERS.search(text)
    name = found["name"] if found else ""
    who = [int(each) for each in re.findall(r"\d+", holders["ranks"])] if holders else list(ranks)
    return FirstWrong(name, "replica", name.rpartition(".")[0], ranks=who, explanation=text)


def _hang(waits: list[dict[str, Any]], ranks: list[int], said: str) -> FirstWrong:
    """Return the verdict on ranks that waited for a rank which did not arrive."""
    late = [each for each in waits if each["type"] == "DeadlineError"] or waits
    text = late[0]["text"] if late else said
    found = _COLLECTIVE.search(text)
    return FirstWrong(found["what"] if found else "", "hang", ranks=ranks, explanation=text)


def _mentioned(text: str, names: Collection[str]) -> str:
    """Return the first name of a module or parameter in an error."""
    known = {name for name in names if "." in name or len(name) > 3}
    return next((word for word in re.findall(r"[\w.]*\w", text) if word in known), "")


def _ranks_of(said: str) -> list[int]:
    return [int(each) for each in re.findall(r"^rank (\d+) failed", said, re.MULTILINE)]
