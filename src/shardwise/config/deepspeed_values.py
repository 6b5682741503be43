"""The values of a DeepSpeed configuration by path: given, resolved from "auto", or the default of the table.

    GivenKeys     reads a configuration; checks that keys are known and values fit; replaces old names by current ones
    KeyValues     returns the value of every key of the table, and collects refused keys

Both collect faults instead of raising the first.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.base.policy import nearest
from shardwise.config.deepspeed_keys import KEYS, ONE_BIT_TYPES, REQUIRED, DeepSpeedKey
from shardwise.config.deepspeed_kinds import fault_of, in_words_of, shown

ROWS: dict[str, list[DeepSpeedKey]] = {}
for _row in KEYS:
    ROWS.setdefault(_row.path, []).append(_row)
CHILDREN: dict[str, list[str]] = {}
for _row in KEYS:
    _parent, _, _name = _row.path.rpartition(".")
    CHILDREN.setdefault(_parent, []).append(_name)
_TYPED = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}


def row_of(path: str, kind: str | None = None) -> DeepSpeedKey | None:
    """Return the row of a path; for a path that several types have, the row of the type ``kind``."""
    for row in ROWS.get(path, ()):
        if not row.of or kind in row.of:
            return row
    return None


class GivenKeys:
    """The keys and values of a file by path, and the faults in the file."""

    def __init__(self, auto: Mapping[str, Any]) -> None:
        self.auto = auto
        self.found: dict[str, Any] = {}
        self.rows: dict[str, DeepSpeedKey] = {}
        self.said: dict[str, Any] = {}
        self.kinds: dict[str, str | None] = {}
        self.faults: list[str] = []
        self.unread: dict[str, str] = {}
        """The reason for which a key is skipped, by place: comments, and keys with dots, which DeepSpeed does not
        read."""

    def read(self, given: Mapping[str, Any]) -> None:
        """Read a whole configuration."""
        for path, own in (("optimizer", "optimizer.params"), ("scheduler", "scheduler.params")):
            inner = given.get(path)
            word = inner.get("type") if isinstance(inner, Mapping) else None
            self.kinds[own] = type_word(path, word) if isinstance(word, str) else None
        self._block("", given)

    def _block(self, path: str, given: Mapping[str, Any], place: str | None = None) -> None:
        place = path if place is None else place
        for key, value in given.items():
            if why := self._skipped(path, str(key)):
                own = f"{place}.{key}".lstrip(".")
                self.unread[own], self.said[own] = why, value
                continue
            row = self._row(path, str(key), place)
            if row is not None:
                self._take(row, f"{place}.{key}".lstrip("."), value)

    def _skipped(self, path: str, key: str) -> str:
        """Return the reason for which a key is skipped; empty for a key that is read."""
        if key.startswith("_"):
            return "a comment, since the name begins with an underscore"
        if "." in key and row_of(f"{path}.{key}".lstrip(".")) is not None:
            return "DeepSpeed reads no name with dots; write the key in its block"
        return ""

    def _row(self, path: str, key: str, place: str) -> DeepSpeedKey | None:
        kind = self.kinds.get(path)
        row = row_of(f"{path}.{key}".lstrip("."), kind) or row_of(f"{path}.NAME", kind)
        if row is None and not (path in _TYPED and not _is_checked(path, kind)):
            self.faults.append(self._unknown(path, key, place))
        return row

    def _unknown(self, path: str, key: str, place: str) -> str:
        kind = self.kinds.get(path)
        prefix = f"{path}." if path else ""
        known = [
            name for name in CHILDREN.get(path, ()) if row_of(prefix + name, kind) and name.isidentifier()
        ]
        hint = nearest(key, known)
        elsewhere = [row for row in KEYS if row.path.rpartition(".")[2] == key]
        if "did you mean" not in hint and elsewhere:
            home = ", ".join(elsewhere[0].of) or elsewhere[0].path.rpartition(".")[0] or "the top level"
            hint = f"; it belongs to {home}"
        return f"{place or '(top level)'}: unknown key {key!r:.100}{hint}"

    def _take(self, row: DeepSpeedKey, place: str, value: Any) -> None:
        self.said[place] = value
        path = row.stands_for or row.path
        if row.stands_for:
            row = next(each for each in ROWS[row.stands_for])
        if path in self.found and not path.endswith("NAME"):
            self.faults.append(f"{place}: {path} is given too, and both mean the same; keep {path}")
            return
        if value == "auto":
            value = self.auto.get(path, None if row.default == REQUIRED else row.default)
            if path in _AUTO_IS_NONE and path not in self.auto:
                self.rows[place], self.found[path] = row, None
                return
            if value is None:
                self.rows[place] = row
                return
        if path == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        fault = fault_of(row.kind, value)
        if fault:
            self.faults.append(f"{place}: {fault} (given {shown(value)})")
            return
        self.rows[place] = row
        value = in_words_of(row.kind, value)
        if isinstance(value, Mapping) and row.kind.startswith("block"):
            self.found[path] = {}
            self._block(path, value, place if "NAME" in path or "[]" in path else path)
        elif isinstance(value, list) and f"{path}.[]" in _LISTS:
            self.found[path] = value
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    self._block(f"{path}.[]", item, f"{place}.{number}")
                else:
                    self.faults.append(f"{place}.{number}: expected keys and values (given {shown(item)})")
        else:
            self.found[path] = value


_AUTO_IS_NONE = ("scheduler.params.warmup_max_lr",)
"""Keys for which "auto" means None in place of the default, because another key (the optimizer's rate) sets the
value."""

_LISTS = {row.path.partition(".[]")[0] + ".[]" for row in KEYS if ".[]" in row.path}


def _known_types(path: str) -> set[str]:
    return {kind for row in KEYS if row.path.startswith(f"{path}.") for kind in row.of}


def _is_checked(path: str, kind: str | None) -> bool:
    """Return True if the parameters at ``path`` belong to a type whose parameters are known and supported."""
    return kind in _known_types(path) and kind not in ONE_BIT_TYPES


def type_word(block: str, word: str) -> str:
    """Return a type of optimizer in the table's spelling; names of schedulers are case-sensitive, as in DeepSpeed."""
    if block == "scheduler":
        return word
    known = _known_types(f"{block}.params")
    return next((kind for kind in known if kind.lower() == word.lower()), word)


class KeyValues:
    """The values of a configuration; refused values are faults."""

    def __init__(self, reading: GivenKeys) -> None:
        self._reading = reading
        self.faults: list[str] = []
        self.off = {row.path for rows in ROWS.values() for row in rows if self._is_off(row)}
        for row in KEYS:
            if row.default == REQUIRED and row.fate == "does" and self._is_missing(row):
                self.faults.append(f"{row.path} is missing; it has no default")
        for place, row in reading.rows.items():
            if row.fate == "refused" and self._asks(row, reading.said[place]):
                self.refuse(place, reading.said[place], row.said)

    def __call__(self, path: str) -> Any:
        """Return the value of a key: the given one, or its default; None for a required key that is left out."""
        found = self._reading.found
        if path in found:
            return found[path]
        row = row_of(path, self._reading.kinds.get(path.rpartition(".")[0]))
        return None if row is None or row.default == REQUIRED else row.default

    def given(self, path: str) -> bool:
        """Return True if the configuration contains the key."""
        return path in self._reading.found

    def differs(self, path: str) -> bool:
        """Return True if the value of the key differs from its default."""
        row = row_of(path, self._reading.kinds.get(path.rpartition(".")[0]))
        return row is not None and self(path) != row.default

    def does(self, name: str, kind: str) -> bool:
        """Return True if the parameter ``name`` has an effect on optimizers of the type ``kind``."""
        row = row_of(f"optimizer.params.{name}", kind)
        return row is not None and row.fate == "does"

    def parameters(self, path: str) -> Mapping[str, Any]:
        """Return the content of a block as it was given."""
        found = self._reading.said.get(path)
        return found if isinstance(found, Mapping) else {}

    def refuse(self, place: str, value: Any, instead: str) -> None:
        """Record a fault: a value that is not accepted, and its replacement."""
        self.faults.append(f"{place}: {shown(value, place)} is not taken here; instead: {instead}")

    def places(self) -> Iterable[tuple[str, DeepSpeedKey, Any]]:
        """Yield (place, row, value) of everything that was given, except blocks that have keys."""
        for place, row in self._reading.rows.items():
            value = self._reading.said[place]
            if not (isinstance(value, Mapping) and value):
                yield place, row, value

    def unread(self) -> Iterable[tuple[str, Any, str]]:
        """Yield (place, value, reason) of everything that was given and is skipped."""
        for place, why in self._reading.unread.items():
            yield place, self._reading.said[place], why

    def values(self) -> dict[str, Any]:
        """Return every value by path, except blocks and keys under names that the user chooses."""
        known = [path for path in ROWS if "NAME" not in path and "[]" not in path]
        kept = (p for p in known if not ROWS[p][0].kind.startswith("block") and not ROWS[p][0].stands_for)
        return {path: self(path) for path in kept}

    def _is_off(self, row: DeepSpeedKey) -> bool:
        """Return True if a block has no effect: it is empty, or its key ``enabled`` is false."""
        if not row.kind.startswith("block"):
            return False
        switch = f"{row.path}.enabled"
        if switch in ROWS:
            return not (self.given(row.path) and self(switch))
        inner = (self(path) for path in self._reading.found if path.startswith(f"{row.path}."))
        return not any(value is not None for value in inner)

    def _is_missing(self, row: DeepSpeedKey) -> bool:
        block = row.path.rpartition(".")[0]
        is_wanted = not row.of or self._reading.kinds.get(block) in row.of
        top = block.partition(".")[0]
        return is_wanted and self.given(top) and self(top) is not None and row.path not in self._reading.said

    def _asks(self, row: DeepSpeedKey, value: Any) -> bool:
        """Return True if a refused key has a value that would have an effect."""
        block = row.path.rpartition(".")[0]
        if row.of and {*row.of} <= {*ONE_BIT_TYPES}:
            return False  # the type of the optimizer is already refused
        if block and any(each.fate == "refused" for each in ROWS.get(block, ())):
            return False  # the whole block is already refused
        if row.kind.startswith("block"):
            return row.path not in self.off and value not in ({}, None)
        is_off = (
            value == row.default
            or value is None
            or value == "auto"
            or (value is False and row.default is not True)
        )
        return block not in self.off and not is_off


def some(**keys: Any) -> dict[str, Any]:
    """Return the keyword arguments that are not None."""
    return {key: value for key, value in keys.items() if value is not None}


def whole_number(value: Any) -> Any:
    """Return a float with an integer value, such as 5e8, as an int, and other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
