"""Two hosts with a slow cable between them: a step with keys known ahead over a step without, to the bit.

    python link.py                        as root on Linux; needs ip, tc and unshare; about three minutes
    python link.py --rate 200mbit --rounds 7 --cases dlrm

The hosts are two network namespaces of this machine with one rank each, and a cable of 200 Mbit/s in both directions
(``tc tbf``). Both contenders of a case are started once; then they take turns of some steps while the other sleeps.
Keys travel beside the step before in ``ahead``, and at its beginning otherwise. What is sent is the same, so the gain
is at most the time in which the cable is idle: it is large where keys are a large part of what is sent. The bytes that
the kernel counts on the cable, over its rate, are printed as a share of the step without keys ahead: no step that
sends them is shorter.

    dlrm       rows of 16 numbers: a key is 8 of the 136 bytes that its row costs, beside the dense gradients
    weights    logistic regression: a key is 8 of 16 bytes

Every loss of both contenders is compared to the bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import end_to_end
from contender import Case, Contender, Running
from group import Group
from machine import describe
from rounds import say
from zipf import BOUND

from shardwise.models.ctr.logistic_regression import LogisticRegression
from shardwise.models.ctr.model import ClickModel
from shardwise.models.ctr.policy import LogisticRegressionPolicy
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy

HERE = Path(__file__).resolve().parent
RANKS = 2


def cases(tiny: bool) -> list[Case]:
    sizes = {"rows": 200 if tiny else 100_000, "samples": 64 if tiny else 2048}
    return [Case("link", name, RANKS, sizes) for name in ("dlrm", "weights")]


def contenders(case: Case) -> list[Contender]:
    return [Contender("shardwise"), Contender("shardwise, ahead")]


def build(contender: Contender, case: Case, rank: int) -> Running:
    kind = end_to_end.Ours if case.name == "dlrm" else Weights
    return kind(case, rank, "rowwise_adagrad", ahead="ahead" in contender.name)


class Weights(end_to_end.Ours):
    """Logistic regression on the same batches."""

    def model(self) -> ClickModel:
        tables = [TablePolicy(name=name, rows=self.rows, width=1, init_bound=BOUND) for name in self.names]
        policy = RowOptimizerPolicy(type="rowwise_adagrad", lr=end_to_end.LR, eps=end_to_end.EPS)
        return LogisticRegression(LogisticRegressionPolicy(), end_to_end.DENSE, tables, policy)


class LinkGroup(Group):
    """The rank processes of one contender, one on each host."""

    def __init__(self, hosts: list[Any], contender: str, case: Case, folder: Path) -> None:
        self.hosts = hosts
        super().__init__(contender, "fp32", RANKS, case, folder, HERE / "rank.py")  # type: ignore[arg-type]

    def _start(self, contender: str, dtype: str, rank: int, ranks: int, workload: Any) -> Any:
        setting = {
            "contender": contender,
            "dtype": dtype,
            "rank": rank,
            "world_size": ranks,
            "workload": dataclasses.asdict(workload),
            "folder": str(self.folder),
        }
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.hosts[rank].interface,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": "29500",
            "SHARDWISE_SECRET": "of both hosts",
        }
        with (self.folder / f"rank{rank}.log").open("w") as log:
            return self.hosts[rank].start(
                *(sys.executable, str(self.worker), json.dumps(setting)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                bufsize=1,
            )


def bits_of(rate: str) -> float:
    """Return the bits of a second in a rate as tc writes it, such as 200mbit."""
    for unit, bits in {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * bits
    raise SystemExit(f"--rate {rate}: give a number with gbit, mbit or kbit")


def run_case(case: Case, hosts: list[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the turns of one case and return its row."""
    names = [each.name for each in contenders(case)]
    groups: dict[str, LinkGroup] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[list[float]]] = {name: [] for name in names}
    cable: dict[str, list[float]] = {name: [] for name in names}

    def steps(name: str, count: int) -> list[float]:
        answers = groups[name].ask(do="steps", count=count)
        losses[name] += [list(step) for step in zip(*(each["losses"] for each in answers), strict=True)]
        return [max(step) for step in zip(*(each["seconds"] for each in answers), strict=True)]

    with tempfile.TemporaryDirectory(prefix="link_") as folder:
        try:
            for host in hosts:
                host.limit("")
            for name in names:
                groups[name] = LinkGroup(hosts, name, case, Path(folder) / name.replace(", ", "_"))
                groups[name].ask(do="ready")
                groups[name].ask(do="build")
                steps(name, 3)
                say(f"{case.name}: {name} is built")
            for host in hosts:
                host.limit(arguments.rate)
            for number in range(arguments.rounds):
                for name in names if number % 2 else reversed(names):
                    steps(name, 1)
                    before = [host.counted().sent for host in hosts]
                    seconds[name].append(statistics.median(steps(name, arguments.steps)))
                    sent = [host.counted().sent - first for host, first in zip(hosts, before, strict=True)]
                    cable[name].append(max(sent) / arguments.steps * 8 / bits_of(arguments.rate))
        finally:
            for group in groups.values():
                group.stop()
    plain, ahead = (seconds[name] for name in names)
    return {
        "case": case.name,
        "options": case.options,
        "step_s": statistics.median(plain),
        "step_s_ahead": statistics.median(ahead),
        "ratio": statistics.median(a / b for a, b in zip(ahead, plain, strict=True)),
        "cable_s": statistics.median(cable[names[0]]),
        "cable_s_ahead": statistics.median(cable[names[1]]),
        "to_the_bit": losses[names[0]] == losses[names[1]],
        "steps_compared": len(losses[names[0]]),
    }


def main() -> None:
    """Measure, print a line a case, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="rate of the cable, as tc writes it")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--cases", default="dlrm,weights", help="names, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, nothing is written")
    parser.add_argument("--out", type=Path, default=HERE / "link.json", help="where the JSON goes")
    arguments = parser.parse_args()
    sys.path.append(str(HERE.parent.parent))
    from tests.namespaces import namespaces

    wanted = arguments.cases.split(",")
    with namespaces() as hosts:
        rows = [run_case(case, hosts, arguments) for case in cases(arguments.tiny) if case.name in wanted]
    for row in rows:
        print(
            f"{row['case']}: {row['step_s'] * 1e3:.1f} ms, keys ahead {row['step_s_ahead'] * 1e3:.1f} ms, "
            f"{row['ratio']:.2f} of it; the cable alone needs {row['cable_s_ahead'] / row['step_s']:.2f} of it; "
            f"{row['steps_compared']} losses "
            f"{'are equal to the bit' if row['to_the_bit'] else 'DIFFER'}"
        )
    if not arguments.tiny:
        header = describe() | {
            "command": " ".join(["python", "link.py", *sys.argv[1:]]),
            "rate": arguments.rate,
        }
        arguments.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
