"""Exchanges between ranks around a training loop: votes, and rows of metrics."""

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.equality import are_equal, terms
from shardwise.engine.parts.parts import EngineParts


def agree(parts: EngineParts, flag: bool) -> bool:
    """Return True on all ranks if ``flag`` is true on any rank; see ``Engine.agree``. Collective."""
    vote = torch.tensor([float(flag)], dtype=torch.float64, device=parts.device)
    parts.groups["world"].all_reduce(vote, "a vote", purpose="control").wait()
    return bool(vote.item() > 0)


def are_alike(parts: EngineParts, number: int) -> bool:
    """Return True if all ranks pass the same integer ``number``. Collective."""
    world = parts.groups["world"]
    sums = torch.tensor(terms(number), dtype=torch.float64, device=parts.device)
    world.all_reduce(sums, "one number", purpose="control").wait()
    return are_equal(world.size, sums.tolist())


def gather_rows(dp: Group, device: torch.device, value: Tensor, samples: int | None) -> Tensor:
    """Return the rows of all data-parallel ranks; see ``Engine.gather_metrics``. Collective.

    Rows are exchanged as bytes, padded to the largest number of rows of a rank.

    Args:
        dp: all data-parallel ranks.
        device: the device of this rank.
        value: the rows of this rank; a scalar counts as one row.
        samples: the number of rows that count; None: all.

    Raises:
        UsageError: if ``value`` is no tensor, or has fewer rows than ``samples``.
    """
    if not isinstance(value, Tensor):
        raise UsageError(
            f"gather_metrics: expected a tensor, given {value!r:.100}; torch.tensor(value) makes one"
        )
    own = value.detach().to(device)
    own = own.reshape(1) if own.dim() == 0 else own
    if samples is not None:
        if samples > len(own):
            raise UsageError(
                f"gather_metrics: {samples} samples shall count, but the tensor has {len(own)} rows"
            )
        own = own[:samples]
    if dp.size == 1:
        return own.clone()
    counts = torch.zeros(dp.size, dtype=torch.float64, device=device)
    counts[dp.index] = len(own)
    dp.all_reduce(counts, "rows of metrics", purpose="control").wait()
    rows = [int(count) for count in counts.tolist()]
    if not any(rows):
        return own.clone()
    padded = own.new_zeros(max(rows), *own.shape[1:])
    padded[: len(own)] = own
    every = padded.new_empty(dp.size, *padded.shape)
    sent, received = (each.reshape(-1).view(torch.uint8) for each in (padded, every))
    dp.all_gather(received, sent, "metrics", purpose="control").wait()
    return torch.cat([every[index, :count] for index, count in enumerate(rows)])
