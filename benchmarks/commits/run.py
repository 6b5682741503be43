"""Is a commit slower than another? Both take turns, round by round, on this machine.

    python run.py --before COMMIT          against the working tree; COMMIT is checked out into a folder of its own

Turns: training steps on two ranks (step.py), and the bookkeeping of the host (../host_overhead, one process). Figures
are ratios, after over before: medians over the rounds.

Cost: about a minute a round.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAMES = ["zero0", "zero1", "zero2", "zero3", "pp2", "tables"]
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402
from table import insert  # noqa: E402


def turn(tree: Path, seconds: float, names: list[str]) -> dict[str, float]:
    """One turn of the commit in ``tree``: seconds of a step by name."""
    variables = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwise", "launch", "--ranks", "2", str(HERE / "step.py")]
    out = subprocess.run(
        [*command, str(seconds), *names], env=variables, capture_output=True, text=True, check=True
    )
    found = re.search(r"RESULT (\{.*\})", out.stdout)
    assert found is not None, out.stdout + out.stderr
    rows: dict[str, float] = json.loads(found[1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        overhead = [str(HERE.parent / "host_overhead" / "run.py"), "--contenders", "bare,shardwise"]
        subprocess.run(
            [sys.executable, *overhead, "--rounds", "6", "--steps", "3", "--out", str(file)],
            env=variables,
            capture_output=True,
            check=True,
        )
        rows["hooks"] = json.loads(file.read_text())["rows"]["shardwise"]["overhead_s_per_block"]
    return rows


def render(results: dict[str, dict[str, list[float]]], command: str) -> str:
    """The table, with the command that made it."""
    here = describe()
    lines = [
        f"`{command}`, {here['date']}, {here['machine']}, torch {here['versions']['torch']}, "
        f"{len(results['before']['hooks'])} rounds.",
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row in a turn")
    parser.add_argument("--names", default=",".join(NAMES), help="rows, separated by commas")
    parser.add_argument("--readme", type=Path, help="where the table goes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), given.before], check=True)
        results: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
        try:
            for number in range(given.rounds):
                for who, where in (("before", tree), ("after", ROOT))[:: 1 if number % 2 else -1]:
                    for name, seconds in turn(where, given.seconds, given.names.split(",")).items():
                        results[who].setdefault(name, []).append(seconds)
                print(f"round {number + 1} of {given.rounds}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    text = render(results, " ".join(["python run.py", *sys.argv[1:]]))
    print(text)
    if given.readme is not None:
        given.readme.write_text(insert(given.readme.read_text(), text))


if __name__ == "__main__":
    main()
