"""The table of every key of a DeepSpeed configuration, with its effect in Shardwise.

    does       the key has an effect; ``said`` names the Shardwise key that it sets
    idle       a valid value has no effect, for the reason given
    refused    any value but the default is an error that names a replacement

The rows are in ``deepspeed_keys.json``, one a line: path, kind, default, fate and sentence; where they apply, the types
of optimizer or scheduler that have the key, and the key for which an older or other name stands. ``$NAME`` is a
sentence that several rows share. ``config/deepspeed.py`` translates by this table, and docs/deepspeed.md is generated
from it. The keys are those that DeepSpeed 0.19.6 and 0.19.8 read, older names that both still accept, and the fourteen
keys that 0.19.8 removed.

Paths are dotted; ``[]`` is any item of a list, and ``NAME`` a name that the user chooses. Kinds:

    bool int num text list texts numbers block any      a value of that type; ``num >= 0 <= 1``: and in that range
    decays, pair        two numbers from 0 to less than 1; two numbers above 0
    rates               a number, or a list with one number for each group of the optimizer
    count               an integer above 0, or infinity
    amount              an integer of at least 0, or false for none
    dtype               fp32, fp16, bf16, or torch's names of these dtypes
    one of a|b          a word, in any case
    a trailing ?        or null
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

Fate = Literal["does", "idle", "refused"]
REQUIRED = "required"
"""The default of a key that cannot be left out."""
ONE_BIT_TYPES = ("onebitadam", "zerooneadam", "onebitlamb")
"""Optimizers that are refused together with all of their parameters."""
ROWS_FILE = Path(__file__).with_name("deepspeed_keys.json")
"""The file of the rows."""


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


def _read() -> tuple[DeepSpeedKey, ...]:
    """Read the rows of the table."""
    table = json.loads(ROWS_FILE.read_text(encoding="utf-8"))
    sentences = {f"${name}": sentence for name, sentence in table["sentences"].items()}
    return tuple(
        DeepSpeedKey(path, kind, default, fate, sentences.get(said, said), tuple(of.split()), *stands_for)
        for path, kind, default, fate, said, of, *stands_for in (
            row if len(row) > 5 else [*row, ""] for row in table["rows"]
        )
    )


KEYS = _read()
"""The rows of the table."""
