"""Time and memory of one script under DeepSpeed, under its names on Shardwise, and in Shardwise's own.

    python benchmarks/deepspeed/one_script_speed.py --deepspeed /path/to/deepspeed/bin/python [--memory]

    theirs    the deepspeed package
    facade    the same lines under ``shardwise launch --as-deepspeed``
    own       ``shardwise.initialize`` with the same configuration and data, a loop in its own names

One step is that of one_script.py with a larger model: two microbatches, clipped, AdamW, WarmupDecayLR, on two CPU ranks
of one thread each. The three jobs of a stage and dtype are started once and take turns in a shuffled order, the others
sleeping: a turn is steps that are not timed, then timed ones; a round's sample is the mean of the slower rank's times.
Ratios are medians over rounds.

Memory is what a rank holds above the import of the package and its late parts (anonymous pages, its part of shared
ones), the rank with more: at its peak, and after the last step. The heap of glibc keeps holes between large blocks that
come and go; the first figures are of jobs that give large blocks back (MALLOC_MMAP_THRESHOLD_),
the last of jobs with the heap as it comes.
"""

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RANKS = 2
KINDS = ("theirs", "facade", "own")
LIMITS = {"fp32": 0.97, "bf16": 0.90}
"""Time of the facade over theirs."""
OVER_OWN, MEMORY = 1.03, 1.05
"""Time of the facade over our own names; memory of the facade over theirs."""
TIME_HEADS = "step, ms | time over theirs | over own names | losses"
MEMORY_HEADS = (
    "theirs: peak, MiB | held | ours: peak | held | ratios: peak | held | as the heap comes: peak | held"
)
WORDS = 512
LATE = {
    "theirs": (
        "runtime.zero.stage_1_and_2",
        "runtime.zero.stage3",
        "runtime.bf16_optimizer",
        "ops.op_builder",
    ),
    "facade": ("build",),
    "own": ("engine.build",),
}
"""Modules of the package that ``initialize`` imports when it is called."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Of glibc: blocks from this size on are pages of their own, gone when they are freed."""


# A rank -------------------------------------------------------------------------------------------------------------


def memory(name: str) -> dict[str, int]:
    """The lines ``key: number kB`` of a file in /proc/self, in bytes."""
    words = (line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines())
    return {w[0].rstrip(":"): int(w[1]) << 10 for w in words if len(w) == 3 and w[2] == "kB"}


def held_bytes() -> int:
    """Anonymous pages, and this process's part of shared memory."""
    return memory("status")["RssAnon"] + memory("smaps_rollup")["Pss_Shmem"]


def peak_bytes() -> int:
    """The most since the mark was reset, of the same."""
    status = memory("status")
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"] + memory("smaps_rollup")["Pss_Shmem"]


def steps_in_deepspeeds_names(args: argparse.Namespace) -> Iterator[float]:
    """One optimizer step after another; yields its loss."""
    from language_model import Net, Sentences, configuration
    from torch import nn

    import deepspeed

    deepspeed.runtime.utils.set_random_seed(1234)
    model = Net(WORDS, args.length, args.width, args.layers)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Sentences(args.samples, args.length, WORDS),
        config=configuration(args),
    )
    engine.train()
    while True:
        for _, tokens, targets in loader:
            tokens, targets = tokens.to(engine.device), targets.to(engine.device)
            logits = engine(tokens)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            at_boundary = engine.is_gradient_accumulation_boundary()
            engine.backward(loss)
            engine.step()
            if at_boundary:
                yield loss.item()


def steps_in_own_names(args: argparse.Namespace) -> Iterator[float]:
    """The same."""
    import torch
    from language_model import Net, Sentences, configuration
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler

    import shardwise

    torch.manual_seed(1234)
    engine = shardwise.initialize(Net(WORDS, args.length, args.width, args.layers), configuration(args))
    data = Sentences(args.samples, args.length, WORDS)
    sampler = DistributedSampler(data, num_replicas=RANKS, rank=engine.dp_index)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler, num_workers=2)
    while True:
        for _, tokens, targets in loader:
            tokens, targets = tokens.to(engine.device), targets.to(engine.device)
            logits = engine(tokens)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            engine.backward(loss, weight=1.0)
            if engine.step() is not None:
                yield loss.item()


