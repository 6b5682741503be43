"""Memory of a rank whose model is made in pieces:  python benchmarks/deepspeed/init_memory.py --theirs PYTHON

48 blocks of 2 matrices, made under ``zero.Init`` on 2 ranks; the resident memory that came on top, at its peak and held
afterwards, as a part of the model's bytes, on the rank that had more. Figures in README.md.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

WIDTH, BLOCKS = 768, 48
HERE = Path(__file__).resolve()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)


def resident(key: str) -> int:
    """Bytes: VmRSS now, VmHWM at its peak since it was reset."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def measure(package: str) -> None:
    """On one rank."""
    if package == "theirs":
        import deepspeed
    else:
        import shardwise.deepspeed as deepspeed
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        nn.ModuleList([Block()])  # what comes with the first collectives
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        model = nn.ModuleList([Block() for _ in range(BLOCKS)])
    size = 4 * BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)
    peak, held = (resident("VmHWM") - before) / size, (resident("VmRSS") - before) / size
    print(f"measured {peak:.3f} {held:.3f} {len(list(model.parameters()))}", flush=True)


def main() -> None:
    """Both packages, one after the other, three times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--theirs", required=True, help="Python of an environment with deepspeed")
    given = parser.parse_args()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    bare = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    rows: dict[str, list[tuple[float, float]]] = {"theirs": [], "ours": []}
    for _ in range(3):
        for package, python, env in (("theirs", given.theirs, bare), ("ours", sys.executable, environment)):
            launch = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(HERE), package]
            said = subprocess.run(launch, env=env, check=True, capture_output=True, text=True).stdout
            found = [line.split()[1:3] for line in said.splitlines() if line.startswith("measured")]
            rows[package].append(
                (max(float(peak) for peak, _ in found), max(float(held) for _, held in found))
            )
    print("| package | peak | held |\n|---|---|---|")
    for package, pairs in rows.items():
        peak, held = (sorted(column)[1] for column in zip(*pairs, strict=True))
        print(f"| {package} | {peak:.3f} | {held:.3f} |")


if __name__ == "__main__":
    if sys.argv[1:2] in (["theirs"], ["ours"]):
        measure(sys.argv[1])
    else:
        main()
