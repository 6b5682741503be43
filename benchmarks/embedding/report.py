"""The tables of results.json as text between the markers of README.md.

    python report.py results.json README.md

A ratio is our time over a peer's of the same case: below 1 we are faster.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import beside  # noqa: F401
from table import MIB, insert, peak_bytes

Row = dict[str, Any]
TITLES = {
    "lookup": "Tables alone: forward, backward and update, one thread",
    "end_to_end": "A small DLRM end to end, two ranks of one thread",
    "vocabulary": "Wide&Deep and the size of the vocabulary, one thread",
    "dynamic": "Dynamic tables that evict",
    "multi_hot": "Many keys a sample",
    "kernels": "The loops, one thread",
}


def render(results: dict[str, Any]) -> str:
    """The whole text between the markers."""
    found = []
    for name, title in TITLES.items():
        given = results["parts"].get(name)
        if given is None:
            continue
        versions = ", ".join(
            f"{package} {number}" for package, number in given["versions"].items() if number is not None
        )
        found.append(f"## {title}")
        found.append(
            f"`{given['command']}`, {given['date']}, {given['machine']}, commit {given['commit']}"
            + (f"; {versions}." if versions else ".")
        )
        rows = given["rows"]
        if name == "kernels":
            found.append(_loops(rows))
            continue
        for case in dict.fromkeys(row["case"] for row in rows):
            found += [
                f"**{case[0].upper()}{case[1:]}**",
                _table([row for row in rows if row["case"] == case]),
            ]
        summary = _summary(name, rows)
        if summary:
            found.append(summary)
    return "\n\n".join(found)


def _table(rows: list[Row]) -> str:
    """One line per contender."""
    notes = list(dict.fromkeys(note for row in rows for note in row.get("notes", {})))
    has_loss = any(len(set(row.get("losses", []))) > 1 for row in rows)
    head = ["contender", "step, ms (quartiles; best)", "samples/s", "ours / it", "peak memory, MiB a rank"]
    head += ["loss, last 20 steps"] * has_loss + notes + ["computes the same as"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        if row["failure"] is not None:
            lines.append(
                f"| {row['name']} | {row['failure'].splitlines()[-1][:90]} |" + " |" * (len(head) - 2)
            )
            continue
        low, high = row["step_s_quartiles"] or (math.nan, math.nan)
        best = min(row["step_s_rounds"])
        cells = [
            f"**{row['name']}**" if row["ours"] else row["name"],
            f"{1e3 * row['step_s']:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f}; {1e3 * best:.2f})",
            f"{row['samples'] / row['step_s']:,.0f}",
            "" if row["ours"] else _ratios(row, rows),
            f"{peak_bytes(row) / MIB:,.0f}",
        ]
        if has_loss:
            cells.append(f"{_mean_loss(row):.6f}")
        cells += [f"{row['notes'][note]:,.0f}" if note in row.get("notes", {}) else "" for note in notes]
        cells.append(_agrees(row, rows))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratios(peer: Row, rows: list[Row]) -> str:
    """Ours over it: of the same optimizer where there is one, and of row-wise Adagrad beside torch's Adagrad."""
    found = []
    for row in rows:
        if not row["ours"] or row["failure"] is not None or not _comparable(row, peer):
            continue
        by_round = [a / b for a, b in zip(row["step_s_rounds"], peer["step_s_rounds"], strict=False)]
        best = min(row["step_s_rounds"]) / min(peer["step_s_rounds"])
        middle = sorted(by_round)[len(by_round) // 2]
        found.append(f"{middle:.2f} (best {best:.2f}) {_variant(row)}".rstrip())
    return "; ".join(found)


def _variant(row: Row) -> str:
    return row["name"].partition(", ")[2]


def _comparable(row: Row, peer: Row) -> bool:
    mine, its = _variant(row), _variant(peer)
    return mine == its or "" in (mine, its) or (mine, its) == ("rowwise_adagrad", "adagrad")


def _agrees(row: Row, rows: list[Row]) -> str:
    """Others whose watched rows and losses are the same, with the largest relative difference."""
    found = []
    for other in rows:
        if other is row or other["failure"] is not None or not row["state"] or not other["state"]:
            continue
        if len(other["state"]) != len(row["state"]) or len(other["losses"]) != len(row["losses"]):
            continue
        pairs = [*zip(row["state"], other["state"], strict=True)]
        pairs += [*zip(row["losses"], other["losses"], strict=True)]
        apart = max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)
        if apart < 1e-3:
            found.append(f"{other['name']} ({apart:.0e})")
    return ", ".join(found)


def _mean_loss(row: Row) -> float:
    last = row["losses"][-20:]
    return sum(last) / len(last)


def _summary(name: str, rows: list[Row]) -> str:
    """What the part is about, in a line."""
    if name != "vocabulary":
        return ""
    lines = []
    for name_ in dict.fromkeys(row["name"] for row in rows if row["failure"] is None):
        for law in dict.fromkeys(row["options"]["law"] for row in rows):
            mine = [
                row
                for row in rows
                if row["name"] == name_ and row["options"]["law"] == law and row["failure"] is None
            ]
            if len(mine) < 2:
                continue
            first, last = mine[0], mine[-1]
            ratio, best = (
                last["step_s"] / first["step_s"],
                min(last["step_s_rounds"]) / min(first["step_s_rounds"]),
            )
            lines.append(
                f"- {name_}, {law}: {last['options']['rows']:,} rows take {ratio:.2f} (best {best:.2f}) times "
                f"{first['options']['rows']:,} rows"
            )
    return "\n".join(lines)


def _loops(rows: list[Row]) -> str:
    lines = ["| loop | ms, median | best | M items/s | plain torch, ms |", "|---|---|---|---|---|"]
    for row in rows:
        reference = "" if row["reference_ms"] is None else f"{row['reference_ms']:.2f}"
        lines.append(
            f"| {row['name']} | {row['median_ms']:.3f} | {row['best_ms']:.3f} | {row['rate']:.1f} | {reference} |"
        )
    return "\n".join(lines)


def main() -> None:
    results, readme = Path(sys.argv[1]), Path(sys.argv[2])
    readme.write_text(insert(readme.read_text(), render(json.loads(results.read_text()))))


if __name__ == "__main__":
    main()
