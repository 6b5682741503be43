"""The rows of the table of DeepSpeed's keys (deepspeed_keys.py), and their notation.

Paths are dotted; ``[]`` is any item of a list, and ``NAME`` a name that the user chooses. The keys under
``optimizer.params`` and ``scheduler.params`` depend on the type of optimizer or scheduler: ``of`` lists the types.
Kinds:

    bool int num text list texts numbers block any      a value of that type; ``num >= 0 <= 1``: and in that range
    decays, pair        two numbers from 0 to less than 1; two numbers above 0
    rates               a number, or a list with one number for each group of the optimizer
    count               an integer above 0, or infinity
    amount              an integer of at least 0, or false for none
    dtype               fp32, fp16, bf16, or torch's names of these dtypes
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
    """For *does*: Shardwise's key, and the conversion; for *idle*: the reason; for *refused*: the replacement."""
    of: tuple[str, ...] = ()
    """Types of optimizer or scheduler that have the key; empty for all."""
    stands_for: str = ""
    """The key for which this older or other name stands."""


def does(name: str, kind: str, default: Any, ours: str) -> DeepSpeedKey:
    """Return the row of a key that has an effect."""
    return DeepSpeedKey(name, kind, default, "does", ours)


def idle(name: str, kind: str, default: Any, why: str) -> DeepSpeedKey:
    """Return the row of a key that has no effect."""
    return DeepSpeedKey(name, kind, default, "idle", why)


def refused(name: str, kind: str, default: Any, instead: str) -> DeepSpeedKey:
    """Return the row of a key that is refused unless it has its default."""
    return DeepSpeedKey(name, kind, default, "refused", instead)


def old(name: str, kind: str, now: str) -> DeepSpeedKey:
    """Return the row of another name of a key in the same block."""
    return DeepSpeedKey(name, kind, None, "does", f"an older or other name of {now}", stands_for=now)


def block(head: DeepSpeedKey, *rows: DeepSpeedKey | list[DeepSpeedKey]) -> list[DeepSpeedKey]:
    """Return the row of a block, followed by the rows of its keys."""
    return [head, *_under(head.path, rows)]


def _under(path: str, rows: Iterable[DeepSpeedKey | list[DeepSpeedKey]]) -> Iterator[DeepSpeedKey]:
    for row in rows:
        for each in [row] if isinstance(row, DeepSpeedKey) else row:
            now = f"{path}.{each.stands_for}" if each.stands_for else ""
            yield each._replace(path=f"{path}.{each.path}", stands_for=now)


def of(types: str, *rows: DeepSpeedKey) -> list[DeepSpeedKey]:
    """Return rows that apply only to these types of optimizer or scheduler."""
    return [row._replace(of=tuple(types.split())) for row in rows]
