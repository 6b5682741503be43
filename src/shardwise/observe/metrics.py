"""metrics.csv: one row per optimizer step, with exact numbers, and complete across kills and resumes.

Numbers are written by ``repr``, the shortest text that reads back to the same float, so two runs can be compared
bit for bit by comparing files. An absent number is an empty cell.

A run that was killed at step 130 and resumes from the checkpoint of step 100 computes steps 101 to 130 again:
opening the file for step 100 cuts the later rows off first. A last line without its newline is a write that the
kill cut short; it is dropped, because ``12`` may be the beginning of ``123``.

A run of a language model writes ``StepRecord``s, a run of a click-through model ``ClickRecord``s, and a run of an image
model ``ImageRecord``s; the header shows which. In a file of an earlier version, which lacks the last columns, these
columns count as empty.

Cost: one small write and one flush per step, on rank 0 only.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, get_args, get_type_hints

from shardwise.base.errors import DataError
from shardwise.base.regular_files import open_regular, read_small_file
from shardwise.base.words import in_words
from shardwise.observe.stragglers import SlowestRank, SlowPhase

_LIMIT_BYTES = 1 << 30
"""Largest size of a metrics file that is read: five million steps."""


class StepRecord(NamedTuple):
    """The results of one optimizer step: the columns of ``metrics.csv``, in this order."""

    step: int
    """Optimizer step, counted from 1."""
    loss: float
    """Training loss of this step: mean over all tokens of the global batch."""
    val_loss: float | None = None
    """Mean loss over the validation data after this step, on the steps that evaluate."""
    grad_norm: float | None = None
    """L2 norm of all gradients before clipping."""
    lr: float | None = None
    """Learning rate that this step used (of the first parameter group)."""
    tokens: int | None = None
    """Tokens in this step's global batch."""
    tokens_per_s: float | None = None
    """Tokens of this step over ``step_s``, all ranks together."""
    step_s: float | None = None
    """Wall time of this step in seconds, without evaluation and checkpoints."""
    memory: int | None = None
    """Bytes on rank 0: on an accelerator the largest number that tensors took since the record before (an evaluation
    between two records belongs to the second), else the process's resident memory now."""
    flops: float | None = None
    """Floating-point operations that the model needs for this step, all ranks; recomputation is not counted. The
    built-in GPT has a formula; of another model the first step is counted. Empty with ``compile``."""
    pf_days: float | None = None
    """Compute since step 0, in petaflop/s-days (1 is 8.64e19 operations)."""
    mfu: float | None = None
    """Model FLOP/s utilization, a share of 1: ``flops / step_s`` over the peak of all devices. The peak is that of the
    data sheet, on a processor that of a matrix product which rank 0 measures at the start; empty if the peak is not
    known."""
    forward_s: float | None = None
    """Seconds of rank 0 in this step's forward passes; with a pipeline those of its stages."""
    backward_s: float | None = None
    """Seconds of rank 0 in this step's backward passes, including the reductions beside them."""
    update_s: float | None = None
    """Seconds from the last backward pass to the end of the step: sums, norm, optimizer, gathers of weights. On a
    device the value of the step before, because this step's update is still running."""
    loss_scale: float | None = None
    """Factor of losses in the next step under fp16; empty otherwise."""
    expert_load: float | None = None
    """(token, expert) pairs of the busiest expert over the mean, in the worst layer of this step; 1 is even. Empty,
    like the next two columns, for models without experts."""
    expert_drops: float | None = None
    """Share of the pairs that found no room with their expert and were dropped."""
    router_entropy: float | None = None
    """Entropy in nats of the routers' scores, normalized to a sum of 1: the mean over tokens and layers. With E
    experts, ln E is the entropy of equal scores."""
    memory_allocated: int | None = None
    """Bytes on rank 0's accelerator that tensors take at the end of the step; empty on a processor."""
    memory_reserved: int | None = None
    """Largest number of bytes that torch reserved on the accelerator since the record before: tensors and torch's
    cache. Empty on a processor."""
    stalled: float | None = None
    """Share of ``step_s`` in which rank 0 waited for data."""
    resumed_from: int | None = None
    """Step that the run was resumed from, or that was loaded, in the first row after it; empty in all other rows."""
    exposed_s: float | None = None
    """Seconds in which rank 0's computation waited for other ranks in this step, all axes together: communication that
    no computation hid. On a device the time in which the computation's stream stood, from the norm of the step before
    to this step's norm; on a processor the time of the thread. Empty if no wait was measured."""
    exposed_dp_s: float | None = None
    """The part of ``exposed_s`` for data-parallel ranks: gathers of weights, sums of gradients, keys and rows of
    tables."""
    exposed_tp_s: float | None = None
    """The part of ``exposed_s`` for tensor-parallel ranks."""
    exposed_pp_s: float | None = None
    """The part of ``exposed_s`` for messages of other stages, so with the pipeline's bubble."""
    exposed_ep_s: float | None = None
    """The part of ``exposed_s`` for ranks with other experts. Waits over several axes together, such as the norm over
    all ranks that share a model, count in ``exposed_s`` alone."""
    slowest_rank: int | None = None
    """Rank whose reading and computing took longest in the step before, compared with ranks of the same pipeline stage;
    beyond 512 ranks the first of some consecutive ranks. Empty if ``monitor.rank_seconds`` is off or ranks have no
    others like them."""
    slowest_phase: str | None = None
    """What made ``slowest_rank`` slow: ``reading``, ``computing``, or ``waiting`` if no rank's own work took 1.15 times
    as long as that of the others, and waits took a tenth of its step. With ``waiting`` the rank is on the host
    whose bytes were still on their way when the others' had arrived, or else waited longest."""

    @property
    def validation(self) -> float | None:
        """The loss over held-out data, on the steps that evaluate; else None."""
        return self.val_loss


