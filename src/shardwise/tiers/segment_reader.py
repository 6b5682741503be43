"""Reads of rows from segments: sorted by position, joined where they are near, several at a time.

    positions, sorted     p0 p1        p2       p3 p4 p5
    pages of 4 KiB       |=====|      |==|     |========|
    requests             |-------------|       |--------|     joined over gaps of up to 8 KiB, at most 256 KiB long
    jobs                 |---------------- 4 MiB --------------|  its requests, 64 of them under way, then its CRCs

A request reads whole pages past the page cache into memory of its job. Then a compiled loop checks the CRC and the row
of each record and copies the line to the caller's memory, so no caller gets a wrong byte. Requests and checks run
without the interpreter's lock. Where the system has no queue of reads (``memory/page_reads.py``), jobs of 1 MiB run on
threads, each with one request under way.

Cost:  a request for each record that is far from others: 4 or 8 KiB for a line of a few hundred bytes; memory of about
       4 MiB, or of 2 MiB for each thread, which is kept.
Shapes: n records of one call.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import torch

from shardwise.kernels.tables.records import Bytes, Numbers, collect
from shardwise.memory.direct_io import ALIGNMENT_BYTES, aligned_empty, bytes_of
from shardwise.memory.page_reads import PageQueue, read_many
from shardwise.tiers.segment_file import SegmentFile, SegmentFiles, SegmentShape

__all__ = ["SegmentReader"]

GAP_PAGES = 2
"""Most pages between two records that are read with them, so that there is one request instead of two."""
REQUEST_PAGES = 64
"""Most pages of a request, except for the end of its last record."""
_JOB_BYTES, _LEAST_JOB_BYTES = 2**20, 2**16
_QUEUED_JOB_BYTES = 2**22
"""Bytes of a job whose requests are under way together."""
SPARE_BYTES = _QUEUED_JOB_BYTES + (REQUEST_PAGES + 2) * ALIGNMENT_BYTES
"""Most bytes of the memory of a job, which is kept for the next one."""
_QUEUE_DEPTH = 64
"""Most requests under way together; a virtual disk that answers one in 90 us answered 3, 7 and 9 times as many a second
with 4, 16 and 32 of them."""


@dataclass(frozen=True, slots=True)
class RecordReads:
    """Requests for sorted records, and the jobs that they belong to."""

    slots: Numbers
    """Slot of each request: [requests]."""
    offsets: Numbers
    """Offset of each request in its file: [requests]."""
    sizes: Numbers
    """Bytes of each request: [requests]."""
    places: Numbers
    """Offset of each request in its job's memory: [requests]."""
    starts: Numbers
    """Offset of each record in its job's memory: [n]."""
    request_jobs: list[tuple[int, int]]
    """First request of each job, and the one behind its last."""
    record_jobs: list[tuple[int, int]]
    """First record of each job, and the one behind its last."""
    job_bytes: int
    """Bytes of memory of the largest job."""


