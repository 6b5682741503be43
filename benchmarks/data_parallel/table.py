"""Writes the table of a results file between the markers of README.md.

    python table.py results.json README.md

Under the table stand the two ratios per stage that the comparison is about: our time over that of the fastest
peer of the same stage, and our memory over that of the leanest. A peer without an fp32 master trains other
numbers with less state; where it is the fastest or the leanest, the ratio against the best peer that keeps a
master stands beside it. A peer that never releases the weights is no stage 3 in memory and says so in its row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN = "<!-- table begins -->"
END = "<!-- table ends -->"
MIB = 2**20


def render(results: dict[str, Any]) -> str:
    """The whole text between the markers."""
    versions = results["versions"]
    parts = [
        f"`{results['command']}`, {results['date']}, {results['machine']}, one thread per rank, "
        f"commit {results['commit']}, torch {versions['torch']}, deepspeed {versions['deepspeed'] or 'absent'}."
    ]
    cases = sorted(
        {(row["ranks"], row["dtype"]) for row in results["rows"]}, key=lambda c: (c[0], c[1] != "fp32")
    )
    for ranks, dtype in cases:
        rows = [row for row in results["rows"] if (row["ranks"], row["dtype"]) == (ranks, dtype)]
        parts += [f"### {dtype}, {ranks} ranks", table(rows), ratios(rows)]
    if results["skipped"]:
        parts.append("Skipped: " + "; ".join(f"{n} ({why})" for n, why in results["skipped"].items()) + ".")
    return "\n\n".join(part for part in parts if part)


def table(rows: list[dict[str, Any]]) -> str:
    """One line per contender, by stage."""
    lines = [
        "| stage | contender | step, s (quartiles) | peak memory growth, MiB per rank | sent, MB per rank and step "
        "| loss | gradient / on the wire | fp32 master |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["stage"], row["ours"])):
        if row["failure"] is not None:
            last = row["failure"].splitlines()[-1][:80]
            lines.append(f"| {row['stage']} | {row['name']} | failed: {last} | | | | | |")
            continue
        name = f"**{row['name']}**" if row["ours"] else row["name"]
        lines.append(
            f"| {row['stage']} | {name} | {seconds(row)} | {peak_bytes(row) / MIB:.0f} | {sent(row)} "
            f"| {row['loss']:.5f} | {row['grad']} / {row['wire']} | {'yes' if row['fp32_master'] else 'no'} |"
        )
    return "\n".join(lines)


def ratios(rows: list[dict[str, Any]]) -> str:
    """Ours against the best peer of the same stage, in time and memory."""
    lines = []
    for stage in sorted({row["stage"] for row in rows}):
        here = [row for row in rows if row["stage"] == stage and row["failure"] is None]
        peers = [row for row in here if not row["ours"]]
        if not peers:
            continue
        lines += [_against(row, peers, stage) for row in here if row["ours"]]
    if not lines:
        return ""
    head = (
        "| stage | ours | time / fastest peer | time / fastest with master | memory / leanest peer "
        "| memory / leanest with master |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


def _against(row: dict[str, Any], peers: list[dict[str, Any]], stage: int) -> str:
    kept = [peer for peer in peers if peer["fp32_master"]]
    cells = [_ratio(row, group, "step_s") for group in (peers, kept)]
    cells += [_ratio(row, group, "peak") for group in (peers, kept)]
    return f"| {stage} | {row['name']} | " + " | ".join(cells) + " |"


def _ratio(row: dict[str, Any], peers: list[dict[str, Any]], what: str) -> str:
    def value(of: dict[str, Any]) -> float | None:
        return float(peak_bytes(of)) if what == "peak" else of["step_s"]

    known = [(measured, peer["name"]) for peer in peers if (measured := value(peer)) is not None]
    own = value(row)
    if not known or own is None:
        return ""
    best, name = min(known)
    return f"{own / best:.2f} ({name})"


def peak_bytes(row: dict[str, Any]) -> int:
    """The rank that needs most."""
    return max(row["peak_bytes_per_rank"])


def seconds(row: dict[str, Any]) -> str:
    if row["step_s"] is None:
        return ""
    if row["step_s_quartiles"] is None:
        return f"{row['step_s']:.3f}"
    low, high = row["step_s_quartiles"]
    return f"{row['step_s']:.3f} ({low:.3f}-{high:.3f})"


def sent(row: dict[str, Any]) -> str:
    if row["sent_bytes_per_rank_and_step"] is None:
        return ""
    socket, other = row["sent_bytes_per_rank_and_step"] / 1e6, row["other_bytes_per_rank_and_step"] / 1e6
    return f"{socket:.1f}" if other == 0 else f"{other:.1f} in shared memory, {socket:.1f} by socket"


def insert(text: str, between: str) -> str:
    """Replace what stands between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"README has no pair of markers {BEGIN} and {END}; add them where the table belongs")
    return f"{before}{BEGIN}\n{between}\n{END}{after}"


def main() -> None:
    results, readme = Path(sys.argv[1]), Path(sys.argv[2])
    readme.write_text(insert(readme.read_text(), render(json.loads(results.read_text()))))


if __name__ == "__main__":
    main()