class ClickRecord(NamedTuple):
    """The results of one optimizer step of a click-through model: the columns of its ``metrics.csv``, in this order.

    A column without a sentence has the meaning of the column of ``StepRecord`` with the same name.
    """

    step: int
    loss: float
    """Training log loss of this step: mean over all samples of the global batch."""
    log_loss: float | None = None
    """Mean log loss over the validation data after this step, on the steps that evaluate."""
    auc: float | None = None
    """Exact area under the ROC curve over the validation data."""
    grad_norm: float | None = None
    """L2 norm of all gradients before clipping, those of table rows included."""
    lr: float | None = None
    """Learning rate of the dense part that this step used (of the first parameter group)."""
    samples: int | None = None
    """Samples in this step's global batch."""
    samples_per_s: float | None = None
    """Samples of this step over ``step_s``, all ranks together."""
    step_s: float | None = None
    memory: int | None = None
    rows: int | None = None
    """Rows in use, over all tables and ranks, on the steps that evaluate."""
    inserted: int | None = None
    """Rows inserted since step 0."""
    evicted: int | None = None
    """Rows evicted since step 0."""
    hits: int | None = None
    """Rows that were in rank 0's memory when this step needed them, since the record before; empty, like the next three
    columns, without tables in tiers."""
    misses: int | None = None
    """Rows that the step waited for, because they were on a disk or were new."""
    read_ahead: int | None = None
    """Rows that the thread of keys brought into memory before the step that needs them."""
    stall_s: float | None = None
    """Seconds in which rank 0 waited for rows from the disk."""
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    memory_allocated: int | None = None
    memory_reserved: int | None = None
    stalled: float | None = None
    resumed_from: int | None = None
    exposed_s: float | None = None
    exposed_dp_s: float | None = None
    exposed_tp_s: float | None = None
    exposed_pp_s: float | None = None
    exposed_ep_s: float | None = None
    slowest_rank: int | None = None
    slowest_phase: str | None = None

    @property
    def validation(self) -> float | None:
        """The loss over held-out data, on the steps that evaluate; else None."""
        return self.log_loss


