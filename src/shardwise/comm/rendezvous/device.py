"""The device of a rank: its own accelerator if there is one that supports every operation of a step, else the CPU.

"auto" checks the device for what every step needs: sums in fp64 (the norm and the loss), and a backend of torch that
exchanges its tensors. Apple's MPS has neither, so a laptop computes on its CPU.

A rank that sees several devices takes the one at its place among the ranks of its host. A rank that sees one device
takes that one, because ``srun --gpus-per-task=1``, Ray and containers show each rank another device, which is number 0
for all of them. So ranks compare their devices by ``identity_of``, which names the hardware, when they meet.
"""

import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError
from shardwise.base.words import counted
from shardwise.comm.rendezvous.seat import JobSeat


def choose_device(wanted: str, seat: JobSeat, visible: str | None) -> tuple[torch.device, str]:
    """Return the device of a rank, and the backend for its tensors.

    Args:
        wanted: Value of ``comm.device``.
        seat: The rank and its host.
        visible: Value of ``CUDA_VISIBLE_DEVICES``, for errors.

    Raises:
        ConfigError: if the device does not exist or there are fewer devices than ranks.
    """
    if wanted == "cpu":
        return torch.device("cpu"), "gloo"
    try:
        device = torch.device(wanted) if wanted != "auto" else _accelerator(seat)
    except RuntimeError as error:
        raise ConfigError(
            f"comm.device: {wanted!r} is no device of torch's; use auto, cpu, cuda or cuda:1"
        ) from error
    if device is None or device.type == "cpu":
        return torch.device("cpu"), "gloo"
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    available = torch.accelerator.current_accelerator()
    if available is None or available.type != device.type:
        here = "no accelerator" if available is None else available.type
        raise ConfigError(
            f"comm.device: {wanted!r} is asked for, and torch finds {here} here; use auto or cpu"
        )
    place = seat.local_rank if device.index is None else device.index
    sees_its_own = count == 1 and "," not in (visible or "")
    if sees_its_own and device.index is None:
        place = 0
    if (seat.local_size > count and not sees_its_own) or place >= count:
        limit = f", CUDA_VISIBLE_DEVICES={visible}" if visible else ""
        if "MIG-" in (visible or ""):  # parts of devices, whose names do not contain their order
            limit += " (of the parts of a device that MIG makes, CUDA shows a process one)"
        where = (
            "this one's place is" if device.index is None else f"{wanted!r} is asked for; this one's place is"
        )
        raise ConfigError(
            f"comm.device: {counted(seat.local_size, 'rank')} on this host ({where} {seat.local_rank})"
            f", but {counted(count, 'device')} of type {device.type}{limit}; start one "
            "rank per device, or set comm.device: cpu"
        )
    device = torch.device(device.type, place)
    torch.accelerator.set_device_index(device.index)
    return device, dist.get_default_backend_for_device(device)


def identity_of(device: torch.device, visible: str | None) -> str:
    """Return a text that only the same hardware has: "cuda:GPU-5d5ba0d6-...", or "" for the CPU, which ranks may share.

    Args:
        device: The device of this rank.
        visible: Value of ``CUDA_VISIBLE_DEVICES``.
    """
    if device.type == "cpu":
        return ""
    if visible and visible.startswith("MIG-") and "," not in visible:
        return f"{device.type}:{visible}"  # the properties of a part may be those of the whole device
    module = torch.get_device_module(device)
    read = getattr(module, "get_device_properties", None)
    uuid = None if read is None else getattr(read(device.index), "uuid", None)
    return str(device) if uuid is None else f"{device.type}:GPU-{uuid}"


def _accelerator(seat: JobSeat) -> torch.device | None:
    """Return the accelerator's type if it supports what a step needs: sums in fp64, a backend for several ranks."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    assert found is not None, "is_available() promised an accelerator"
    try:
        torch.zeros(1, dtype=torch.float64, device=found)
    except (TypeError, RuntimeError):  # Apple's MPS
        return None
    if seat.world_size > 1 and found.type not in dist.Backend.default_device_backend_map:
        return None
    return torch.device(found.type)
