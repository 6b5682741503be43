"""Tables of hardware: those that are shipped, by name, and those in a user's file, both in one form.

    {
      "like": "h100",
      "links": {"cluster": {"rate": "25 GB/s", "reached": 0.9, "latency": "14 us"}},
      "sources": {"links.cluster": "our switch's manual"}
    }

Every figure is text with its unit, except shares, which are numbers above 0 and up to 1. A rate counts by the share of
it that is ``reached``. ``like`` names a shipped table whose figures hold if the file gives none; ``peaks``, if given,
replace all peaks of that table. ``sources`` names the source of a figure, or of all figures below a key.

    peaks.DTYPE                    rate, such as "989.4 TFLOP/s": dense, with 32-bit accumulation
    efficiency.KIND [DTYPE]        [["1 GFLOP", 0.6], ...]: share of the peak by the FLOPs of one operation
    memory.TIER                    size, rate, reached
    links.LEVEL                    rate in one direction, reached, latency, taken (share of the device's computation),
                                   groups (shares of the rate between few ranks, such as [[2, 0.5]])
    operation, action              seconds, such as "5 us"
    ending_action                  the same, of an Action that ends a step
    operations.CLASS               [["1 MB", "20 GB/s"], ...]: rate of a class by the bytes that one operation touches
    unevenness                     [["10 ms", 0.05], ...]: share of the work since a meeting for which ranks wait
    passes                         [[1, 0.95], [2, 1.1], ...]: seconds of a model's passes, over the sum of those of
                                   their operations, by the number of ranks that compute at the same time
    rows                           rate of scattered rows
    exchanges.OPERATION            [["1 MB", "0.4 ms"], ...]: measured seconds by the bytes that a rank copies
    spread.USE                     [0.9, 1.2]: factors on seconds for the low and the high end of a price
    devices                        regular expressions for whole names that drivers give, without the vendor's name
    measured                       machine and date of a calibration (simulate/calibration.py)

Cost: one small file, read once.
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import Hardware, Level, Link, Neighbours
from shardwise.base.policy import nearest
from shardwise.base.regular_files import read_small_file, write_small_file
from shardwise.base.strict_json import read_object
from shardwise.base.words import in_words

_SHIPPED = Path(__file__).with_name("devices.json")
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_FACTORS: Mapping[str, Mapping[str, Decimal]] = {
    **{
        unit: {f"{prefix}{unit}": Decimal(factor) for prefix, factor in {**_DECIMAL, **binary}.items()}
        for unit, binary in {"FLOP/s": {}, "FLOP": {}, "B/s": _BINARY, "B": _BINARY}.items()
    },
    "s": {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")},
}
"""Factors of the units in which a figure may be given, by the unit in which it is kept."""
_EXAMPLES = {"FLOP/s": "312 TFLOP/s", "FLOP": "1 GFLOP", "B/s": "25 GB/s", "B": "80 GB", "s": "5 us"}
_FIGURE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")
_DTYPES = ("fp64", "fp32", "fp16", "bf16", "fp8")
_KINDS = ("product", "attention", "convolution")
_BATCHED = "batched"
_CLASSES = ("arithmetic", "function", "copy", "update", "page")
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "barrier")
_EXCHANGES = (*_OPERATIONS, *(f"gloo {operation}" for operation in _OPERATIONS))
_USES = ("compute", "update", "exchange", "waits", "bubble", "data", "rest")
_SHARE, _SHARES, _TIMES, _ENDS, _RATES, _WAITS = "share", "shares", "times", "ends", "rates", "waits"
_GROUPS, _BY_RANKS = "groups", "factors by ranks"
_COLUMNS: Mapping[str, tuple[str, str]] = {
    _SHARES: ("FLOP", _SHARE),
    _TIMES: ("B", "s"),
    _RATES: ("B", "B/s"),
    _WAITS: ("s", _SHARE),
}
"""Units of the columns of tables."""
_SCHEMA: Mapping[str, Any] = {
    "peaks": dict.fromkeys(_DTYPES, "FLOP/s"),
    "efficiency": {
        **dict.fromkeys(_KINDS, _SHARES),
        **{f"{kind} {dtype}": _SHARES for kind in _KINDS for dtype in _DTYPES},
        _BATCHED: _SHARES,
    },
    "memory": {
        "device": {"size": "B", "rate": "B/s", "reached": _SHARE},
        "host": {"size": "B", "rate": "B/s", "reached": _SHARE},
        "disk": {"size": "B", "rate": "B/s", "reached": _SHARE},
    },
    "links": {
        level: {"rate": "B/s", "reached": _SHARE, "latency": "s", "taken": _SHARE, "groups": _GROUPS}
        for level in ("device", "host", "cluster")
    },
    "operation": "s",
    "action": "s",
    "ending_action": "s",
    "operations": dict.fromkeys(_CLASSES, _RATES),
    "unevenness": _WAITS,
    "passes": _BY_RANKS,
    "rows": "B/s",
    "exchanges": dict.fromkeys(_EXCHANGES, _TIMES),
    "spread": dict.fromkeys(_USES, _ENDS),
}
"""Units of the figures, by their place in the file."""
_BESIDE = ("like", "devices", "sources", "measured")
_NEEDED = (
    "peaks",
    "efficiency.product",
    *(f"memory.{tier}.rate" for tier in ("device", "host", "disk")),
    *(f"links.{level}.{what}" for level in ("device", "host", "cluster") for what in ("rate", "latency")),
)

_Figure = float | tuple[float, float] | tuple[tuple[float, float], ...]


class DeviceTable(NamedTuple):
    """One table: figures and their sources by place in the file, and the names of the devices that it describes."""

    figures: Mapping[str, _Figure]
    sources: Mapping[str, str]
    devices: tuple[str, ...]
    """Regular expressions for whole device names, without the vendor's name at their start."""

    def hardware(self, name: str) -> Hardware:
        """Return the table as hardware of a name."""
        figures = self.figures

        def of(place: str) -> dict[str, Any]:
            start = f"{place}."
            return {key.removeprefix(start): figures[key] for key in figures if key.startswith(start)}

        def number(key: str, default: float) -> float:
            return cast(float, figures.get(key, default))

        tiers = [tier for tier in ("device", "host", "disk") if f"memory.{tier}.rate" in figures]
        levels: tuple[Level, ...] = ("device", "host", "cluster")
        return Hardware(
            name,
            peaks=of("peaks"),
            efficiency=dict.fromkeys(_KINDS, of("efficiency")["product"]) | of("efficiency"),
            memory_bytes={
                tier: int(number(f"memory.{tier}.size", 0))
                for tier in tiers
                if f"memory.{tier}.size" in figures
            },
            memory_bytes_s={
                tier: number(f"memory.{tier}.rate", 0) * number(f"memory.{tier}.reached", 1.0)
                for tier in tiers
            },
            links={
                level: Link(
                    number(f"links.{level}.rate", 0) * number(f"links.{level}.reached", 1.0),
                    number(f"links.{level}.latency", 0),
                    number(f"links.{level}.taken", 0.0),
                    cast(Any, figures.get(f"links.{level}.groups", ())),
                )
                for level in levels
            },
            operation_s=number("operation", 0.0),
            action_s=number("action", 0.0),
            ending_action_s=number("ending_action", 0.0),
            operations=of("operations"),
            neighbours=Neighbours(*(cast(Any, figures.get(name, ())) for name in Neighbours._fields)),
            row_bytes_s=number("rows", 4e9),
            exchanges=of("exchanges"),
            spread=of("spread"),
            sources=self.sources,
        )