class ImageRecord(NamedTuple):
    """The results of one optimizer step of an image model: the columns of its ``metrics.csv``, in this order.

    A column without a sentence has the meaning of the column of ``StepRecord`` with the same name.
    """

    step: int
    loss: float
    """Training loss of this step: mean over all pictures of the global batch."""
    val_loss: float | None = None
    """Mean cross entropy over the held-out pictures after this step, on the steps that evaluate."""
    accuracy: float | None = None
    """Share of the held-out pictures whose class has the largest output, exact over all ranks."""
    grad_norm: float | None = None
    lr: float | None = None
    samples: int | None = None
    """Pictures in this step's global batch."""
    samples_per_s: float | None = None
    """Pictures of this step over ``step_s``, all ranks together."""
    step_s: float | None = None
    stalled: float | None = None
    memory: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    memory_allocated: int | None = None
    memory_reserved: int | None = None
    resumed_from: int | None = None
    exposed_s: float | None = None
    exposed_dp_s: float | None = None
    exposed_tp_s: float | None = None
    exposed_pp_s: float | None = None
    exposed_ep_s: float | None = None
    slowest_rank: int | None = None
    slowest_phase: str | None = None

    @property
    def validation(self) -> float | None:
        """The loss over held-out data, on the steps that evaluate; else None."""
        return self.val_loss


Record = StepRecord | ClickRecord | ImageRecord

_EXPOSED_COLUMNS = {
    "dp": "exposed_dp_s",
    "dp_replicate": "exposed_dp_s",
    "dp_shard": "exposed_dp_s",
    "edp": "exposed_dp_s",
    "expert_dp": "exposed_dp_s",
    "keys": "exposed_dp_s",
    "tp": "exposed_tp_s",
    "etp": "exposed_tp_s",
    "pp": "exposed_pp_s",
    "ep": "exposed_ep_s",
}
"""Column of the waits for a group, by the axis of the group; a group over several axes has no column of its own."""


