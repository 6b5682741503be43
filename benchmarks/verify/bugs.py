"""Compare what finds the seeded bugs of tests/verify/bugs.py, and what names the wrong tensor.

    loss curve   the loss of a step differs by more than 10^-5 of itself, the tolerance of golden curves
    norm         the gradient norm differs by more than 10^-5 of itself
    bf16         a gradient differs by more than 2.8·10^-2, the noise of bf16 (the floor of a comparison of traces in
                 bf16); it names the gradient that differs most
    check        the check of the first step refuses to train; its sentence names parameters
    guard        an error of diverged copies, with ``guard: {every: 1}``; its sentence names a tensor

Every bug runs on CPU ranks with gloo, two steps of a small model in fp64, against torch's own loop. "named" means that
what is named fits the pattern of the list; a loss and a norm name nothing.

    python -m benchmarks.verify.bugs [--rows] [PART OF A NAME]
"""

import argparse
import os
import re
import tempfile
from typing import NamedTuple

from tests.engine.plain import TRUTHS
from tests.ranks import RankPool
from tests.verify.bugs import BUGS, Bug
from tests.verify.facts import REFUSED
from tests.verify.test_bugs_check import Measured, measured_on

CURVE, NORM, BF16 = 1e-5, 1e-5, 2.8e-2
FINDERS = ("loss curve", "norm", "bf16", "check", "guard")


class Verdict(NamedTuple):
    """What one finder makes of one bug."""

    found: bool
    named: bool = False

    def __str__(self) -> str:
        return "named" if self.named else "found" if self.found else ""


def verdicts(bug: Bug, measured: Measured) -> dict[str, Verdict]:
    """Return what each finder makes of a bug; a run that the engine refuses is found by none of the first three."""
    figures = measured.figures
    if REFUSED in figures:
        found = {name: Verdict(False) for name in FINDERS[:3]}
    else:
        gradient = figures["gradient"]
        found = {
            "loss curve": Verdict(figures["loss"].error > CURVE),
            "norm": Verdict(figures["norm"].error > NORM),
            "bf16": Verdict(gradient.error > BF16, gradient.error > BF16 and fits(bug, [gradient.name])),
        }
    return found | {
        name: Verdict(bool(said), fits(bug, re.findall(r"[\w.]*\w", said)))
        for name, said in (("check", measured.check), ("guard", measured.guard))
    }


def fits(bug: Bug, words: list[str]) -> bool:
    """Return whether one of ``words`` is a tensor that may be named; a pattern that all fit needs a parameter."""
    if bug.kind in ("loss", "norm"):
        return any(word in ("loss", "norm") for word in words)
    return any(bug.may_name(word) for word in words if "." in word)


def main() -> None:
    """Print one row for each bug, if asked for, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", nargs="?", default="", help="only bugs with this in their names")
    parser.add_argument("--rows", action="store_true", help="print a row for each bug")
    given = parser.parse_args()
    bugs = [bug for bug in BUGS if given.part in bug.name]
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    with tempfile.TemporaryDirectory() as folder:
        os.environ[TRUTHS] = folder
        measured = measured_on(pool, [bug.name for bug in bugs], finders=True)
    for each in pools.values():
        each.close()
    table = {bug.name: verdicts(bug, measured[bug.name]) for bug in bugs}
    if given.rows:
        print(f"| bug | layout | {' | '.join(FINDERS)} |\n|---|---|{'---|' * len(FINDERS)}")
        for bug in bugs:
            print(f"| {bug.name} | `{bug.case.layout}` | {' | '.join(map(str, table[bug.name].values()))} |")
    print(f"\n| {len(bugs)} bugs | {' | '.join(FINDERS)} |\n|---|{'---|' * len(FINDERS)}")
    for what in ("found", "named"):
        counts = [sum(getattr(row[finder], what) for row in table.values()) for finder in FINDERS]
        print(f"| {what} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