def rank_main(kind: str, args: argparse.Namespace) -> None:
    """Obey lines on the FIFO of this rank: a number of steps, timed, until it closes."""
    import torch

    orders = (args.folder / f"{kind}.{os.environ['RANK']}.orders").open()
    answers = (args.folder / f"{kind}.{os.environ['RANK']}.answers").open("w", buffering=1)
    package = {"theirs": "deepspeed", "facade": "shardwise.deepspeed", "own": "shardwise"}[kind]
    for name in LATE[kind]:
        import_module(f"{package}.{name}")
    for name in ("language_model", "torch._inductor.compile_fx", "torch.utils.data"):
        import_module(name)
    if kind != "own":
        import deepspeed

        deepspeed.init_distributed()
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()  # loads what torch loads late
    before = held_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    steps = (steps_in_own_names if kind == "own" else steps_in_deepspeeds_names)(args)
    for line in orders:
        seconds, losses = [], []
        for _ in range(int(line)):
            began = time.perf_counter()
            losses.append(next(steps))
            seconds.append(time.perf_counter() - began)
        found = {"seconds": seconds, "losses": losses, "threads": torch.get_num_threads()}
        found |= {"peak_bytes": peak_bytes() - before, "held_bytes": held_bytes() - before}
        answers.write(json.dumps(found) + "\n")
    os._exit(0)  # the measurement is over


# The jobs -----------------------------------------------------------------------------------------------------------


