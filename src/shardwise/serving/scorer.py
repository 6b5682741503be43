"""Scorer: the logits of a trained click-through model, without an engine.

    shardwise convert runs/clicks served                                 # vectors of the tables, and the dense part

    scorer = shardwise.Scorer("served")
    logits = scorer.score({"dense": numbers, "sparse": {"user": Ragged.of_ones(keys), ...}})       # [B]

The model is the trained one with each collection of tables replaced by a reader of vectors (collection.py). Keys that a
dynamic table does not have read zeros, as in ``engine.predict``; keys outside of a static table are treated as its
``out_of_range`` says. Nothing of torch.distributed is started and there is no optimizer.

Vectors lie in mapped files: processes that open one folder share their pages. Beside the maps each process holds the
dense part, 16 bytes for each row of the tables that were looked up, and at most ``cache_bytes`` of hot rows
(hot_rows.py).

Several threads may call ``score``, ``apply`` and ``refresh`` of one Scorer. A request is computed with the vectors and
the dense part of one step: ``apply`` and ``refresh`` put the new step together beside the one in use (rows, hot rows
and dense part), and then replace one reference. A scorer of a folder that a running job exports to (``export.every``)
follows the job:

    while True:                                                           # in a thread beside those of requests
        scorer.refresh()
        time.sleep(1)

Cost:   a lookup in memory for each hot key, a binary search for each other one, and one forward pass of the dense part.
        An increment is read, joined to the changed rows before it, and costs a copy of the hot rows and a new model;
        the sorted keys of the files are kept.
Shapes: B samples, F features, N dense features.
"""

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import CheckpointError, DataError, MismatchError, UsageError
from shardwise.base.policy import nearest
from shardwise.base.ragged import Ragged
from shardwise.checkpoint import StepSummary, describe
from shardwise.checkpoint.steps import steps_at
from shardwise.engine.parts.inputs import apply, cast_inputs
from shardwise.models.ctr.model import ClickModel
from shardwise.models.dense_part import DensePart
from shardwise.models.vectors import Vectors
from shardwise.parallel.embedding.ahead import are_features
from shardwise.parallel.embedding.collection import EmbeddingCollection, collections_of
from shardwise.serving.collection import ServedCollection
from shardwise.serving.dense_model import built_in, dtype_of, fill
from shardwise.serving.export import export_step

_CACHE_BYTES = 64 << 20
_INDEX = "tables.json"


class _ServedModel(NamedTuple):
    """A model with the vectors and the dense part of one step."""

    vectors: Vectors
    """The reader of the vectors, which stays at this step."""
    source: tuple[str, float]
    """The file that says which step of a run is the newest, and the time of its last change."""
    model: nn.Module
    collections: list[ServedCollection]
    dtype: torch.dtype