def find_hardware(name: str) -> Hardware:
    """Return a shipped table by its name, or the table in a file by its path.

    Args:
        name: Name such as ``h100``, or the path of a JSON file.

    Raises:
        ConfigError: if there is neither such a table nor such a file, or the file is not valid.
    """
    known = shipped_tables()
    if name in known:
        return known[name].hardware(name)
    if "/" in name or name.endswith(".json") or Path(name).is_file():
        return read_hardware(Path(name))
    raise ConfigError(
        f"device: no hardware is named {name!r}, and there is no file {name}{nearest(name, known)}"
    )


def read_hardware(path: Path) -> Hardware:
    """Return the hardware that a user's file describes; its name is the file's, without the ending.

    Raises:
        ConfigError: if the file does not open, or a figure is missing, unknown, or in a wrong unit.
    """
    where = f"hardware file {path}"
    try:
        data = read_small_file(path)
    except OSError as error:
        raise ConfigError(
            f"{where}: {in_words(error)}; expected a JSON file, or one of the shipped names"
        ) from None
    table = read_table(read_object(data, where, kind=ConfigError), where, shipped_tables(), str(path))
    return table.hardware(path.stem)


def write_hardware(path: Path, hardware: Hardware) -> None:
    """Write hardware as a file that ``read_hardware`` reads; a reader sees the old file or the whole new one.

    Raises:
        OSError: if the file cannot be written.
    """
    write_small_file(path, (json.dumps(plain_hardware(hardware), indent=2) + "\n").encode())


