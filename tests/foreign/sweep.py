"""The sweep: every language model of transformers, tiny, in every layout, held to one plain process.

    python -m tests.foreign.sweep --results runs/foreign.jsonl                  all of it; goes on where it stopped
    python -m tests.foreign.sweep --results runs/foreign.jsonl --only Llama*    some of it, again
    python -m tests.foreign.sweep --results runs/foreign.jsonl --table docs/foreign_models.md

Each case is a group of forked processes with a time limit, killed as a group where it passes; nothing of one case is
left to the next.

    exact      equal to 1e-9, in fp64
    refused    an error that names what cannot be, on every rank that does not end because of it, before any step
    wrong, error, late     faults
    unbuilt    the class could not be made tiny, or gives no loss for tokens and labels alone
"""

import argparse
import faulthandler
import fnmatch
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
import transformers

import shardwise.engine.construction.build  # noqa: F401 - with torch._dynamo half of a rank's time: once, before the forks
from shardwise.comm.policy import CommPolicy
from shardwise.comm.world import join
from tests.foreign.case import LAYOUTS, laid_out, plain
from tests.foreign.models import classes, variants

GOOD = ("exact", "refused", "unbuilt")


class Case(NamedTuple):
    """One class, or a variant of it with further keys of its configuration."""

    title: str
    kind: str
    name: str
    model_type: str
    more: Mapping[str, Any]


def cases() -> Iterator[Case]:
    """All of them, variants behind their class."""
    for kind, name, model_type in classes():
        yield Case(name, kind, name, model_type, {})
        for what, more in variants(name, model_type):
            yield Case(f"{name} ({what})", kind, name, model_type, more)


# Processes ---------------------------------------------------------------------------------------------------------


def forked(functions: Iterable[Callable[[], Any]], folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Run each function in a process of its own; what they return. All are killed where one passes the limit."""
    pids = []
    functions = list(functions)
    for rank, function in enumerate(functions):
        pid = os.fork()
        if pid == 0:
            _child(function, folder / f"answer.{rank}")
        pids.append(pid)
    end = time.monotonic() + limit_s
    waiting, status = set(pids), {}
    while waiting and time.monotonic() < end:
        for pid in list(waiting):
            done, status[pid] = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.discard(pid)
        time.sleep(0.02)
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    answers = []
    for rank, pid in enumerate(pids):
        path = folder / f"answer.{rank}"
        if path.exists():
            answers.append(json.loads(path.read_text()))
        elif pid in waiting:
            answers.append({"verdict": "late", "text": f"not done after {limit_s:.0f} s"})
        else:
            answers.append({"verdict": "error", "text": f"the process ended: wait status {status[pid]}"})
    return answers


def _child(function: Callable[[], Any], answer: Path) -> None:
    """Never returns."""
    try:
        quiet = os.open(f"{answer}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        faulthandler.enable()
        torch.set_num_threads(1)
        try:
            found = function()
        except Exception:
            found = {"verdict": "error", "text": " ".join(traceback.format_exc().split())[-300:]}
        partial = answer.with_name(f"{answer.name}.partial")
        partial.write_text(json.dumps(found))
        partial.rename(answer)
    finally:
        os._exit(0)


def truth(case: Case, folder: Path, limit_s: float) -> dict[str, Any]:
    """What one plain process does, written into ``folder``."""

    def run() -> dict[str, Any]:
        plain(case.kind, case.name, case.model_type, folder, case.more)
        return {"verdict": "built", "text": "", **json.loads((folder / "truth.json").read_text())}

    (answer,) = forked([run], folder, limit_s)
    return answer


def verdict(case: Case, layout: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """That of all ranks together."""
    size, _ = LAYOUTS[layout]
    inside = folder / layout
    inside.mkdir()

    def rank_of(rank: int) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            store = dist.FileStore(str(inside / "store"), size)
            world = join(rank, size, store=store, quiet=True, policy=CommPolicy(join_timeout_s=60))
            return laid_out(world, case.kind, case.name, case.model_type, layout, folder, case.more)

        return run

    answers = forked([rank_of(rank) for rank in range(size)], inside, limit_s)
    return together(answers)


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of the ranks; one that was left alone by a refusal counts as refused."""
    order = ["wrong", "late", "error", "refused", "left alone", "exact"]
    worst = min(answers, key=lambda answer: order.index(answer["verdict"]))
    if worst["verdict"] == "left alone":
        return {**worst, "verdict": "error"}
    if worst["verdict"] == "exact":
        return max(answers, key=lambda answer: answer["worst"])
    return worst


# The sweep ---------------------------------------------------------------------------------------------------------


def sweep(
    results: Path, only: str, layouts: Iterable[str], limit_s: float, again: Iterable[str] | None, say: Any
) -> None:
    """Append one line of JSON per case and layout to ``results``, leaving out those that stand there."""
    results.parent.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    for case in cases():
        if not fnmatch.fnmatch(case.title, only):
            continue
        known = read(results).get(case.title, {})
        wanted = [
            each for each in layouts if each not in known or (again and known[each]["verdict"] in again)
        ]
        if not wanted:
            continue
        folder = Path(tempfile.mkdtemp(prefix="foreign."))
        try:
            built = truth(case, folder, limit_s)
            for layout in wanted:
                if layout == "ep2" and not built.get("experts", True):
                    continue
                if built["verdict"] != "built":
                    found = {"verdict": "unbuilt", "text": built["text"]}
                elif built["draws"]:
                    found = {
                        "verdict": "unbuilt",
                        "text": "two passes of one process differ: it draws random numbers",
                    }
                else:
                    found = verdict(case, layout, folder, limit_s)
                line = {"title": case.title, "kind": case.kind, "layout": layout, **found}
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                say(
                    f"{case.title:44} {layout:7} {found['verdict']:8} {found.get('worst', '')} {found['text'][:200]}"
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def read(results: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The newest answer by title and layout."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    if results.exists():
        for line in results.read_text().splitlines():
            answer = json.loads(line)
            found.setdefault(answer["title"], {})[answer["layout"]] = answer
    return found


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="Every language model of transformers in every layout.")
    parser.add_argument("--results", type=Path, default=Path("runs/foreign.jsonl"))
    parser.add_argument("--only", default="*", help="pattern of class names")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of one case in one layout")
    parser.add_argument("--again", help="verdicts to try again, as in wrong,error,late")
    parser.add_argument("--table", type=Path, help="write the table of what is in --results, and run nothing")
    given = parser.parse_args()
    if given.table is None:
        again = given.again.split(",") if given.again else None
        sweep(given.results, given.only, given.layouts.split(","), given.limit, again, print_line)
    else:
        from tests.foreign.table import page

        given.table.write_text(page(read(given.results)))
    faults = [
        answer
        for by_layout in read(given.results).values()
        for answer in by_layout.values()
        if answer["verdict"] not in GOOD
    ]
    print(f"{len(faults)} faults")
    return 1 if faults else 0


def print_line(text: str) -> None:
    """At once, also into a file."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
