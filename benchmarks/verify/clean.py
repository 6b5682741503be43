"""Run ``shardwise verify`` on more than 200 layouts without a bug, and list every alarm.

    python -m benchmarks.verify.clean FILE [PART OF A NAME]     appends one JSON line for each layout to FILE, and
                                                               goes on behind the lines that it finds there;
                                                               --most N: N layouts
    python -m benchmarks.verify.clean FILE --table              the counts of FILE

A layout that the engine refuses by name is counted apart: it computes nothing, so nothing is compared. Models are as
small as their axes allow; two steps are run, except with schedules, which need three to move the weights.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ConfigError, MeshError, PlanError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models import Bert, BertPolicy, Gpt, GptPolicy, build_ctr
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.models.gpt import GptExperts
from shardwise.models.images.policy import ResNetPolicy
from shardwise.models.images.resnet import ResNet
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.verify.run import verify

CONTEXT, VOCABULARY, SAMPLES = 8, 19, 24


class Subject(NamedTuple):
    """A model and the global batch of a step."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]


class Clean(NamedTuple):
    """One layout without a bug."""

    model: str
    layout: str
    keys: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The words that tell this layout from the others."""
        said = [f"{key}={json.dumps(value)}" for key, value in self.keys.items()]
        return " ".join([self.model, self.layout, *said])


def _gpt(**sizes: Any) -> Callable[[], nn.Module]:
    given = dict(layers=4, width=16, heads=4, context=CONTEXT, vocab=VOCABULARY, hidden=24)
    return lambda: Gpt(GptPolicy(**(given | sizes)))


def _text() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(0, VOCABULARY, (2, SAMPLES, CONTEXT), generator=_generator())
    targets[3:5, 4:] = -100
    return tokens, targets


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _hugging(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return the function that makes a model of transformers from its configuration's sizes."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name.split('For')[0].removesuffix('LMHeadModel')}Config")(**sizes)
        config._experts_implementation = "eager"  # products of grouped experts have no fp64 on a CPU
        return getattr(transformers, name)(config).train()  # type: ignore[no-any-return]

    return make


def _labelled() -> dict[str, torch.Tensor]:
    tokens, targets = _text()
    return {"input_ids": tokens, "labels": tokens.where(targets != -100, targets)}


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=_generator())
    return pixels, torch.randint(0, 5, (SAMPLES,), generator=_generator())


def _vit_batch() -> dict[str, torch.Tensor]:
    pixels, labels = _pictures()
    return {"pixel_values": pixels, "labels": labels}


def _clicks() -> dict[str, Any]:
    generator = _generator()
    keys = torch.randint(0, 40, (3, SAMPLES, 3), generator=generator).tolist()
    sparse = {
        f"c{i}": Ragged.of_lists([each[: j % 4] for j, each in enumerate(own)]) for i, own in enumerate(keys)
    }
    labels = torch.rand(SAMPLES, generator=generator).round()
    return {"dense": torch.randn(SAMPLES, 4, generator=generator), "sparse": sparse, "labels": labels}


def _dlrm() -> nn.Module:
    features = tuple(SparseFeature(f"c{i}") for i in range(3))
    schema = ClickSchema(tuple(f"d{i}" for i in range(4)), features)
    rows = {f"c{i}": 40 for i in range(3)}
    return build_ctr(DlrmPolicy(width=4, bottom=[8], top=[8, 4]), schema, rows=rows)


_EXPERTS = GptExperts(count=4, hidden=8, router=RouterPolicy(top_k=2))
_LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    use_cache=False,
)
_GPT2 = dict(
    vocab_size=VOCABULARY,
    n_positions=CONTEXT,
    n_embd=16,
    n_layer=2,
    n_head=4,
    use_cache=False,
    attn_pdrop=0.0,
)
_BERT = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
    attention_probs_dropout_prob=0.0,
)
_VIT = dict(
    image_size=8, patch_size=4, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_labels=5,
)  # fmt: skip
MODELS: dict[str, Subject] = {
    "gpt llama": Subject(_gpt(kv_heads=2), _text),
    "gpt llama dropout": Subject(_gpt(dropout=0.1), _text),
    "gpt gpt2": Subject(_gpt(family="gpt2"), _text),
    "gpt experts": Subject(_gpt(layers=2, experts=_EXPERTS), _text),
    "bert": Subject(
        lambda: Bert(BertPolicy(layers=2, width=16, heads=4, context=CONTEXT, vocab=VOCABULARY)), _text
    ),
    "resnet": Subject(lambda: ResNet(ResNetPolicy(depth=18, width=4, size=8), 5), _pictures),
    "dlrm": Subject(_dlrm, _clicks),
    "hf llama": Subject(_hugging("LlamaForCausalLM", **_LLAMA), _labelled),
    "hf gpt2": Subject(_hugging("GPT2LMHeadModel", **_GPT2), _labelled),
    "hf bert": Subject(_hugging("BertForMaskedLM", **_BERT), _labelled),
    "hf mixtral": Subject(
        _hugging("MixtralForCausalLM", **_LLAMA, num_local_experts=4, num_experts_per_tok=2), _labelled
    ),
    "hf vit": Subject(_hugging("ViTForImageClassification", **_VIT), _vit_batch),
}
_PRECISIONS: tuple[Mapping[str, Any], ...] = (
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": {"compute": "bf16", "reduce": "bf16"}},
    {"precision": {"compute": "bf16", "grad": "bf16"}},
    {"precision": {"amp": "O2"}},
    {"precision": {"amp": "O1"}},
    {"precision": {"compute": "bf16", "keep_fp32": ["*norm*"]}},
)
_OPTIMIZERS: tuple[Mapping[str, Any], ...] = (
    {"type": "adam", "weight_decay": 0.1, "amsgrad": True},
    {"type": "sgd", "momentum": 0.9, "nesterov": True},
    {"type": "rmsprop", "momentum": 0.5, "centered": True},
    {"type": "adagrad", "lr_decay": 0.1},
    {"type": "adadelta"},
    {"type": "adamax"},
    {"type": "nadam", "weight_decay": 0.1, "decoupled_weight_decay": True},
    {"type": "radam"},
    {"type": "asgd"},
    {"type": "rprop"},
    {"type": "muon", "lr": 0.01, "weight_decay": 0.1},
)
_SCHEDULES: tuple[Mapping[str, Any], ...] = (
    {"type": "cosine", "warmup_steps": 1, "total_steps": 5},
    {"type": "wsd", "warmup_steps": 1, "total_steps": 4, "decay_steps": 2},
    {"type": "warmup_linear", "warmup_steps": 2, "total_steps": 6},
    {"type": "one_cycle", "min_lr": 0.001, "max_lr": 0.01, "rise_steps": 2},
)


def _layouts() -> Iterator[Clean]:
    """Yield the layouts: axes of each model first, then techniques, precisions, optimizers and schedules on them."""
    everywhere = [f"dp=2,zero={stage}" for stage in range(4)] + [
        "dp=4,zero=3",
        "dp=2x2,zero=1",
        "dp=2x2,zero=3",
    ]
    cut = ["tp=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3"]
    piped = [
        "pp=2",
        "pp=2,virtual=2",
        "pp=2,dp=2,zero=1",
        "pp=2,dp=2,zero=3",
        "pp=2,tp=2",
        "pp=2,dp=2,tp=2,zero=1",
    ]
    for model in ("gpt llama", "gpt gpt2"):
        for layout in [
            *everywhere,
            *cut,
            *piped,
            "dp=2x2,zero=2",
            "tp=4",
            "pp=4",
            "dp=2,tp=2,zero=2",
            "pp=3",
        ]:
            yield Clean(model, layout, {})
    for layout in (
        "ep=2,dp=2,zero=1",
        "ep=2,dp=2,zero=3",
        "ep=2,dp=4,zero=1",
        "ep=2,tp=2",
        "ep=2,etp=2,tp=2,dp=2",
        "tp=2",
    ):
        yield Clean("gpt experts", layout, {})
        yield Clean("gpt experts", layout, {"precision": "bf16"})
    for model in ("bert", "hf llama", "hf gpt2", "hf bert", "hf mixtral", "hf vit", "resnet", "dlrm"):
        for layout in [*everywhere[:5], "dp=2x2,zero=2"]:
            yield Clean(model, layout, {})
        yield Clean(model, "dp=2,zero=2", {"precision": "bf16"})
        yield Clean(model, "dp=2,zero=1", {"precision": "fp16"})
    for model in ("bert", "hf llama", "hf gpt2", "hf bert", "hf mixtral", "dlrm"):
        # Vectors of tables hold whole sequences.
        keys = {"tensor": {"sequence_parallel": False}} if model == "dlrm" else {}
        for layout in cut[:2]:
            yield Clean(model, layout, keys)
        yield Clean(model, "pp=2", {})
        yield Clean(model, "tp=2", {**keys, "precision": "bf16"})
    yield Clean("hf mixtral", "ep=2,dp=2,zero=1", {})
    yield Clean("resnet", "dp=2,zero=1", {"batch_norm": "synchronized"})
    yield Clean("resnet", "dp=2x2,zero=2", {"batch_norm": "synchronized", "precision": "bf16"})
    for placement in ("row", "column", "table", "data_parallel"):
        yield Clean("dlrm", "dp=2,zero=1", {"tables": {"placement": {"*": placement}}})
        yield Clean("dlrm", "dp=4", {"tables": {"placement": {"*": placement}}, "precision": "bf16"})
    for optimizer in ("sgd", "momentum", "adagrad", "adam", "ftrl"):
        yield Clean("dlrm", "dp=2", {"tables": {"optimizer": {"type": optimizer}}})
    yield from _techniques()


def _techniques() -> Iterator[Clean]:
    for layout, scope in itertools.product(("dp=2,zero=3", "pp=2", "tp=2"), ("full", "selective")):
        yield Clean("gpt llama dropout", layout, {"recompute": scope})
    offloads: tuple[Mapping[str, Any], ...] = (
        {"optimizer": "host"},
        {"optimizer": "host", "parameters": "host"},
        {"optimizer": "disk"},
        {"optimizer": "disk", "parameters": "disk"},
        {"activations": "host"},
        {"state": "bf16"},
        {"state": "int8"},
    )
    for layout, offload in itertools.product(("dp=2,zero=3", "dp=2,zero=1", "dp=2,tp=2,zero=2"), offloads):
        yield Clean("gpt llama", layout, {"offload": offload})
    for layout, tiles in itertools.product(
        ("dp=2,zero=2", "tp=2", "pp=2,dp=2"), ({"logits": 4}, {"mlp": 4}, {"logits": 4, "mlp": 4})
    ):
        yield Clean("gpt llama", layout, {"tiles": tiles})
    for layout in ("tp=2", "dp=2,tp=2,zero=2"):
        yield Clean("gpt llama", layout, {"tensor": {"sequence_parallel": False}})
        yield Clean("gpt gpt2", layout, {"tensor": {"overlap": 2}})
    for layout in ("pp=2", "pp=4", "pp=2,dp=2,zero=1"):
        yield Clean("gpt gpt2", layout, {"pipeline": {"schedule": "gpipe"}})
    for layout, precision in itertools.product(
        ("dp=2,zero=1", "dp=2,zero=3", "dp=2,tp=2,zero=2", "pp=2,dp=2"), _PRECISIONS
    ):
        yield Clean("gpt llama", layout, precision)
    for precision in _PRECISIONS[:3]:
        yield Clean("gpt gpt2", "pp=2,tp=2", precision)
        yield Clean("gpt llama dropout", "dp=2x2,zero=2", precision)
    for layout, optimizer in itertools.product(("dp=2,zero=2", "dp=2,tp=2,zero=1"), _OPTIMIZERS):
        yield Clean("gpt llama", layout, {"optimizer": optimizer})
    for schedule in _SCHEDULES:
        yield Clean("gpt gpt2", "dp=2,zero=1", {"schedule": schedule})
    yield Clean("gpt gpt2", "pp=2", {"schedule": _SCHEDULES[0], "precision": "bf16"})


LAYOUTS = tuple(dict.fromkeys(each.name for each in _layouts()))
"""The names of all layouts, in the order in which they run."""


def verified(clean: Clean) -> dict[str, Any]:
    """Return the outcome of one layout as a line of the file."""
    subject, keys = MODELS[clean.model], dict(clean.keys)
    microbatches = 3 if "pp=" in clean.layout else 2
    config: dict[str, Any] = {
        "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1},
        "max_grad_norm": 0.5,
        "batch": {"accumulation": microbatches},
        **keys,
    }
    steps = 3 if "schedule" in keys else 2
    with tempfile.TemporaryDirectory() as folder:
        if config.get("offload", {}).get("optimizer") == "disk":
            config["offload"] = {**config["offload"], "disk_path": folder}
        try:
            found = verify(subject.make, config, subject.batch(), layout=clean.layout, steps=steps)
        except (ConfigError, MeshError, PlanError, UsageError) as error:
            return {"name": clean.name, "verdict": "refused", "why": f"{type(error).__name__}: {error}"}
    trained = sum(each.requires_grad for each in subject.make().parameters())
    passes = {each.name: each for each in found.passes}
    first = found.first
    return {
        "name": clean.name,
        "verdict": "refused" if first is not None and first.kind == "refused" else found.verdict,
        "seconds": found.seconds,
        "passes": [*passes],
        "gradients": passes["fp64"].compared["gradients"] if "fp64" in passes else 0,
        "of": trained * steps,
        "failed_in": found.failed_in,
        "first": None if first is None else [first.kind, first.name, first.explanation[:2000]],
        "wrong": len(found.wrong),
        "worst": {name: each.worst for name, each in passes.items()},
        "declared": found.declared,
        "left_out": found.left_out,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Return the counts of a file as a table."""
    counts = Counter(line["verdict"] for line in lines)
    own = sum("own" in line.get("passes", ()) for line in lines if line["verdict"] == "pass")
    compared = [line for line in lines if line["verdict"] == "pass"]
    alike = sum(line["gradients"] == line["of"] for line in compared)
    rows = [
        ("layouts that ran", str(counts["pass"] + counts["fail"])),
        ("equal to one process", str(counts["pass"])),
        ("false alarms", str(counts["fail"])),
        ("with the pass own", str(own)),
        ("gradients compared = the model's", f"{alike} of {len(compared)}"),
        ("refused by name, not counted", str(counts["refused"] + counts["unverifiable"])),
    ]
    return "\n".join(["| what | figure |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows)])


def main() -> None:
    """Run the layouts that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--most", type=int, default=len(LAYOUTS))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    if given.table:
        print(table(lines))
        return
    done = {line["name"] for line in lines}
    waiting = [each for each in {each.name: each for each in _layouts()}.values() if each.name not in done]
    for clean in [each for each in waiting if given.part in each.name][: given.most]:
        line = verified(clean)
        with given.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line["verdict"], line.get("seconds", ""), clean.name, line.get("first") or "", file=sys.stderr)


if __name__ == "__main__":
    main()