class Scorer:
    """The logits of a trained click-through model, without an engine.

    Args:
        folder: A folder that ``shardwise convert`` made of a run with embedding tables, or that a running job exports
            to; or a run, its checkpoints or one step, whose vectors are then first written into temporary files.
        model: For a model that is not one of the built-in ones: a function that builds it, as it was built for the
            training; each step that is opened calls it again.
        cache_bytes: Most bytes of memory for vectors that are asked for often.

    Raises:
        CheckpointError: if the folder holds neither vectors nor a checkpoint.
        DamagedError: if a file is missing, short or damaged.
        MismatchError: if the model's parameters or tables are not those of the folder.
        UsageError: if the folder holds a model of your own and ``model`` is not given, or holds no dense part.

    Example:
        >>> scorer = Scorer("served")
        >>> logits = scorer.score({"dense": torch.zeros(2, 3), "sparse": {"user": Ragged.of_ones(keys)}})    # [2]
    """

    def __init__(
        self,
        folder: str | Path,
        model: Callable[[], nn.Module] | None = None,
        *,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self.folder = Path(folder)
        self._build = model
        self._cache_bytes = cache_bytes
        self._refreshing = threading.Lock()
        self._follows_folder = (self.folder / _INDEX).is_file()
        self._served = self._open()

    def score(self, batch: Any) -> Tensor:
        """Return the logits of a batch: [B].

        Args:
            batch: What the model takes: for the built-in models ``{"dense": [B, N], "sparse": {name: Ragged}}``, or
                ``{name: Ragged}`` alone if the model has no dense features. Labels may be left out.

        Raises:
            DataError: if a feature is missing or does not fit, or a key lies outside its static table.
            UsageError: if the model returns no logits.
        """
        served = self._served
        with torch.inference_mode():
            given = cast_inputs(_whole(batch, served.model), torch.device("cpu"), served.dtype)
            return _logits_in(apply(served.model, given))

    def vectors(self, features: Mapping[str, Ragged]) -> Tensor:
        """Return the vectors that a built-in model computes from, in the order of its features: [B, F, W].

        They are the second input of the program that ``shardwise convert RUN dense.onnx`` writes (programs.py).

        Args:
            features: The keys of each feature.

        Raises:
            DataError: if a feature is missing or does not fit, or a key lies outside its static table.
            UsageError: if the model is not one of the built-in ones.
        """
        model = self._served.model
        if not isinstance(model, ClickModel):
            raise UsageError(
                f"Scorer.vectors: the built-in click-through models compute from one tensor of vectors; {self.folder} "
                f"holds a {type(model).__name__}. Read its vectors with shardwise.Vectors"
            )
        with torch.inference_mode():
            return model.vectors(features)

    def apply(self, increment: str | Path) -> None:
        """Go on to the step of an increment: its rows and its dense part.

        Requests that run meanwhile, in other threads, are computed with the step before, and later ones with the new
        step.

        Args:
            increment: A folder that ``shardwise convert --since`` or ``export.every`` wrote.

        Raises:
            MismatchError: if the increment is of another run or another model, applied already, or out of order; the
                step before stays in use.
            DamagedError: if a file of the increment changed after it was written; the step before stays in use.
            CheckpointError: if the folder is no increment.
            UsageError: if the increment has no dense part, because an earlier version wrote it.
        """
        with self._refreshing:
            served = self._served
            vectors = served.vectors.at_this_step()
            vectors.apply(increment)
            self._served = self._made(vectors, served.source, served)

    def refresh(self) -> bool:
        """Go on to the newest step in the folder, and return True if it is another one than before.

        Increments that a running job wrote since are applied one after another; a step that was exported anew is
        opened. Requests that run meanwhile, in other threads, are computed with the step before. Without news this
        method looks at one small file and a folder.

        Raises:
            CheckpointError: as the constructor and ``apply``; the step before stays in use.
            UsageError: as the constructor and ``apply``; the step before stays in use.
        """
        with self._refreshing:
            served = self._served
            if not self._follows_folder:
                if _newest_file(self.folder) == served.source:
                    return False
                self._served = self._open()
                return True
            vectors = served.vectors.at_this_step()
            if not vectors.refresh():
                return False
            self._served = self._made(vectors, served.source, served)
            return True

    @property
    def step(self) -> int:
        """The number of optimizer steps done when the vectors and the dense part were written."""
        return self._served.vectors.step

    @property
    def cached_bytes(self) -> int:
        """Bytes of memory that hot rows take in this process."""
        return sum(hot.nbytes for each in self._served.collections for hot in each.hot)

    @property
    def hit_rate(self) -> float:
        """Share of the keys so far whose vectors were hot rows; NaN before the first key."""
        hot = [each for collection in self._served.collections for each in collection.hot]
        hits, misses = sum(each.hits for each in hot), sum(each.misses for each in hot)
        return hits / (hits + misses) if hits + misses else float("nan")

    def _open(self) -> _ServedModel:
        """Open the newest step and build its model."""
        source = _newest_file(self.folder)
        if self._follows_folder:
            vectors = Vectors(self.folder)
        else:
            step = _newest_step(self.folder)
            with tempfile.TemporaryDirectory(prefix="shardwise-") as place:
                export_step(step.path, Path(place))
                vectors = Vectors(place)  # its maps stay readable after the files are removed
        return self._made(vectors, source)

    def _made(
        self, vectors: Vectors, source: tuple[str, float], before: _ServedModel | None = None
    ) -> _ServedModel:
        """Build the model of the step of ``vectors``.

        Args:
            vectors: The reader of the vectors, which nobody else moves on.
            source: The file that says which step is the newest.
            before: The model in use, whose hot rows are taken over if the files are the same.
        """
        dense = vectors.dense
        if dense is None:
            raise UsageError(
                f"{self.folder}: holds vectors of step {vectors.step} without the dense part of a model (an export or "
                "an increment of an earlier version); export again with shardwise convert, or by export.every"
            )
        if dense.about.get("step") not in (None, vectors.step):
            raise UsageError(
                f"{self.folder}: its vectors are of step {vectors.step}, and its dense part is of step "
                f"{dense.about['step']}; a Scorer reads both of one step: export the run again with shardwise convert"
            )
        model = self._built(dense)
        if before is not None and not _with_state(before.model).isdisjoint(_with_state(model)):
            raise UsageError(
                "Scorer: the function given as model= returned modules that it returned before, which requests use; "
                "build a new model in each call"
            )
        dtype = dtype_of(dense)
        model = model.to(dtype)
        collections = self._replace(model, vectors, dtype)
        fill(model, dense.tensors, self.folder)
        if before is not None and vectors.continues(before.vectors) and dtype == before.dtype:
            for mine, theirs in zip(collections, before.collections, strict=True):
                mine.take_over(theirs, vectors.write_changes)
        return _ServedModel(vectors, source, model.eval().requires_grad_(False), collections, dtype)

    def _built(self, dense: DensePart) -> nn.Module:
        """Build the model, without its weights."""
        if self._build is None:
            return built_in(
                dense, self.folder, "give the function that builds it: Scorer(folder, model=build)"
            )
        model = self._build()
        if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
            raise UsageError("Scorer: the model was built on meta; build it on the CPU, with its own buffers")
        return model

    def _replace(self, model: nn.Module, vectors: Vectors, dtype: torch.dtype) -> list[ServedCollection]:
        """Put readers of vectors in the place of the model's collections, and return them."""
        found = collections_of(model)
        if not found:
            raise MismatchError(
                f"{self.folder}: the model has no EmbeddingCollection", "Give the model that was trained"
            )
        total = sum(len(each.tables) for each in found.values())
        made = []
        for name, collection in found.items():
            _check_tables(self.folder, name, collection, vectors)
            most = self._cache_bytes * len(collection.tables) // total
            made.append(ServedCollection(collection, name, dtype, vectors.lookup_tables, most))
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, made[-1])
        return made


