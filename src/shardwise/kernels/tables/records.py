"""Records of rows in a file, all of one length, checked and moved by compiled loops.

    record   | CRC-32, 4 bytes | row, int64 | line | zeros up to a multiple of 4 bytes |

The CRC covers row and line. It begins with the order number of the record, which counts the records of a file group
from its first record on, instead of with zero:

    crc = CRC-32(row + line, begun with order mod 2^32)

So the sum differs not only if a byte has changed, but also if a disk returns another record of the same row, such as
the older line in a place that a lost write should have overwritten.

Without numba the sums are those of zlib, one call a record, and several times slower.

Cost:  12 bytes a record and at most 3 of padding; a sum reads 8 bytes with 8 look-ups in tables of 1 KiB (slicing by 8:
       Kounavis and Berry 2005, A Systematic Approach to Building High Performance Software-Based CRC Generators).
Shapes: n records of b bytes, lines of w bytes.
"""

import zlib

import numpy as np
import numpy.typing as npt

from shardwise.kernels.tables.compiled import has_numba, loop

__all__ = ["HEAD_BYTES", "collect", "compile_loops", "intact", "lines_in", "pack", "record_bytes", "rows_in"]

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

HEAD_BYTES = 12
"""Bytes of a record before its line: CRC and row."""
_HEAD_WORDS = HEAD_BYTES // 4
_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF


def _tables() -> npt.NDArray[np.uint32]:
    """Return the remainders of a byte with 0 to 7 bytes of zeros behind it: [8, 256]."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    found = [table]
    for _ in range(7):
        found.append(table[found[-1] & 0xFF] ^ (found[-1] >> np.uint32(8)))
    return np.stack(found)


_REMAINDERS = _tables()
_BYTE = np.uint64(0xFF)
_8, _16, _24 = np.uint64(8), np.uint64(16), np.uint64(24)
_START = np.uint64(_ONES)


def record_bytes(line_bytes: int) -> int:
    """Return the bytes of a record: head and line, rounded up to a multiple of 4."""
    return -(-(HEAD_BYTES + line_bytes) // 4) * 4


def pack(records: Bytes, rows: Numbers, lines: Bytes, first: int) -> None:
    """Fill records with rows, lines and their CRCs.

    Args:
        records: The records to fill: [n, b], contiguous.
        rows: Rows: [n].
        lines: Lines: [n, w].
        first: Order number of the first record; the others follow it.
    """
    width = lines.shape[1]
    records[:, 4:HEAD_BYTES] = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), 8)
    records[:, HEAD_BYTES : HEAD_BYTES + width] = lines
    records[:, HEAD_BYTES + width :] = 0
    records[:, :4] = _sums(records, first).view(np.uint8).reshape(len(rows), 4)


def intact(records: Bytes, first: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the records whose CRC is that of their bytes: [n, b] -> [n].

    Args:
        records: Records, one after another and contiguous.
        first: Order number of the first record.
    """
    stored = np.ascontiguousarray(records[:, :4]).view(np.uint32).reshape(-1)
    found: npt.NDArray[np.bool_] = stored == _sums(records, first)
    return found


def rows_in(records: Bytes) -> Numbers:
    """Return the rows of records, which may be damaged: [n, b] -> int64 [n]."""
    return np.ascontiguousarray(records[:, 4:HEAD_BYTES]).view(np.int64).reshape(-1)


def lines_in(records: Bytes, line_bytes: int) -> Bytes:
    """Return a view of the lines of records: [n, b] -> [n, w]."""
    return records[:, HEAD_BYTES : HEAD_BYTES + line_bytes]


