"""Two hosts with a slow cable between them: seconds of a step and bytes on the cable, beside DDP, FSDP2 and DeepSpeed.

    python run.py --stages 0 --rounds 2          as root on Linux; needs ip, tc and unshare

The hosts are two network namespaces of this machine, two ranks on each, with a cable of 100 Mbit/s in both directions
(``tc tbf``). The contenders are those of ../data_parallel with their training problem, a GPT of 33.7 M parameters, in
fp32 and with another number of samples a rank. All contenders of a stage are started once; then they take turns, one
step each, while the others sleep. Bytes are what the kernel counts on the cable's ends, headers included.

Cost: about six minutes a stage at 100 Mbit/s.
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path += [str(HERE.parent / "data_parallel"), str(ROOT)]

from group import Group  # noqa: E402
from machine import describe  # noqa: E402
from rounds import say  # noqa: E402
from rows import select  # noqa: E402
from tests.namespaces import NamespaceHost, namespaces  # noqa: E402
from workload import Workload  # noqa: E402

RANKS, PER_HOST = 4, 2
NAMES = {
    0: ["ddp", "deepspeed-0", "shardwise-0-shm"],
    1: ["torch-zero1", "deepspeed-1", "shardwise-1-shm"],
    2: ["fsdp2-2", "deepspeed-2", "shardwise-2-shm"],
    3: ["fsdp2-3", "deepspeed-3", "shardwise-3-shm"],
}
"""Contenders by stage."""


class HostsGroup(Group):
    """The rank processes of one contender on the hosts."""

    def __init__(self, hosts: list[NamespaceHost], contender: str, workload: Workload, folder: Path) -> None:
        self.hosts = hosts
        super().__init__(contender, "fp32", RANKS, workload, folder)

    def _start(
        self, contender: str, dtype: str, rank: int, ranks: int, workload: Workload
    ) -> subprocess.Popen[str]:
        host = self.hosts[rank // PER_HOST]
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
            "GLOO_SOCKET_IFNAME": host.interface,
            "DS_ACCELERATOR": "cpu",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % PER_HOST),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(PER_HOST),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": "29500",
            "SHARDWISE_SECRET": "of both hosts",
        }
        with (self.folder / f"rank{rank}.log").open("w") as log:
            return host.start(
                *(sys.executable, str(self.worker), json.dumps(setting)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                bufsize=1,
            )


def one_step(group: Group, hosts: list[NamespaceHost]) -> dict[str, float]:
    """Run one step; return its seconds on the slowest rank, and the bytes that the busier host sent."""
    before = [host.counted().sent for host in hosts]
    answers = group.ask(do="steps", count=1)
    sent = [host.counted().sent - start for host, start in zip(hosts, before, strict=True)]
    return {
        "seconds": max(each["seconds"][0] for each in answers),
        "sent_bytes": max(sent),
        "loss": statistics.fmean(each["losses"][0] for each in answers if each["losses"][0] is not None),
    }


def run_stage(stage: int, arguments: argparse.Namespace, hosts: list[NamespaceHost]) -> list[dict[str, Any]]:
    """Return a row of each contender of a stage."""
    rows = [row for row in select(NAMES[stage], "fp32") if row.stage == stage]
    groups, seen = {}, {row.name: [] for row in rows}
    with tempfile.TemporaryDirectory(prefix="hosts_") as folder:
        try:
            for host in hosts:
                host.limit("")
            for row in rows:
                groups[row.name] = HostsGroup(hosts, row.name, arguments.workload, Path(folder) / row.name)
                groups[row.name].ask(do="ready")
                groups[row.name].ask(do="build")
                groups[row.name].ask(do="steps", count=2)  # DDP orders its buckets after the first step
                groups[row.name].ask(do="sleep")
                say(f"stage {stage}: {row.name} is built")
            for host in hosts:
                host.limit(arguments.rate)
            for number in range(arguments.rounds):
                for row in rows if number % 2 else reversed(rows):
                    seen[row.name].append(one_step(groups[row.name], hosts))
                    say(f"stage {stage}, round {number + 1}: {row.name} {seen[row.name][-1]}")
        finally:
            for group in groups.values():
                group.stop()
    return [
        {
            "name": row.name,
            "stage": stage,
            "step_s": statistics.median(each["seconds"] for each in seen[row.name]),
            "step_s_rounds": [each["seconds"] for each in seen[row.name]],
            "sent_bytes": statistics.median(each["sent_bytes"] for each in seen[row.name]),
            "loss": seen[row.name][-1]["loss"],
        }
        for row in rows
    ]


def main() -> None:
    """Measure, and write the JSON file; rows of other stages stay."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default="0,1,2,3", help="stages, separated by commas")
    parser.add_argument("--rounds", type=int, default=2, help="timed steps of each contender")
    parser.add_argument("--rate", default="100mbit", help="rate of the cable, as tc writes it")
    parser.add_argument("--samples", type=int, default=1, help="samples a rank")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to see that everything runs")
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where the JSON goes")
    arguments = parser.parse_args()
    base = Workload.tiny() if arguments.tiny else Workload()
    arguments.workload = dataclasses.replace(base, micro_batch=arguments.samples)
    stages = [int(stage) for stage in arguments.stages.split(",")]
    kept = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    rows = [row for row in kept if row["stage"] not in stages]
    with namespaces() as hosts:
        for stage in stages:
            rows += run_stage(stage, arguments, hosts)
    header = describe() | {
        "command": " ".join(["python", "run.py", *sys.argv[1:]]),
        "workload": dataclasses.asdict(arguments.workload),
        "rate": arguments.rate,
    }
    arguments.out.write_text(
        json.dumps(header | {"rows": sorted(rows, key=lambda row: row["stage"])}, indent=1)
    )
    for row in rows:
        peers = [
            each
            for each in rows
            if each["stage"] == row["stage"] and not each["name"].startswith("shardwise")
        ]
        fastest = min(each["step_s"] for each in peers)
        fewest = min(each["sent_bytes"] for each in peers)
        say(
            f"stage {row['stage']} {row['name']}: {row['step_s']:.1f} s ({row['step_s'] / fastest:.2f} of the fastest "
            f"peer), {row['sent_bytes'] / 1e6:.0f} MB ({row['sent_bytes'] / fewest:.2f} of the leanest), "
            f"loss {row['loss']:.4f}"
        )


if __name__ == "__main__":
    main()
