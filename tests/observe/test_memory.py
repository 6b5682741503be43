import ctypes
import mmap
import resource
import sys

import pytest
import torch

from shardwise.observe import memory

needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MIB = 2**20


@needs_proc
def test_resident_memory_grows_by_what_is_touched_and_the_peak_stays() -> None:
    before = memory.resident_bytes()
    block = mmap.mmap(
        -1, 64 * MIB
    )  # a tensor may come from the heap's free top, which glibc keeps when it is freed
    for _ in range(64):
        block.write(bytes(MIB))
    during = memory.resident_bytes()
    assert before is not None and during is not None
    assert 60 * MIB < during - before < 80 * MIB
    block.close()
    after = memory.resident_bytes()
    assert after is not None and after < during - 50 * MIB
    assert memory.peak_resident_bytes() >= during - MIB, (
        "the kernel counts pages per core and sums them lazily"
    )


@needs_proc
def test_shared_pages_are_divided() -> None:
    proportional, resident = memory.proportional_bytes(), memory.resident_bytes()
    assert proportional is not None and resident is not None
    assert 0 < proportional <= resident * 1.05


def test_a_missing_source_is_no_number() -> None:
    assert memory._field_of("/proc/self/no_such_file", "VmRSS") is None


@needs_proc
def test_on_a_processor_the_memory_in_use_is_resident_memory() -> None:
    taken = memory.taken(torch.device("cpu"))
    assert (taken.memory or 0) > 10 * MIB
    assert taken[1:] == (None, None)


def test_on_an_accelerator_peaks_are_those_since_the_record_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, peak, reserved = 3, 9, 12

    def stats(_device: object) -> dict[str, int]:
        return {
            "allocated_bytes.all.peak": peak, "allocated_bytes.all.current": now, "reserved_bytes.all.peak": reserved
        }  # fmt: skip

    def reset(_device: object) -> None:
        nonlocal peak
        peak = now

    monkeypatch.setattr(torch.accelerator, "memory_stats", stats)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    there = torch.device("cuda", 0)
    assert memory.taken(there) == (9, 3, 12)
    assert memory.taken(there) == (3, 3, 12), "the spike was told once"


@needs_proc
def test_what_is_available_is_less_than_the_machine_and_more_than_nothing() -> None:
    available = memory.available_bytes(torch.device("cpu"))
    total = memory._field_of("/proc/meminfo", "MemTotal")
    assert available is not None and total is not None and 0 < available < total


@needs_proc
def test_tensors_of_a_step_reuse_the_pages_of_those_before() -> None:
    """The heap's first limits, which its later ones depend on, are set before: 128 KiB, so that tensors go back.

    What tests before have left free in the heap goes back too, because tensors would take it without a fault.
    """
    set_heap = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_heap is None:
        pytest.skip("a C library other than glibc")
    set_heap(memory._MMAP_THRESHOLD, 128 * 1024)
    ctypes.CDLL(None).malloc_trim(0)
    assert faults_of_a_step() > 1000
    assert memory.keep_freed_memory()
    assert min(faults_of_a_step() for _ in range(5)) < 50


def faults_of_a_step() -> int:
    """Return the page faults of twelve tensors of 3 MiB that are freed together."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.zeros(3 * MIB, dtype=torch.uint8) for _ in range(12)]
    del made
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
