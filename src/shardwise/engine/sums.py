"""Sums of a few numbers over ranks: one all-reduce for all of them, and one look from the host.

    summed    numbers by name, from the host or still on the device, summed over a group   nothing is waited for
    read      the sums, on the host                                                        the one wait

On a device a number is there when its kernel has run, and a host that asks for it stands still until then. So what a
device computes (squares, losses) is summed there, unread.

Cost: 8 bytes a number.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.comm.collectives import Group
from shardwise.memory.streams import to_device

Number = float | Tensor
"""One that the host knows, or one on the device: []."""


def summed(
    group: Group, own: Mapping[str, Sequence[Number] | Tensor], what: str, device: torch.device
) -> dict[str, Tensor]:
    """The sums over the ranks of every number of ``own``, by name: fp64 [n] on ``device``."""
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
    """What ``summed`` gave, on the host, in one copy."""
    numbers = iter(torch.cat([part for each in sums for part in each.values()]).tolist())
    return [{name: [next(numbers) for _ in part] for name, part in each.items()} for each in sums]


def number_of(value: Tensor | float) -> Number:
    """As the host knows it; unread where it is on a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().double().reshape(())
    return float(value)


def filled_like(tensor: Tensor, number: Number) -> Tensor:
    """``number`` in the shape, dtype and place of ``tensor``."""
    if isinstance(number, Tensor):
        return number.to(tensor.device, tensor.dtype).expand_as(tensor).contiguous()
    return torch.full_like(tensor, number)
