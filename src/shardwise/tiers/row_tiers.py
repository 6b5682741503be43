"""RowTiersPolicy: the tiers of an embedding table whose rows do not all fit in memory, and the rows in its cache. Pure.

    host    a cache of rows, with their optimizer state      tiers/row_cache.py
    disk    all other rows that were ever changed            tiers/row_segments.py

The cache has ``host_rows`` rows of a table over all ranks, or as many as ``host`` bytes hold. A table that is placed by
row has its share of them on each rank; every copy of a table, and every rank that has some of its columns, has all.

Shapes: rows of one table; bytes of a whole line, weights and optimizer state.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from shardwise.base.policy import Policy

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def bytes_of(given: Any) -> Any:
    """Return the number of bytes of a text such as ``4GiB``; other values are returned unchanged.

    Raises:
        ValueError: if the text is no size.
    """
    if not isinstance(given, str):
        return given
    match = _SIZE.fullmatch(given)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{given!r:.80} is no size; give bytes, or a number with KiB, MiB, GiB or TiB: 4GiB")
    return int(float(match[1]) * _UNITS[match[2]])


class RowTiersPolicy(Policy):
    """Tiers of a table that is larger than memory: keys under ``tiers:`` of a table."""

    host: Annotated[PositiveInt, BeforeValidator(bytes_of)] | None = Field(default=None)
    """Bytes of host memory for the table's rows over all ranks, such as ``4GiB``. The index of the rows in memory takes
    about 60 bytes a row beside them.
    """
    host_rows: PositiveInt | None = None
    """The same limit in rows over all ranks."""
    disk: Path | None = None
    """Folder on a local disk for the rows that are not in memory. The files are scratch: a run removes its own at the
    end, and the next run removes those of a dead one. A checkpoint holds all rows.
    """
    hit_rate: float = Field(default=0.95, ge=0, le=1)
    """Share of the distinct rows of a batch that are expected in memory, for the price of a step; ``metrics.csv`` has
    the measured share.
    """
    device: Annotated[PositiveInt, BeforeValidator(bytes_of)] | None = Field(default=None)
    """Bytes of device memory for the table's rows. Refused, because rows in tiers are kept in host memory."""

    @model_validator(mode="after")
    def _are_two_tiers(self) -> Self:
        if self.device is not None:
            raise ValueError(
                "device: rows in tiers are kept in host memory; give host or host_rows, and disk"
            )
        if (self.host is None) == (self.host_rows is None):
            given = "neither" if self.host is None else "both"
            raise ValueError(
                f"{given} of host and host_rows is given; give one of them, the size of the cache"
            )
        if self.disk is None:
            raise ValueError("disk is missing; give the folder for the rows that are not in memory")
        return self

    @property
    def folder(self) -> Path:
        """Folder of the rows that are not in memory."""
        assert self.disk is not None, "validated"
        return self.disk

    def rows_in_memory(self, rows: float | None, line_bytes: int, is_by_row: bool, ranks: int) -> int:
        """Return the number of rows of one table in the cache of a rank that holds any part of the table.

        Args:
            rows: rows of a static table; None if the table is dynamic.
            line_bytes: bytes of a whole row with its optimizer state.
            is_by_row: True if the table's rows are spread over the ranks.
            ranks: number of ranks.
        """
        most = self.host_rows if self.host_rows is not None else max((self.host or 0) // line_bytes, 1)
        cut = ranks if is_by_row else 1
        share = -(-most // cut)
        return share if rows is None else max(min(share, -(-int(rows) // cut)), 1)
