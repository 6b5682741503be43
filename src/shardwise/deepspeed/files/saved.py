"""``save_checkpoint`` and ``load_checkpoint``: DeepSpeed's folders with Shardwise's steps in them.

    DIR/latest                            the newest tag, written last
    DIR/zero_to_fp32.py                   python zero_to_fp32.py . OUT writes the whole model in fp32 (whole_states.py)
    DIR/TAG/step_00000003/                a Shardwise step, which loads on any ranks, stage and mesh; every byte has a
                                          checksum
    DIR/TAG/mp_rank_00_model_states.pt    a file for torch only: ["module"], counters, and the states of the scheduler
                                          and the client

``torch.load(..., weights_only=True)["module"]`` is the whole model at every stage. This file is written from a memory
map of the step that was just saved, so no rank ever has the whole model in memory. their_checkpoint.py reads steps
that DeepSpeed itself saved; whole_states.py writes a step as fp32 weights.
"""

import logging
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError, UsageError
from shardwise.base.regular_files import open_regular, read_small_file
from shardwise.base.strict_json import JSON_BYTES
from shardwise.checkpoint import Manifest
from shardwise.comm import default_group
from shardwise.deepspeed.calls.living import find
from shardwise.deepspeed.calls.unmet import UnmetError
from shardwise.deepspeed.files.their_checkpoint import convert, find_step, read_latest
from shardwise.formats.safetensors import read_header

_log = logging.getLogger(__name__)

DeepSpeedEngine = Any
"""The engine of engine.py, which calls these functions; typed as ``Any``, because an import would be circular."""
LATEST = "latest"
SCRIPT = "zero_to_fp32.py"
_TO_FP32 = '''#!/usr/bin/env python
"""Write the whole model of a checkpoint in fp32: python zero_to_fp32.py CHECKPOINTS OUT [--tag TAG]."""

from shardwise.deepspeed.files.whole_states import main

main()
'''
FOR_TORCH = "mp_rank_00_model_states.pt"
_RESERVED = {
    "module",
    "counters",
    "lr_scheduler",
    "saved_by",
    *("global_steps", "global_samples", "skipped_steps"),
}


