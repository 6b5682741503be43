"""Rows as Criteo's, made on the spot: some numbers and categories missing, numbers below zero, rare keys."""

import os
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.clicks import ClickBatch, ClickPolicy, build_clicks
from shardwise.data.clicks.rows import ClickSchema


def criteo_text(rows: int, seed: int = 0) -> str:
    """Tab-separated lines: label, 13 integers, 26 categories of eight hexadecimal digits."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        numbers = np.floor(np.exp(rng.normal(1.5, 1.5, 13))).astype(int) - 2
        keys = (rng.zipf(1.3, 26) % 5000) * 2654435761 % 2**32
        cells = ["" if rng.random() < 0.1 else str(number) for number in numbers]
        cells += ["" if rng.random() < 0.05 else f"{key:08x}" for key in keys]
        lines.append("\t".join([str(int(rng.random() < 0.25)), *cells]))
    return "\n".join(lines) + "\n"


def criteo_file(kind: str, folder: Path) -> Path:
    """Made rows, or the file that SHARDWISE_CRITEO names."""
    if kind == "made":
        path = folder / "made.tsv"
        path.write_text(criteo_text(400))
        return path
    named = os.environ.get("SHARDWISE_CRITEO")
    if named is None or not Path(named).is_file():
        pytest.skip("SHARDWISE_CRITEO names no file of Criteo rows")
    return Path(named)


def criteo_batches(
    path: Path, cache: Path, size: int, limit: int = 50
) -> tuple[ClickSchema, list[ClickBatch]]:
    """The rows in batches of ``size``, as many as there are whole ones, at most ``limit``."""
    train = build_clicks(ClickPolicy(source=str(path), validation=0.01), cache).train
    count = min(len(train) // size, limit)
    return train.schema, [train.batch(np.arange(i * size, (i + 1) * size)) for i in range(count)]
