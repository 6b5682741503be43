"""From ``data:`` to clicks to learn from and to be evaluated on; from files of any kind to one packed file.

packed clicks      mapped as they are
Criteo, CSV,
Parquet            converted once into the cache folder; the name carries a hash of paths, sizes, times and of what
                   decides the content, so that changed files are converted anew. One rank of a host works, the
                   others wait.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shardwise.data.clicks.criteo import is_criteo_line, read_criteo, whole_lines
from shardwise.data.clicks.csv_text import csv_schema, read_csv, separator_of
from shardwise.data.clicks.malformed import Malformed
from shardwise.data.clicks.packed import SUFFIX, KeyType, PackedClicks, PackedWriter, is_packed
from shardwise.data.clicks.parquet import MAGIC as PARQUET
from shardwise.data.clicks.parquet import parquet_schema, read_parquet
from shardwise.data.clicks.policy import SYNTHETIC, ClickPolicy
from shardwise.data.clicks.rows import CRITEO, BatchForm, ClickRows, Schema, SparseFeature
from shardwise.data.clicks.source import Clicks
from shardwise.data.clicks.synthetic import Best, SyntheticClicks
from shardwise.data.text import Progress, find_files, locked
from shardwise.observe.auc import ClickMetrics, ClickScore
from shardwise.plan.errors import DataError
from shardwise.plan.regular_files import expanded, open_regular

_log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1 << 15
_STEM_LETTERS = 50
"""Of a source's name that its cached file keeps: what is added to it fits a name of 255 bytes in any letters."""


@dataclass(frozen=True)
class ClickCorpus:
    """What a click-through model learns from and what it is evaluated on."""

    train: Clicks
    validation: Clicks
    skipped: int = 0
    """Malformed rows that were left out."""

    @property
    def schema(self) -> Schema:
        """The columns of both."""
        return self.train.schema

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of the features whose keys are known to lie below a number; none where keys are hashed or from files."""
        source = self.train.source
        if not isinstance(source, SyntheticClicks) or source.keys == "hashed":
            return {}
        return dict(zip((feature.name for feature in self.schema.features), source.table_rows, strict=True))

    @property
    def best(self) -> Best | None:
        """The best score that any model can have; None where nobody knows it."""
        source = self.train.source
        return source.best if isinstance(source, SyntheticClicks) else None

    def best_on_validation(self, samples: int | None = None) -> ClickScore | None:
        """What the teacher scores on the very rows held out, or on those that an evaluation of ``samples`` takes: their
        labels are drawn, which moves every model's AUC alike (by 0.001 at 200,000 rows). None without a teacher."""
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
        """Equal on two ranks that read the same clicks."""
        return self.train.fingerprint()


def build_clicks(policy: ClickPolicy, cache: Path, progress: Progress | None = None) -> ClickCorpus:
    """Open, and where needed convert, what the policy names. ``cache`` is used unless the policy names a folder."""
    form = BatchForm(policy.dense_transform, policy.missing_key)
    if policy.source == SYNTHETIC:
        return _synthetic(policy, form)
    cache = cache if policy.cache is None else expanded(policy.cache)
    train = _open(policy.source, policy, cache, progress)
    if isinstance(policy.validation, float):
        return ClickCorpus(*Clicks(train, form=form).split(policy.validation), train.skipped)
    held_out = _open(policy.validation, policy, cache, progress)
    if held_out.schema != train.schema:
        raise DataError(
            f"data.validation {held_out.path} has other columns than data.source {train.path}: "
            f"{_columns(held_out.schema)} instead of {_columns(train.schema)}"
        )
    skipped = train.skipped + held_out.skipped
    return ClickCorpus(Clicks(train, form=form), Clicks(held_out, form=form), skipped)


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
    return ClickCorpus(Clicks(clicks, 0, cut, form), Clicks(clicks, cut, len(clicks), form))


def convert_clicks(
    sources: str | Iterable[str],
    out: str | Path,
    *,
    pattern: str = "*",
    schema: Schema | None = None,
    label: str = "label",
    malformed_limit: int = 0,
    separator: str | None = None,
    progress: Progress | None = None,
) -> PackedClicks:
    """Click logs, one behind the other in the order given (files of a folder by name), as the packed file ``out``.

    ``schema`` names the columns of Parquet and CSV files; left out, the first file decides by types, and what they do
    not decide is refused. ``separator``: of text with a header, where a file's name does not end in .csv or .tsv.
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
    return _convert(files, out, schema, label, separator, Malformed(malformed_limit), progress)


def _convert(
    files: list[Path],
    out: Path,
    schema: Schema | None,
    label: str,
    separator: str | None,
    malformed: Malformed,
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
    schema: Schema,
    label: str,
    separator: str | None,
    malformed: Malformed,
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
    file: Path, kind: str, schema: Schema | None, label: str, separator: str | None, tells: bool
) -> Schema:
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
    # Criteo's text has no header, whatever its files are called.
    return "criteo" if separator is None and is_criteo_line(next(whole_lines(file), b"")) else "csv"


def _files(sources: list[str], pattern: str) -> list[Path]:
    """The files of all sources; those of a folder in the order of their names, which is that of the days."""
    return [path for source in sources for path in sorted(find_files(source, pattern).paths)]


def _columns(schema: Schema) -> str:
    return f"{len(schema.dense)} numbers and {len(schema.features)} features"


def _open(
    source: str | list[str], policy: ClickPolicy, cache: Path, progress: Progress | None
) -> PackedClicks:
    files = _files([source] if isinstance(source, str) else source, policy.pattern)
    if len(files) == 1 and _kind(files[0]) == "packed":
        return PackedClicks(files[0])
    schema = None
    if policy.dense is not None and policy.sparse is not None:
        schema = Schema(tuple(policy.dense), tuple(SparseFeature(name) for name in policy.sparse))
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
                for leftover in cache.glob(
                    f".{out.name}.*.tmp"
                ):  # of a process that was killed while it wrote
                    leftover.unlink(missing_ok=True)
            malformed = Malformed(policy.malformed_limit)
            found = _convert(files, out, schema, policy.label, policy.separator, malformed, progress)
    if schema is None and found.schema != CRITEO and _kind(files[0], policy.separator) != "packed":
        _log.info("data: taken from %s: %s", files[0].name, _assigned(found.schema, policy.label))
    return found


def _assigned(schema: Schema, label: str) -> str:
    """Which column is what, as it followed from types."""
    keys = ", ".join(feature.name + (" (lists)" if feature.many else "") for feature in schema.features)
    return (
        f"label {label}; numbers {', '.join(schema.dense) or 'none'}; keys {keys or 'none'}. Types decided that; "
        "data.dense and data.sparse name the columns otherwise"
    )


def _opened(path: Path) -> PackedClicks | None:
    """A cached file, or None where it is missing or cut short: then it is made again."""
    if not path.exists():
        return None
    try:
        return PackedClicks(path)
    except DataError:
        return None