def save(
    engine: DeepSpeedEngine,
    save_dir: str | Path,
    tag: str | int | None,
    client_state: Mapping[str, Any] | None,
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Save a step; ``DeepSpeedEngine.save_checkpoint`` documents arguments and errors. Collective."""
    if not str(save_dir or ""):
        raise UnmetError(f"save_checkpoint: save_dir is {save_dir!r}; give the folder of the checkpoints")
    name = checked_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
    _check_same_tag(engine.ours, name)
    client, scheduler = _client_data(client_state or {}), _scheduler_data(engine.lr_scheduler)
    ours, folder = engine.ours, Path(save_dir) / name
    counters = vars(engine.counters)
    ours.save(folder, {"counters": counters, "client": sorted(client)}, asynchronous=False)
    error = ""
    if ours.is_main:
        try:
            _write_for_torch(engine, folder, client, scheduler, exclude_frozen)
            if save_latest:  # after the step is written, so that ``latest`` never names an incomplete step
                write_whole(Path(save_dir) / LATEST, lambda path: path.write_text(name, encoding="utf-8"))
            script = Path(save_dir) / SCRIPT
            if not script.exists():
                write_whole(script, lambda path: path.write_text(_TO_FP32, encoding="utf-8"))
        except OSError as found:
            error = str(found)
    if ours.agree(bool(error)):
        raise CheckpointError(
            f"save_checkpoint: {folder}: {error or 'rank 0 could not write it; see its log'}"
        )
    return True


def _check_same_tag(ours: Any, name: str) -> None:
    """Raise UnmetError if a rank saves under another tag than rank 0. Collective."""
    if default_group.size() == 1:
        return
    own = int.from_bytes(sha256(name.encode()).digest()[:7], "big")
    first = torch.tensor([own], device=ours.device)
    default_group.broadcast(first, 0)
    if ours.agree(first.item() != own):
        raise UnmetError(
            f"save_checkpoint: the tag of this rank is {name!r}, and the ranks do not have the same one; give all "
            "ranks one tag"
        )


def checked_tag(tag: str) -> str:
    """Return ``tag`` if it is a plain name.

    Raises:
        UsageError: if the tag is not the name of a single folder.
    """
    if Path(tag).name != tag or tag in ("", ".", "..") or not tag.isprintable():
        raise UsageError(
            f"checkpoint: the tag {tag!r} is not a plain name; a tag is one folder below the checkpoints'"
        )
    return tag


def _client_data(client: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client's state in types that torch loads without running code.

    Raises:
        UsageError: if a key is reserved, or a value cannot be read back without running code; the error names the
            key.
    """
    taken = _RESERVED & client.keys()
    if taken:
        raise UsageError(
            f"save_checkpoint: client_state[{min(taken)!r}] is the engine's own key; give it another name"
        )
    return {key: _data(value, f"client_state[{key!r}]") for key, value in client.items()}


def _scheduler_data(scheduler: Any) -> Any:
    """Return the scheduler's state; None if the scheduler has no ``state_dict``.

    Raises:
        UsageError: if the state has a value that cannot be read back without running code.
    """
    if scheduler is None:
        return None
    if not hasattr(scheduler, "state_dict"):
        _log.warning(
            "save_checkpoint: the scheduler, a %s, has no state_dict() and is not saved; keep what it needs in "
            "client_state",
            type(scheduler).__qualname__,
        )
        return None
    return _data(scheduler.state_dict(), "lr_scheduler.state_dict()")


_MAPPINGS = (dict, Counter, OrderedDict)
_SEQUENCES = (list, tuple, set)
_DATA = (bool, int, float, str, bytes, Tensor, torch.nn.Parameter, type(None))


def _data(value: Any, where: str) -> Any:
    """Return ``value`` in types that torch.load(weights_only=True) accepts; NumPy numbers become Python numbers."""
    if type(value) in _MAPPINGS:
        for key in value:
            if not isinstance(key, str | int | float | bool):
                raise UsageError(f"save_checkpoint: {where} has a key of type {type(key).__name__}; use text")
        return type(value)(
            {_data(key, where): _data(each, f"{where}[{key!r}]") for key, each in value.items()}
        )
    if type(value) in _SEQUENCES:
        return type(value)(_data(each, f"{where}[{place}]") for place, each in enumerate(value))
    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) not in _DATA:
        kind = type(value)
        raise UsageError(
            f"save_checkpoint: {where} is a {kind.__module__}.{kind.__qualname__}, which could be read back by "
            "running code alone; give numbers, text, tensors, lists and dictionaries, such as its state_dict()"
        )
    return value


