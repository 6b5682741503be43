"""Shardwise's blocks from a DeepSpeed configuration: one function per block, which reads keys and refuses wrong ones.

    BLOCKS["zero"](values)    {"stage": 3, "prefetch_bytes": 100_000_000}, from keys of several DeepSpeed blocks

A block without settings is empty, or None. ``deepspeed_updates.py`` fills optimizer and schedule.
"""

import math
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.config.deepspeed_kinds import fault_of, is_number
from shardwise.config.deepspeed_updates import optimizer, schedule
from shardwise.config.deepspeed_values import KeyValues, some, whole_number


def _batch(v: KeyValues) -> dict[str, Any]:
    sizes = some(
        global_size=whole_number(v("train_batch_size")),
        micro_size=whole_number(v("train_micro_batch_size_per_gpu")),
        accumulation=whole_number(v("gradient_accumulation_steps")),
    )
    return {**sizes, "weigh_by": "batches", "scaled_losses": "allow"}


def _clip(v: KeyValues) -> float | None:
    return v("gradient_clipping") or None


def _mesh(v: KeyValues) -> dict[str, Any]:
    stages = v("pipeline.stages")
    if stages != "auto" and (not is_number(stages) or stages < 1):
        v.refuse("pipeline.stages", stages, "auto, or a number of stages")
        stages = "auto"
    tp = max(v("tensor_parallel.autotp_size"), v("tensor_parallel.tp.tp_size"))
    return some(
        pp=int(stages) if stages != "auto" and stages > 1 else None,
        tp=int(tp) if tp > 1 else None,
        cp=int(v("sequence_parallel_size")) if v("sequence_parallel_size") > 1 else None,
        dp=_data_parallel(v),
        **_experts(v),
    )


def _experts(v: KeyValues) -> dict[str, int]:
    """Return the sizes of the axes ep and etp that are not 1."""
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
    return whole_number(v("data_parallel_size"))


def _zero(v: KeyValues) -> dict[str, Any]:
    key = "zero_optimization.stage3_prefetch_bucket_size"
    ahead = int(v(key)) * _element_bytes(v) if v.differs(key) else None
    waits = v("zero_optimization.overlap_comm") is False
    return some(
        stage=int(v("zero_optimization.stage")),
        prefetch_bytes=ahead,
        reductions_under_way=0 if waits else None,
    )


def _element_bytes(v: KeyValues) -> int:
    """Return the bytes of an element of a gathered weight."""
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
    if parameters != "device":  # weights must be in the tier of their masters
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
    """Return the tier that a block names, either in the block or in one of its older keys."""
    before = next((key for key in old if v(f"zero_optimization.{key}")), None)
    if before and v.given(block):
        v.refuse(f"zero_optimization.{before}", True, f"{block} alone, which says the same")
    if before:
        return "host"
    return _TIERS[v(f"{block}.device")] if v(block) is not None else "device"


def _disk(v: KeyValues) -> dict[str, Any]:
    """Return the folder and the number of buffers of a block with the device nvme."""
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
    return some(disk_path=folder, buffers=buffers)


_HALVES = ("fp16", "bf16", "amp", "torch_autocast")
"""Blocks that each set the dtypes of computation."""
_SAFE = ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]
"""Modules whose gradients are reduced in 16 bits under torch_autocast if the configuration names none."""


def _precision(v: KeyValues) -> dict[str, Any]:
    on = [name for name in _HALVES if v(f"{name}.enabled")]
    both = len(on) == 2 and on[1] == "torch_autocast" and on[0] == _autocast_dtype(v)
    if len(on) > 1 and not both:
        v.refuse(f"{on[1]}.enabled", True, f"{' or '.join(on)} alone")
    half = on[0] if on else ""
    keep = v("data_types.keep_in_fp32_modules")
    if keep != "auto" and fault_of("texts", keep):
        v.refuse("data_types.keep_in_fp32_modules", keep, 'a list of patterns, or "auto"')
        keep = "auto"
    fill = {"amp": _amp, "torch_autocast": _autocast}.get(half, _sixteen)
    return some(
        # 16-bit weights with the products of torch_autocast: all other dtypes follow from the weights.
        **({"operations": half} if both else {}),
        **fill(v, half),
        reduce=v("communication_data_type"),
        buffers=v("data_types.buffer_dtype"),
        keep_fp32=None if keep == "auto" else [f"*{pattern}*" for pattern in keep],
    )


def _sixteen(v: KeyValues, half: str) -> dict[str, Any]:
    """Return the dtypes for ``fp16``, ``bf16``, or neither."""
    compute = half or v("data_types.param_dtype")
    is_narrow = half and v(f"{half}.{half}_master_weights_and_grads")
    skips = (half == "bf16" and v("bf16.check_grad_overflow")) or (half == "fp16" and v("fp16.loss_scale"))
    return some(
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
    follows = some(growth_interval=2000, hysteresis=1, min_scale=v("amp.min_loss_scale"))
    return {"amp": level, "loss_scale": float(scale) if is_number(scale) else follows}


def _autocast_dtype(v: KeyValues) -> str:
    """Return the dtype of the products under torch_autocast."""
    return str(v("torch_autocast.dtype") or "bf16")


def _autocast(v: KeyValues, half: str) -> dict[str, Any]:
    dtype = _autocast_dtype(v)
    if dtype == "fp32":
        v.refuse("torch_autocast.dtype", dtype, "bf16 or fp16")
    safe = v("torch_autocast.lower_precision_safe_modules")
    classes = _SAFE if safe is None else safe
    return {
        "operations": dtype,
        "narrow_reduce": [f"class:{name.rpartition('.')[2]}" for name in classes],
        "loss_scale": {"growth_interval": 2000, "hysteresis": 1} if dtype == "fp16" else None,
    }


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
"""DeepSpeed's names of Shardwise's columns."""


def _monitor(v: KeyValues) -> dict[str, Any]:
    every = v("steps_per_print")
    made = some(
        tensorboard=_folder(v, "tensorboard"),
        csv_per_tag=_folder(v, "csv_monitor"),
        print_every=int(every) if every not in (None, math.inf) else None,
        breakdown=True if v("wall_clock_breakdown") else None,
    )
    if v("wandb.enabled"):
        made |= some(wandb=v("wandb.project"), wandb_group=v("wandb.group"), wandb_team=v("wandb.team"))
    if v("comet.enabled"):
        if v("comet.project") is None:
            v.refuse("comet.project", None, "the name of a project")
        places = {"comet": "project", "comet_workspace": "workspace", "comet_experiment": "experiment_name"}
        made |= some(**{ours: v(f"comet.{theirs}") for ours, theirs in places.items()})
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
    return some(
        step=int(v("flops_profiler.profile_step")),
        depth=None if depth < 0 else max(depth, 1),
        top=int(v("flops_profiler.top_modules")),
        tree=bool(v("flops_profiler.detailed")),
        output=v("flops_profiler.output_file"),
    )


BLOCKS: Mapping[str, Callable[[KeyValues], Any]] = {
    "mesh": _mesh,
    "zero": _zero,
    "offload": _offload,
    "pipeline": _pipeline,
    "recompute": _recompute,
    "batch": _batch,
    "precision": _precision,
    "optimizer": optimizer,
    "schedule": schedule,
    "max_grad_norm": _clip,
    "compile": _compile,
    "checkpoint": _checkpoint,
    "monitor": _monitor,
    "module_profile": _module_profile,
}
