"""Does training go on from a step that DeepSpeed saved?  python benchmarks/deepspeed/checkpoints.py --theirs PYTHON

    their side    2 ranks, 6 optimizer steps at stages 0 to 3, in fp32 and bf16; a step is saved after the third
    our side      the step is converted, and loaded on 1, 2 and 4 ranks at another stage; the microbatches of the last
                  three steps follow, and their losses are held against those of DeepSpeed

Figures in README.md. ``--theirs``: the Python of an environment with deepspeed 0.19.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, SAVED_AFTER, ACCUMULATION, SIZE = 6, 3, 2, 4
HERE = Path(__file__).resolve()


class Net(nn.Module):
    """A tied table, a frozen layer, a layer that is never used, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.middle = nn.Linear(7, 11, bias=False)
        self.unused = nn.Linear(3, 5)
        self.last = nn.Linear(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(self.first(self.embed(tokens)).tanh()))
        return self.head(self.last(self.middle(hidden)))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    return [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]


def microbatches(index: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Those of one of ``ranks`` ranks: both of their ranks draw 4 samples at a time, dealt out anew to any number."""
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    found = []
    for _ in range(STEPS * ACCUMULATION):
        pairs = [
            (torch.randint(11, (SIZE,), generator=d), torch.randint(11, (SIZE,), generator=d)) for d in draws
        ]
        inputs, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
        size = 2 * SIZE // ranks
        found.append((inputs[index * size : (index + 1) * size], labels[index * size : (index + 1) * size]))
    return found


def theirs(stage: int, dtype: str, folder: Path) -> None:
    """Under DeepSpeed."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    losses = []
    for number, (inputs, labels) in enumerate(microbatches(engine.global_rank, 2)):
        loss = nn.functional.cross_entropy(engine(inputs).float(), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if number == SAVED_AFTER * ACCUMULATION - 1:
            engine.save_checkpoint(str(folder))
    (folder / f"losses{engine.global_rank}.json").write_text(json.dumps(losses))


def ours(stage: int, dtype: str, folder: Path, converted: Path) -> None:
    """Under Shardwise, on this job's ranks: prints the largest difference of a loss of theirs, by step."""
    import shardwise

    torch.manual_seed(5)
    model = Net()
    ranks = int(os.environ["WORLD_SIZE"])
    engine = shardwise.initialize(
        model,
        {
            "zero": {"stage": stage},
            "batch": {"micro_size": 2 * SIZE // ranks, "global_size": 2 * SIZE * ACCUMULATION},
            "precision": dtype,
            "max_grad_norm": 1.0,
        },
        optimizer=torch.optim.AdamW(groups_of(model), lr=0.01, weight_decay=0.01),
    )
    engine.load(converted)
    told = [json.loads((folder / f"losses{rank}.json").read_text()) for rank in range(2)]
    worst = 0.0
    for number, (inputs, labels) in enumerate(microbatches(engine.dp_index, ranks)):
        if number < SAVED_AFTER * ACCUMULATION:
            continue
        loss = nn.functional.cross_entropy(engine(inputs).float(), labels)
        engine.backward(loss)
        engine.step()
        mean = engine.gather_metrics(loss.detach().float()).mean().item()
        worst = max(worst, abs(mean - (told[0][number] + told[1][number]) / 2))
    engine.print(f"worst {worst}")
    engine.close()


def convert(step: Path, out: Path) -> None:
    """As the engine's facade does: at stage 0 with the names of the groups."""
    from shardwise.deepspeed.files.their_checkpoint import convert as rewrite

    model = Net()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in groups_of(model)]
    left_out = rewrite(step, out, groups if not list(step.glob("*zero_pp*")) else None)
    assert not left_out, left_out


def main() -> None:
    """Every stage and dtype; a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--theirs", required=True, help="Python of an environment with deepspeed")
    given = parser.parse_args()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    print("| stage, dtype | losses on 1 rank | 2 ranks | 4 ranks |\n|---|---|---|---|")
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory() as scratch:
                folder, converted = Path(scratch) / "theirs", Path(scratch) / "ours"
                command = [given.theirs, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(HERE)]
                command += ["theirs", str(stage), dtype, str(folder)]
                bare = {k: v for k, v in environment.items() if k != "PYTHONPATH"}
                subprocess.run(command, env=bare, check=True, capture_output=True)
                convert(folder / f"global_step{SAVED_AFTER}", converted)
                cells = []
                for ranks in (1, 2, 4):
                    words = ["ours", str((stage + ranks) % 4), dtype, str(folder), str(converted)]
                    launch = [
                        sys.executable,
                        "-m",
                        "shardwise",
                        "launch",
                        "-n",
                        str(ranks),
                        str(HERE),
                        *words,
                    ]
                    said = subprocess.run(
                        launch, env=environment, check=True, capture_output=True, text=True
                    ).stdout
                    worst = next(line for line in said.splitlines() if line.startswith("worst "))
                    cells.append(f"{float(worst.split()[1]):.1e}")
                print(f"| {stage}, {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "theirs":
        theirs(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    elif len(sys.argv) > 1 and sys.argv[1] == "ours":
        ours(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