def planned(
    shape: SegmentShape, positions: Numbers, threads: int, most_bytes: int = _JOB_BYTES
) -> RecordReads:
    """Return the requests for records.

    Args:
        shape: Sizes of the segments.
        positions: Positions of the records, ascending: [n], at least one.
        threads: Number of jobs worth having.
        most_bytes: Bytes of a job, up to a request more.
    """
    slots = positions // shape.per_segment
    offsets = shape.offsets(positions - slots * shape.per_segment)
    low = offsets // ALIGNMENT_BYTES
    high = (offsets + (shape.record_bytes - 1)) // ALIGNMENT_BYTES + 1
    begins = np.ones(len(positions), np.bool_)
    begins[1:] = (
        (slots[1:] != slots[:-1])
        | (low[1:] > high[:-1] + GAP_PAGES)
        | (low[1:] // REQUEST_PAGES != low[:-1] // REQUEST_PAGES)
    )
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(positions)) - 1
    sizes = (high[last] - low[first]) * ALIGNMENT_BYTES
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    job_bytes = min(most_bytes, max(_LEAST_JOB_BYTES, -(-total // threads)))
    jobs = (ends - sizes) // job_bytes  # a job's memory may be longer by one request
    cuts = np.append(np.flatnonzero(np.append(True, jobs[1:] != jobs[:-1])), len(first))
    bases = np.repeat((ends - sizes)[cuts[:-1]], np.diff(cuts))
    places = ends - sizes - bases
    request_of = np.cumsum(begins) - 1
    starts = places[request_of] + offsets - low[first][request_of] * ALIGNMENT_BYTES
    cut_records = np.append(first[cuts[:-1]], len(positions))
    return RecordReads(
        slots[first],
        low[first] * ALIGNMENT_BYTES,
        sizes,
        places,
        starts,
        list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)),
        list(zip(cut_records[:-1].tolist(), cut_records[1:].tolist(), strict=True)),
        int((places + sizes).max()),
    )


class SegmentReader:
    """Reader of records from segments.

    Args:
        files: The segments.
        shape: Their sizes.
        threads: Number of requests under way at once where the system has no queue of reads.
        depth: Number of requests under way at once in a queue of reads.
    """

    def __init__(
        self, files: SegmentFiles, shape: SegmentShape, threads: int, depth: int = _QUEUE_DEPTH
    ) -> None:
        """Open the queue of reads, or make the threads, which start with the first read that is worth more than one."""
        self.requests = 0
        """Requests made so far."""
        self.bytes_read = 0
        """Bytes of these requests."""
        self._files, self._shape, self._threads = files, shape, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardwise-rows")
        self._queue = PageQueue(depth)
        self._spares: SimpleQueue[Bytes] = SimpleQueue()

    def read(
        self,
        segments: Mapping[int, SegmentFile],
        positions: Numbers,
        rows: Numbers,
        out: Bytes,
        places: Numbers,
    ) -> None:
        """Read records and copy their lines to the caller's memory.

        Args:
            segments: The segments of all positions, pinned, by slot.
            positions: Positions of the records: [n].
            rows: Row of each record: [n].
            out: Memory for lines: [m, line bytes], contiguous.
            places: Index in ``out`` for each record: [n].

        Raises:
            DamagedStateError: If the bytes of a record are not those that were written.
            TierError: If the disk fails.
        """
        if not len(positions):
            return
        order = np.argsort(positions)
        ascending = positions[order]
        queue = self._queue if _can_queue(self._queue, segments) else None
        most_bytes = _JOB_BYTES if queue is None else _QUEUED_JOB_BYTES
        reads = planned(self._shape, ascending, 1 if queue is not None else self._threads, most_bytes)
        self.requests += len(reads.sizes)
        self.bytes_read += int(reads.sizes.sum())
        job = _ReadJob(
            self._files, self._shape, queue, segments, reads, ascending, rows[order], out, places[order]
        )
        if queue is not None or len(reads.request_jobs) == 1:
            for number in range(len(reads.request_jobs)):
                self._run(job, number)
            return
        under_way = [self._pool.submit(self._run, job, number) for number in range(len(reads.request_jobs))]
        _wait(under_way)

    def _run(self, job: "_ReadJob", number: int) -> None:
        try:
            spare = self._spares.get_nowait()
        except Empty:
            spare = bytes_of(aligned_empty(0, torch.uint8))
        if spare.nbytes < job.reads.job_bytes:
            spare = bytes_of(aligned_empty(max(job.reads.job_bytes, 2 * _LEAST_JOB_BYTES), torch.uint8))
        job.run(number, spare)
        self._spares.put(spare)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is kept for jobs, at most."""
        most_bytes = _QUEUED_JOB_BYTES if self._queue.is_open else _JOB_BYTES
        return self._queue.nbytes + self._spares.qsize() * (
            most_bytes + (REQUEST_PAGES + 2) * ALIGNMENT_BYTES
        )

    def close(self) -> None:
        """End the threads after the jobs under way, and close the queue."""
        self._pool.shutdown(wait=True)
        self._queue.close()


def _can_queue(queue: PageQueue, segments: Mapping[int, SegmentFile]) -> bool:
    """Return whether reads of the segments may be under way together."""
    return queue.is_open and all(segment.file.is_direct for segment in segments.values())


@dataclass(frozen=True, slots=True)
class _ReadJob:
    """Everything that the jobs of one read share."""

    files: SegmentFiles
    shape: SegmentShape
    queue: PageQueue | None
    """Queue of reads; None reads one request after another."""
    segments: Mapping[int, SegmentFile]
    reads: RecordReads
    positions: Numbers
    rows: Numbers
    out: Bytes
    places: Numbers

    def run(self, number: int, spare: Bytes) -> None:
        """Read the pages of one job, check its records and copy their lines."""
        reads = self.reads
        some = slice(*reads.request_jobs[number])
        asked = [self.segments[slot] for slot in reads.slots[some].tolist()]
        places, sizes, offsets = reads.places[some], reads.sizes[some], reads.offsets[some]
        files = [segment.file for segment in asked]
        if self.queue is not None:
            left = self.queue.read(files, spare, places, sizes, offsets).tolist()
        else:
            left = range(read_many(files, spare, places, sizes, offsets), len(asked))
        for each in left:
            into = spare[places[each] : places[each] + sizes[each]]
            self.files.read_pages(asked[each], into, int(offsets[each]))
        begin, end = reads.record_jobs[number]
        positions, rows = self.positions[begin:end], self.rows[begin:end]
        slots = positions // self.shape.per_segment
        numbers = positions - slots * self.shape.per_segment
        used, which = np.unique(slots, return_inverse=True)
        serials = np.array([self.segments[slot].serial for slot in used.tolist()], np.int64)
        orders = serials[which] * self.shape.per_segment + numbers
        wrong = collect(spare, reads.starts[begin:end], orders, rows, self.out, self.places[begin:end])
        if wrong >= 0:
            segment = self.segments[int(slots[wrong])]
            raise self.files.damaged_record(segment, int(numbers[wrong]), int(rows[wrong]))


def _wait(under_way: list[Future[None]]) -> None:
    """Wait for all jobs, which use the caller's memory, then raise the first error."""
    errors = [error for each in under_way if (error := each.exception()) is not None]
    if errors:
        raise errors[0]
