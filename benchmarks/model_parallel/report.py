"""Writes the tables of a JSON file of ``run.py`` between two markers of a README.

python report.py results.json README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import beside  # noqa: F401
from table import MIB, insert, peak_bytes, seconds, sent

Row = dict[str, Any]


def render(results: dict[str, Any]) -> str:
    """The whole text between the markers."""
    parts = [
        f"`{results['command']}`, {results['date']}, {results['machine']}, one thread per rank, "
        f"commit {results['commit']}, torch {results['versions']['torch']}."
    ]
    for case in dict.fromkeys(row["case"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["case"] == case]
        # The single process ran beside all schedules with as many microbatches.
        extra = [
            row
            for row in results["rows"]
            if row["ranks"] == 1 and row["case"] != case and row["microbatches"] == rows[0]["microbatches"]
        ]
        title = case if rows[0]["microbatches"] == 1 else f"{case} microbatches"
        parts += [f"## {title[0].upper()}{title[1:]}", table(extra + rows)]
    return "\n\n".join(parts)


def table(rows: list[Row]) -> str:
    """One line per contender; ours against the fastest peer."""
    peers = [r["step_s"] for r in rows if not r["ours"] and r["ranks"] > 1 and r["failure"] is None]
    lines = [
        "| contender | step, s (quartiles) | / fastest peer | idle: simulated, measured "
        "| peak memory growth, MiB per rank | sent, MB per rank and step | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["failure"] is not None:
            lines.append(f"| {row['name']} | failed: {row['failure'].splitlines()[-1][:80]} | | | | | |")
            continue
        name = f"**{row['name']}**" if row["ours"] else row["name"]
        ratio = f"{row['step_s'] / min(peers):.2f}" if row["ours"] and peers else ""
        idle = row["idle_simulated_and_measured"]
        shares = "" if idle is None else f"{idle[0]:.1%}, {idle[1]:.1%}"
        lines.append(
            f"| {name} | {seconds(row)} | {ratio} | {shares} | {peak_bytes(row) / MIB:.0f} | {sent(row)} "
            f"| {row['loss']:.5f} |"
        )
    return "\n".join(lines)


def main() -> None:
    results, readme = Path(sys.argv[1]), Path(sys.argv[2])
    readme.write_text(insert(readme.read_text(), render(json.loads(results.read_text()))))


if __name__ == "__main__":
    main()
