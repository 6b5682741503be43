"""Builds training and validation clicks from ``data:``, and one packed file from files of any kind.

packed clicks      mapped without conversion
Criteo, CSV,
Parquet            converted once into the cache folder; the name contains a hash of paths, sizes, times and of the
                   options that decide the content, so that changed files are converted anew. One rank of a host works,
                   the others wait.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from shardwise.base.errors import DataError
from shardwise.base.regular_files import expanded, open_regular
from shardwise.data.clicks.criteo import is_criteo_line, read_criteo, whole_lines
from shardwise.data.clicks.csv_text import csv_schema, read_csv, separator_of
from shardwise.data.clicks.malformed import MalformedRows
from shardwise.data.clicks.packed import SUFFIX, KeyType, PackedClicks, PackedWriter, is_packed
from shardwise.data.clicks.parquet import MAGIC as PARQUET
from shardwise.data.clicks.parquet import parquet_schema, read_parquet
from shardwise.data.clicks.policy import SYNTHETIC, ClickPolicy
from shardwise.data.clicks.rows import CRITEO, BatchForm, ClickRows, ClickSchema, SparseFeature
from shardwise.data.clicks.source import ClickDataset
from shardwise.data.clicks.synthetic import SyntheticClicks, TeacherScores
from shardwise.data.text import Progress, find_files, locked
from shardwise.observe.auc import ClickMetrics, ClickScore

_log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1 << 15
_STEM_LETTERS = 50
"""Characters of a source's name that the name of its cached file keeps: with the rest it fits into 255 bytes in any
script.
"""


@dataclass(frozen=True)
class ClickCorpus:
    """Training clicks and validation clicks of a run."""

    train: ClickDataset
    """Rows to learn from."""
    validation: ClickDataset
    """Rows to be evaluated on."""
    skipped: int = 0
    """Number of malformed rows that were left out."""

    @property
    def schema(self) -> ClickSchema:
        """Columns of both parts."""
        return self.train.schema

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of the features whose keys are known to lie below a number.

        Empty if keys are hashed or come from files.
        """
        source = self.train.source
        if not isinstance(source, SyntheticClicks) or source.keys == "hashed":
            return {}
        return dict(zip((feature.name for feature in self.schema.features), source.table_rows, strict=True))

    @property
    def best(self) -> TeacherScores | None:
        """Best score that any model can have; None if it is unknown."""
        source = self.train.source
        return source.best if isinstance(source, SyntheticClicks) else None

    def best_on_validation(self, samples: int | None = None) -> ClickScore | None:
        """Return the teacher's score on the held-out rows, or on those that an evaluation of ``samples`` rows uses.

        The labels of these rows are drawn, which changes every model's AUC alike (by 0.001 at 200,000 rows).

        Args:
            samples: rows of an evaluation; None takes all.

        Returns:
            The score; None without a teacher.
        """
        source, held_out = self.validation.source, len(self.validation)
        if not isinstance(source, SyntheticClicks):
            return None
        metrics = ClickMetrics()
        size = min(samples or held_out, held_out)
        chosen = self.validation.start + np.arange(size) * held_out // size
        for start in range(0, size, _ROWS_AT_ONCE):
            at = chosen[start : start + _ROWS_AT_ONCE]
            metrics.add(torch.from_numpy(source.logits(at)), torch.from_numpy(source.rows(at).labels))
        return metrics.result()

    def fingerprint(self) -> str:
        """Return a digest that is equal on two ranks that read the same clicks."""
        return self.train.fingerprint()


class ClickColumns(NamedTuple):
    """Columns of a click log, known without its rows."""

    schema: ClickSchema
    table_rows: dict[str, int]
    """Rows of the features whose keys are known to lie below a number."""


def columns_of(policy: ClickPolicy) -> ClickColumns:
    """Return the columns of the clicks that the policy names, by the keys of ``data:`` or the head of the first file.

    Raises:
        DataError: if the first file cannot be read, or its columns do not follow from its head.
    """
    if policy.source == SYNTHETIC:
        corpus = _synthetic(policy, BatchForm())
        return ClickColumns(corpus.schema, corpus.table_rows)
    first = _files([policy.source] if isinstance(policy.source, str) else policy.source, policy.pattern)[0]
    kind = _kind(first, policy.separator)
    return ClickColumns(
        _schema_of(first, kind, _named(policy), policy.label, policy.separator, tells=False), {}
    )