@functools.cache
def shipped_tables() -> Mapping[str, DeviceTable]:
    """Return the tables of the package by name."""
    found = read_object(_SHIPPED.read_bytes(), str(_SHIPPED), kind=ConfigError)
    tables: dict[str, DeviceTable] = {}

    def table(name: str) -> DeviceTable:
        if name not in tables:
            base = found[name].get("like")
            known = {base: table(base)} if base in found else {}
            tables[name] = read_table(found[name], f"{_SHIPPED.name}: {name}", known, name)
        return tables[name]

    return {name: table(name) for name in sorted(found)}


def read_table(
    found: Mapping[str, Any], where: str, known: Mapping[str, DeviceTable], origin: str
) -> DeviceTable:
    """Return a table from its parsed JSON.

    Args:
        found: The JSON object.
        where: Place of the object, which begins errors.
        known: Tables that ``like`` may name.
        origin: Source of figures that name none.

    Raises:
        ConfigError: if a figure is missing, unknown, or in a wrong unit.
    """
    base = None
    if "like" in found:
        if found["like"] not in known:
            raise ConfigError(
                f"{where}: like: no table is named {found['like']!r}{nearest(str(found['like']), known)}"
            )
        base = known[found["like"]]
    given = {place: figure for place, figure in _figures(found, _SCHEMA, "", where)}
    kept = {} if base is None else dict(base.figures)
    if "peaks" in found:
        kept = {place: figure for place, figure in kept.items() if not place.startswith("peaks.")}
    figures = kept | given
    for needed in _NEEDED:
        if not any(place == needed or place.startswith(f"{needed}.") for place in figures):
            raise ConfigError(
                f'{where}: {needed} is missing; give it, or name a table that has it with "like"'
            )
    told = _sources(found, where, figures)
    sources = {
        place: _source(place, told, origin)
        if place in given or base is None
        else told.get(place, base.sources[place])
        for place in figures
    }
    return DeviceTable(figures, sources, _devices(found, where))


def _figures(found: Any, schema: Mapping[str, Any], place: str, where: str) -> Iterator[tuple[str, _Figure]]:
    """Yield the figures of an object with their places."""
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{where}: {place}: expected an object with {', '.join(schema)}, found {found!r:.100}"
        )
    for key, value in found.items():
        here = f"{place}.{key}" if place else key
        if not place and key in _BESIDE:
            continue
        if key not in schema:
            names = [*schema, *(_BESIDE if not place else ())]
            raise ConfigError(f"{where}: unknown key {here!r:.100}{nearest(key, names)}")
        unit = schema[key]
        if isinstance(unit, Mapping):
            yield from _figures(value, unit, here, where)
        elif unit in _COLUMNS:
            yield here, _rows(value, f"{where}: {here}", _COLUMNS[unit])
        elif unit == _GROUPS:
            yield here, _groups(value, f"{where}: {here}")
        elif unit == _BY_RANKS:
            yield here, _by_ranks(value, f"{where}: {here}")
        elif unit == _ENDS:
            yield here, _ends(value, f"{where}: {here}")
        elif unit == _SHARE:
            yield here, _share(value, f"{where}: {here}")
        else:
            figure = _figure(value, unit, f"{where}: {here}")
            if figure == 0 and unit != "s":
                raise ConfigError(
                    f"{where}: {here}: {value!r} is zero; expected more, such as {_EXAMPLES[unit]!r}"
                )
            yield here, figure


