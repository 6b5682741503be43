"""Trainers of TRL, PEFT and Transformers at stages 2 and 3, against the same trainers without DeepSpeed.

    python benchmarks/deepspeed/trainers.py [--kinds sft,dpo,grpo,lora,translate] [--stages 2,3]

Each kind trains a tiny model made on the spot, with a tokenizer made on the spot, for three steps on 2 ranks under
``shardwise launch --as-deepspeed``, under torch's own DDP on 2 ranks (``use_cpu``), and as one process with the batch
of both. It prints losses and gradient norms, and the largest relative difference from each reference. GRPO draws tokens
on every rank, so that one process draws others and DDP alone is its reference.

    sft, dpo, grpo    SFTTrainer, DPOTrainer (with a reference model), GRPOTrainer of TRL, on a two-block Llama
    lora              trl.SFTTrainer with a LoRA adapter of PEFT
    translate         Seq2SeqTrainer on a two-block T5, with ``predict_with_generate``: losses, and the words it makes

The environment needs trl, peft, accelerate, datasets and transformers 5.
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
KINDS = ("sft", "dpo", "grpo", "lora", "translate")
STEPS = 3
WORDS = [f"w{number}" for number in range(40)]


def tokenizer() -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    found.padding_side = "left"
    return found


def llama(words: int, seed: int = 0) -> Any:
    """A Llama of two blocks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=words, pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes)
    )


def t5(words: int) -> Any:
    """A T5 of two blocks."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=words, dropout_rate=0.0, **sizes, **ends))


def text(place: int, words: int) -> str:
    """A sentence of ``words`` words that follows from its place."""
    return " ".join(WORDS[(place * 7 + step * (place % 5 + 1)) % len(WORDS)] for step in range(words))


def keys(stage: int) -> dict[str, Any] | None:
    """A DeepSpeed configuration; None without one."""
    if stage < 0:
        return None
    auto = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    sizes = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    )
    return {**auto, "zero_optimization": {"stage": stage, **(sizes if stage == 3 else {})}}


def train(kind: str, stage: int, ranks: int, out: Path) -> None:
    """One rank's script, as anybody's."""
    from datasets import Dataset

    said = tokenizer()
    common: dict[str, Any] = {
        "output_dir": str(out.parent / f"out_{os.environ.get('RANK', '0')}"),
        "deepspeed": keys(stage),
        "use_cpu": stage < 0,
        "ddp_backend": "gloo" if ranks > 1 else None,
        "per_device_train_batch_size": 4 // ranks,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
    }
    found: dict[str, Any] = {}
    places = range(16)
    if kind in ("sft", "lora"):
        from trl import SFTConfig, SFTTrainer

        extra = {}
        if kind == "lora":
            from peft import LoraConfig

            extra["peft_config"] = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
        data = Dataset.from_dict({"text": [text(place, 4 + place % 3) for place in places]})
        made: Any = SFTTrainer(
            model=llama(len(said)),
            args=SFTConfig(**common, max_length=16, gradient_checkpointing=False),
            train_dataset=data,
            processing_class=said,
            **extra,
        )
    elif kind == "dpo":
        from trl import DPOConfig, DPOTrainer

        columns = {"prompt": (3, 0), "chosen": (3, 1), "rejected": (4, 2)}
        data = Dataset.from_dict(
            {name: [text(place + shift, size) for place in places] for name, (size, shift) in columns.items()}
        )
        made = DPOTrainer(
            model=llama(len(said)),
            ref_model=llama(len(said), seed=1),
            args=DPOConfig(**common, max_length=16, gradient_checkpointing=False),
            train_dataset=data,
            processing_class=said,
        )
    elif kind == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        data = Dataset.from_dict({"prompt": [text(place, 3) for place in places]})
        # A folder: with a beta the trainer reads its reference model once more.
        saved = out.parent / f"model_{os.environ.get('RANK', '0')}"
        llama(len(said)).save_pretrained(saved)
        said.save_pretrained(saved)
        made = GRPOTrainer(
            model=str(saved),
            reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
            args=GRPOConfig(
                **common,
                num_generations=2,
                max_completion_length=6,
                beta=0.1,
                gradient_checkpointing=False,
            ),
            train_dataset=data,
            processing_class=said,
        )
    else:
        from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

        model = t5(len(said))
        rows = [said(text(place, 5)) | {"labels": said(text(place, 4))["input_ids"]} for place in places]
        rows = [{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in rows]
        made = Seq2SeqTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(
                **common,
                # T5 weighs no tokens itself; Trainer would multiply its losses by the number of ranks all the same.
                average_tokens_across_devices=False,
                predict_with_generate=True,
                generation_max_length=6,
                per_device_eval_batch_size=4 // ranks,
            ),
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(said, model=model),
        )
    made.train()
    if kind == "translate":
        told = made.predict(rows[:4])
        found["words"] = told.predictions.tolist()
        found["eval"] = told.metrics["test_loss"]
    logs = [log for log in made.state.log_history if "loss" in log]
    found["losses"] = [log["loss"] for log in logs]
    found["norms"] = [float(log["grad_norm"]) for log in logs]
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found), encoding="utf-8")


def run(kind: str, stage: int, ranks: int) -> dict[str, Any]:
    """What a job of ``ranks`` ranks found; ``stage`` -1 is without DeepSpeed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        script = [
            str(HERE),
            "--kind",
            kind,
            "--stage",
            str(stage),
            "--ranks",
            str(ranks),
            "--write",
            str(out),
        ]
        launch = ["-m", "shardwise", "launch", "--ranks", str(ranks)]
        launch += ["--as-deepspeed"] if stage >= 0 else []
        command = [sys.executable, *(launch if ranks > 1 or stage >= 0 else []), *script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        if not out.exists():
            return {"error": (done.stdout + done.stderr)[-1500:]}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def difference(found: dict[str, Any], reference: dict[str, Any]) -> str:
    """The largest relative difference of losses and norms, and whether the words are the same."""
    if "error" in found or "error" in reference:
        return "failed"
    pairs = [pair for name in ("losses", "norms") for pair in zip(found[name], reference[name], strict=True)]
    largest = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    same = (
        ""
        if "words" not in found
        else f", words {'same' if found['words'] == reference['words'] else 'differ'}"
    )
    return f"{largest:.1e}{same}"


def main() -> None:
    """Run and compare; with ``--kind`` this process is one rank of a job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given, _ = parser.parse_known_args()
    if given.kind:
        train(given.kind, given.stage, given.ranks, given.write)
        return
    print("| kind | stage | losses | norms | from DDP | from one process |\n|---|---|---|---|---|---|")
    for kind in given.kinds.split(","):
        plain, single = run(kind, -1, 2), run(kind, -1, 1)
        for each in (plain, single):
            if "error" in each:
                print(each["error"])
        for stage in map(int, given.stages.split(",")):
            found = run(kind, stage, 2)
            if "error" in found:
                print(found["error"])
            numbers = " | ".join(
                ", ".join(f"{number:.6g}" for number in found.get(name, [])) for name in ("losses", "norms")
            )
            alone = "draws others" if kind == "grpo" else difference(found, single)
            print(f"| {kind} | {stage} | {numbers} | {difference(found, plain)} | {alone} |", flush=True)


if __name__ == "__main__":
    main()
