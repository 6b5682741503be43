"""Out of memory, as one short error: what was being made, what this rank holds, and which keys would make it fit.

    torch on a CPU       RuntimeError: ... DefaultCPUAllocator: can't allocate memory: you tried to allocate N bytes
    torch on a device    torch.OutOfMemoryError: ... Tried to allocate 2.00 GiB
    Python, numpy        MemoryError

``initialize`` and the calls of an engine that compute raise ``OutOfMemoryError`` in place of these errors. The bytes
held come from the ledger. If the rank's memory was foreseen (``engine.expect_bytes``), the error names the row that
outgrew its forecast most. What passes keep and work with has rows of its own in a step that is measured
(step_meter.py); in any other step it is one row, the memory in use less the other rows. The advice follows only from
the configuration, because no memory is left for an estimate.
"""

import functools
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch

from shardwise.base.errors import OutOfMemoryError
from shardwise.base.words import bytes_text
from shardwise.config.run import RunConfig
from shardwise.engine.parts.attention_backend import note_the_backend
from shardwise.engine.parts.deterministic import note_the_key
from shardwise.engine.parts.parts import EngineParts
from shardwise.memory.ledger import STEP_ROWS, Ledger, Lifetime, Row
from shardwise.observe.memory import available_bytes, resident_bytes
from shardwise.plan.action import Kind
from shardwise.plan.placement import Tier
from shardwise.plan.plan import tier_of_row

_Method = TypeVar("_Method", bound=Callable[..., Any])
_CPU_WORDS = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory")
_ASKED = re.compile(r"(?i)allocate (\d+(?:\.\d+)?) ?(bytes|[kmgt]ib)")
_FACTORS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LIMITS = {"RLIMIT_DATA": resource.RLIMIT_DATA, "RLIMIT_AS": resource.RLIMIT_AS}
_WORDS = {
    Kind.F: "the forward pass",
    Kind.B: "the backward pass",
    Kind.I: "the backward pass",
    Kind.W: "the weights' backward pass",
    Kind.UNSHARD: "the gather of the weights",
    Kind.REDUCE: "the reduction of the gradients",
    Kind.STEP: "the update",
}
_FOR_LIFE: tuple[Lifetime, ...] = ("engine",)
_ALL: tuple[Lifetime, ...] = ("engine", "step")
_SHOWN = 3
"""Pieces of advice that an error gives."""


class HasParts(Protocol):
    """An object with the running parts of an engine."""

    _parts: EngineParts


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of an allocator of torch, numpy or Python."""
    if isinstance(error, OutOfMemoryError):
        return False  # raised by this module already
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


def tells_out_of_memory(method: _Method) -> _Method:
    """Decorate a method of an engine that computes: raise OutOfMemoryError in place of an allocator's error.

    An error about an operation without a deterministic implementation, or about attention that no enabled kernel
    serves, gets a note that names the key.
    """

    @functools.wraps(method)
    def call(engine: HasParts, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(engine, *args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                note_the_key(error)
                note_the_backend(error)
                raise
            raise in_a_step(engine._parts, error) from None

    return cast(_Method, call)


@contextmanager
def making(what: str) -> Iterator[None]:
    """Add a note that names ``what`` is being made to an allocator's error inside; the innermost note counts."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            error.add_note(what)
        raise


@contextmanager
def told_in_initialize(
    rank: int, device: torch.device, config: RunConfig, dp: int, ledger: Ledger
) -> Iterator[None]:
    """Raise OutOfMemoryError in place of an allocator's error while an engine is made."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        what = next(iter(getattr(error, "__notes__", ())), "the engine")
        where = f"initialize, making {what}"
        rows = ledger.bytes_by_row(_FOR_LIFE)
        raise _told(error, where, rank, device, config, dp, rows, [], in_a_pass=False) from None


def in_a_step(parts: EngineParts, error: BaseException) -> OutOfMemoryError:
    """Return the error to raise in place of ``error``, an allocator's, before the running step is discarded."""
    action, unit = parts.walker.under_way, ""
    if action is not None and action.unit >= 0:
        unit = f" of Unit {parts.program.plan.own.units[action.unit].title}"
    where = f"step {parts.progress.step_count + 1}"
    if action is not None:
        where += f", {_WORDS.get(action.kind, action.kind.name)}{unit} ({action})"
    in_a_pass = action is None or not action.kind.ends_step
    has_gradients = parts.accumulation.passes or action is not None and action.kind is not Kind.F
    held = parts.site.ledger.bytes_by_row(_ALL if has_gradients else _FOR_LIFE)
    said = outgrown(parts.site.ledger, held, parts.device, bytes_asked(str(error)) or 0)
    rank, config, dp = parts.world.rank, parts.config, parts.data.size
    return _told(error, where, rank, parts.device, config, dp, held, said, in_a_pass=in_a_pass)