def _figure(value: Any, unit: str, where: str) -> float:
    """Return a number in ``unit`` from text with a number and a unit."""
    matched = _FIGURE.fullmatch(value) if isinstance(value, str) else None
    factor = None if matched is None else _FACTORS[unit].get(matched[2])
    figure = math.inf if matched is None or factor is None else float(Decimal(matched[1]) * factor)
    if not math.isfinite(figure):
        raise ConfigError(
            f"{where}: {value!r:.100} is not in {unit}; expected text with a number and a unit, such as "
            f"{_EXAMPLES[unit]!r}"
        )
    return figure


def _share(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{where}: {value!r:.100} is no share; expected a number above 0 and up to 1")
    return float(value)


def _rows(value: Any, where: str, units: tuple[str, str]) -> tuple[tuple[float, float], ...]:
    """Return a table of two columns, the first of which ascends; the second holds shares if it has no unit."""
    of, share = units
    example = [[_EXAMPLES[of], _EXAMPLES.get(share, 0.6)]]
    expected = f"expected pairs such as {json.dumps(example)}"
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(row, list) and len(row) == 2 for row in value)
    ):
        raise ConfigError(f"{where}: {value!r:.100} is no table; {expected}")
    rows = tuple(
        (
            _figure(first, of, where),
            _share(second, where) if share == _SHARE else _figure(second, share, where),
        )
        for first, second in value
    )
    if rows[0][0] <= 0 or any(low >= high for (low, _), (high, _) in zip(rows, rows[1:], strict=False)):
        raise ConfigError(f"{where}: the {of} of the rows do not ascend from above zero; {expected}")
    if any(second <= 0 for _, second in rows):
        raise ConfigError(f"{where}: a row has a zero; {expected}")
    return rows