def _named(policy: ClickPolicy) -> ClickSchema | None:
    """Return the columns that the policy names; None if it leaves them to the types of a file."""
    if policy.dense is None or policy.sparse is None:
        return None
    return ClickSchema(tuple(policy.dense), tuple(SparseFeature(name) for name in policy.sparse))


def build_clicks(policy: ClickPolicy, cache: Path, progress: Progress | None = None) -> ClickCorpus:
    """Open the clicks that the policy names, and convert them if needed.

    Args:
        policy: the policy.
        cache: folder for converted files, unless the policy names a folder.
        progress: called with (bytes converted, bytes in all).

    Raises:
        DataError: if files cannot be read, or if validation has other columns than training.
    """
    form = BatchForm(policy.dense_transform, policy.missing_key)
    if policy.source == SYNTHETIC:
        return _synthetic(policy, form)
    cache = cache if policy.cache is None else expanded(policy.cache)
    train = _open(policy.source, policy, cache, progress)
    if isinstance(policy.validation, float):
        return ClickCorpus(*ClickDataset(train, form=form).split(policy.validation), train.skipped)
    held_out = _open(policy.validation, policy, cache, progress)
    if held_out.schema != train.schema:
        raise DataError(
            f"data.validation {held_out.path} has other columns than data.source {train.path}: "
            f"{_columns(held_out.schema)} instead of {_columns(train.schema)}"
        )
    skipped = train.skipped + held_out.skipped
    return ClickCorpus(ClickDataset(train, form=form), ClickDataset(held_out, form=form), skipped)


def _synthetic(policy: ClickPolicy, form: BatchForm) -> ClickCorpus:
    given = policy.synthetic
    clicks = SyntheticClicks(
        given.samples + given.validation_samples,
        given.table_rows,
        dense=given.dense,
        exponent=given.exponent,
        keys=given.keys,
        fresh=given.fresh,
        click_rate=given.click_rate,
        seed=given.seed,
    )
    cut = given.samples
    return ClickCorpus(ClickDataset(clicks, 0, cut, form), ClickDataset(clicks, cut, len(clicks), form))


def convert_clicks(
    sources: str | Iterable[str],
    out: str | Path,
    *,
    pattern: str = "*",
    schema: ClickSchema | None = None,
    label: str = "label",
    malformed_limit: int = 0,
    separator: str | None = None,
    progress: Progress | None = None,
) -> PackedClicks:
    """Convert click logs, one after the other in the given order, to the packed file ``out``.

    Args:
        sources: files and folders; files of a folder are read in the order of their names.
        out: path of the packed file.
        pattern: glob for the files of a folder.
        schema: columns of Parquet and CSV files; None lets the types of the first file decide, and refuses columns
            whose types do not.
        label: column of the label.
        malformed_limit: rows that may be left out.
        separator: character between the fields of text with a header, for files whose names do not end in .csv or .tsv.
        progress: called with (bytes converted, bytes in all).

    Raises:
        DataError: if ``out`` exists and holds no packed clicks, if files differ in their columns, or if files cannot be
            read.
    """
    out = Path(out)
    if out.is_dir():
        raise DataError(
            f"{out} is a folder; expected the path of the file to write, such as {out / 'day'}{SUFFIX}"
        )
    if out.exists() and not is_packed(out):
        raise DataError(
            f"{out} exists and is not a file of packed clicks; it is not overwritten, give another path"
        )
    files = _files([sources] if isinstance(sources, str) else list(sources), pattern)
    return _convert(files, out, schema, label, separator, MalformedRows(malformed_limit), progress)