def _with_state(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a model that have parameters, buffers or tables of their own."""
    return {
        each
        for each in model.modules()
        if isinstance(each, EmbeddingCollection)
        or next(each.parameters(recurse=False), None) is not None
        or next(each.buffers(recurse=False), None) is not None
    }


def _newest_file(folder: Path) -> tuple[str, float]:
    """Return the file or folder whose change says that there is another step, and the time of its last change."""
    steps = None if (folder / _INDEX).is_file() or not folder.is_dir() else steps_at(folder)
    place = folder / _INDEX if steps is None else steps
    try:
        found = place.stat()
    except OSError:
        return str(place), -1
    return f"{place}:{found.st_ino}", found.st_mtime_ns


def _newest_step(folder: Path) -> StepSummary:
    """Return the newest step that opens.

    Raises:
        CheckpointError: if there is none.
    """
    place = steps_at(folder) if folder.is_dir() else None
    if place is None:
        what = "holds neither" if folder.is_dir() else "is no folder; expected one with"
        raise CheckpointError(
            f"{folder}: {what} {_INDEX}, which shardwise convert writes, nor the steps of a run with embedding tables"
        )
    found = describe(place, check=False)
    steps = (found,) if isinstance(found, StepSummary) else found.steps
    for step in steps:
        if not step.problem:
            return step
    raise CheckpointError(f"{folder}: none of its {len(steps)} steps opens; the newest: {steps[0].problem}")


def _check_tables(folder: Path, name: str, collection: EmbeddingCollection, vectors: Vectors) -> None:
    """Check that the folder has the tables of a collection, in their width; raise MismatchError if not."""
    there = vectors.tables
    for table in collection.tables:
        full = f"{name}.{table.name}" if name else table.name
        if full not in there:
            raise MismatchError(
                f"{folder}: the model has a table {full!r}, which is not there{nearest(full, there)}",
                "Give the model that was trained",
            )
        rows, width = there[full]
        if width != table.width or table.rows not in (None, rows):
            raise MismatchError(
                f"{folder}: table {full!r} is {rows} x {width} there and {table.rows or 'dynamic'} x {table.width} in "
                "the model",
                "Give the model that was trained",
            )


def _whole(batch: Any, model: nn.Module) -> Any:
    """Return a batch with an empty ``dense``, if it is features alone and the model is a built-in one.

    Raises:
        DataError: if the batch is not what a built-in model takes.
    """
    if not isinstance(model, ClickModel):
        return batch
    if not are_features(batch):
        if isinstance(batch, Mapping) and not {"dense", "sparse"} <= batch.keys():
            raise DataError(
                f"score: the batch has {', '.join(map(str, batch)) or 'nothing'}; expected dense and sparse, or "
                "features by name for a model without dense features"
            )
        if isinstance(batch, str | bytes | int | float | None):
            raise DataError(
                f"score: the batch is a {type(batch).__name__}; expected a dictionary of tensors and features"
            )
        return batch
    samples = next(iter(batch.values())).samples
    return {"dense": torch.zeros(samples, 0), "sparse": batch}


def _logits_in(output: Any) -> Tensor:
    """Return the logits in a model's output, or the output itself if it is a tensor.

    Raises:
        UsageError: if there are none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() == 0:
        raise UsageError(
            f"the model returned a {type(output).__name__} without logits; to be scored it returns a tensor of logits, "
            'or {"logits": ...}'
        )
    return logits
