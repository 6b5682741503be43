"""Embedding tables for serving: (key, vector) pairs in plain files, and a reader that needs no engine.

    tables.json            {"format": 1, "step": 500, "tables": {"tables.user": {"file", "rows", "width", "dynamic"}}}
    tables.user.safetensors    "keys" int64 [M], "vectors" [M, D]; rows in any order

    vectors = Vectors("exported")
    vectors.lookup("tables.user", torch.tensor([7, 12]))           # [2, D]

The files are mapped: a lookup reads the pages of its rows alone, and many processes share one copy in memory.

Cost: opening a table sorts its keys once, 8 M bytes of memory beside the map; a lookup is a binary search a key.
Shapes: M rows of a table, D width, n keys.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.models.safetensors import Writer, read_header
from shardwise.plan.errors import CheckpointError, DamagedError, DataError, UsageError
from shardwise.plan.policy import nearest

_INDEX = "tables.json"
_FORMAT = 1
_CARRIERS = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
}


class StoredTable(NamedTuple):
    """One table, as whoever has its rows offers them."""

    name: str
    rows: int
    width: int
    is_dynamic: bool
    parts: Callable[[], Iterator[tuple[int, Tensor, Tensor]]]
    """Stretches of rows, that together are all: (first row, keys [n], vectors [n, D])."""


def write_vectors(
    folder: str | Path, tables: Iterable[StoredTable], step: int, dtype: torch.dtype = torch.float32
) -> Path:
    """Write tables, one stretch of rows in memory at a time."""
    if dtype not in (torch.float32, torch.float16, torch.float64):
        raise UsageError(f"vectors are written as fp64, fp32 or fp16; given {dtype}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    for table in tables:
        file = f"{table.name}.safetensors"
        if Path(file).name != file or table.name.startswith("."):
            raise UsageError(f"table {table.name!r}: its name cannot be a file's; rename the table")
        shapes = {"keys": (table.rows,), "vectors": (table.rows, table.width)}
        with Writer(folder / file, shapes, {"keys": torch.int64, "vectors": dtype}) as writer:
            for first, keys, vectors in table.parts():
                writer.write_part("keys", first, keys)
                writer.write_part("vectors", first * table.width, vectors)
        entries[table.name] = {
            "file": file,
            "rows": table.rows,
            "width": table.width,
            "dynamic": table.is_dynamic,
        }
    temporary = folder / f"{_INDEX}.part"
    content = {"format": _FORMAT, "step": step, "tables": entries}
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / _INDEX)
    return folder


class Vectors:
    """The tables in a folder that :func:`write_vectors` made. Errors: CheckpointError, DamagedError."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            content = json.loads((self.folder / _INDEX).read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"{folder}: no {_INDEX} ({error.strerror}); expected a folder that shardwise convert made of a run"
            ) from None
        except ValueError as error:
            raise DamagedError(f"{self.folder / _INDEX}: not JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise CheckpointError(
                f"{self.folder / _INDEX}: another format; this version reads format {_FORMAT}"
            )
        self.step = int(content["step"])
        """Optimizer steps done when it was saved."""
        self._entries: dict[str, dict[str, Any]] = content["tables"]
        self._open: dict[str, _Table] = {}

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """(rows, width) by name."""
        return {name: (entry["rows"], entry["width"]) for name, entry in self._entries.items()}

    def lookup(self, table: str, keys: Tensor) -> Tensor:
        """Vectors of keys: int64 [n] -> [n, D]. A key that a dynamic table has not reads zeros, as in training.

        Errors: UsageError for an unknown table, DataError for a key outside a static one.
        """
        if table not in self._entries:
            raise UsageError(f"{self.folder}: there is no table {table!r}{nearest(table, self._entries)}")
        if table not in self._open:
            self._open[table] = self._map(table)
        vectors, sorted_keys, order = self._open[table]
        asked = keys.detach().cpu().reshape(-1).numpy()
        places = np.searchsorted(sorted_keys, asked)
        found = np.zeros(asked.size, bool)
        if sorted_keys.size:
            places = np.minimum(places, sorted_keys.size - 1)
            found = sorted_keys[places] == asked
        if not found.all() and not self._entries[table]["dynamic"]:
            key = int(asked[~found][0])
            raise DataError(f"table {table!r}: key {key} of a table with keys 0 to {sorted_keys.size - 1}")
        rows = np.zeros((asked.size, vectors.shape[1]), vectors.dtype)
        rows[found] = vectors[order[places[found]]]
        return torch.from_numpy(rows).view(*keys.shape, vectors.shape[1])

    def _map(self, table: str) -> "_Table":
        file = self.folder / str(self._entries[table]["file"])
        if file.parent != self.folder:
            raise DamagedError(f"{self.folder / _INDEX}: table {table!r} names a file outside the folder")
        header = read_header(file)
        keys, vectors = header["keys"], header["vectors"]

        def mapped(stored: Any) -> np.ndarray:
            if stored.elements == 0:
                return np.zeros(stored.shape, _CARRIERS[stored.dtype])
            return np.memmap(file, _CARRIERS[stored.dtype], "r", stored.offset, stored.shape)

        found = mapped(keys)
        order = np.argsort(found, kind="stable")
        return _Table(mapped(vectors), found[order], order)


class _Table(NamedTuple):
    vectors: np.ndarray
    sorted_keys: np.ndarray
    order: np.ndarray
