"""Learning rates and momenta of DeepSpeed's five schedules and of torch's through its engine, held to ours.

    THEIRS/bin/python benchmarks/deepspeed/schedules.py judge  schedules.json     # an environment with deepspeed
    python benchmarks/deepspeed/schedules.py compare schedules.json               # ours; ends with 1 beyond 1e-9

``judge`` trains one weight under deepspeed.initialize and writes what stands in ``param_groups`` before each step, so
that it is seen too when the package's engine calls ``step()``. ``compare`` computes the same from the applied steps.
"""

import json
import os
import sys
from typing import Any

STEPS = 170
LIMIT = 1e-9
RATES = (0.02, 0.005)
"""Learning rates of the two groups of the optimizer."""

Block = tuple[str, dict[str, Any], dict[str, Any]]
"""Their type and parameters, and our block."""

WORDS = {
    "warmup_min_lr": "min_lr",
    "warmup_max_lr": "max_lr",
    "warmup_num_steps": "warmup_steps",
    "warmup_type": "rise",
    "total_num_steps": "total_steps",
    "warmup_min_ratio": "start_ratio",
    "cos_min_ratio": "min_ratio",
    "lr_range_test_min_lr": "min_lr",
    "lr_range_test_step_size": "interval_steps",
    "lr_range_test_step_rate": "rate",
    "lr_range_test_staircase": "staircase",
    "cycle_min_lr": "min_lr",
    "cycle_max_lr": "max_lr",
    "cycle_first_step_size": "rise_steps",
    "cycle_second_step_size": "fall_steps",
    "cycle_first_stair_count": "rise_stairs",
    "cycle_second_stair_count": "fall_stairs",
    "decay_step_size": "decay_steps",
    "decay_lr_rate": "decay_lr_rate",
    "cycle_momentum": "cycle_momentum",
    "cycle_min_mom": "min_momentum",
    "cycle_max_mom": "max_momentum",
    "decay_mom_rate": "decay_momentum_rate",
}
"""Their parameters, and our keys."""


def block(kind: str, ours: str, theirs: dict[str, Any], **more: Any) -> Block:
    """``ours``: our type; ``more``: what it takes beside their parameters."""
    return kind, theirs, {"type": ours, **more, **{WORDS[key]: value for key, value in theirs.items()}}


def warmup_blocks() -> list[Block]:
    """WarmupLR and WarmupDecayLR."""
    blocks: list[Block] = []
    for rise in ("log", "linear"):
        for steps, low, high in (
            (1, 0.0, 0.01),
            (2, 0.001, 0.01),
            (10, 0.0, 0.1),
            (37, 1e-5, [0.01, 0.003]),
            (200, 0.0, 0.05),
        ):
            theirs = {
                "warmup_min_lr": low,
                "warmup_max_lr": high,
                "warmup_num_steps": steps,
                "warmup_type": rise,
            }
            blocks.append(block("WarmupLR", "warmup", theirs))
            for total in (30, 150, 170) if steps in (10, 37) else ():
                blocks.append(block("WarmupDecayLR", "warmup_linear", {**theirs, "total_num_steps": total}))
    blocks.append(block("WarmupLR", "warmup", {"warmup_num_steps": 20}))
    return blocks


def cosine_blocks() -> list[Block]:
    """WarmupCosineLR."""
    names = ("total_num_steps", "warmup_num_steps", "warmup_min_ratio", "cos_min_ratio", "warmup_type")
    rows = (
        (150, 10, 0.0, 1e-4, "log"),
        (150, 10, 0.1, 0.01, "linear"),
        (170, 1, 0.0, 0.0, "log"),
        (60, 25, 0.3, 0.2, "log"),
        (20, 20, 0.0, 0.1, "linear"),
        (15, 30, 0.0, 0.1, "log"),
        (400, 50, 0.05, 1e-4, "linear"),
    )
    return [block("WarmupCosineLR", "warmup_cosine", dict(zip(names, row, strict=True))) for row in rows]


def range_blocks() -> list[Block]:
    """LRRangeTest."""
    names = ("min_lr", "step_size", "step_rate", "staircase")
    rows = ((1e-3, 2000, 1.0), (1e-4, 10, 5.0), ([0.01, 0.002], 7, 0.3), (1e-5, 1, 2.0))
    found = []
    for staircase in (False, True):
        for row in rows:
            values = zip(names, (*row, staircase), strict=True)
            theirs = {f"lr_range_test_{name}": value for name, value in values}
            found.append(block("LRRangeTest", "range_test", theirs))
    return found


