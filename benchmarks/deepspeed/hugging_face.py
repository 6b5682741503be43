"""Hugging Face's programs under both packages:  python benchmarks/deepspeed/hugging_face.py --theirs PYTHON

A GPT-2 of two blocks out of ``from_pretrained`` (at stage 3 under ``zero.Init``), 2 ranks, 8 steps of two microbatches,
clipped; then once more from a checkpoint. By whom:

    trainer   Trainer(deepspeed=...) with a configuration of "auto"
    named     a loop with Accelerate: DummyOptim and DummyScheduler, whose numbers the same configuration takes
    own       a loop with Accelerate: the script's own AdamW and LambdaLR; 7 microbatches in an epoch, so that its last
              step has one

The largest differences of losses, rates and norms from DeepSpeed's, and of the resumed run from the first.

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
SAVED = 5
"""Steps before the save of a loop of its own; it lies inside of an epoch."""
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


def accelerate(stage: int, folder: Path, resumes: bool, by: str) -> None:
    """One rank's script with a loop of its own."""
    import torch
    from accelerate import Accelerator, PartialState
    from accelerate.utils import (
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        DummyOptim,
        DummyScheduler,
        set_seed,
    )
    from transformers import GPT2LMHeadModel

    PartialState(backend="gloo")  # without an accelerator Accelerate would take itself for one process
    keys = configuration(stage)
    keys |= {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    keys["optimizer"]["params"] |= {"betas": [0.9, 0.999], "eps": 1e-8}
    if by == "own":
        del keys["optimizer"], keys["scheduler"]
    plugin = DeepSpeedPlugin(hf_ds_config=keys)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # the same in a run that is resumed
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, dataloader_config=order)
    set_seed(1)
    draws = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 37, (8,), generator=draws) for _ in range(64 if by == "named" else 28)]
    loader: Any = torch.utils.data.DataLoader(tokens, batch_size=2, shuffle=True)
    model = GPT2LMHeadModel.from_pretrained(folder / "model")
    if by == "named":
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2)
        scheduler: Any = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    done = 0
    if resumes:
        accelerator.load_state(str(folder / "state"))
        done = SAVED
    rows: list[list[float]] = []
    losses: list[float] = []
    per_epoch = (len(loader) + 1) // 2
    for epoch in range(done // per_epoch, 100):
        loader.set_epoch(epoch)
        seen = done - epoch * per_epoch
        batches = accelerator.skip_first_batches(loader, 2 * seen) if resumes and seen > 0 else loader
        for batch in batches:
            with accelerator.accumulate(model):
                rate = optimizer.param_groups[0]["lr"]
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                rows.append([sum(losses) / len(losses), rate, float(norm)])
                losses.clear()
                done += 1
                if done == SAVED:
                    accelerator.save_state(str(folder / "state"))
                if done == 8:
                    if accelerator.is_main_process:
                        print("LOG", json.dumps(rows), flush=True)
                    accelerator.wait_for_everyone()
                    return


def make_model(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 37, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **drops)).save_pretrained(
        folder / "model"
    )


def logged(
    launch: list[str], environment: dict[str, str], by: str, stage: int, folder: Path, resumes: bool
) -> Any:
    words = [str(HERE), "train", by, str(stage), str(folder), str(int(resumes))]
    ended = subprocess.run([*launch, *words], env=environment, capture_output=True, text=True, check=False)
    found = [line for line in ended.stdout.splitlines() if line.startswith("LOG")]
    if not found:
        raise SystemExit(f"{launch}: {ended.stdout[-1500:]}{ended.stderr[-3000:]}")
    return json.loads(found[0][4:])


def worst(rows: Any, others: Any) -> str:
    last = min(len(rows), len(others))  # a resumed loop of one's own has the later steps alone
    columns = zip(zip(*rows[-last:], strict=True), zip(*others[-last:], strict=True), strict=True)
    return " | ".join(f"{max(abs(a - b) for a, b in zip(x, y, strict=True)):.1e}" for x, y in columns)


def main() -> None:
    """A line a stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--theirs", required=True, help="Python of an environment with deepspeed")
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--by", default="trainer,named,own")
    given = parser.parse_args()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    bare = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    theirs = [given.theirs, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ours = [sys.executable, "-m", "shardwise", "launch", "-n", "2", "--as-deepspeed", "--no_local_rank"]
    print(
        "| by | stage | losses | rates | norms | resumed: losses | rates | norms |\n|---|---|---|---|---|---|---|---|"
    )
    for by in given.by.split(","):
        for stage in map(int, given.stages.split(",")):
            rows: dict[str, Any] = {}
            for name, launch, env in (("theirs", theirs, bare), ("ours", ours, environment)):
                with tempfile.TemporaryDirectory() as scratch:
                    make_model(Path(scratch))
                    rows[name] = logged(launch, env, by, stage, Path(scratch), resumes=False)
                    if name == "ours":
                        rows["resumed"] = logged(launch, env, by, stage, Path(scratch), resumes=True)
            beside, again = worst(rows["ours"], rows["theirs"]), worst(rows["resumed"], rows["ours"])
            print(f"| {by} | {stage} | {beside} | {again} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        by, stage, folder, resumes = sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5] == "1"
        if by == "trainer":
            train(stage, folder, resumes)
        else:
            accelerate(stage, folder, resumes, by)
    else:
        main()
