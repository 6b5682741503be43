"""Sums of a few numbers over ranks: one all-reduce for all of them, and one copy to the host.

    summed    numbers by name, from the host or on the device, summed over a group      does not wait
    read      the sums, on the host                                                     waits once

A number on a device exists when its kernel has run, and a host that reads the number waits until then. So numbers that
a device computes (squares, losses) are summed on the device, and the host does not read them.

Cost: 8 bytes a number.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.memory.streams import to_device

Number = float | Tensor
"""A number on the host, or a tensor [] on the device."""


def summed(
    group: Group, own: Mapping[str, Sequence[Number] | Tensor], what: str, device: torch.device
) -> dict[str, Tensor]:
    """Return the sums over the ranks of every number of ``own``, by name: fp64 [n] on ``device``.

    Args:
        group: The ranks to sum over.
        own: This rank's numbers, with the same names and counts on all ranks.
        what: Description of the sum, for the trace and for errors.
        device: Device of the all-reduce.
    """
    pieces: list[Tensor] = []
    known: list[float] = []
    for numbers in own.values():
        for number in [numbers] if isinstance(numbers, Tensor) else numbers:
            if isinstance(number, Tensor):
                if known:
                    pieces.append(to_device(torch.tensor(known, dtype=torch.float64), device))
                    known = []
                pieces.append(number.detach().to(device, torch.float64).view(-1))
            else:
                known.append(number)
    if known:
        pieces.append(to_device(torch.tensor(known, dtype=torch.float64), device))
    flat = torch.cat(pieces)
    group.all_reduce(flat, what, purpose="control").wait()
    return dict(zip(own, flat.split([len(numbers) for numbers in own.values()]), strict=True))


def read(*sums: Mapping[str, Tensor]) -> list[dict[str, list[float]]]:
    """Copy results of ``summed`` to the host, all in one copy."""
    numbers = iter(torch.cat([part for each in sums for part in each.values()]).tolist())
    return [{name: [next(numbers) for _ in part] for name, part in each.items()} for each in sums]


def number_of(value: Tensor | float) -> Number:
    """Return a value as a number on the host, or unread as a tensor [] if it is on a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().double().reshape(())
    return float(value)


def filled_like(tensor: Tensor, number: Number) -> Tensor:
    """Return a tensor filled with ``number`` in the shape, dtype and device of ``tensor``."""
    if isinstance(number, Tensor):
        return number.to(tensor.device, tensor.dtype).expand_as(tensor).contiguous()
    return torch.full_like(tensor, number)
