"""From a DeepSpeed configuration to ours, with a word on what became of every key.

    made = translate({"train_batch_size": 32, "zero_optimization": {"stage": 2}})
    made.config     {"batch": {"global_size": 32, ...}, "zero": {"stage": 2}, ...}    for RunConfig.parse, or as YAML
    made.values     every key of theirs by its path: given, resolved from "auto", or their default; old names translated
    made.notes      a Note per key that was given, and per default of theirs that is not ours

The table is ``deepspeed_keys.py``; ``deepspeed_values.py`` reads values by it; the functions below fill our blocks, one
for each. Unknown keys, wrong values and what is refused are one ConfigError that names every fault by its path.
``config.run.load`` comes here with a file or dictionary that ``is_deepspeed`` recognises.
"""

import base64
import binascii
import math
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import lr_scheduler

from shardwise.config.deepspeed_kinds import fault_of, is_number, shown
from shardwise.config.deepspeed_rows import DeepSpeedKey
from shardwise.config.deepspeed_values import CHILDREN, ROWS, GivenKeys, KeyValues
from shardwise.config.relaxed_json import read_json
from shardwise.plan.errors import ConfigError
from shardwise.plan.policy import nearest

_FAULTS = 20
SHARED = ("optimizer", "pipeline", "compile", "checkpoint")
"""Blocks of the top level that DeepSpeed and we have."""


class Note(NamedTuple):
    """What became of one key."""

    path: str
    given: Any
    fate: str
    """``does``, ``idle``; ``default`` of a key that was left out and acts here by their default."""
    said: str

    def __str__(self) -> str:
        marks = {"does": "->", "idle": "no effect here:", "default": "left out, so as there:"}
        return f"{self.path}: {shown(self.given, self.path)} {marks[self.fate]} {self.said}"


class Translation(NamedTuple):
    """A DeepSpeed configuration in our words."""

    config: dict[str, Any]
    values: dict[str, Any]
    notes: tuple[Note, ...]

    def summary(self) -> str:
        """One sentence for the log."""
        idle = [note.path for note in self.notes if note.fate == "idle"]
        acts = sum(note.fate == "does" for note in self.notes)
        rest = f"; {len(idle)} have no effect here: {', '.join(idle)}" if idle else ""
        return f"{acts} keys act{rest} (shardwise convert says what became of each)"


def is_deepspeed(given: Mapping[str, Any], shared: Mapping[str, Iterable[str]]) -> bool:
    """True of a configuration with a key that DeepSpeed has and we have not. ``shared`` are the blocks of the top level
    that both have, and our keys in them."""
    inner = {name: value for name in shared if isinstance(value := given.get(name), Mapping)}
    theirs = {name: {*CHILDREN[name]} - {*shared[name]} for name in inner}
    return any(key in CHILDREN[""] and key not in shared for key in given) or any(
        theirs[name] & {*keys} for name, keys in inner.items()
    )