def _groups(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    """Return shares of a rate by the ranks of a group."""
    if not _ascends(value, 2):
        raise ConfigError(
            f"{where}: {value!r:.100} is no table of groups; expected pairs of ranks, ascending from 2, and shares, "
            "such as [[2, 0.5]]"
        )
    return tuple((float(size), _share(share, where)) for size, share in value)


def _by_ranks(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    """Return factors by a number of ranks."""
    if not _ascends(value, 1) or not all(
        type(factor) in (int, float) and 0.1 <= factor <= 10 for _, factor in value
    ):
        raise ConfigError(
            f"{where}: {value!r:.100} is no table of factors; expected pairs of ranks, ascending from 1, and factors "
            "from 0.1 to 10, such as [[1, 0.95], [2, 1.1]]"
        )
    return tuple((float(ranks), float(factor)) for ranks, factor in value)


def _ascends(value: Any, least: int) -> bool:
    """Return whether a value has pairs whose first numbers are whole and ascend from ``least``."""
    if not isinstance(value, list) or not value:
        return False
    firsts = [row[0] for row in value if isinstance(row, list) and len(row) == 2]
    if len(firsts) < len(value) or not all(type(first) is int and first >= least for first in firsts):
        return False
    return all(low < high for low, high in zip(firsts, firsts[1:], strict=False))


def _ends(value: Any, where: str) -> tuple[float, float]:
    """Return the factors for the low and the high end of a price."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(end) in (int, float) for end in value)
    if not is_pair or not 0.1 <= value[0] <= 1 <= value[1] <= 10:
        raise ConfigError(f"{where}: {value!r:.100} is no range of factors; expected two such as [0.9, 1.2]")
    return float(value[0]), float(value[1])


def _devices(found: Mapping[str, Any], where: str) -> tuple[str, ...]:
    given = found.get("devices", [])
    try:
        if not isinstance(given, list):
            raise TypeError
        for name in given:
            re.compile(name)
    except (re.error, TypeError):
        raise ConfigError(f"{where}: devices: {given!r:.100} is no list of regular expressions") from None
    return tuple(given)


def _sources(found: Mapping[str, Any], where: str, figures: Mapping[str, _Figure]) -> Mapping[str, str]:
    told = found.get("sources", {})
    if not isinstance(told, Mapping) or not all(isinstance(text, str) for text in told.values()):
        raise ConfigError(f"{where}: sources: expected an object of texts, found {told!r:.100}")
    for place in told:
        if not any(figure == place or figure.startswith(f"{place}.") for figure in figures):
            raise ConfigError(f"{where}: sources: no figure lies at {place!r:.100}{nearest(place, figures)}")
    return told


def _source(place: str, told: Mapping[str, str], origin: str) -> str:
    """Return the source of the nearest place above a figure."""
    parts = place.split(".")
    for length in range(len(parts), 0, -1):
        if (above := ".".join(parts[:length])) in told:
            return told[above]
    return origin


def plain_hardware(hardware: Hardware) -> dict[str, Any]:
    """Return hardware in the form of a file; each rate is the one that is reached."""
    memory: dict[str, dict[str, Any]] = {
        tier: {"rate": _text(rate, "B/s")} for tier, rate in hardware.memory_bytes_s.items()
    }
    for tier, size in hardware.memory_bytes.items():
        memory.setdefault(tier, {})["size"] = f"{size} B"
    links: dict[str, dict[str, Any]] = {}
    for level, link in hardware.links.items():
        links[level] = {"rate": _text(link.bytes_s, "B/s"), "latency": _text(link.latency_s, "s")}
        if link.taken:
            links[level]["taken"] = link.taken
        if link.groups:
            links[level]["groups"] = [[int(ranks), share] for ranks, share in link.groups]
    found = {
        "peaks": {dtype: _text(peak, "FLOP/s") for dtype, peak in hardware.peaks.items()},
        "efficiency": {
            kind: [[_text(size, "FLOP"), share] for size, share in table]
            for kind, table in hardware.efficiency.items()
        },
        "memory": memory,
        "links": links,
        "operation": _text(hardware.operation_s, "s"),
        "action": _text(hardware.action_s, "s"),
        "operations": {
            name: [[_text(size, "B"), _text(rate, "B/s")] for size, rate in table]
            for name, table in hardware.operations.items()
        },
        "rows": _text(hardware.row_bytes_s, "B/s"),
        "exchanges": {
            operation: [[_text(size, "B"), _text(seconds, "s")] for size, seconds in table]
            for operation, table in hardware.exchanges.items()
        },
        "spread": {use: list(ends) for use, ends in hardware.spread.items()},
    }
    if hardware.ending_action_s:
        found["ending_action"] = _text(hardware.ending_action_s, "s")
    unevenness, passes = hardware.neighbours
    if unevenness:
        found["unevenness"] = [[_text(worked, "s"), share] for worked, share in unevenness]
    if passes:
        found["passes"] = [[int(ranks), factor] for ranks, factor in passes]
    places = dict(_figures(found, _SCHEMA, "", hardware.name))
    return {**found, "sources": {place: text for place, text in hardware.sources.items() if place in places}}


def with_source(hardware: Hardware, source: str) -> Hardware:
    """Return hardware with a source for every figure that has none.

    Args:
        hardware: Hardware whose sources may name figures, or places above them.
        source: Source of the others.
    """
    places = dict(_figures(plain_hardware(hardware), _SCHEMA, "", hardware.name))
    return replace(hardware, sources={place: _source(place, hardware.sources, source) for place in places})


def _text(value: float, unit: str) -> str:
    """Return a figure as text with the largest unit of which it is at least one."""
    units = [(float(factor), name) for name, factor in _FACTORS[unit].items() if "i" not in name]
    fitting = [each for each in units if each[0] <= value] or [min(units)]
    factor, name = max(fitting)
    return f"{value / factor:.9g} {name}"
