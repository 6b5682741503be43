"""Compare what finds the seeded bugs of tests/verify/bugs.py, and what names the wrong tensor.

    loss curve   the loss of a step differs by more than 10^-5 of itself, the tolerance of golden curves
    norm         the gradient norm differs by more than 10^-5 of itself
    bf16         a gradient differs by more than 2.8·10^-2, the noise of bf16 (the floor of a comparison of traces in
                 bf16); it names the gradient that differs most
    check        the check of the first step refuses to train; its sentence names parameters
    guard        an error of diverged copies, with ``guard: {every: 1}``; its sentence names a tensor
    verify       the verdict of ``shardwise verify``; it names the first wrong tensor and explains it (verdicts.py)

Every bug runs on CPU ranks with gloo, two steps of a small model in fp64, against torch's own loop. "named" means that
what is named fits the pattern of the list; a loss and a norm name nothing. "explained" means that the sentence of the
verdict is the one that the list has.

    python -m benchmarks.verify.bugs [--rows] [--only-verify] [PART OF A NAME]
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
from tests.verify.test_bugs_verify import planted, verdict_on
from tests.verify.verdicts import VERDICTS

CURVE, NORM, BF16 = 1e-5, 1e-5, 2.8e-2
FINDERS = ("loss curve", "norm", "bf16", "check", "guard", "verify")


class Finding(NamedTuple):
    """What one finder makes of one bug."""

    found: bool
    named: bool = False
    explained: bool = False
    said: str = ""
    """The first wrong tensor and the explanation, if the finder gives them."""

    def __str__(self) -> str:
        words = ("explained", self.explained), ("named", self.named), ("found", self.found)
        return next((word for word, holds in words if holds), "")


def verified(bug: Bug) -> Finding:
    """Return what ``verify`` makes of a bug."""
    found = verdict_on(bug.case, dict(bug.keys), planted(bug))
    wanted, first = VERDICTS[bug.name], found.first
    said = "" if first is None else f"{first.kind} `{first.name}`: {first.explanation.partition(chr(10))[0]}"
    return Finding(found.verdict == "fail", wanted.is_named(first), wanted.is_explained(first), said)


def verdicts(bug: Bug, measured: Measured) -> dict[str, Finding]:
    """Return what each finder makes of a bug; a run that the engine refuses is found by none of the first three."""
    figures = measured.figures
    if REFUSED in figures:
        found = {name: Finding(False) for name in FINDERS[:3]}
    else:
        gradient = figures["gradient"]
        found = {
            "loss curve": Finding(figures["loss"].error > CURVE),
            "norm": Finding(figures["norm"].error > NORM),
            "bf16": Finding(gradient.error > BF16, gradient.error > BF16 and fits(bug, [gradient.name])),
        }
    return found | {
        name: Finding(bool(said), fits(bug, re.findall(r"[\w.]*\w", said)))
        for name, said in (("check", measured.check), ("guard", measured.guard))
    }


def fits(bug: Bug, words: list[str]) -> bool:
    """Return whether one of ``words`` is a tensor that may be named; a pattern that all fit needs a parameter."""
    if bug.kind in ("loss", "norm"):
        return any(word in ("loss", "norm") for word in words)
    return any(bug.may_name(word) for word in words if "." in word)


def measured(bugs: list[Bug]) -> dict[str, dict[str, Finding]]:
    """Return what each finder but ``verify`` makes of each bug."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    with tempfile.TemporaryDirectory() as folder:
        os.environ[TRUTHS] = folder
        found = measured_on(pool, [bug.name for bug in bugs], finders=True)
    for each in pools.values():
        each.close()
    return {bug.name: verdicts(bug, found[bug.name]) for bug in bugs}


def main() -> None:
    """Print one row for each bug, if asked for, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", nargs="?", default="", help="only bugs with this in their names")
    parser.add_argument("--rows", action="store_true", help="print a row for each bug")
    parser.add_argument("--only-verify", action="store_true", help="leave the other finders out")
    given = parser.parse_args()
    bugs = [bug for bug in BUGS if given.part in bug.name]
    finders = ("verify",) if given.only_verify else FINDERS
    table = {bug.name: {} for bug in bugs} if given.only_verify else measured(bugs)
    for bug in bugs:
        table[bug.name]["verify"] = verified(bug)
    if given.rows:
        print(
            f"| bug | layout | {' | '.join(finders)} | verdict of verify |\n|---|---|{'---|' * (len(finders) + 1)}"
        )
        for bug in bugs:
            row = table[bug.name]
            print(
                f"| {bug.name} | `{bug.case.layout}` | {' | '.join(map(str, row.values()))} | {row['verify'].said} |"
            )
    print(f"\n| {len(bugs)} bugs | {' | '.join(finders)} |\n|---|{'---|' * len(finders)}")
    for what in ("found", "named", "explained"):
        counts = [sum(getattr(row[finder], what) for row in table.values()) for finder in finders]
        print(f"| {what} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