class Job:
    """The ranks of one contender."""

    def __init__(self, kind: str, deepspeed: str, folder: Path, options: list[str], more: dict[str, str]):
        self.kind = kind
        """``more``: of its environment."""
        self.samples_s: list[float] = []
        """Mean step of each turn."""
        self.last: list[dict[str, Any]] = []
        """Of each rank, the last answer."""
        names = [folder / f"{kind}.{rank}.{way}" for way in ("orders", "answers") for rank in range(RANKS)]
        for name in names:
            os.mkfifo(name)
        opened = [os.open(name, os.O_RDWR) for name in names]  # neither side waits for the other to open
        self._orders = [os.fdopen(each, "w", buffering=1) for each in opened[:RANKS]]
        self._answers = [os.fdopen(each, "r") for each in opened[RANKS:]]
        environment = {**os.environ, **more, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "shardwise", "launch", "--ranks", str(RANKS)]
        if kind == "facade":
            command.insert(4, "--as-deepspeed")
        if kind == "theirs":
            agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            command = [deepspeed, *agent]
            environment |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
            environment.pop("PYTHONPATH", None)
        self._log = (folder / f"{kind}.log").open("w+")
        self._process = subprocess.Popen(
            [*command, str(HERE), "--rank_of", kind, "--folder", str(folder), *options],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def run(self, steps: int) -> list[dict[str, Any]]:
        """On all ranks. Errors: SystemExit with the end of what the job printed, where it ended or is silent."""
        for each in self._orders:
            each.write(f"{steps}\n")
        found, deadline = [], time.monotonic() + 300
        for each in self._answers:
            while not select.select([each], [], [], 1.0)[0]:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    raise SystemExit(f"{self.kind} ended or is silent:\n{self._log.read()[-6000:]}")
            found.append(json.loads(each.readline()))
        self.last = found
        return found

    def turn(self, warm: int, steps: int) -> None:
        """One sample."""
        self.run(warm)
        per_step = zip(*(each["seconds"] for each in self.run(steps)), strict=True)
        self.samples_s.append(statistics.fmean(max(times) for times in per_step))

    def end(self) -> None:
        """Its ranks read that there are no more orders."""
        for each in self._orders:
            each.close()
        self._process.wait(60)
        for file in (*self._answers, self._log):
            file.close()

    def bytes(self, which: str) -> int:
        """Of the rank with more."""
        return max(each[f"{which}_bytes"] for each in self.last)


@contextmanager
def jobs_of(
    stage: int, dtype: str, args: argparse.Namespace, more: dict[str, str]
) -> Iterator[dict[str, Job]]:
    """All contenders of one stage and dtype, after their first steps."""
    options = ["--stage", str(stage), *(["--bf16"] if dtype == "bf16" else [])]
    for name in ("width", "layers", "length", "micro_batch", "samples"):
        options += [f"--{name}", str(getattr(args, name))]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {kind: Job(kind, args.deepspeed, Path(folder), options, more) for kind in args.kinds}
        try:
            for job in jobs.values():
                job.run(args.first)
            yield jobs
        finally:
            for job in jobs.values():
                job.end()
    for kind, job in jobs.items():
        told = ", ".join(f"{which} {job.bytes(which) / 2**20:.1f}" for which in ("peak", "held"))
        print(f"  {kind}: {told} MiB {more or ''}", file=sys.stderr, flush=True)


def time_of(stage: int, dtype: str, args: argparse.Namespace) -> tuple[list[str], bool]:
    """All rounds of one stage and dtype: cells of a row, and whether they keep the limits."""
    order = random.Random(stage)
    with jobs_of(stage, dtype, args, {}) as jobs:
        for number in range(args.rounds):
            for job in order.sample(list(jobs.values()), len(jobs)):
                job.turn(args.warm, args.steps)
            told = ", ".join(f"{kind} {job.samples_s[-1] * 1e3:.1f}" for kind, job in jobs.items())
            print(f"stage {stage} {dtype}, round {number + 1}: {told} ms", file=sys.stderr, flush=True)
    over_theirs = ratio(jobs, "theirs", lambda job: job.samples_s)
    over_own = ratio(jobs, "own", lambda job: job.samples_s)
    step_s = statistics.median(jobs["facade"].samples_s)
    difference = max(
        abs(a - b)
        for one, other in zip(jobs["facade"].last, jobs.get("theirs", jobs["facade"]).last, strict=True)
        for a, b in zip(one["losses"], other["losses"], strict=True)
    )
    cells = [f"{step_s * 1e3:.0f}", f"{over_theirs:.2f}", f"{over_own:.3f}", f"{difference:.1e}"]
    return cells, over_theirs <= LIMITS[dtype] and over_own <= OVER_OWN


def memory_of(stage: int, dtype: str, args: argparse.Namespace) -> tuple[list[str], bool]:
    """Of one stage and dtype: cells of a row, and whether they keep the limit."""
    found = []
    for more in (GIVES_BACK, {}):
        with jobs_of(stage, dtype, args, more) as jobs:
            for job in jobs.values():
                job.run(args.memory_steps)
        found += [ratio(jobs, "theirs", lambda job, of=of: [job.bytes(of)]) for of in ("peak", "held")]
        if more:
            sizes = [
                f"{jobs[kind].bytes(of) / 2**20:.0f}"
                for kind in ("theirs", "facade")
                for of in ("peak", "held")
            ]
    return [*sizes, *(f"{each:.2f}" for each in found)], max(found) <= MEMORY


def ratio(jobs: dict[str, Job], other: str, what: Callable[[Job], list[float]]) -> float:
    """Of the facade to another: the median over rounds; NaN where the other did not run."""
    if other not in jobs:
        return float("nan")
    return statistics.median(a / b for a, b in zip(what(jobs["facade"]), what(jobs[other]), strict=True))


def main() -> None:
    """A row for each stage and dtype."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed", help="a Python with deepspeed and without Shardwise")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="facade is always needed")
    parser.add_argument("--memory", action="store_true", help="in place of time")
    parser.add_argument("--memory_steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed, of a turn")
    parser.add_argument("--warm", type=int, default=1, help="not timed, of a turn")
    parser.add_argument("--first", type=int, default=4, help="not timed, of a job")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--rank_of", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args.rank_of, args)
        return
    measure, heads = (memory_of, MEMORY_HEADS) if args.memory else (time_of, TIME_HEADS)
    print(f"| stage | dtype | {heads} |\n" + "|---" * (3 + heads.count("|")) + "|")
    missed = []
    for dtype in args.dtypes:
        for stage in args.stages:
            cells, kept = measure(stage, dtype, args)
            print(f"| {stage} | {dtype} | {' | '.join(cells)} |", flush=True)
            if not kept:
                missed.append((stage, dtype))
    if missed:
        raise SystemExit(f"beyond the limits: {missed}")


if __name__ == "__main__":
    main()
