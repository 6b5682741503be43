"""Do two commits compute the same bits? Trains every layout under both, and compares digests.

    python digests.py --before COMMIT          against the working tree; COMMIT is checked out into a folder of its own
    python digests.py --layouts tp2,zero3      only these

A row is a layout of 2 or 4 ranks that trains a small model for three steps. Its digest covers the losses and the norms
of all steps, the full gradients of the last step where the layout shows gradients, and all weights at the end. Only
names that are public in both commits may be used here.

Cost: about three seconds a layout and commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
STEPS, CONTEXT, VOCABULARY = 3, 16, 64
ADAMW = {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1}
EXPERTS = {"count": 4, "hidden": 32, "router": {"top_k": 2, "balance": "bias"}}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero{stage}": (2, {"zero": {"stage": stage}}) for stage in range(4)},
    **{
        f"zero{stage}_accumulation": (2, {"zero": {"stage": stage}, "batch": {"accumulation": 3}})
        for stage in range(4)
    },
    **{
        f"zero{stage}_bf16": (2, {"zero": {"stage": stage}, "precision": {"compute": "bf16"}})
        for stage in range(4)
    },
    "zero3_recompute": (2, {"zero": {"stage": 3}, "recompute": {"scope": "full"}}),
    "zero2_reduce_at_step": (2, {"zero": {"stage": 2, "reduce": "step"}, "batch": {"accumulation": 2}}),
    "zero1_host": (2, {"zero": {"stage": 1}, "offload": {"optimizer": "host"}}),
    "zero2_fraction": (2, {"zero": {"stage": 2}, "offload": {"optimizer": "host", "fraction": 0.5}}),
    "zero3_disk": (2, {"zero": {"stage": 3}, "offload": {"optimizer": "disk"}}),
    "zero3_weights_on_host": (
        2,
        {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host"}},
    ),
    "zero1_delayed": (2, {"zero": {"stage": 1}, "offload": {"optimizer": "host", "step": "delayed"}}),
    "zero1_at_end": (2, {"zero": {"stage": 1}, "offload": {"optimizer": "host", "step": "at_end"}}),
    "zero2_tiles": (2, {"zero": {"stage": 2}, "tiles": {"logits": 8}}),
    "zero2_int8_moments": (2, {"zero": {"stage": 2}, "offload": {"optimizer": "host", "state": "int8"}}),
    "muon_zero1": (2, {"zero": {"stage": 1}, "optimizer": {"type": "muon", "lr": 1e-2}}),
    "muon_zero3": (2, {"zero": {"stage": 3}, "optimizer": {"type": "muon", "lr": 1e-2}}),
    "lamb_zero2": (2, {"zero": {"stage": 2}, "optimizer": {"type": "lamb", "lr": 1e-2}}),
    "sgd_zero0": (2, {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}}),
    "tp2": (2, {"mesh": {"tp": 2}}),
    "tp2_sequence": (2, {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}),
    "pp2": (2, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}),
    "pp2_interleaved": (
        2,
        {
            "mesh": {"pp": 2},
            "batch": {"accumulation": 4},
            "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
        },
    ),
    "pp2_zero3_kept": (
        4,
        {
            "zero": {"stage": 3, "reshard_after_forward": False},
            "mesh": {"pp": 2},
            "batch": {"accumulation": 4},
        },
    ),
    "ep2": (2, {"mesh": {"ep": 2}, "zero": {"stage": 2}}),
    "ep2_zero3": (2, {"mesh": {"ep": 2}, "zero": {"stage": 3}}),
    "tables": (2, {"zero": {"stage": 1}}),
    "tables_dynamic": (2, {}),
    "hsdp": (4, {"zero": {"stage": 3}, "mesh": {"dp": {"replicate": 2, "shard": 2}}}),
    "dp2_tp2_zero3": (4, {"zero": {"stage": 3}, "mesh": {"tp": 2}}),
    "dp2_pp2_zero1": (4, {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 4}}),
    "tp2_pp2": (4, {"mesh": {"tp": 2, "pp": 2}, "batch": {"accumulation": 4}}),
    "dp2_ep2_zero2": (4, {"zero": {"stage": 2}, "mesh": {"ep": 2}}),
}


def gpt(name: str) -> Any:
    """Return the GPT of a layout, with experts if the layout distributes experts."""
    import torch

    from shardwise.models import Gpt, GptPolicy

    torch.manual_seed(0)
    more = {"experts": EXPERTS} if "ep2" in name else {}
    policy = {"layers": 4, "width": 32, "heads": 4, "context": CONTEXT, "vocab": VOCABULARY, **more}
    return Gpt(GptPolicy(**policy))


def texts(world: Any, config: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the microbatches of each step; ranks of one model draw the same tokens."""
    import torch

    mesh = config.get("mesh", {})
    alone = mesh.get("tp", 1) * mesh.get("pp", 1)
    data_rank = world.rank % (world.size // alone) if mesh.get("pp", 1) > 1 else world.rank // alone
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + data_rank)
        batches = []
        for _ in range(config.get("batch", {}).get("accumulation", 1)):
            tokens = torch.randint(0, VOCABULARY, (2, CONTEXT + 1), generator=generator)
            batches.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        yield batches


