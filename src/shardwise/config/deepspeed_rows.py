"""Rows of the table of DeepSpeed's keys (deepspeed_keys.py), and how they are written.

Paths are dotted; ``[]`` is any item of a list, ``NAME`` a name of the user's. What stands under ``optimizer.params``
and ``scheduler.params`` depends on the type beside it: ``of`` names the types. Kinds:

    bool int num text list texts numbers block any      a value of that type; ``num >= 0 <= 1``: and in that range
    decays, pair        two numbers from 0 to less than 1; two above 0
    rates               a number, or a list of one for each group of the optimizer
    count               an integer above 0, or infinity
    amount              an integer of at least 0, or false for none
    dtype               fp32, fp16, bf16, or the words that torch has for them
    one of a|b          a word, in any case
    a trailing ?        or null
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

Fate = Literal["does", "idle", "refused"]
REQUIRED = "required"
"""The default of a key that cannot be left out."""


class DeepSpeedKey(NamedTuple):
    """One row of the table."""

    path: str
    kind: str
    default: Any
    fate: Fate
    said: str
    """Of *does*: our key, and how; of *idle*: why; of *refused*: what to do instead."""
    of: tuple[str, ...] = ()
    """Types of optimizer or scheduler that have the key; empty for all."""
    stands_for: str = ""
    """The key that this older or other name means."""


def does(name: str, kind: str, default: Any, ours: str) -> DeepSpeedKey:
    """A key that acts."""
    return DeepSpeedKey(name, kind, default, "does", ours)


def idle(name: str, kind: str, default: Any, why: str) -> DeepSpeedKey:
    """A key without effect here."""
    return DeepSpeedKey(name, kind, default, "idle", why)


def refused(name: str, kind: str, default: Any, instead: str) -> DeepSpeedKey:
    """A key that is refused where it asks for something."""
    return DeepSpeedKey(name, kind, default, "refused", instead)


def old(name: str, kind: str, now: str) -> DeepSpeedKey:
    """Another name of a key of the same block."""
    return DeepSpeedKey(name, kind, None, "does", f"an older or other name of {now}", stands_for=now)


def block(head: DeepSpeedKey, *rows: DeepSpeedKey | list[DeepSpeedKey]) -> list[DeepSpeedKey]:
    """A block, and its keys under it."""
    return [head, *_under(head.path, rows)]


def _under(path: str, rows: Iterable[DeepSpeedKey | list[DeepSpeedKey]]) -> Iterator[DeepSpeedKey]:
    for row in rows:
        for each in [row] if isinstance(row, DeepSpeedKey) else row:
            now = f"{path}.{each.stands_for}" if each.stands_for else ""
            yield each._replace(path=f"{path}.{each.path}", stands_for=now)


def of(types: str, *rows: DeepSpeedKey) -> list[DeepSpeedKey]:
    """Rows of these types of optimizer or scheduler alone."""
    return [row._replace(of=tuple(types.split())) for row in rows]
