"""The translation of a DeepSpeed optimizer and scheduler into Shardwise's blocks ``optimizer`` and ``schedule``.

Parameters with the same meaning keep their names; this module contains the parameters that DeepSpeed derives from
others or counts differently.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim import lr_scheduler

from shardwise.base.policy import nearest
from shardwise.config.deepspeed_keys import ONE_BIT_TYPES
from shardwise.config.deepspeed_values import KeyValues, some, whole_number

_OPTIMIZER_TYPES = (
    *("Adam", "AdamW", "Lamb", "Lion", "Adagrad", "Muon"),
    *("SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
)
_PASSED_ON = (
    *(
        "weight_decay",
        "betas",
        "eps",
        "amsgrad",
        "momentum",
        "nesterov",
        "dampening",
        "alpha",
        "centered",
        "lr_decay",
    ),
    *("initial_accumulator_value", "rho", "momentum_decay", "decoupled_weight_decay", "lambd", "t0", "etas"),
    "step_sizes",
)
"""Parameters that have the same meaning in both configurations."""


def optimizer(v: KeyValues) -> dict[str, Any] | None:
    """Return Shardwise's block ``optimizer``; None if DeepSpeed's optimizer is left out or refused."""
    word = v("optimizer.type") if v("optimizer") is not None else None
    if word is None:
        return None
    kind = str(word).lower()
    if kind not in [known.lower() for known in _OPTIMIZER_TYPES]:
        others = f"one of {', '.join(_OPTIMIZER_TYPES)}, or an optimizer object of torch's"
        is_one_bit = kind in ONE_BIT_TYPES
        v.refuse(
            "optimizer.type",
            word,
            "Adam or Lamb with communication_data_type: bf16; no gradient travels in one bit"
            if is_one_bit
            else others,
        )
        return None

    def of(name: str) -> Any:
        return v(f"optimizer.params.{name}")

    made = some(
        type=kind, lr=float(of("lr")), **{name: of(name) for name in _PASSED_ON if v.does(name, kind)}
    )
    if kind == "adam" and of("adam_w_mode"):
        made["type"] = "adamw"
    if made["type"] == "adamw" and of("torch_adam") and not v.given("optimizer.params.weight_decay"):
        made["weight_decay"] = 0.01
    if kind in ("adam", "adamw") and not of("bias_correction"):
        made["correct"] = "none"
    if kind == "lamb":
        made["trust_bounds"] = [of("min_coeff"), of("max_coeff")]
        made["correct"] = "step" if of("bias_correction") else "none"
    if kind == "muon":
        made |= _muon(v)
    return made


_NO_MATRIX = ("embed", "lm_head")
"""Parts of names whose weights Muon leaves to Adam."""


def _muon(v: KeyValues) -> dict[str, Any]:
    """Return the keys for Muon, which updates all 2-D weights but embeddings and heads, found by name."""
    lr, of_matrices, of_rest = (v(f"optimizer.params.{name}") for name in ("lr", "muon_lr", "adam_lr"))
    embeddings = "|".join(
        "*" + "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in w) + "*" for w in _NO_MATRIX
    )
    return {
        "lr": float(lr if of_matrices is None else of_matrices),
        "rest_lr": float(of_rest if of_rest is not None else lr if v.given("optimizer.params.lr") else 1e-3),
        "adjust_lr_fn": "original",
        "groups": [{"match": embeddings, "matrices": False}, {"match": "*", "matrices": True}],
    }


_SCHEDULES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "LRRangeTest": (
        "range_test",
        {
            "min_lr": "lr_range_test_min_lr",
            "interval_steps": "lr_range_test_step_size",
            "rate": "lr_range_test_step_rate",
            "staircase": "lr_range_test_staircase",
        },
    ),
    "OneCycle": (
        "one_cycle",
        {
            "min_lr": "cycle_min_lr",
            "max_lr": "cycle_max_lr",
            "rise_steps": "cycle_first_step_size",
            "fall_steps": "cycle_second_step_size",
            "rise_stairs": "cycle_first_stair_count",
            "fall_stairs": "cycle_second_stair_count",
            "decay_steps": "decay_step_size",
            "decay_lr_rate": "decay_lr_rate",
            "cycle_momentum": "cycle_momentum",
            "min_momentum": "cycle_min_mom",
            "max_momentum": "cycle_max_mom",
            "decay_momentum_rate": "decay_mom_rate",
        },
    ),
    "WarmupLR": (
        "warmup",
        {
            "min_lr": "warmup_min_lr",
            "max_lr": "warmup_max_lr",
            "warmup_steps": "warmup_num_steps",
            "rise": "warmup_type",
        },
    ),
    "WarmupDecayLR": (
        "warmup_linear",
        {
            "min_lr": "warmup_min_lr",
            "max_lr": "warmup_max_lr",
            "warmup_steps": "warmup_num_steps",
            "rise": "warmup_type",
            "total_steps": "total_num_steps",
        },
    ),
    "WarmupCosineLR": (
        "warmup_cosine",
        {
            "warmup_steps": "warmup_num_steps",
            "rise": "warmup_type",
            "start_ratio": "warmup_min_ratio",
            "min_ratio": "cos_min_ratio",
            "total_steps": "total_num_steps",
        },
    ),
}
"""For each scheduler of DeepSpeed, Shardwise's type, and for each of Shardwise's keys the parameter that sets it."""


def schedule(v: KeyValues) -> dict[str, Any] | None:
    """Return Shardwise's block ``schedule``; None if DeepSpeed's scheduler is left out or refused."""
    word = v("scheduler.type") if v("scheduler") is not None else None
    if word is None:
        return None
    if word not in _SCHEDULES:
        if not hasattr(lr_scheduler, word):
            known = nearest(word, [*_SCHEDULES, *(name for name in dir(lr_scheduler) if name.endswith("LR"))])
            v.refuse("scheduler.type", word, f"one of {', '.join(_SCHEDULES)}, or of torch{known}")
            return None
        return {"type": "torch", "scheduler": word, "arguments": dict(v.parameters("scheduler.params"))}
    kind, keys = _SCHEDULES[word]
    made = {ours: whole_number(v(f"scheduler.params.{theirs}")) for ours, theirs in keys.items()}
    if kind == "one_cycle":
        made["second_beta"] = 0.99
        has_betas = v("optimizer") is None or v("optimizer.params.betas") is not None
        made["cycle_momentum"] = bool(made["cycle_momentum"] and has_betas)
        if not made["decay_steps"]:  # DeepSpeed ignores the decay rates if there are no decay steps
            del made["decay_lr_rate"], made["decay_momentum_rate"]
    return {"type": kind, **some(**made)}