def collect(held: Bytes, starts: Numbers, orders: Numbers, rows: Numbers, out: Bytes, places: Numbers) -> int:
    """Check records that lie anywhere in a piece of memory and copy their lines.

    Args:
        held: The memory, whose address is a multiple of 4: [bytes].
        starts: Offset of each record in ``held``, a multiple of 4: [n].
        orders: Order number of each record: [n].
        rows: Row that each record must have: [n].
        out: Where the lines are written: [m, w].
        places: Index in ``out`` for each record: [n].

    Returns:
        -1, or the index of a record whose CRC or row is wrong; its line is not copied.
    """
    if has_numba():
        return int(_collect(held, held.view(np.uint32), starts, orders, rows, out, places))
    size = record_bytes(out.shape[1])
    for begin in range(0, len(starts), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        records = held[starts[some, None] + np.arange(size)]
        stored = np.ascontiguousarray(records[:, :4]).view(np.uint32).reshape(-1)
        right = (stored == _sums_of(records, orders[some])) & (rows_in(records) == rows[some])
        if not right.all():
            return begin + int(np.argmin(right))
        out[places[some]] = lines_in(records, out.shape[1])
    return -1


def compile_loops() -> None:
    """Compile the loops of this module, so that the first step does not wait for it."""
    held, zero = np.zeros((1, record_bytes(1)), np.uint8), np.zeros(1, np.int64)
    pack(held, zero, held[:, :1], 0)
    assert intact(held, 0).all(), "the sum of a record is right"
    collect(held.reshape(-1), zero, zero, zero, np.empty((1, 1), np.uint8), zero)


_AT_ONCE = 4096
"""Records that are gathered at once without numba."""


def _sums(records: Bytes, first: int) -> npt.NDArray[np.uint32]:
    """Return the CRCs of contiguous records: [n, b] -> uint32 [n]."""
    if not has_numba():
        return _sums_of(records, first + np.arange(len(records)))
    found = np.empty(len(records), np.uint32)
    _sum_all(records.reshape(-1).view(np.uint32), records.shape[1] // 4, first, found)
    return found


def _sums_of(records: Bytes, orders: Numbers) -> npt.NDArray[np.uint32]:
    """Run ``_sums`` with zlib, for records with any order numbers."""
    starts = (orders & _ONES).tolist()
    parts = np.ascontiguousarray(records[:, 4:])
    return np.array([zlib.crc32(part, start) for part, start in zip(parts, starts, strict=True)], np.uint32)


@loop
def _sum(words: np.ndarray, begin: int, end: int, order: int) -> np.uint64:
    """Return the CRC of words [begin, end)."""
    crc = (np.uint64(order) & _START) ^ _START
    at = begin
    while at + 1 < end:
        one, two = crc ^ np.uint64(words[at]), np.uint64(words[at + 1])
        crc = np.uint64(
            _REMAINDERS[7, one & _BYTE]
            ^ _REMAINDERS[6, (one >> _8) & _BYTE]
            ^ _REMAINDERS[5, (one >> _16) & _BYTE]
            ^ _REMAINDERS[4, one >> _24]
            ^ _REMAINDERS[3, two & _BYTE]
            ^ _REMAINDERS[2, (two >> _8) & _BYTE]
            ^ _REMAINDERS[1, (two >> _16) & _BYTE]
            ^ _REMAINDERS[0, two >> _24]
        )
        at += 2
    if at < end:
        one = crc ^ np.uint64(words[at])
        crc = np.uint64(
            _REMAINDERS[3, one & _BYTE]
            ^ _REMAINDERS[2, (one >> _8) & _BYTE]
            ^ _REMAINDERS[1, (one >> _16) & _BYTE]
            ^ _REMAINDERS[0, one >> _24]
        )
    return crc ^ _START


@loop
def _sum_all(words: np.ndarray, size: int, first: int, out: np.ndarray) -> None:
    for i in range(out.size):
        out[i] = _sum(words, i * size + 1, (i + 1) * size, first + i)


@loop
def _collect(
    held: np.ndarray,
    words: np.ndarray,
    starts: np.ndarray,
    orders: np.ndarray,
    rows: np.ndarray,
    out: np.ndarray,
    places: np.ndarray,
) -> int:
    width = out.shape[1]
    size = (_HEAD_WORDS * 4 + width + 3) // 4
    for i in range(starts.size):
        at = starts[i] // 4
        row = np.int64(np.uint64(words[at + 1]) | (np.uint64(words[at + 2]) << np.uint64(32)))
        if row != rows[i] or np.uint64(words[at]) != _sum(words, at + 1, at + size, orders[i]):
            return i
        begin = starts[i] + _HEAD_WORDS * 4
        into = places[i]
        for column in range(width):
            out[into, column] = held[begin + column]
    return -1