_OF_A_PASS = "kept, received and at work"
"""Name of the sum of the rows of a step that is not measured."""
_REMEDIES = {
    "kept": "recompute=full and a smaller batch.micro_size keep less; a batch larger than the first keeps more",
    "at work": "tiles.logits, tiles.mlp and a smaller batch.micro_size make less at once",
    _OF_A_PASS: "recompute=full and a smaller batch.micro_size need less; a batch larger than the first needs more",
    "gathered": "a smaller zero.prefetch_bytes gathers fewer Units ahead",
    "dynamic tables": "tables.defaults.dynamic.capacity bounds their rows",
    "activations": "offload.activations=device leaves them on the device; recompute=full keeps fewer",
    "save": "checkpoint.asynchronous=false writes without a copy",
}


def outgrown(ledger: Ledger, held: Mapping[Row, int], device: torch.device, asked_bytes: int) -> list[str]:
    """Return a line on the row that outgrew its forecast most; nothing if nothing was foreseen.

    Args:
        ledger: The ledger, with what was foreseen.
        held: Bytes that are held, by row.
        device: The device on which memory ended.
        asked_bytes: Bytes that could not be had.
    """
    foreseen = dict(ledger.foreseen)
    if not foreseen:
        return []
    rows: dict[str, int] = {str(row): size for row, size in held.items()}
    now = ledger.rows_now()
    if now:
        rows |= {str(row): now.get(row, 0) for row in STEP_ROWS}
        rows["at work"] += asked_bytes
    else:
        in_use = _bytes_in_use(device)
        if in_use is None:
            return []
        near = ("device", "host") if device.type == "cpu" else ("device",)
        others = sum(size for row, size in rows.items() if tier_of_row(row) in near)
        others += foreseen.get("process", 0) + foreseen.get("buffers", 0)
        rows[_OF_A_PASS] = max(in_use - others, 0) + asked_bytes
        foreseen[_OF_A_PASS] = sum(foreseen.pop(row, 0) for row in STEP_ROWS)
    row = max(rows, key=lambda each: rows[each] - foreseen.get(each, 0))
    if rows[row] <= foreseen.get(row, 0):
        return ["  no row has outgrown its forecast: less memory was free than the forecast counted on"]
    sizes = f"foreseen {bytes_text(foreseen.get(row, 0))}, held {bytes_text(rows[row])} with what could not be had"
    remedy = f"; {_REMEDIES[row]}" if row in _REMEDIES else ""
    return [f"  outgrew its forecast most: {row}, {sizes}{remedy}"]


