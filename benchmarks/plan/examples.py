"""Every example that ``shardwise train`` runs, as a user starts it: its outcome against what it foresaw of itself.

Each example trains a few steps on two CPU ranks, evaluates and saves, and its ``outcome.json`` is read: model state by
row of the ledger, which must be equal to the byte, and the most bytes that rank 0 has held, within 8 %.

    python examples.py --readme README.md

Cost: five minutes. Lessons in ``examples/*.py`` are loops of their own, which write no outcome.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE.parent / "data_parallel"))

from machine import describe  # noqa: E402

from shardwise.base.words import bytes_text  # noqa: E402
from shardwise.cli.examples import found as shipped  # noqa: E402
from shardwise.cli.outlook.outcome import RunOutcome, read_outcome  # noqa: E402
from shardwise.memory.ledger import PREDICTED  # noqa: E402

BEGIN, END = "<!-- examples begin -->", "<!-- examples end -->"
RANKS, STEPS, WITHIN = 2, 6, 0.08
ALWAYS = (f"train.steps={STEPS}", "train.eval_every=3", "checkpoint.every=3")
SMALLER = {
    "dlrm": ("data.synthetic.samples=400000", "train.early_stop=null", "schedule.warmup_steps=2"),
}
"""Further keys by example: those that make the data small."""


class Checked(NamedTuple):
    """The outcome of one example."""

    name: str
    outcome: RunOutcome

    @property
    def unequal(self) -> list[str]:
        """Rows of model state that were not foreseen to the byte; dynamic tables, which grow, are left out."""
        rows = self.outcome.rows
        fixed = (row for row in PREDICTED if row in rows and row != "dynamic tables")
        return [row for row in fixed if (rows[row].foreseen or 0) != (rows[row].actual or 0)]

    @property
    def ratio(self) -> float:
        """Peak, foreseen over actual."""
        peak = self.outcome.peak_bytes
        return (peak.foreseen or 0.0) / (peak.actual or 1.0)

    @property
    def holds(self) -> bool:
        """True if the example is within the targets."""
        return not self.unequal and abs(self.ratio - 1) <= WITHIN


def checked(name: str, folder: Path, steps: int = STEPS) -> Checked:
    """Train an example in a folder of its own, and read its outcome."""
    out = folder / "runs" / name
    command = [sys.executable, "-m", "shardwise", "train", name, "--ranks", str(RANKS)]
    for override in (*ALWAYS, f"train.steps={steps}", *SMALLER.get(name, ()), f"output_dir={out}"):
        command += ["--set", override]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr}{done.stdout}"
        )
    return Checked(name, read_outcome(out / "outcome.json"))


def table(found: list[Checked]) -> str:
    """The outcomes as a table in Markdown."""
    said = ["| example | model state | peak of rank 0, foreseen | actual | ratio |", "|---|---|---|---|---|"]
    for each in found:
        state = "equal" if not each.unequal else "not equal: " + ", ".join(each.unequal)
        peak = each.outcome.peak_bytes
        foreseen, actual = bytes_text(int(peak.foreseen or 0)), bytes_text(int(peak.actual or 0))
        said.append(f"| {each.name} | {state} | {foreseen} | {actual} | {each.ratio:.3f} |")
    return "\n".join(said)


def main() -> int:
    """Train the examples, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples; none: all")
    parser.add_argument("--readme", type=Path)
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names or sorted(shipped()):
            found.append(checked(name, Path(folder)))
            print(f"{name}: {found[-1].ratio:.3f} {found[-1].unequal}", flush=True)
            for row, each in found[-1].outcome.rows.items():
                print(f"    {row:<16} {each.foreseen} {each.actual}", flush=True)
    print(table(found))
    if given.readme is not None:
        text = given.readme.read_text()
        start, stop = text.index(BEGIN), text.index(END)
        said = describe()
        head = (
            f"{BEGIN}\n`python examples.py`, {said['date']}, {said['machine']}, one thread per rank, commit "
            f"{said['commit']}, torch {said['versions']['torch']}.\n\n"
        )
        given.readme.write_text(text[:start] + head + table(found) + "\n" + text[stop:])
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
