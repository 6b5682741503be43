"""Texts of torch's communicators that say a deadline passed, and those that say something else."""

import pytest

from shardwise.comm.faults import cause_of, is_late


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "ncclUnhandledCudaError: Call failed. Last error: Cuda failure 2 'out of memory' Timeout(ms)=1",
            "is full",
        ),
        (
            "ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
            "one device",
        ),
        ("ncclSystemError: Call to connect returned Connection timed out", "network or the driver"),
        ("CUDA error: device-side assert triggered", "a kernel on this rank's device failed"),
        ("[connection.cc:1] Connection closed by peer", "another rank ended"),
    ],
)
def test_causes(text: str, cause: str) -> None:
    assert cause in cause_of(RuntimeError(text))


def test_an_error_of_nccl_is_no_deadline() -> None:
    """It prints its setting in the text of any error."""
    assert not is_late(
        RuntimeError("NCCL error: remote process exited, WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=600000)")
    )
    assert is_late(RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(Timeout(ms)=600000)"))
    assert not is_late(RuntimeError("ncclSystemError: Call to connect returned Connection timed out"))
    assert is_late(RuntimeError("Operation timed out!"))