def from_base64(text: str) -> dict[str, Any] | None:
    """The configuration in url-safe base64, DeepSpeed's form for a command line; None where ``text`` is none."""
    try:
        found = read_json(base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8"))
    except (ValueError, binascii.Error, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def translate(
    given: Mapping[str, Any], where: str = "config", auto: Mapping[str, Any] | None = None
) -> Translation:
    """``given``, a DeepSpeed configuration, in our keys.

    where   what errors call it
    auto    what ``"auto"`` stands for, by path (``{"optimizer.params.lr": 3e-4}``); what is not named there takes the
            default, batch sizes follow from one another, and fp16, bf16 from the model

    Errors: ConfigError.
    """
    reading = GivenKeys(auto or {})
    reading.read(given)
    view = KeyValues(reading)
    config: dict[str, Any] = {}
    for name, fill in _BLOCKS.items():
        if (found := fill(view)) not in ({}, None):
            config[name] = found
    faults = reading.faults + view.faults
    if faults:
        more = f"; and {len(faults) - _FAULTS} more" if len(faults) > _FAULTS else ""
        raise ConfigError(f"{where}: " + "; ".join(faults[:_FAULTS]) + more)
    return Translation(config, view.values(), tuple(_notes(view, config)))


# Our blocks ---------------------------------------------------------------------------------------------------------


def _some(**keys: Any) -> dict[str, Any]:
    """The keys that have a value."""
    return {key: value for key, value in keys.items() if value is not None}


def _number(value: Any) -> Any:
    """5e8 as an integer, where it is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _batch(v: KeyValues) -> dict[str, Any]:
    sizes = _some(
        global_size=_number(v("train_batch_size")),
        micro_size=_number(v("train_micro_batch_size_per_gpu")),
        accumulation=_number(v("gradient_accumulation_steps")),
    )
    return {**sizes, "weigh_by": "batches"}


def _clip(v: KeyValues) -> float | None:
    return v("gradient_clipping") or None


def _mesh(v: KeyValues) -> dict[str, Any]:
    stages = v("pipeline.stages")
    if stages != "auto" and (not is_number(stages) or stages < 1):
        v.refuse("pipeline.stages", stages, "auto, or a number of stages")
        stages = "auto"
    tp = max(v("tensor_parallel.autotp_size"), v("tensor_parallel.tp.tp_size"))
    return _some(
        pp=int(stages) if stages != "auto" and stages > 1 else None,
        tp=int(tp) if tp > 1 else None,
        dp=_data_parallel(v),
        **_experts(v),
    )


def _experts(v: KeyValues) -> dict[str, int]:
    """ep and etp, where they are not 1."""
    if not v("expert_parallel.enabled"):
        return {}
    sizes = {
        "ep": int(v("expert_parallel.autoep_size")),
        "etp": int(v("expert_parallel.expert_tensor_parallel_size")),
    }
    return {axis: size for axis, size in sizes.items() if size > 1}


def _data_parallel(v: KeyValues) -> Any:
    shard = int(v("zero_optimization.mics_shard_size"))
    if shard > 0:
        if v("zero_optimization.stage") != 3:
            v.refuse("zero_optimization.mics_shard_size", shard, "stage: 3 beside it, or leave it out")
        return {"replicate": "auto", "shard": shard}
    return _number(v("data_parallel_size"))


def _zero(v: KeyValues) -> dict[str, Any]:
    key = "zero_optimization.stage3_prefetch_bucket_size"
    ahead = int(v(key)) * _element_bytes(v) if v.differs(key) else None
    waits = v("zero_optimization.overlap_comm") is False
    return _some(
        stage=int(v("zero_optimization.stage")),
        prefetch_bytes=ahead,
        reductions_under_way=0 if waits else None,
    )


def _element_bytes(v: KeyValues) -> int:
    """Of a weight as it is gathered."""
    half = next((name for name in _HALVES if v(f"{name}.enabled")), "")
    by_half = {"amp": v("amp.opt_level") in ("O2", "O3"), "torch_autocast": False}
    is_narrow = by_half.get(half, bool(half) or v("data_types.param_dtype") not in (None, "fp32"))
    return 2 if is_narrow else 4


_TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}
_LOW_FIRST = ("disk", "host", "device")


def _offload(v: KeyValues) -> dict[str, Any]:
    optimizer, parameters = (
        _tier(v, "zero_optimization.offload_optimizer", ("cpu_offload",)),
        _tier(v, "zero_optimization.offload_param", ("cpu_offload_param", "cpu_offload_params")),
    )
    ratio = v("zero_optimization.offload_optimizer.ratio") if optimizer != "device" else 1.0
    if ratio != 1.0 and parameters != "device":
        v.refuse(
            "zero_optimization.offload_optimizer.ratio",
            ratio,
            "1.0 beside offload_param: a Unit's weights move with its masters",
        )
    if parameters != "device":  # weights lie where their masters lie
        optimizer = parameters = min(optimizer, parameters, key=_LOW_FIRST.index)
    moves = v("compile.deepcompile") and v("compile.offload_activation")
    found: dict[str, Any] = {}
    if v("activation_checkpointing.cpu_checkpointing") or moves:
        found["activations"] = "host"
    if optimizer == "device" or ratio == 0.0:
        return found
    found["optimizer"] = optimizer
    if parameters != "device":
        found["parameters"] = parameters
    if ratio != 1.0:
        found["fraction"] = ratio
    return found | (_disk(v) if optimizer == "disk" else {})


def _tier(v: KeyValues, block: str, old: Sequence[str]) -> str:
    """What a block asks for, or one of its older forms."""
    before = next((key for key in old if v(f"zero_optimization.{key}")), None)
    if before and v.given(block):
        v.refuse(f"zero_optimization.{before}", True, f"{block} alone, which says the same")
    if before:
        return "host"
    return _TIERS[v(f"{block}.device")] if v(block) is not None else "device"


def _disk(v: KeyValues) -> dict[str, Any]:
    """Folder and blocks, where either block says nvme."""
    paths = {}
    for block in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        if v(block) is not None and v(f"{block}.device") == "nvme":
            paths[f"{block}.nvme_path"] = v(f"{block}.nvme_path")
    for path, folder in paths.items():
        if folder is None:
            v.refuse(path, folder, "a folder on that disk")
    (first, folder), *more = paths.items()
    if more and None not in paths.values():
        (second, other) = more[0]
        if posixpath.normpath(folder) != posixpath.normpath(other):
            v.refuse(second, other, f"one folder in both blocks; {first} is {folder!r}")
    count = "zero_optimization.offload_optimizer.buffer_count"
    buffers = max(1, math.ceil(v(count) / 4)) if v.differs(count) else None
    return _some(disk_path=folder, buffers=buffers)


_HALVES = ("fp16", "bf16", "amp", "torch_autocast")
"""Blocks that each say in which dtypes to compute."""
_SAFE = ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]
"""Modules whose gradients travel in 16 bits under torch_autocast, where none are named."""


def _precision(v: KeyValues) -> dict[str, Any]:
    on = [name for name in _HALVES if v(f"{name}.enabled")]
    if len(on) > 1:
        v.refuse(f"{on[1]}.enabled", True, f"{' or '.join(on)} alone")
    half = on[0] if on else ""
    keep = v("data_types.keep_in_fp32_modules")
    if keep != "auto" and fault_of("texts", keep):
        v.refuse("data_types.keep_in_fp32_modules", keep, 'a list of patterns, or "auto"')
        keep = "auto"
    return _some(
        **{"amp": _amp, "torch_autocast": _autocast}.get(half, _sixteen)(v, half),
        reduce=v("communication_data_type"),
        buffers=v("data_types.buffer_dtype"),
        keep_fp32=None if keep == "auto" else [f"*{pattern}*" for pattern in keep],
    )


def _sixteen(v: KeyValues, half: str) -> dict[str, Any]:
    """``fp16``, ``bf16``, or neither."""
    compute = half or v("data_types.param_dtype")
    is_narrow = half and v(f"{half}.{half}_master_weights_and_grads")
    skips = (half == "bf16" and v("bf16.check_grad_overflow")) or (half == "fp16" and v("fp16.loss_scale"))
    return _some(
        compute=compute,
        grad=v("data_types.grad_accum_dtype") or (compute if is_narrow else None),
        master=compute if is_narrow else None,
        loss_scale=_loss_scale(v) if half == "fp16" else None,
        nonfinite="skip" if skips else None,
    )


def _loss_scale(v: KeyValues) -> Any:
    if v("fp16.loss_scale"):
        return float(v("fp16.loss_scale"))
    return {
        "init_scale": 2.0 ** v("fp16.initial_scale_power"),
        "growth_interval": int(v("fp16.loss_scale_window")),
        "growth_delay": 1,
        "hysteresis": int(v("fp16.hysteresis")),
        "consecutive_hysteresis": bool(v("fp16.consecutive_hysteresis")),
        "min_scale": float(v("fp16.min_loss_scale")),
    }


def _amp(v: KeyValues, half: str) -> dict[str, Any]:
    level, scale = v("amp.opt_level"), v("amp.loss_scale")
    if not (scale in (None, "dynamic") or (is_number(scale) and scale > 0)):
        v.refuse("amp.loss_scale", scale, "dynamic, or a number above 0")
        return {}
    if level in ("O0", "O3"):
        if scale not in (None, 1):
            v.refuse("amp.loss_scale", scale, f"opt_level: O1 or O2; {level} has none")
        return {"amp": level}
    follows = _some(growth_interval=2000, hysteresis=1, min_scale=v("amp.min_loss_scale"))
    return {"amp": level, "loss_scale": float(scale) if is_number(scale) else follows}


def _autocast(v: KeyValues, half: str) -> dict[str, Any]:
    dtype = v("torch_autocast.dtype") or "bf16"
    if dtype == "fp32":
        v.refuse("torch_autocast.dtype", dtype, "bf16 or fp16")
    safe = v("torch_autocast.lower_precision_safe_modules")
    classes = _SAFE if safe is None else safe
    return {
        "operations": dtype,
        "narrow_reduce": [f"class:{name.rpartition('.')[2]}" for name in classes],
        "loss_scale": {"growth_interval": 2000, "hysteresis": 1} if dtype == "fp16" else None,
    }


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
"""Parameters that mean the same here."""


def _optimizer(v: KeyValues) -> dict[str, Any] | None:
    word = v("optimizer.type") if v("optimizer") is not None else None
    if word is None:
        return None
    kind = str(word).lower()
    if kind not in [known.lower() for known in _OPTIMIZER_TYPES]:
        v.refuse(
            "optimizer.type", word, f"one of {', '.join(_OPTIMIZER_TYPES)}, or an optimizer object of torch's"
        )
        return None

    def of(name: str) -> Any:
        return v(f"optimizer.params.{name}")

    made = _some(
        type=kind, lr=float(of("lr")), **{name: of(name) for name in _PASSED_ON if v.does(name, kind)}
    )
    if kind == "adam" and of("adam_w_mode"):
        made["type"] = "adamw"
    if made["type"] == "adamw" and of("torch_adam") and not v.given("optimizer.params.weight_decay"):
        made["weight_decay"] = 0.01
    if kind == "lamb":
        made["trust_bounds"] = [of("min_coeff"), of("max_coeff")]
        made["correct"] = "step" if of("bias_correction") else "none"
    if kind == "muon":
        made |= _muon(v)
    return made


def _muon(v: KeyValues) -> dict[str, Any]:
    """Muon for everything of two dims but embeddings and heads, by their names, as there."""
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


_NO_MATRIX = ("embed", "lm_head")
"""Parts of names whose weights Muon leaves to Adam."""

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
"""Their schedulers as types of ours, and our keys of each by theirs."""


def _schedule(v: KeyValues) -> dict[str, Any] | None:
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
    made = {ours: _number(v(f"scheduler.params.{theirs}")) for ours, theirs in keys.items()}
    if kind == "one_cycle":
        made["second_beta"] = 0.99
        has_betas = v("optimizer") is None or v("optimizer.params.betas") is not None
        made["cycle_momentum"] = bool(made["cycle_momentum"] and has_betas)
        if not made["decay_steps"]:  # their decay is off then, whatever its rates
            del made["decay_lr_rate"], made["decay_momentum_rate"]
    return {"type": kind, **_some(**made)}


_RECOMPUTES = (
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.number_checkpoints",
    "pipeline.activation_checkpoint_interval",
)


def _recompute(v: KeyValues) -> dict[str, Any]:
    return {"scope": "full"} if any(v(path) for path in _RECOMPUTES) else {}


def _pipeline(v: KeyValues) -> dict[str, Any]:
    word = v("pipeline.partition")
    known = {"best": "parameters", "parameters": "parameters", "uniform": "uniform"}
    if word.lower().startswith("type:"):
        return {"partition": f"type:{word[5:]}"}
    if word.lower() not in known:
        v.refuse("pipeline.partition", word, f"one of {', '.join(known)}, type:REGEX")
        return {}
    return {"partition": known[word.lower()]} if v.given("pipeline.partition") else {}


def _compile(v: KeyValues) -> dict[str, Any]:
    return {"scope": "blocks"} if v("compile.deepcompile") else {}


def _checkpoint(v: KeyValues) -> dict[str, Any]:
    return {"asynchronous": bool(v("checkpoint.writer.decoupled"))}


_TAGS = {
    "loss": "Train/Samples/train_loss",
    "lr": "Train/Samples/lr",
    "loss_scale": "Train/Samples/loss_scale",
}
"""Their names of our columns."""


def _monitor(v: KeyValues) -> dict[str, Any]:
    every = v("steps_per_print")
    made = _some(
        tensorboard=_folder(v, "tensorboard"),
        csv_per_tag=_folder(v, "csv_monitor"),
        print_every=int(every) if every not in (None, math.inf) else None,
        breakdown=True if v("wall_clock_breakdown") else None,
    )
    if v("wandb.enabled"):
        made |= _some(wandb=v("wandb.project"), wandb_group=v("wandb.group"), wandb_team=v("wandb.team"))
    if v("comet.enabled"):
        if v("comet.project") is None:
            v.refuse("comet.project", None, "the name of a project")
        places = {"comet": "project", "comet_workspace": "workspace", "comet_experiment": "experiment_name"}
        made |= _some(**{ours: v(f"comet.{theirs}") for ours, theirs in places.items()})
    if {"tensorboard", "csv_per_tag", "wandb", "comet"} & {*made}:
        made["tags"] = dict(_TAGS)
        if v("train_batch_size") is not None or v("train_micro_batch_size_per_gpu") is not None:
            made["axis"] = "samples"
    return made


def _folder(v: KeyValues, name: str) -> str | None:
    if not v(f"{name}.enabled"):
        return None
    return posixpath.join(v(f"{name}.output_path"), v(f"{name}.job_name")) or "."


def _module_profile(v: KeyValues) -> dict[str, Any]:
    if not v("flops_profiler.enabled"):
        return {}
    depth = int(v("flops_profiler.module_depth"))
    return _some(
        step=int(v("flops_profiler.profile_step")),
        depth=None if depth < 0 else max(depth, 1),
        top=int(v("flops_profiler.top_modules")),
        tree=bool(v("flops_profiler.detailed")),
        output=v("flops_profiler.output_file"),
    )


_BLOCKS: Mapping[str, Callable[[KeyValues], Any]] = {
    "mesh": _mesh,
    "zero": _zero,
    "offload": _offload,
    "pipeline": _pipeline,
    "recompute": _recompute,
    "batch": _batch,
    "precision": _precision,
    "optimizer": _optimizer,
    "schedule": _schedule,
    "max_grad_norm": _clip,
    "compile": _compile,
    "checkpoint": _checkpoint,
    "monitor": _monitor,
    "module_profile": _module_profile,
}


# Notes --------------------------------------------------------------------------------------------------------------

_DEFAULTS = {
    "gradient_clipping": "max_grad_norm",
    "checkpoint.writer.decoupled": "checkpoint.asynchronous",
}
"""Keys whose default of theirs is not ours."""


def _notes(v: KeyValues, config: Mapping[str, Any]) -> Iterable[Note]:
    for place, row, value in v.places():
        off = next((path for path in _outer(row.path) if path in v.off and f"{path}.enabled" in ROWS), None)
        if off is not None and not row.path.endswith(".enabled"):
            yield Note(place, value, "idle", f"{off}.enabled is false")
        elif row.fate == "does" and (value != row.default or row.default is not False):
            yield Note(place, value, "does", _ours(row, config))
        else:
            yield Note(place, value, "idle", row.said if row.fate == "idle" else "it asks for nothing")
    for path, ours in _DEFAULTS.items():
        if not v.given(path):
            yield Note(path, v(path), "default", f"{ours}: {shown(_at(config, ours))}")
    yield Note("(loss)", "mean", "default", "batch.weigh_by: batches, so every microbatch weighs the same")


def _outer(path: str) -> Sequence[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _ours(row: DeepSpeedKey, config: Mapping[str, Any]) -> str:
    """Our key with its value, where the row names one."""
    path = row.said.partition(":")[0].partition(";")[0].partition(",")[0].strip()
    found = _at(config, path)
    return row.said if found is None else f"{path}: {shown(found)}"


def _at(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