def _write_for_torch(
    engine: DeepSpeedEngine, folder: Path, client: Mapping[str, Any], scheduler: Any, exclude_frozen: bool
) -> None:
    """Write the file for torch from a memory map of the step's own files; only rank 0 calls this function."""
    newest = max(folder.glob("step_*/manifest.json"), key=lambda path: path.stat().st_mtime_ns).parent
    tensors: dict[str, Tensor] = {}
    for file in sorted((newest / "model").glob("*.safetensors")):
        for name, stored in read_header(file).items():
            tensors[name] = stored.mapped()
    manifest = Manifest.decode(read_small_file(newest / "manifest.json", JSON_BYTES), str(newest))
    for name, others in manifest.aliases.items():
        tensors |= {other: tensors[name] for other in others if name in tensors}
    frozen = {
        name for name, p in engine.module.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    left_out = frozen if exclude_frozen else set()
    content = {
        **client,
        "module": {name: tensor for name, tensor in tensors.items() if name not in left_out},
        "lr_scheduler": scheduler,
        "counters": dict(vars(engine.counters)),
        **{name: vars(engine.counters)[name] for name in ("global_steps", "global_samples", "skipped_steps")},
        "saved_by": "shardwise",
    }
    write_whole(folder / FOR_TORCH, lambda path: torch.save(content, path))


def write_whole(path: Path, write: Any) -> None:
    """Write a file completely or not at all: write a new file, flush it to disk, and rename it to ``path``."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # if this were a link, writing would overwrite the file behind it
    write(fresh)
    # Flush before the rename: after a crash, the final name could otherwise point to an incomplete file.
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)


def load(
    engine: DeepSpeedEngine,
    load_dir: str | Path,
    tag: str | int | None,
    strict: bool,
    wants_optimizer: bool,
    wants_scheduler: bool,
    module_only: bool,
) -> tuple[str | None, dict[str, Any]]:
    """Load a step; ``DeepSpeedEngine.load_checkpoint`` documents arguments and errors. Collective."""
    root = Path(load_dir)
    if tag is None and not os.path.lexists(root / LATEST):
        _log.warning("load_checkpoint: %s has no file %r; nothing was loaded", root, LATEST)
        return None, {}
    name = checked_tag(read_latest(root) if tag is None else str(tag))
    folder = root / name
    is_ours = any(folder.glob("step_*/manifest.json"))
    step = None if is_ours else find_step(root, name)
    if not is_ours and step is None:
        raise CheckpointError(
            f"load_checkpoint: {folder} holds no step, neither ours nor DeepSpeed's; there are "
            f"{', '.join(sorted(path.name for path in root.iterdir() if path.is_dir())[:8]) or 'no tags'}"
        )
    weights_only = module_only or not wants_optimizer
    extra = {} if strict else {"missing": ["*"], "unexpected": ["*"]}
    if step is None:
        user = engine.ours.load(folder, weights_only=weights_only, **extra)
        open_regular(folder / FOR_TORCH).close()
        # weights_only: without it, a pickle could run code.
        told = torch.load(folder / FOR_TORCH, map_location="cpu", weights_only=True, mmap=True)
        told.pop("module")
        client = {key: value for key, value in told.items() if key not in _RESERVED}
        scheduler = told.get("lr_scheduler")
    else:
        user = _load_theirs(engine, step, weights_only, extra)
        client, scheduler = dict(user["client"]), user["lr_scheduler"]
    assert user is not None, "a step was found"
    if not module_only:
        for key, value in user["counters"].items():
            setattr(engine.counters, key, int(value))
        if wants_scheduler and scheduler is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
            engine.lr_scheduler.load_state_dict(scheduler)
    return str(folder), client


def _load_theirs(
    engine: DeepSpeedEngine, step: Path, weights_only: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Load a step that DeepSpeed saved: rank 0 converts the step into a folder beside it, all ranks load that folder.

    The converted folder is removed afterwards.
    """
    ours, error = engine.ours, ""
    converted = step.with_name(f".{step.name}.shardwise")
    if ours.is_main:
        try:
            shutil.rmtree(converted, ignore_errors=True)
            for line in convert(step, converted, _names_by_group(engine)):
                _log.warning("load_checkpoint: %s: left out: %s", step, line)
        except (CheckpointError, OSError) as found:
            error = str(found)
    if ours.agree(bool(error)):
        raise CheckpointError(
            error
            or f"load_checkpoint: rank 0 could not read {step}; see its log. Where the folder cannot be written, "
            "`shardwise convert` writes the step elsewhere"
        )
    try:
        user = ours.load(converted, weights_only=weights_only, **extra)
        ours.barrier()  # without it, rank 0 could remove the folder while another rank still reads
    finally:
        if ours.is_main:
            shutil.rmtree(converted, ignore_errors=True)
    assert user is not None, "it was written a moment ago"
    return user


def _names_by_group(engine: DeepSpeedEngine) -> list[list[str]] | None:
    """Return the names of the optimizer's parameters by group, because DeepSpeed's stage 0 saves only their numbers."""
    if engine.optimizer is None:
        return None
    found = [[find(p) for p in group["params"]] for group in engine.optimizer.param_groups]
    return [[each[1] for each in group if each is not None] for group in found]


def save_16bit(engine: DeepSpeedEngine, save_dir: str | Path, filename: str, exclude_frozen: bool) -> bool:
    """Write the whole model in 16 bits; ``DeepSpeedEngine.save_16bit_model`` documents the arguments. Collective."""
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else None
    state = engine.ours.mapped_state_dict(save_dir, trained_only=exclude_frozen, dtype=dtype)
    error = ""
    if engine.ours.is_main:
        try:
            write_whole(Path(save_dir) / filename, lambda path: torch.save(state, path))
        except OSError as found:
            error = str(found)
    if engine.ours.agree(bool(error)):
        raise CheckpointError(
            f"save_16bit_model: {save_dir}: {error or 'rank 0 could not write it; see its log'}"
        )
    return True
