"""The verdict of ``shardwise verify``, as lines for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "fail", "unverifiable"]
_SHOWN = 12
_EXIT = {"pass": 0, "fail": 1, "unverifiable": 2}


@dataclass
class PassReport:
    """The counts and errors of one pass, by kind."""

    name: str
    compared: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    limit: str = ""


@dataclass
class FirstWrong:
    """The first tensor whose inputs are right and which is wrong, or the reason why a run gave no tensors."""

    name: str
    kind: str
    module: str = ""
    line: str = ""
    slice: str = ""
    ranks: list[int] = field(default_factory=list)
    explanation: str = ""


@dataclass
class Verdict:
    """The outcome of the comparison of a layout with one process."""

    verdict: Outcome
    layout: str
    ranks: int
    shrunk: dict[str, Any] = field(default_factory=dict)
    static: dict[str, Any] | None = None
    """Result of the static part; None if the layout does not cut tensors along "tp"."""
    passes: list[PassReport] = field(default_factory=list)
    failed_in: str = ""
    first: FirstWrong | None = None
    wrong: list[str] = field(default_factory=list)
    """All wrong tensors in causal order; with ``isolate``, those that are wrong though their inputs are right."""
    isolated: bool = False
    """True if ``wrong`` comes from a run in which each module was fed by the reference."""
    between: list[str] = field(default_factory=list)
    """What a rank did between the last right tensor and the first wrong one, with ``explains``."""
    declared: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 if the layout is equal to one process, 1 if it is not, 2 if this cannot be verified."""
        return _EXIT[self.verdict]

    def to_json(self) -> str:
        """Return the verdict as JSON."""
        return json.dumps(asdict(self), indent=2)

    def lines(self) -> list[str]:
        """Return the verdict as lines for people."""
        said = [f"layout {self.layout} on {self.ranks} ranks, {self.seconds:.1f} s"]
        said += [f"  shrunk {key}: {old} -> {new}" for key, (old, new) in self.shrunk.items()]
        if self.static is not None:
            checked, unknown = self.static["checked"], len(self.static["unknown"])
            said.append(
                f"static: {checked['operations']} operations and {checked['gradients']} gradients checked, "
                f"{unknown} unknown, {len(self.static['problems'])} problems"
            )
            for each in self.static["problems"]:
                said.append(
                    f"  {each['name']} in {each['module']} at {each['line']}: expected {each['wanted']}, "
                    f"found {each['found']}"
                )
        for report in self.passes:
            said.append(f"pass {report.name}: limit {report.limit}")
            for kind, count in report.compared.items():
                if count:
                    noise = f", plain loop {report.noise[kind]:.1e}" if kind in report.noise else ""
                    said.append(
                        f"  {kind:12} {count:5} compared, largest error {report.worst[kind]:.1e}{noise}"
                    )
        said += [f"declared: {each}" for each in self.declared]
        said += [f"left out: {each}" for each in _by_reason(self.left_out)[:_SHOWN]]
        first = self.first
        if first is not None:
            said.append(f"first wrong in pass {self.failed_in}: {first.kind} {first.name}".rstrip())
            facts = {"module": first.module, "line": first.line, "slice": first.slice}
            said += [f"  {key}: {value}" for key, value in facts.items() if value]
            said += [f"  ranks: {', '.join(map(str, first.ranks))}"] if first.ranks else []
            said += [f"  explanation: {first.explanation}"] if first.explanation else []
        if self.between:
            said += ["between the last right tensor and the first wrong one:", *self.between]
        if self.isolated:
            said.append(f"wrong with right inputs: {len(self.wrong)} tensors")
            said += [f"  {each}" for each in self.wrong]
        elif len(self.wrong) > 1:
            said.append(f"wrong in all: {len(self.wrong)} tensors")
        words = {
            "pass": "equal to one process" if self.passes else "no problem in the placements along tp",
            "fail": "NOT equal to one process" if self.failed_in != "static" else "wrong placements along tp",
            "unverifiable": "cannot be verified",
        }
        return [*said, f"verdict: {words[self.verdict]}"]


def _by_reason(left_out: Sequence[str]) -> list[str]:
    """Return a line for each reason, with the first thing that was left out for it and the number of the others."""
    found: dict[str, list[str]] = {}
    for each in left_out:
        name, _, reason = each.partition(": ")
        found.setdefault(reason, []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in found.items()
    ]
