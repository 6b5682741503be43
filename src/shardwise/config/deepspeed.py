"""The translation of a DeepSpeed configuration into Shardwise's keys, with a note on every key.

    made = translate({"train_batch_size": 32, "zero_optimization": {"stage": 2}})
    made.config     {"batch": {"global_size": 32, ...}, "zero": {"stage": 2}, ...}    for RunConfig.parse, or as YAML
    made.values     every DeepSpeed key by path: given, resolved from "auto", or default; old names are replaced
    made.notes      a DeepSpeedKeyEffect for each given key and for each default that differs from Shardwise's

The table of keys is in ``deepspeed_keys.py``; ``deepspeed_values.py`` reads values according to the table, and
``deepspeed_blocks.py`` fills Shardwise's blocks. Unknown keys, wrong values and refused keys raise a single
ConfigError that names every fault by its path. ``config.run.load`` calls this module for a file or dictionary that
``is_deepspeed`` recognises.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.base.errors import ConfigError
from shardwise.config.deepspeed_blocks import BLOCKS
from shardwise.config.deepspeed_keys import DeepSpeedKey
from shardwise.config.deepspeed_kinds import shown
from shardwise.config.deepspeed_values import CHILDREN, ROWS, GivenKeys, KeyValues
from shardwise.config.relaxed_json import read_json

_FAULTS = 20
SHARED = ("optimizer", "pipeline", "compile", "checkpoint")
"""Blocks of the top level that both DeepSpeed and Shardwise have."""


class DeepSpeedKeyEffect(NamedTuple):
    """The effect of one key of a DeepSpeed configuration."""

    path: str
    given: Any
    fate: str
    """``does``, ``idle``, or ``default`` for a key that was left out and acts by DeepSpeed's default."""
    said: str

    def __str__(self) -> str:
        marks = {"does": "->", "idle": "no effect here:", "default": "left out, so as there:"}
        return f"{self.path}: {shown(self.given, self.path)} {marks[self.fate]} {self.said}"


class ConfigTranslation(NamedTuple):
    """A DeepSpeed configuration in Shardwise's keys."""

    config: dict[str, Any]
    values: dict[str, Any]
    notes: tuple[DeepSpeedKeyEffect, ...]

    def summary(self) -> str:
        """Return one sentence for the log."""
        idle = [note.path for note in self.notes if note.fate == "idle"]
        acts = sum(note.fate == "does" for note in self.notes)
        rest = f"; {len(idle)} have no effect here: {', '.join(idle)}" if idle else ""
        return f"{acts} keys act{rest} (shardwise convert says what became of each)"


def is_deepspeed(given: Mapping[str, Any], shared: Mapping[str, Iterable[str]]) -> bool:
    """Return True if a configuration has a key that DeepSpeed has and Shardwise does not.

    Args:
        given: The configuration.
        shared: The blocks of the top level that both have, each with Shardwise's keys in the block.
    """
    inner = {name: value for name in shared if isinstance(value := given.get(name), Mapping)}
    theirs = {name: {*CHILDREN[name]} - {*shared[name]} for name in inner}
    return any(key in CHILDREN[""] and key not in shared for key in given) or any(
        theirs[name] & {*keys} for name, keys in inner.items()
    )


def from_base64(text: str) -> dict[str, Any] | None:
    """Return the configuration in url-safe base64, DeepSpeed's form for a command line; None for other text."""
    try:
        found = read_json(base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8"))
    except (ValueError, binascii.Error, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def translate(
    given: Mapping[str, Any], where: str = "config", auto: Mapping[str, Any] | None = None
) -> ConfigTranslation:
    """Translate a DeepSpeed configuration into Shardwise's keys.

    Args:
        given: The DeepSpeed configuration.
        where: The name of the source, for errors.
        auto: The values of ``"auto"`` by path (``{"optimizer.params.lr": 3e-4}``). Other keys with ``"auto"`` take
            their default; batch sizes follow from one another, and fp16 and bf16 from the model.

    Raises:
        ConfigError: if a key is unknown or refused, or a value is wrong; the error names every fault.
    """
    reading = GivenKeys(auto or {})
    reading.read(given)
    view = KeyValues(reading)
    config: dict[str, Any] = {}
    for name, fill in BLOCKS.items():
        if (found := fill(view)) not in ({}, None):
            config[name] = found
    faults = reading.faults + view.faults
    if faults:
        more = f"; and {len(faults) - _FAULTS} more" if len(faults) > _FAULTS else ""
        raise ConfigError(f"{where}: " + "; ".join(faults[:_FAULTS]) + more)
    return ConfigTranslation(config, view.values(), tuple(_notes(view, config)))


# Notes --------------------------------------------------------------------------------------------------------------

_DEFAULTS = {
    "gradient_clipping": "max_grad_norm",
    "checkpoint.writer.decoupled": "checkpoint.asynchronous",
}
"""Keys whose default in DeepSpeed differs from Shardwise's, each with Shardwise's key."""


def _notes(v: KeyValues, config: Mapping[str, Any]) -> Iterable[DeepSpeedKeyEffect]:
    for place, row, value in v.places():
        off = next((path for path in _outer(row.path) if path in v.off and f"{path}.enabled" in ROWS), None)
        if off is not None and not row.path.endswith(".enabled"):
            yield DeepSpeedKeyEffect(place, value, "idle", f"{off}.enabled is false")
        elif row.fate == "does" and (value != row.default or row.default is not False):
            yield DeepSpeedKeyEffect(place, value, "does", _ours(row, config))
        else:
            yield DeepSpeedKeyEffect(
                place, value, "idle", row.said if row.fate == "idle" else "it asks for nothing"
            )
    for place, value, why in v.unread():
        yield DeepSpeedKeyEffect(place, value, "idle", why)
    for path, ours in _DEFAULTS.items():
        if not v.given(path):
            yield DeepSpeedKeyEffect(path, v(path), "default", f"{ours}: {shown(_at(config, ours))}")
    yield DeepSpeedKeyEffect(
        "(loss)", "mean", "default", "batch.weigh_by: batches, so every microbatch weighs the same"
    )


def _outer(path: str) -> Sequence[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _ours(row: DeepSpeedKey, config: Mapping[str, Any]) -> str:
    """Return Shardwise's key with its value if the row names a key, else the row's sentence."""
    path = row.said.partition(":")[0].partition(";")[0].partition(",")[0].strip()
    found = _at(config, path)
    return row.said if found is None else f"{path}: {shown(found)}"


def _at(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
