"""The form of a table in a checkpoint: whole rows ordered by (bucket, key), for any number of ranks and any placement.

    rows     | bucket 0 | bucket 1 | ... | bucket 1023 |        within a bucket by key
    writers  | rank 0          | rank 1 ...            |        neighbouring buckets, so that a writer has one stretch

    data_parallel   each rank writes its stretch of the copy, without an exchange
    table           the owner writes all rows
    row             rows go to the writers of their buckets
    column          columns go to the writers of their buckets, which join them to rows

A rank that loads reads the stretches of the buckets that it is to hold. Keys of a static table follow from the
positions of its rows, so that keys are not stored.

Cost:   once the bytes of the rank's rows over the link for row and column, none for the others.
Shapes: n rows on this rank, M rows of the table over all ranks, N ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.exchange import Counts, gather, send, share
from shardwise.kernels.tables.index_snapshot import IndexSnapshot
from shardwise.parallel.embedding.layout import BUCKETS, TablePlacement, buckets_of, columns_of, writer_of
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.parallel.embedding.rules import ONE_A_ROW

Range = tuple[int, int]
"""Rows [start, stop) in the order of (bucket, key)."""


KEY, SCORE, PAIR = "key", "score", "pair"
"""Kinds of numbers of a row beside those of its line: its key, its score, and both."""
READ_ROWS = 1 << 14
"""Rows of which a save reads the lines at once."""


class SavedRowRange(NamedTuple):
    """Rows of a table that one rank writes."""

    rows: KeyedRows
    first: int
    """Index of the first row among all rows of the table."""
    counts: Tensor
    """Rows of each bucket over all ranks: int64 [BUCKETS]."""

    @property
    def total(self) -> int:
        """Number of rows of the table over all ranks, M."""
        return int(self.counts.sum())


class _Window(NamedTuple):
    """Numbers of a kind of some neighbouring rows that a rank writes."""

    kind: str
    first: int
    numbers: Tensor

    @property
    def last(self) -> int:
        """The place behind the last row."""
        return self.first + len(self.numbers)


class StreamedRows:
    """Rows of one table that this rank writes into a checkpoint, read when they are written.

    Args:
        counts: rows of each bucket over all ranks.
        mine: mask of the buckets that this rank writes.
        columns: number of columns and dtype of each kind of number that is written.
        read: function that returns the numbers of a kind, [n, columns], of rows [n] of the snapshot.
        rows: snapshot of the index of a dynamic table, or function that returns the rows in ranges of a static one.
    """

    def __init__(
        self,
        counts: Tensor,
        mine: Tensor,
        columns: Mapping[str, tuple[int, torch.dtype]],
        read: Callable[[str, Tensor], Tensor],
        rows: IndexSnapshot | Callable[[list[Range]], Tensor],
    ) -> None:
        self.counts = counts
        self.columns = columns
        self.ranges = _ranges_of(counts, mine)
        """Ranges of rows that this rank writes, in the order of (bucket, key)."""
        self._mine = mine
        self._read = read
        self._rows = rows
        self._order: Tensor | None = None
        sizes = torch.tensor([stop - start for start, stop in self.ranges], dtype=torch.int64)
        self._starts = torch.tensor([start for start, _ in self.ranges], dtype=torch.int64)
        self._ends = sizes.cumsum(0)
        """Number of rows in the ranges up to each, with it: places count the rows that this rank writes."""
        self._window: _Window | None = None

    @property
    def total(self) -> int:
        """Number of rows of the table over all ranks, M."""
        return int(self.counts.sum())

    def read(self, kind: str, within: Range) -> Tensor:
        """Return the numbers of a kind of the rows in a part of one of ``ranges``: [n, columns].

        Whole lines are read, of ``READ_ROWS`` rows at a time. A block of a state with one number a row has millions of
        rows, whose lines together are hundreds of times the block. A rank with placement row has a range for each
        bucket, of a few rows: the ranges after it are read with it, and kept for the next call.
        """
        first = self._place(within[0])
        last = first + within[1] - within[0]
        if last - first < READ_ROWS:
            return self._in_window(kind, first, last)
        columns, dtype = self.columns[kind]
        found = torch.empty(last - first, columns, dtype=dtype)
        for start in range(first, last, READ_ROWS):
            stop = min(start + READ_ROWS, last)
            found[start - first : stop - first] = self._read(kind, self._rows_at(start, stop))
        return found

    def _in_window(self, kind: str, first: int, last: int) -> Tensor:
        """Return the numbers of the rows at places [first, last), which are kept with those of rows behind them."""
        window = self._window  # another thread, which writes another file, may replace it
        if window is None or window.kind != kind or not window.first <= first <= last <= window.last:
            rows = self._rows_at(first, min(first + READ_ROWS, int(self._ends[-1])))
            self._window = window = _Window(kind, first, self._read(kind, rows).contiguous())
        return window.numbers[first - window.first : last - window.first]

    def _place(self, row: int) -> int:
        """Return the place of a row of one of ``ranges`` among the rows that this rank writes."""
        number = int(torch.searchsorted(self._starts, row, right=True)) - 1
        start, stop = self.ranges[number]
        return int(self._ends[number]) - (stop - start) + row - start

    def _rows_at(self, first: int, last: int) -> Tensor:
        """Return the rows of the snapshot at places [first, last) among the rows that this rank writes: int64 [n]."""
        if isinstance(self._rows, IndexSnapshot):
            if self._order is None:
                self._order = self._rows.order(self._mine)
            return self._order[first:last].long()
        found: list[Range] = []
        for number in range(int(torch.searchsorted(self._ends, first, right=True)), len(self.ranges)):
            start, stop = self.ranges[number]
            shift = stop - int(self._ends[number])
            if last + shift <= start:
                break
            found.append((max(start, first + shift), min(stop, last + shift)))
        return self._rows(found)


def _ranges_of(counts: Tensor, mine: Tensor) -> list[Range]:
    """Return the ranges of rows of the buckets in ``mine``; neighbouring buckets are joined."""
    found: list[Range] = []
    ends = counts.cumsum(0).tolist()
    start = 0
    for is_mine, stop in zip(mine.tolist(), ends, strict=True):
        if is_mine and stop > start:
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        start = stop
    return found


def written_buckets(placement: str, index: int, ranks: int, owner: int) -> Tensor:
    """Return a mask of the buckets whose rows a rank writes without an exchange: bool [BUCKETS]."""
    buckets = torch.arange(BUCKETS)
    if ranks == 1:
        return torch.ones(BUCKETS, dtype=torch.bool)
    if placement == "row":
        return buckets % ranks == index
    if placement == "table":
        return torch.full((BUCKETS,), index == owner)
    return writer_of(buckets, ranks) == index


def stretch_to_write(
    rows: KeyedRows, buckets: Tensor, place: TablePlacement, width: int, group: Group, what: str
) -> SavedRowRange:
    """Return the rows that this rank writes, exchanged between the ranks where the placement needs it. Collective.

    Args:
        rows: rows of this rank, ordered by (bucket, key); for data_parallel, only the part that this rank writes.
        buckets: bucket of each row.
        place: placement of the table.
        width: numbers in a whole row.
        group: ranks that hold the table.
        what: name of the table, for errors and traffic.
    """
    n = group.size
    leaving = torch.bincount(writer_of(buckets, n), minlength=n)
    if n > 1 and place.placement in ("row", "column"):
        counts: Counts = share(leaving[:, None], group, f"rows of {what}")[:, :, 0].tolist()
        if place.placement == "row":
            rows = _rows_together(rows, counts, group, what)
            buckets = send(buckets, counts, group, what, "control")
            order = rows.keys.argsort()
            order = order[buckets[order].argsort(stable=True)]
            rows, buckets = _some(rows, order), buckets[order]
        else:
            rows, mine = _columns_together(rows, counts, width, group, what)
            buckets = buckets[mine]
    counted = torch.bincount(buckets, minlength=BUCKETS)
    everyone = gather(counted[None], [1] * n, group, f"buckets of {what}", "control").sum(0)
    first = int(everyone[: int(buckets[0])].sum()) if buckets.numel() else 0
    return SavedRowRange(rows, first, everyone)


def ranges_to_read(
    counts: Tensor, place: TablePlacement, index: int, ranks: int, within: Range
) -> list[Range]:
    """Return the ranges of rows that rank ``index`` is to hold, restricted to the range ``within``.

    Args:
        counts: rows of each bucket over all ranks.
        place: placement of the table.
        index: index of the rank.
        ranks: number of ranks.
        within: range of rows in the order of (bucket, key).
    """
    low, high = within
    if not place.holds(index):
        return []
    if place.placement != "row" or ranks == 1:
        return [within] if low < high else []
    ends = counts.cumsum(0).tolist()
    found: list[Range] = []
    for bucket in buckets_of(index, ranks):
        start, stop = max(ends[bucket - 1] if bucket else 0, low), min(ends[bucket], high)
        if start < stop:
            found.append((start, stop))
    return found


def static_counts(rows: int) -> Tensor:
    """Return the number of rows of each bucket of a static table: int64 [BUCKETS]."""
    counts = torch.full((BUCKETS,), rows // BUCKETS)
    counts[: rows % BUCKETS] += 1
    return counts


def static_keys_at(counts: Tensor, ranges: list[Range]) -> Tensor:
    """Return the keys of the rows in ``ranges`` of a static table."""
    starts = counts.cumsum(0) - counts
    places = torch.cat([torch.arange(*each) for each in ranges] or [torch.empty(0, dtype=torch.int64)])
    buckets = torch.searchsorted(starts + counts, places, right=True)
    return (places - starts[buckets]) * BUCKETS + buckets


def chunks(counts: Tensor, rows: int) -> Iterator[Range]:
    """Yield ranges of whole buckets with about ``rows`` rows each, which are read at once."""
    start = end = 0
    for count in counts.tolist():
        if end > start and end + count - start > rows:
            yield start, end
            start = end
        end += count
    if end > start:
        yield start, end


def _some(rows: KeyedRows, which: Tensor) -> KeyedRows:
    """Return the rows that ``which`` selects."""
    return KeyedRows(
        rows.keys[which],
        rows.weights[which],
        {name: tensor[which] for name, tensor in rows.state.items()},
        None if rows.scores is None else rows.scores[which],
        rows.first_column,
    )


def _rows_together(rows: KeyedRows, counts: Counts, group: Group, what: str) -> KeyedRows:
    """Return whole rows at the writers of their buckets, in the order of the source ranks."""

    def sent(tensor: Tensor) -> Tensor:
        return send(tensor, counts, group, what, "control")

    return KeyedRows(
        sent(rows.keys),
        sent(rows.weights),
        {name: sent(tensor) for name, tensor in rows.state.items()},
        None if rows.scores is None else sent(rows.scores),
    )


def _columns_together(
    rows: KeyedRows, counts: Counts, width: int, group: Group, what: str
) -> tuple[KeyedRows, slice]:
    """Return whole rows at their writers, and the slice of this rank's rows that they are.

    The slice exists because every rank has the same keys.
    """
    widths = [len(columns_of(width, index, group.size)) for index in range(group.size)]
    leaving = counts[group.index]
    start = sum(leaving[: group.index])
    mine = slice(start, start + leaving[group.index])

    def arrived(tensor: Tensor) -> Tensor:
        padded = tensor.new_zeros(len(tensor), max(widths))  # a message has one width
        padded[:, : tensor.shape[1]] = tensor
        return send(padded, counts, group, what, "control").view(group.size, -1, max(widths))

    def joined(tensor: Tensor) -> Tensor:
        parts = zip(arrived(tensor), widths, strict=True)
        return torch.cat([part[:, :columns] for part, columns in parts], 1)

    def state_of(name: str, tensor: Tensor) -> Tensor:
        if name == "step":  # columns that never had a gradient rest from an earlier step on
            return arrived(tensor)[:, :, :1].amax(0)
        return tensor[mine] if name in ONE_A_ROW else joined(tensor)

    state = {name: state_of(name, tensor) for name, tensor in rows.state.items()}
    scores = None if rows.scores is None else rows.scores[mine]
    return KeyedRows(rows.keys[mine], joined(rows.weights), state, scores), mine


def of_first_rank(rows: KeyedRows, group: Group, what: str, device: torch.device) -> KeyedRows:
    """Return the first rank's rows on all ranks, as for the weights of a model that was built before. Collective.

    Raises:
        UsageError: if the ranks have different numbers of rows.
    """
    if group.size == 1:
        return rows
    waiting = 0 if rows.candidates is None else len(rows.candidates)
    shape = torch.tensor([[*rows.weights.shape, len(rows.state), waiting]] * group.size, device=device)
    if bool((share(shape, group, what) != shape[0]).any()):
        raise UsageError(f"embedding: the ranks differ in the number of {what}; give all of them the same")

    def first(tensor: Tensor) -> Tensor:
        whole = tensor.detach().to(device).clone(memory_format=torch.contiguous_format)
        group.broadcast(whole.view(-1), 0, what).wait()
        return whole.cpu()

    scores = None if rows.scores is None else first(rows.scores)
    state = {name: first(tensor) for name, tensor in sorted(rows.state.items())}
    candidates = None if rows.candidates is None else first(rows.candidates)
    return KeyedRows(first(rows.keys), first(rows.weights), state, scores, rows.first_column, candidates)
