"""Records of layouts that passed ``shardwise verify``, and what a run says of itself in its first lines.

    a pass writes    ~/.cache/shardwise/verified/HASH.json
    a run reads      verified on pp=2,dp=2,tp=2 (2026-11-29); or: not verified: what differs and the command

HASH is that of what a proof depends on:

    code       the file of the function that makes the model, or the built-in model's name and the package's files
    keys       those of the configuration that choose a technique or a dtype; sizes, rates, data and logs are left out,
               because verify shrinks a model
    axes       names of the axes above 1, whose sizes are left out for the same reason; stages per rank; ZeRO's stage
    versions   of shardwise, torch and Python

A record is a note and no condition: a run without one is never refused. A module that the file of the function imports
is no part of the code.
"""

import hashlib
import importlib.util
import inspect
import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardwise.models
from shardwise.config.run import RunConfig
from shardwise.models.policy import TargetPolicy
from shardwise.verify.layout import VerifiedLayout, layout_of
from shardwise.verify.verdict import Verdict

_KEYS = (
    "zero",
    "tensor",
    "experts",
    "pipeline",
    "tables",
    "recompute",
    "tiles",
    "offload",
    "precision",
    "compile",
    "attention",
    "batch_norm",
    "deterministic",
)
"""Blocks of the configuration that choose a technique or a dtype."""
_NOT_KEYS = {"offload": ("disk_path",), "tables": ("defaults", "named")}
"""Keys in these blocks that are sizes or places."""


class Proof(NamedTuple):
    """The facts on which a proof depends."""

    code: str
    keys: dict[str, Any]
    axes: dict[str, Any]
    versions: dict[str, str]

    @property
    def name(self) -> str:
        """The hash of all parts."""
        return hashlib.sha256(json.dumps(self._asdict(), sort_keys=True).encode()).hexdigest()[:32]


def folder_of_records(folder: Path | None = None) -> Path:
    """Return the folder of the records; ``folder`` in place of the user's own."""
    return folder or Path.home() / ".cache" / "shardwise" / "verified"


def proof_of(config: RunConfig, layout: VerifiedLayout, make: Callable[[], Any] | str | None = None) -> Proof:
    """Return what a proof of a layout depends on.

    Args:
        config: The configuration.
        layout: The layout.
        make: The function that makes the model, or ``module:function``; None: the model of the configuration.
    """
    whole = config.model_dump(mode="json")
    keys = {block: _without(block, whole[block]) for block in _KEYS}
    keys["optimizer"] = whole["optimizer"]["type"]
    for block in ("zero", "recompute", "pipeline"):  # the layout sets these
        for key in ("stage", "scope", "virtual_stages", "schedule"):
            if isinstance(keys[block], dict):
                keys[block].pop(key, None)
    mesh = layout.mesh
    sizes = {
        axis: getattr(mesh, axis) for axis in ("pp", "cp", "tp", "ep", "etp", "dp_replicate", "dp_shard")
    }
    axes: dict[str, Any] = {"above 1": sorted(axis for axis, size in sizes.items() if size > 1)}
    axes["stages per rank"] = "several" if layout.virtual_stages > 1 else "one"
    axes["zero.stage"] = config.zero.stage if layout.zero_stage is None else layout.zero_stage
    axes["recompute"] = config.recompute.scope if layout.recompute is None else layout.recompute
    versions = {
        "shardwise": shardwise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return Proof(_code_of(config, make), keys, axes, versions)


def _without(block: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: each for key, each in value.items() if key not in _NOT_KEYS.get(block, ())}
    if block == "tiles":  # the number of tokens in a tile is a size
        kept = {key: "a number" if isinstance(each, int) else each for key, each in kept.items()}
    return kept


def _code_of(config: RunConfig, make: Callable[[], Any] | str | None) -> str:
    """Return the hash of the file that the model comes from."""
    model = config.model
    if make is None and isinstance(model, TargetPolicy):
        make = model.target
    if make is None:
        files = sorted(Path(shardwise.models.__file__).parent.rglob("*.py"))
        return _hashed(str(getattr(model, "name", "")), *files)
    if isinstance(make, str):
        module, _, name = make.partition(":")
        found = importlib.util.find_spec(module)
        return _hashed(make, *([Path(found.origin)] if found is not None and found.origin else []))
    name = f"{getattr(make, '__module__', '')}:{getattr(make, '__qualname__', type(make).__qualname__)}"
    with suppress(TypeError, OSError):
        return _hashed(name, Path(inspect.getsourcefile(make) or ""))
    return _hashed(name)


def _hashed(name: str, *files: Path) -> str:
    found = hashlib.sha256(name.encode())
    for file in files:
        with suppress(OSError):
            found.update(file.read_bytes())
    return found.hexdigest()


def keep(proof: Proof, verdict: Verdict, folder: Path | None = None) -> Path | None:
    """Write the record of a pass, and return its path; None if the folder cannot be written."""
    if verdict.verdict != "pass" or not verdict.passes:
        return None
    record = {
        **proof._asdict(),
        "layout": verdict.layout,
        "date": time.strftime("%Y-%m-%d"),
        "passes": [each.name for each in verdict.passes],
        "declared": verdict.declared,
        "left_out": verdict.left_out,
    }
    path = folder_of_records(folder) / f"{proof.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError:
        return None
    return path


def sentence(proof: Proof, command: str, folder: Path | None = None) -> str:
    """Return the line of a run: the layout on which it was verified, or what no record fits.

    Args:
        proof: What a proof of the run depends on.
        command: The command that verifies the run.
        folder: The folder of the records; None: the user's own.
    """
    records = [record for record in map(_read, sorted(folder_of_records(folder).glob("*.json"))) if record]
    for record in records:
        if Proof(**{key: record.get(key) for key in Proof._fields}) == proof:  # type: ignore[arg-type]
            return f"verified on {record.get('layout')} ({record.get('date')})"
    same = [record for record in records if record.get("code") == proof.code]
    if not same:
        return f"not verified: no pass of {command} with this model's code is on record"
    differs = [key for key in ("axes", "keys", "versions") if same[-1].get(key) != getattr(proof, key)]
    details = [
        f"{key}.{part}"
        for key in differs
        for part in sorted({*getattr(proof, key), *(same[-1].get(key) or {})})
        if getattr(proof, key).get(part) != (same[-1].get(key) or {}).get(part)
    ]
    return (
        f"not verified: the record on {same[-1].get('layout')} has other {', '.join(details)}; run {command}"
    )


def sentence_of_run(config: RunConfig, ranks: int, folder: Path | None = None) -> str:
    """Return the line of ``shardwise train``; "" for one rank, whose layout is that of one process."""
    if ranks == 1:
        return ""
    layout = layout_of(config, ranks)
    return sentence(proof_of(config, layout), f'shardwise verify CONFIG --layout "{layout}"', folder)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