def exposed_columns(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the columns ``exposed_s``, ``exposed_dp_s`` and so on of one step.

    Args:
        seconds: Exposed seconds by axis of the group, as ``StepWaits.seconds`` returns them.

    Returns:
        The columns of the axes in ``seconds``; no column if ``seconds`` is empty.
    """
    found: dict[str, Any] = {"exposed_s": sum(seconds.values())} if seconds else {}
    for axis, each_s in seconds.items():
        column = _EXPOSED_COLUMNS.get(axis.partition(" ")[0])  # an axis over several hosts has two levels
        if column is not None:
            found[column] = found.get(column, 0.0) + each_s
    return found


def slowest_columns(found: SlowestRank | None) -> dict[str, Any]:
    """Return the columns ``slowest_rank`` and ``slowest_phase``; no column if no rank is known."""
    return {} if found is None else {"slowest_rank": found.rank, "slowest_phase": found.phase}


NO_SCALARS = frozenset({"step", "resumed_from", "slowest_rank", "slowest_phase"})
"""Columns that identify something and are not measurements, so they are not sent to monitors."""


class Sink(Protocol):
    """An object that gets the record of every step."""

    def write(self, record: Record) -> None:
        """Write the record of one step."""

    def close(self) -> None:
        """Write buffered records and close the sink. Called once, also after an error."""


_KINDS: tuple[type[Record], ...] = (StepRecord, ClickRecord, ImageRecord)
_INTEGERS = frozenset(
    name for kind in _KINDS for name, type_ in get_type_hints(kind).items() if type_ in (int, int | None)
)
_WORDS: Mapping[str, tuple[str, ...]] = {"slowest_phase": get_args(SlowPhase)}
"""Words that a column without numbers may have."""
_ALWAYS = frozenset({"step", "loss"})
_FEWEST = 10
"""Smallest number of columns that any version wrote."""


def _header(kind: type[Record]) -> str:
    return ",".join(kind._fields)


def _row(record: Record) -> str:
    cells = (_cell(name, value) for name, value in zip(record._fields, record, strict=True))
    return ",".join(cells) + "\n"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    # int() and float() first: the repr of a NumPy scalar names its type.
    return str(value) if name in _WORDS else repr(int(value) if name in _INTEGERS else float(value))


def _value(name: str, cell: str) -> int | float | str | None:
    """Return the value of a cell; raise ValueError if it is none."""
    if cell == "" and name not in _ALWAYS:
        return None
    if name not in _WORDS:
        return int(cell) if name in _INTEGERS else float(cell)
    if cell not in _WORDS[name]:
        raise ValueError(f"{name} is {cell!r}, expected one of {', '.join(_WORDS[name])}")
    return cell


def _parse(path: Path, number: int, line: str, kind: type[Record], columns: int) -> Record:
    cells = line.rstrip("\n").split(",")
    try:
        if len(cells) != columns:
            raise ValueError(f"it has {len(cells)} cells")
        values = [_value(name, cell) for name, cell in zip(kind._fields, cells, strict=False)]
    except ValueError as error:
        raise DataError(
            f"{path}, line {number}: {line.rstrip()[:400]!r} is not a row of {columns} numbers "
            f"({str(error)[:200]}); repair or remove the line"
        ) from None
    return kind(*values)  # type: ignore[arg-type]


def read(path: str | os.PathLike[str]) -> list[Record]:
    """Return all complete rows of a metrics file; a last line that a kill cut short is left out.

    Args:
        path: the file.

    Returns:
        The records, of the class that the header identifies.

    Raises:
        FileNotFoundError: if the file does not exist.
        DataError: if the file cannot be read, or is not a metrics file of this version.
    """
    path = Path(path)
    try:
        lines = read_small_file(path, _LIMIT_BYTES).decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"metrics {in_words(error)}; move it away") from None
    lines = [f"{line}\n" for line in lines[:-1]] + lines[
        -1:
    ]  # only at \n: str.splitlines() splits at other characters too
    lines.pop()
    if not lines:
        return []
    header = lines[0].rstrip("\n")
    columns = header.count(",") + 1
    kind = next(
        (kind for kind in _KINDS if columns > _FEWEST and f"{_header(kind)},".startswith(f"{header},")), None
    )
    if kind is None:
        expected = " or ".join(repr(_header(kind)) for kind in _KINDS)
        raise DataError(
            f"{path}: the header is {header[:400]!r}, expected {expected}; "
            f"this is not a metrics file of this version, move it away"
        )
    return [_parse(path, number, line, kind, columns) for number, line in enumerate(lines[1:], start=2)]


class MetricsFile:
    """Sink that writes ``metrics.csv`` with records of one class.

    Args:
        path: the file.
        resume_step: step that the run continues from, whose later rows are dropped; 0 starts the file again.
        kind: class of the records.

    Raises:
        DataError: if another process writes the file, or the file has other columns.
    """

    def __init__(
        self, path: str | os.PathLike[str], resume_step: int = 0, kind: type[Record] = StepRecord
    ) -> None:
        self.path = Path(path)
        if self.path.exists():
            try:
                with open_regular(self.path) as old:
                    self._claim(old)
            except OSError as error:
                raise DataError(f"metrics {in_words(error)}; move it away") from None
        kept = [r for r in read(self.path) if r.step <= resume_step] if self.path.exists() else []
        if any(not isinstance(record, kind) for record in kept):
            raise DataError(
                f"{self.path}: it holds the columns {_header(type(kept[0]))}, and this run writes {_header(kind)}; "
                "choose another folder with output_dir, or move the file away"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The new file is written beside the old one and then renamed, so that a kill leaves a complete file.
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.unlink(missing_ok=True)  # removes a link too, so that its target is not written
        with fresh.open("x", encoding="utf-8", newline="") as file:
            file.write(_header(kind) + "\n")
            file.writelines(map(_row, kept))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="")
        self._claim(self._file)

    def _claim(self, file: IO[Any]) -> None:
        """Lock the file, because two processes that write it would lose each other's rows.

        Raises:
            DataError: if another process holds the lock.
        """
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (
                errno.EWOULDBLOCK,
                errno.EACCES,
            ):  # a file system without locks does not stop a run
                raise DataError(
                    f"{self.path}: another engine or run writes it now; give each one an output_dir of its own"
                ) from None

    def write(self, record: Record) -> None:
        """Append one row and flush it to the operating system at once."""
        self._file.write(_row(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file, which contains every row already."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # else a forked data worker keeps the lock
        self._file.close()