def cycle_blocks() -> list[Block]:
    """OneCycle."""
    given: list[dict[str, Any]] = [
        {"cycle_first_step_size": 50},
        {"cycle_first_step_size": 30, "cycle_second_step_size": 70},
        {
            "cycle_first_step_size": 70,
            "cycle_second_step_size": 30,
            "decay_step_size": 10,
            "decay_lr_rate": 0.5,
        },
        {"cycle_first_step_size": 40, "decay_step_size": 7, "decay_lr_rate": 0.1, "decay_mom_rate": 0.01},
        {"cycle_first_step_size": 40, "cycle_momentum": False},
        {"cycle_first_step_size": 60, "cycle_first_stair_count": 5},
        {"cycle_first_step_size": 60, "cycle_first_stair_count": 7, "cycle_second_stair_count": 3},
        {
            "cycle_first_step_size": 33,
            "cycle_second_step_size": 77,
            "cycle_first_stair_count": 4,
            "decay_step_size": 5,
        },
        {
            "cycle_first_step_size": 50,
            "cycle_second_step_size": 0,
            "decay_step_size": 20,
            "decay_lr_rate": 1.0,
        },
        {"cycle_first_step_size": 300},
        {
            "cycle_first_step_size": 20,
            "cycle_max_lr": [0.2, 0.03],
            "cycle_min_mom": [0.7, 0.85],
            "cycle_max_mom": 0.95,
        },
        {
            "cycle_first_step_size": 37,
            "cycle_second_step_size": 41,
            "cycle_second_stair_count": 9,
            "decay_step_size": 3,
            "decay_mom_rate": 0.001,
        },
    ]
    common = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1}
    return [block("OneCycle", "one_cycle", {**common, **changes}, second_beta=0.99) for changes in given]


def torch_blocks() -> list[Block]:
    """Those of torch, which a DeepSpeed file may name too."""
    given: list[tuple[str, dict[str, Any]]] = [
        ("StepLR", {"step_size": 30, "gamma": 0.5}),
        ("ExponentialLR", {"gamma": 0.98}),
        ("CosineAnnealingLR", {"T_max": 60, "eta_min": 1e-4}),
        ("OneCycleLR", {"max_lr": [0.1, 0.02], "total_steps": 200}),
    ]
    return [(name, args, {"type": "torch", "scheduler": name, "arguments": args}) for name, args in given]


def blocks() -> list[Block]:
    """All of them."""
    return [*warmup_blocks(), *cosine_blocks(), *range_blocks(), *cycle_blocks(), *torch_blocks()]


def judge(path: str) -> None:
    """Write what the package does."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    import torch

    import deepspeed  # type: ignore[import-not-found]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x)).square().mean()

    found = []
    for kind, params, _ in blocks():
        net = Net()
        groups = [
            {"params": net.first.parameters(), "lr": RATES[0]},
            {"params": net.second.parameters(), "lr": RATES[1]},
        ]
        engine, optimizer, _, _ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.Adam(groups),
            config={"train_batch_size": 1, "scheduler": {"type": kind, "params": params}},
        )
        rows = []
        for _ in range(STEPS):
            rows.append(
                [[float(group["lr"]), *map(float, group["betas"])] for group in optimizer.param_groups]
            )
            engine.backward(engine(torch.ones(1, 1)))
            engine.step()
        found.append({"type": kind, "params": params, "rows": rows})
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"version": deepspeed.__version__, "blocks": found}, file)


def compare(path: str) -> int:
    """Hold ours to it; 1 where a number differs by more than the limit."""
    from shardwise.config.run import RunConfig
    from shardwise.optim.groups import OptimizerGroups

    with open(path, encoding="utf-8") as file:
        told = json.load(file)
    worst, wrong = 0.0, 0
    for (kind, params, ours), theirs in zip(blocks(), told["blocks"], strict=True):
        assert (kind, params) == (theirs["type"], theirs["params"]), "the file is of other blocks"
        config = RunConfig.parse(
            {
                "schedule": ours,
                "optimizer": {
                    "type": "adam",
                    "lr": RATES[0],
                    "groups": [{"match": "second.*", "lr": RATES[1]}],
                },
            }
        )
        groups = OptimizerGroups(config.optimizer, config.schedule)
        error = 0.0
        for step, rows in enumerate(theirs["rows"]):
            for group, (lr, *betas) in zip(groups.rates(step), rows, strict=True):
                pairs = zip((group["lr"], *group["betas"]), (lr, *betas), strict=True)
                error = max(error, *(abs(a - b) for a, b in pairs))
        worst, wrong = max(worst, error), wrong + (error > LIMIT)
        if error > LIMIT:
            print(f"{kind} {params}: {error:.3g}")
    print(
        f"deepspeed {told['version']}: {len(told['blocks'])} blocks x {STEPS} steps, rates and betas of two groups: "
        f"largest difference {worst:.3g}, {wrong} blocks beyond {LIMIT:g}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    command, path = sys.argv[1:]
    sys.exit(judge(path) if command == "judge" else compare(path))
