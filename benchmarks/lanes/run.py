"""What it gains to exchange keys ahead: samples/s of a small DLRM at depths 0, 1 and 2, and the lanes as a picture.

    python benchmarks/lanes/run.py --ranks 2 --rounds 9 --steps 20

One engine runs all depths by turns, round by round, so that a machine that slows down slows all alike. Every round
reads on in a packed click log, which a reader thread opens ahead at every depth.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise
from shardwise.comm.world import join
from shardwise.data import Loader
from shardwise.data.clicks import ClickDataset, PackedClicks, PackedWriter, SyntheticClicks
from shardwise.models.ctr.dlrm import Dlrm
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.observe.lanes_picture import LaneRecorder, draw_picture, draw_text
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy

DEPTHS = (0, 1, 2)
TABLES, TABLE_ROWS, WIDTH = 26, 100_000, 16
BOTTOM, TOP = (64,), (128, 64)


def write_log(path: Path, rows: int) -> None:
    """A packed click log with keys of a power law."""
    clicks = SyntheticClicks(rows, (TABLE_ROWS,) * TABLES)
    with PackedWriter(path, clicks.schema, "u32") as writer:
        for start in range(0, rows, 1 << 15):
            writer.append(clicks.rows(np.arange(start, min(start + (1 << 15), rows))))


def rank_main(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's rounds; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    world = join(
        rank, ranks, store=dist.FileStore(f"{folder}/store", ranks) if ranks > 1 else None, quiet=True
    )
    clicks = ClickDataset(PackedClicks(Path(folder) / "log.clicks"))
    tables = [
        TablePolicy(name=feature.name, rows=TABLE_ROWS, width=WIDTH, placement=options.placement)
        for feature in clicks.schema.features
    ]
    model = Dlrm(
        DlrmPolicy(width=WIDTH, bottom=BOTTOM, top=TOP),
        len(clicks.schema.dense),
        tables,
        RowOptimizerPolicy(lr=0.05),
    )
    global_batch = options.batch * ranks
    engine = shardwise.initialize(
        model,
        {
            "batch": {"global_size": global_batch, "micro_size": options.batch},
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "comm": {"transport": options.transport},
        },
        world=world,
    )
    lanes = {depth: LaneRecorder(global_batch) for depth in DEPTHS}
    loaders = {
        depth: Loader(
            clicks,
            global_batch=global_batch,
            micro_batch=options.batch,
            dp_index=rank,
            dp_size=ranks,
            shuffle=False,
            watch=lanes[depth].watch,
        )
        for depth in DEPTHS
    }
    runs = {depth: engine.prefetch(loaders[depth], depth, lanes[depth]) for depth in DEPTHS}
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for number in range(-1, options.rounds):
        for depth in DEPTHS:
            engine.train_step(next(runs[depth]))  # so that what was prepared while others ran is not counted
            started = time.perf_counter()
            for _ in range(options.steps):
                engine.train_step(next(runs[depth]))
            if number >= 0:
                seconds[depth].append((time.perf_counter() - started) / options.steps)
    for run in runs.values():
        run.close()
    if rank == 0:
        print(engine.plan.notes[-1] if engine.plan.notes else "")
        rates = {depth: [global_batch / each for each in found] for depth, found in seconds.items()}
        Path(folder, "rates.json").write_text(json.dumps(rates))
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        windows = {f"depth {depth}": lanes[depth].window() for depth in DEPTHS}
        draw_picture(windows, out / "lanes.png", f"DLRM, {ranks} rank(s), batch {options.batch} each: rank 0")
        for name, spans in windows.items():
            print(f"{name}\n{draw_text(spans)}\n")
    engine.close()
    world.close()


def main() -> None:
    """Parse, run, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("ranks", 2), ("batch", 2048), ("rounds", 9), ("steps", 20), ("rows", 400_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--placement", default="auto")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--out", default="runs/lanes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_log(Path(folder) / "log.clicks", options.rows)
        mp.spawn(rank_main, (options.ranks, folder, options), nprocs=options.ranks)
        rates: dict[str, Any] = json.loads(Path(folder, "rates.json").read_text())
    base = statistics.median(rates["0"])
    print("depth  samples/s (median)  quartiles         against depth 0")
    for depth, found in rates.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{depth:>5}  {middle:>18,.0f}  {low:>7,.0f} {high:>7,.0f}  {middle / base:>15.3f}")


if __name__ == "__main__":
    main()