def _convert(
    files: list[Path],
    out: Path,
    schema: ClickSchema | None,
    label: str,
    separator: str | None,
    malformed: MalformedRows,
    progress: Progress | None,
) -> PackedClicks:
    kinds = {file: _kind(file, separator) for file in files}
    schemas = {
        file: _schema_of(file, kinds[file], schema, label, separator, tells=file == files[0])
        for file in files
    }
    first = schemas[files[0]]
    for file, found in schemas.items():
        if found != first:
            raise DataError(
                f"{file} has other columns than {files[0]}: {_columns(found)} instead of {_columns(first)}"
            )
    key_type: KeyType = "u32" if set(kinds.values()) == {"criteo"} else "i64"
    total, done = sum(file.stat().st_size for file in files), 0

    def advance(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(min(done, total), total)

    with PackedWriter(out, first, key_type) as writer:
        for file in files:
            for rows in _read(file, kinds[file], first, label, separator, malformed, advance):
                writer.append(rows)
        writer.skipped = malformed.count
    return PackedClicks(out)


def _read(
    file: Path,
    kind: str,
    schema: ClickSchema,
    label: str,
    separator: str | None,
    malformed: MalformedRows,
    advance: Callable[[int], None],
) -> Iterator[ClickRows]:
    if kind == "criteo":
        yield from read_criteo(file, malformed, advance)
    elif kind == "parquet":
        yield from read_parquet(file, schema, malformed, label, advance)
    elif kind == "csv":
        yield from read_csv(file, separator_of(file, separator) or ",", schema, malformed, label, advance)
    else:
        packed = PackedClicks(file)
        for start in range(0, len(packed), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(packed))
            yield packed.rows(np.arange(start, stop))
            advance((stop - start) * file.stat().st_size // len(packed))


def _schema_of(
    file: Path, kind: str, schema: ClickSchema | None, label: str, separator: str | None, tells: bool
) -> ClickSchema:
    if kind == "criteo":
        return CRITEO
    if kind == "packed":
        return PackedClicks(file).schema
    if kind == "csv":
        return csv_schema(file, separator_of(file, separator) or ",", label, schema, tells)
    return parquet_schema(file, label, schema, tells)


def _kind(file: Path, separator: str | None = None) -> str:
    with open_regular(file) as opened:
        head = opened.read(4)
    if head == PARQUET:
        return "parquet"
    if is_packed(file) or file.suffix == SUFFIX:
        return "packed"
    if separator_of(file, separator) is None:
        return "criteo"
    # Criteo's text has no header, so a first line of Criteo's fields decides even in a file called .csv or .tsv.
    return "criteo" if separator is None and is_criteo_line(next(whole_lines(file), b"")) else "csv"


def _files(sources: list[str], pattern: str) -> list[Path]:
    """Return the files of all sources; those of a folder in the order of their names, which is that of the days."""
    return [path for source in sources for path in sorted(find_files(source, pattern).paths)]


def _columns(schema: ClickSchema) -> str:
    return f"{len(schema.dense)} numbers and {len(schema.features)} features"


def _open(
    source: str | list[str], policy: ClickPolicy, cache: Path, progress: Progress | None
) -> PackedClicks:
    files = _files([source] if isinstance(source, str) else source, policy.pattern)
    if len(files) == 1 and _kind(files[0]) == "packed":
        return PackedClicks(files[0])
    schema = _named(policy)
    decisive = (schema, policy.label, policy.malformed_limit, policy.separator)
    digest = hashlib.sha256(repr(decisive).encode())
    for file in files:
        state = file.stat()
        digest.update(os.fsencode(file.resolve()) + f"\0{state.st_size} {state.st_mtime_ns}\n".encode())
    out = cache / f"{files[0].stem[:_STEM_LETTERS]}-{digest.hexdigest()[:16]}{SUFFIX}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cache folder {cache} cannot be made ({error.strerror}); set data.cache") from error
    with locked(cache) as is_locked:
        found = _opened(out)
        if found is None:
            if is_locked:
                for leftover in cache.glob(f".{out.name}.*.tmp"):  # left by a process that was killed
                    leftover.unlink(missing_ok=True)
            malformed = MalformedRows(policy.malformed_limit)
            found = _convert(files, out, schema, policy.label, policy.separator, malformed, progress)
    if schema is None and found.schema != CRITEO and _kind(files[0], policy.separator) != "packed":
        _log.info("data: taken from %s: %s", files[0].name, _assigned(found.schema, policy.label))
    return found


def _assigned(schema: ClickSchema, label: str) -> str:
    """Return a line that lists the use of the columns, as it followed from types."""
    keys = ", ".join(feature.name + (" (lists)" if feature.many else "") for feature in schema.features)
    return (
        f"label {label}; numbers {', '.join(schema.dense) or 'none'}; keys {keys or 'none'}. Types decided that; "
        "data.dense and data.sparse name the columns otherwise"
    )


def _opened(path: Path) -> PackedClicks | None:
    """Open a cached file, or return None if it is missing or cut short and must be made again."""
    if not path.exists():
        return None
    try:
        return PackedClicks(path)
    except DataError:
        return None
