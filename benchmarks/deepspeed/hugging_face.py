"""Hugging Face's Trainer under both packages:  python benchmarks/deepspeed/hugging_face.py --theirs PYTHON

``Trainer(deepspeed=...)`` with a configuration of "auto", a GPT-2 of two blocks out of ``from_pretrained`` (at stage 3
under ``zero.Init``), 2 ranks, 8 steps of two microbatches, clipped; then once more from the checkpoint after the fourth
step. The largest differences of logged losses, rates and norms from DeepSpeed's, and of the resumed run from the first.

Both environments need transformers 5 and accelerate. Figures in README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
KEYS = ("loss", "learning_rate", "grad_norm")


def configuration(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto",
                "betas": "auto",
                "eps": "auto",
                "weight_decay": "auto",
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
    }


def train(stage: int, folder: Path, resumes: bool) -> None:
    """One rank's script, as anybody's."""
    import torch
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        deepspeed=configuration(stage),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=8,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        save_steps=4,
        use_cpu=True,
        seed=1,
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel.from_pretrained(folder / "model")
    draws = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 37, (8,), generator=draws) for _ in range(64)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-4") if resumes else None)
    if trainer.is_world_process_zero():
        rows = [[log[key] for key in KEYS] for log in trainer.state.log_history if "loss" in log]
        print("LOG", json.dumps(rows), flush=True)


def make_model(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 37, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **drops)).save_pretrained(
        folder / "model"
    )


def logged(launch: list[str], environment: dict[str, str], stage: int, folder: Path, resumes: bool) -> Any:
    words = [str(HERE), "train", str(stage), str(folder), str(int(resumes))]
    ended = subprocess.run([*launch, *words], env=environment, capture_output=True, text=True, check=False)
    found = [line for line in ended.stdout.splitlines() if line.startswith("LOG")]
    if not found:
        raise SystemExit(f"{launch}: {ended.stdout[-1500:]}{ended.stderr[-3000:]}")
    return json.loads(found[0][4:])


def worst(rows: Any, others: Any) -> str:
    columns = zip(zip(*rows, strict=True), zip(*others, strict=True), strict=True)
    return " | ".join(f"{max(abs(a - b) for a, b in zip(x, y, strict=True)):.1e}" for x, y in columns)


def main() -> None:
    """A line a stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--theirs", required=True, help="Python of an environment with deepspeed")
    parser.add_argument("--stages", default="1,2,3")
    given = parser.parse_args()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    bare = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    theirs = [given.theirs, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ours = [sys.executable, "-m", "shardwise", "launch", "-n", "2", "--as-deepspeed", "--no_local_rank"]
    print(
        "| stage | losses | rates | norms | resumed: losses | rates | norms |\n|---|---|---|---|---|---|---|"
    )
    for stage in map(int, given.stages.split(",")):
        rows: dict[str, Any] = {}
        for name, launch, env in (("theirs", theirs, bare), ("ours", ours, environment)):
            with tempfile.TemporaryDirectory() as scratch:
                make_model(Path(scratch))
                rows[name] = logged(launch, env, stage, Path(scratch), resumes=False)
                if name == "ours":
                    rows["resumed"] = logged(launch, env, stage, Path(scratch), resumes=True)
        print(
            f"| {stage} | {worst(rows['ours'], rows['theirs'])} | {worst(rows['resumed'], rows['ours'])} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(int(sys.argv[2]), Path(sys.argv[3]), bool(int(sys.argv[4])))
    else:
        main()
