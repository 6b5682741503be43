"""One text on all ranks of a group, and one error: those of the first rank that has one.

    first_text      the text of one rank, by weight, then by rank
    common_error    an error of one class with one sentence, which every rank raises

Both are called after a vote has shown that some rank has a text, so a step without a fault sends nothing.

Cost: a sum of one number a rank, and a broadcast of 2,000 bytes.
"""

from collections.abc import Mapping

import torch

from shardwise.base.errors import (
    ConfigError,
    DamagedStateError,
    PlanError,
    ShardwiseError,
    TableFullError,
    TierError,
    UsageError,
)
from shardwise.comm.collectives import Group

_TEXT_BYTES = 2000
"""Bytes of a text that travel; a longer text is cut."""
_CLASSES: Mapping[str, type[ShardwiseError]] = {
    each.__name__: each
    for each in (TableFullError, TierError, DamagedStateError, PlanError, ConfigError, UsageError)
}
"""Classes of errors that ranks raise together, by name."""
_HEAVY = (TierError,)
"""Classes whose errors go first, because errors of other classes may follow from them."""


def first_text(text: str, group: Group, device: torch.device, weight: int = 1) -> str:
    """Return the text of the rank with the largest weight, of several the first one, on every rank. Collective.

    Args:
        text: The text of this rank; empty if it has none.
        group: The ranks.
        device: Device of the exchange.
        weight: Weight of the text, at least 1.
    """
    if group.size == 1:
        return text
    have = torch.zeros(group.size, dtype=torch.float64, device=device)
    have[group.index] = float(weight * bool(text))
    group.all_reduce(have, "whose words", purpose="control").wait()
    words = torch.tensor(
        list(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)), dtype=torch.uint8, device=device
    )
    group.broadcast(words, int(torch.argmax(have)), "the words").wait()
    return bytes(words.cpu().tolist()).decode(errors="replace").strip()


def common_error(error: ShardwiseError | None, group: Group, device: torch.device) -> ShardwiseError:
    """Return the error of the first rank that has one, for every rank to raise. Collective.

    An error of the disk goes before others, and its sentence names the rank.

    Args:
        error: The error of this rank; None if it has none, while another rank does.
        group: The ranks.
        device: Device of the exchange.
    """
    if error is not None and group.size == 1:
        return error
    text = "" if error is None else f"{_class_of(error)} {_placed(error, group)}"
    name, _, sentence = first_text(text, group, device, 1 + isinstance(error, _HEAVY)).partition(" ")
    found = _CLASSES[name](sentence)
    found.__cause__ = error
    return found


def _class_of(error: ShardwiseError) -> str:
    """Return the name of the class in ``_CLASSES`` to which an error belongs."""
    return next(each.__name__ for each in type(error).__mro__ if each.__name__ in _CLASSES)


def _placed(error: ShardwiseError, group: Group) -> str:
    """Return the sentence of an error, which names the rank if the error is one of the disk."""
    said = str(error)
    is_placed = not isinstance(error, _HEAVY) or said.startswith("rank ")
    return said if is_placed else f"rank {group.ranks[group.index]}: {said}"
