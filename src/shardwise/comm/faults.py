"""Causes of torch's communication errors, in words that contain the repair.

NCCL and gloo report a late rank, a dead rank, a full device and a bad cable alike, as a RuntimeError of several lines.
NCCL also prints its setting ("Timeout(ms)=600000") into the text of any error, and a broken network is a connection
that "timed out", so only the sentence of torch's own watchdog means that a rank is late.
"""

_LATE = "collective operation timeout"
_CAUSES = (
    (
        ("out of memory",),
        "the device of this rank is full; NCCL needs some hundred MiB beside torch's: lower the micro batch, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    (
        ("duplicate gpu",),
        "two ranks use one device; start one rank per device",
    ),
    (
        ("ncclremoteerror", "remote process exit"),
        "another rank ended, or the network between the two broke; look for the first error in the other ranks' logs",
    ),
    (
        ("ncclsystemerror", "ncclinternalerror"),
        "the network or the driver of this host failed; NCCL_DEBUG=WARN says which call, and NCCL_SOCKET_IFNAME or "
        "NCCL_IB_HCA choose another interface",
    ),
    (
        ("ncclunhandledcudaerror", "cuda error", "illegal memory access", "device-side assert"),
        "a kernel on this rank's device failed, most likely one before this call; CUDA_LAUNCH_BLOCKING=1 shows which",
    ),
    (
        ("ncclinvalidusage", "ncclinvalidargument"),
        "NCCL refused the call; NCCL_DEBUG=WARN says why",
    ),
)
"""Words of an error and the cause they mean, checked in this order: a remote error mentions sockets, and a full device
is also a failed call of CUDA.
"""


def is_late(error: Exception) -> bool:
    """Return whether torch's error means that another rank did not arrive in time."""
    text = str(error).lower()
    if "nccl" in text:
        return _LATE in text
    return "timed out" in text or "timeout" in text


def cause_of(error: Exception) -> str:
    """Return the most likely cause of an error, other than a late rank."""
    text = str(error).lower()
    for words, cause in _CAUSES:
        if any(word in text for word in words):
            return cause
    return "most likely another rank ended"