def _bytes_in_use(device: torch.device) -> int | None:
    """Return the bytes in use: of the process on a CPU, of torch's allocator on a device; None if unknown."""
    return resident_bytes() if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def _told(
    error: BaseException,
    where: str,
    rank: int,
    device: torch.device,
    config: RunConfig,
    dp: int,
    held: Mapping[Row, int],
    foreseen: Sequence[str],
    *,
    in_a_pass: bool,
) -> OutOfMemoryError:
    words = str(error).strip().splitlines()
    asked = bytes_asked(str(error))
    wanted = "more memory" if asked is None else f"{bytes_text(asked)} more"
    lines = [f"out of memory on rank {rank} in {where}: {wanted} could not be had on {device}{_room(device)}"]
    rows = sorted(((size, row) for row, size in held.items() if size), reverse=True)
    if rows:
        lines.append("  held: " + ", ".join(f"{row} {bytes_text(size)}" for size, row in rows))
    else:
        lines.append(
            "  held: nothing of the engine's yet; the rest is the program's and the model's as it came"
        )
    lines += foreseen
    keys = advice(config, device, dp, in_a_pass)
    if keys:
        lines.append("what takes less memory and computes the same numbers:")
        lines += [f"  {key}: {effect}" for key, effect in keys[:_SHOWN]]
    lines.append(
        "what a step needs, and the cheapest keys that make it fit, without running it: `shardwise train CONFIG "
        "--check --memory SIZE`, or shardwise.fits(make_model, config, {'device': SIZE}, example)"
    )
    if words:
        lines.append(f"  ({type(error).__name__}: {words[0][:200]})")
    return OutOfMemoryError("\n".join(lines))


def bytes_asked(text: str) -> int | None:
    """Return the bytes that an allocator's error names; None if the text has no number."""
    found = _ASKED.search(text)
    return None if found is None else int(float(found[1]) * _FACTORS[found[2].lower()])


def _room(device: torch.device) -> str:
    """Return the memory that the process holds and the memory that is free, for the first line."""
    said = []
    resident, free = resident_bytes(), available_bytes(device)
    if resident is not None and device.type == "cpu":
        said.append(f"the process holds {bytes_text(resident)}")
    for name, number in _LIMITS.items() if device.type == "cpu" else ():
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY:
            said.append(f"its limit {name} is {bytes_text(limit)}")
    if free is not None:
        said.append(f"{bytes_text(free)} are free")
    return f" ({', '.join(said)})" if said else ""


def advice(config: RunConfig, device: torch.device, dp: int, in_a_pass: bool) -> list[tuple[str, str]]:
    """Return (keys, effect) pairs that take less memory than ``config``, the likeliest first.

    Args:
        config: The resolved configuration of the run.
        device: The device that this rank computes on.
        dp: The number of data-parallel ranks.
        in_a_pass: True if memory ended in a forward or backward pass, in which activations grow.
    """
    offload, tier = config.offload, _next_tier(config.offload.optimizer, device)
    state: list[tuple[str, str]] = []
    if config.zero.stage < 3 and dp > 1:
        state.append(
            ("zero.stage=3", f"weights, gradients and optimizer state in {dp} pieces, one on each rank")
        )
    if tier is not None:
        folder = "" if tier == "host" or offload.disk_path else " offload.disk_path=FOLDER"
        state.append((f"offload.optimizer={tier}{folder}", f"masters and moments {_PLACES[tier]}"))
    if tier is not None or offload.parameters != offload.optimizer:
        lies = tier or offload.optimizer
        folder = "" if lies == "host" or offload.disk_path else " offload.disk_path=FOLDER"
        keys = f"offload.optimizer={lies} offload.parameters={lies}{folder}"
        state.append((keys, f"weights too, {_PLACES[lies]}, a few Units at a time in memory"))
    passes: list[tuple[str, str]] = []
    if config.recompute.scope == "none":
        passes.append(("recompute=full", "blocks keep their inputs alone, and compute the rest again"))
    micro = config.batch.micro_size
    if micro is not None and micro > 1:
        smaller = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        more = f", batch.accumulation grows {micro // smaller} times"
        passes.append((f"batch.micro_size={smaller}", f"fewer samples at a time{more}"))
    if device.type != "cpu" and offload.activations == "device":
        passes.append(("offload.activations=host", "what blocks keep waits in host memory"))
    if not in_a_pass:
        return [*state, *passes]
    # Activations grow in a pass, so the first two keys for passes come first; moving state is the surest help after.
    return [*passes[:2], *state, *passes[2:]]


_PLACES: dict[Tier, str] = {"host": "in host memory", "disk": "in files", "device": "on the device"}


def _next_tier(now: Tier, device: torch.device) -> Tier | None:
    """Return the tier below ``now`` that frees memory of ``device``; None if there is none."""
    if now == "disk":
        return None
    return "host" if now == "device" and device.type != "cpu" else "disk"