def clicks(world: Any, name: str) -> tuple[Any, Iterator[list[dict[str, Any]]]]:
    """Return a small click-through model with tables, and its batches."""
    import torch

    import shardwise
    from shardwise.models.ctr.dlrm import Dlrm
    from shardwise.models.ctr.policy import DlrmPolicy

    torch.manual_seed(0)
    dynamic = shardwise.DynamicPolicy(capacity=400) if name == "tables_dynamic" else None
    tables = [
        shardwise.TablePolicy(name=f"f{i}", width=8, **({"dynamic": dynamic} if dynamic else {"rows": 50}))
        for i in range(4)
    ]
    rows = shardwise.RowOptimizerPolicy(type="adam", lr=0.02)
    model = Dlrm(DlrmPolicy(width=8, bottom=(16,), top=(16, 8)), 3, tables, rows)

    def batches() -> Iterator[list[dict[str, Any]]]:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + world.rank)
            keys = torch.randint(0, 50, (4, 16), generator=generator)
            yield [
                {
                    "dense": torch.randn(16, 3, generator=generator),
                    "sparse": {f"f{i}": shardwise.Ragged.of_ones(keys[i]) for i in range(4)},
                    "labels": torch.randint(0, 2, (16,), generator=generator).float(),
                }
            ]

    return model, batches()


def digest(world: Any, name: str, folder: Path) -> str:
    """Train the layout ``name`` and return the digest of all that it computed."""
    import shardwise

    config: dict[str, Any] = {"optimizer": ADAMW, "max_grad_norm": 0.5, **LAYOUTS[name][1]}
    config["output_dir"] = str(folder / name)
    if "disk" in name:
        config["offload"] = {**config["offload"], "disk_path": str(folder)}
    if name.startswith("tables"):
        model, steps = clicks(world, name)
    else:
        model, steps = gpt(name), texts(world, config)
    engine = shardwise.initialize(model, config, world=world)
    found = hashlib.sha256()
    whole_step = name.startswith("tables") or config.get("mesh", {}).get("pp", 1) > 1
    for number, batches in enumerate(steps):
        if whole_step:
            result = engine.train_step(batches)
        else:
            for place, batch in enumerate(batches, start=1):
                engine.backward(engine(batch))
                if number == STEPS - 1 and place == len(batches):
                    add(found, engine.gradients())
                result = engine.step()
        found.update(f"{float(result.loss).hex()} {float(result.grad_norm).hex()}".encode())
    add(found, engine.state_dict())
    engine.close()
    return found.hexdigest()


def add(found: Any, tensors: Mapping[str, Any]) -> None:
    """Add the bits of the tensors to a digest, in the order of their names."""
    import torch

    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def work(names: list[str]) -> None:
    """Run on each rank: rank 0 prints one line of JSON with the digests by layout."""
    import torch

    from shardwise.comm.world import join

    torch.set_num_threads(1)
    world = join(quiet=True)
    found = {}
    for name in names:
        folder = Path(os.environ["DIGESTS_FOLDER"])
        try:
            found[name] = digest(world, name, folder)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
            if world.size > 1:
                break  # the other ranks may wait in a collective of this layout
    if world.rank == 0:
        print("RESULT " + json.dumps(found))


def run(tree: Path, names: list[str]) -> dict[str, str]:
    """Return the digests of the layouts under the package in ``tree``."""
    results: dict[str, str] = {}
    for size in sorted({LAYOUTS[name][0] for name in names}):
        those = [name for name in names if LAYOUTS[name][0] == size]
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "shardwise",
                "launch",
                "--ranks",
                str(size),
                str(HERE / "digests.py"),
            ]
            paths = {"PYTHONPATH": str(tree / "src"), "DIGESTS_FOLDER": folder, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [*command, "--work", ",".join(those)], env=os.environ | paths, capture_output=True, text=True
            )
        line = re.search(r"RESULT (\{.*\})", done.stdout)
        if line is None:
            raise SystemExit(f"{tree}: no digests\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        results |= json.loads(line[1])
    return results


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="commit to compare with")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="rows, separated by commas")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work.split(","))
        return 0
    names = given.layouts.split(",")
    after = run(ROOT, names)
    if given.before is None:
        print("\n".join(f"{name:24} {after.get(name)}" for name in names))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), given.before], check=True)
        try:
            before = run(tree, names)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    unlike = 0
    for name in names:
        one, other = before.get(name, "not run"), after.get(name, "not run")
        same = one == other and re.fullmatch("[0-9a-f]{64}", one) is not None
        unlike += not same
        print(f"{name:24} {'same bits  ' + one[:16] if same else f'DIFFERS  {one[:80]}  {other[:80]}'}")
    print(f"{len(names) - unlike} of {len(names)} layouts have the same bits")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
