"""Runs layers of experts under DeepSpeed and under Shardwise, and compares what came out.

    python benchmarks/deepspeed/experts.py --deepspeed /path/to/deepspeed/bin/python

``--deepspeed``: a Python that has deepspeed and not Shardwise; this Python has Shardwise. The script is this file too
(``--out``): for each setting a model of one layer, with experts that differ, trains three steps of SGD on loss +
0.1 · l_aux. Compared by their largest difference: outputs, l_aux, losses, weights at the end; counts have to be equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTH, EXPERTS, BATCH, LENGTH, STEPS = 8, 4, 3, 5, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "k 1": {"k": 1},
    "k 2": {"k": 2, "top2_2nd_expert_sampling": False},
    "k 3": {"k": 3},
    "k 1, residual": {"k": 1, "use_residual": True},
    "k 1, used_token": {"k": 1, "used": True},
}
LIMIT = 1e-6


# The script --------------------------------------------------------------------------------------------------------


def train(name: str, ep: int, stage: int) -> dict[str, Any]:
    """What this rank saw of one setting."""
    import torch
    from deepspeed.moe.layer import MoE
    from torch import nn

    import deepspeed

    options = dict(SETTINGS[name])
    used = options.pop("used", False)
    rank = deepspeed.comm.get_rank()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH))
            self.first = nn.Linear(WIDTH, WIDTH)
            self.moe = MoE(WIDTH, expert, EXPERTS, ep_size=ep, drop_tokens=False, use_rts=False, **options)

        def forward(self, x: Any, used: Any) -> Any:
            return self.moe(self.first(x), used)

    torch.manual_seed(1)
    model = Net()
    draws = torch.Generator().manual_seed(2)
    stacks = {
        name: torch.randn(EXPERTS, *each.shape, generator=draws) / 2
        for name, each in nn.Sequential(
            nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH)
        ).named_parameters()
    }
    router = torch.randn(EXPERTS, WIDTH, generator=draws)
    theirs = getattr(model.moe, "deepspeed_moe", None)
    with torch.no_grad():
        if theirs is None:
            model.moe.router.weight.copy_(router)
            for key, each in model.moe.experts.named_parameters():
                each.copy_(stacks[key])
        else:
            theirs.gate.wg.weight.copy_(router)
            held = theirs.experts.deepspeed_experts
            for place, each in enumerate(held):
                expert = rank % ep * len(held) + place
                each.load_state_dict({key: stack[expert] for key, stack in stacks.items()})
    groups = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(groups, lr=0.3), config=config)[0]
    found: dict[str, Any] = {"outputs": [], "l_aux": [], "losses": [], "counts": []}
    inputs = torch.Generator().manual_seed(3 + rank)
    for _ in range(STEPS):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=inputs)
        mask = torch.arange(BATCH * LENGTH) % 4 > 0 if used else None
        y, l_aux, counts = engine(x, mask if mask is None else mask.long())
        loss = (y - x.flip(-1)).square().mean() + 0.1 * l_aux
        engine.backward(loss)
        engine.step()
        for key, value in (("outputs", y), ("l_aux", l_aux), ("losses", loss), ("counts", counts)):
            found[key].append(value.detach().double().flatten().tolist())
    found["weights"] = weights_of(engine, theirs)
    return found


def weights_of(engine: Any, theirs: Any) -> dict[str, list[float]]:
    """The model's, experts of this rank alone where they lie on several."""
    model = engine.module
    if theirs is None:
        state = engine.module_state_dict()
        ep = model.moe.ep_size
        mine = {}
        for name, each in state.items():
            if "moe.experts." in name:
                each = each.chunk(ep)[engine.global_rank % ep]
            mine[name] = each
    else:
        names = {"coefficient": "mix", "mlp": "residual"}
        mine = {}
        import torch

        for name, each in model.named_parameters():
            parts = name.split(".")
            if "deepspeed_experts" in parts:
                mine.setdefault(f"moe.experts.{'.'.join(parts[5:])}".replace("deepspeed_experts.", ""), [])
            elif "wg" in parts:
                mine["moe.router.weight"] = each
            else:
                mine[".".join(names.get(part, part) for part in parts)] = each
        held = theirs.experts.deepspeed_experts
        mine = {key: value for key, value in mine.items() if not key.startswith("moe.experts.")}
        for key, _ in held[0].named_parameters():
            mine[f"moe.experts.{key}"] = torch.stack([each.get_parameter(key) for each in held])
    return {name: each.detach().double().flatten().tolist() for name, each in mine.items()}


def script(out: Path, ep: int, stage: int) -> None:
    """Every setting, into a file for each rank."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = {name: train(name, ep, stage) for name in SETTINGS}
    out.with_suffix(f".{deepspeed.comm.get_rank()}.json").write_text(json.dumps(found))


# The comparison ----------------------------------------------------------------------------------------------------


def run(command: list[str], environment: dict[str, str]) -> None:
    """Errors: SystemExit with the end of what it said."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")


def largest(one: Any, other: Any) -> float:
    """Difference of two nests of numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (sorted(one), sorted(other))
        return max(largest(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return max((largest(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)


def main() -> None:
    """A row for each setting and layout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", help="a Python with deepspeed")
    parser.add_argument(
        "--layouts", nargs="*", default=["1,1,0", "2,1,0", "2,1,1", "2,2,0", "2,2,1", "2,2,2"]
    )
    parser.add_argument("--out", type=Path, help="run the script, and write here")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    if args.out is not None:
        return script(args.out, args.ep, args.stage)
    print("| ranks | ep_size | stage | setting | counts | outputs | l_aux | losses | weights |")
    print("|---|---|---|---|---|---|---|---|---|")
    good = True
    for port, layout in enumerate(args.layouts, 29711):
        ranks, ep, stage = map(int, layout.split(","))
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = Path(folder) / "theirs.json", Path(folder) / "ours.json"
            options = [__file__, "--ep", str(ep), "--stage", str(stage), "--out"]
            agent = [
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(ranks),
                "--master-port",
                str(port),
            ]
            threads = {"OMP_NUM_THREADS": "1"}
            run([args.deepspeed, *agent, *options, str(theirs)], {**threads, "DS_ACCELERATOR": "cpu"})
            launch = ["-m", "shardwise", "launch", "--as-deepspeed", "--ranks", str(ranks)]
            run([sys.executable, *launch, *options, str(ours)], threads)
            pairs = [
                [json.loads(file.with_suffix(f".{rank}.json").read_text()) for file in (theirs, ours)]
                for rank in range(ranks)
            ]
        for name in SETTINGS:
            worst = {
                key: max(largest(one[name][key], other[name][key]) for one, other in pairs)
                for key in ("outputs", "l_aux", "losses", "weights")
            }
            equal = all(one[name]["counts"] == other[name]["counts"] for one, other in pairs)
            good &= equal and max(worst.values()) <= LIMIT
            figures = " | ".join(f"{value:.1e}" for value in worst.values())
            print(
                f"| {ranks} | {ep} | {stage} | {name} | {'equal' if equal else 'differ'} | {figures} |",
                flush=True,
            )
    sys.exit(not good)


if __name__ == "__main__":
    main()
