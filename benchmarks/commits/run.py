"""Is a commit slower than another? Both take turns, round by round, on this machine.

    python run.py --before COMMIT          against the working tree; COMMIT is checked out into a folder of its own

Turns: two training steps on two ranks (step.py, turns.py), and the bookkeeping of the host (../host_overhead, one
process). Figures are ratios, after over before, of turns that are seconds apart: medians over the rounds. Whole runs in
turns, a minute apart each, are no measure on a machine that others share: on one they said 1.20 of commits that were
equal.

Cost: about half a minute a round, and as much again for ``hooks``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAMES = ["zero0", "zero1", "zero2", "zero3", "tp2", "pp2", "ep2", "tables", "hooks"]
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402
from table import insert  # noqa: E402


def steps(trees: Mapping[str, Path], rounds: int, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by commit and row: the ranks of both commits run side by side, and one at a time computes."""
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for number, (who, tree) in enumerate(trees.items()):
            command = [sys.executable, "-m", "shardwise", "launch", "--ranks", "2", str(HERE / "turns.py")]
            running[who] = subprocess.Popen(
                [*command, folder, str(number), str(rounds), *names],
                env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
        results = {}
        for who, process in running.items():
            out, _ = process.communicate()
            found = re.search(r"RESULT (\{.*\})", out)
            assert found is not None, out
            results[who] = json.loads(found[1])
    return results


def overhead(tree: Path) -> float:
    """Seconds of the host's bookkeeping a block."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [str(HERE.parent / "host_overhead" / "run.py"), "--contenders", "bare,shardwise"]
        subprocess.run(
            [sys.executable, *command, "--rounds", "6", "--steps", "3", "--out", str(file)],
            env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=True,
        )
        found: float = json.loads(file.read_text())["rows"]["shardwise"]["overhead_s_per_block"]
        return found


def render(results: dict[str, dict[str, list[float]]], command: str) -> str:
    """The table, with the command that made it."""
    here = describe()
    lines = [
        f"`{command}`, {here['date']}, {here['machine']}, torch {here['versions']['torch']}, "
        f"{max(map(len, results['before'].values()))} rounds.",
        "",
        "| what | before, ms | after, ms | after / before (quartiles of the rounds' ratios) |",
        "|---|---|---|---|",
    ]
    for name in results["before"]:
        before, after = results["before"][name], results["after"][name]
        ratios = [a / b for a, b in zip(after, before, strict=True)]
        # One round has no quartiles.
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        times = [f"{1e3 * statistics.median(each):.3g}" for each in (before, after)]
        lines.append(f"| {name} | {times[0]} | {times[1]} | {middle:.2f} ({low:.2f}-{high:.2f}) |")
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--names", default=",".join(NAMES), help="rows, separated by commas")
    parser.add_argument("--readme", type=Path, help="where the table goes")
    given = parser.parse_args()
    names = given.names.split(",")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), given.before], check=True)
        trees = {"before": tree, "after": ROOT}
        try:
            results = steps(trees, given.rounds, [name for name in names if name != "hooks"])
            if "hooks" in names:
                for who in trees:
                    results[who]["hooks"] = []
                for number in range(given.rounds):
                    for who in list(trees)[:: 1 if number % 2 else -1]:
                        results[who]["hooks"].append(overhead(trees[who]))
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    text = render(results, " ".join(["python run.py", *sys.argv[1:]]))
    print(text)
    if given.readme is not None:
        given.readme.write_text(insert(given.readme.read_text(), text))


if __name__ == "__main__":
    main()
