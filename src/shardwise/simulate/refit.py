"""Refit: factors on the rates of a table of hardware with which foreseen steps come closest to measured ones.

    product    share of the peak that products, attention and convolutions reach
    memory     rate of the device's memory
    host       rate of the link between the ranks of a host
    cluster    rate of the link between hosts

The factors minimise the sum of squares of log(foreseen / measured), with a pull of each towards 1. If there are more
steps than factors, the pull is weak, and only a factor which the measured steps do not depend on stays 1. Fewer steps
do not determine the factors. The pull is then that of a table whose figures are within 30 % of the right ones, by which
a step is foreseen within 3 %: no rate moves far to explain the last per cent of a step. The method is Gauss-Newton on
the logarithms of the factors, with damping (Levenberg 1944, Marquardt 1963) and derivatives by differences.

Cost: (factors + 1) prices of every line for each of some ten rounds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import Hardware
from shardwise.base.regular_files import read_small_file
from shardwise.base.strict_json import StrictModel, read_object, validated
from shardwise.base.words import in_words

FACTORS = ("product", "memory", "host", "cluster")
_PULL, _PULL_OF_FEW = 1e-3, 0.03 / 0.3
"""Weights of a factor's logarithm beside the errors of the lines: with more lines than factors, and with fewer."""
_DIFFERENCE = 1e-3
_ROUNDS = 40
_MOST = math.log(20.0)
"""Bound of a factor's logarithm: a table that is 20 times off describes other hardware."""


class StepLine(StrictModel):
    """A measured step."""

    config: str
    """Path of the configuration."""
    ranks: int = Field(ge=1)
    device: str
    """Name of the table of hardware."""
    per_host: int = Field(ge=1)
    """Ranks of one host."""
    step_s: float = Field(gt=0)
    """Seconds of a step."""


Price = Callable[[StepLine, Hardware], float]
"""Function that returns the foreseen seconds of a line's step on a table of hardware."""


class Refit(NamedTuple):
    """A refitted table of hardware."""

    hardware: Hardware
    factors: Mapping[str, float]
    """Factor on the rates of the table, by name in ``FACTORS``."""
    before: tuple[float, ...]
    """Foreseen over measured seconds of each line, by the table as it was."""
    after: tuple[float, ...]
    """The same, by the refitted table."""


def read_lines(path: Path) -> list[StepLine]:
    """Read measured steps from a file with one JSON object a line; empty lines are skipped.

    Raises:
        ConfigError: if the file does not open, or a line is not valid.
    """
    try:
        rows = read_small_file(path).splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {in_words(error)}; expected lines of measured steps") from None
    found = []
    for number, row in enumerate(rows, start=1):
        if row.strip():
            where = f"{path}, line {number}"
            found.append(
                validated(StepLine, read_object(row, where, kind=ConfigError), where, kind=ConfigError)
            )
    return found


def refit(lines: Sequence[StepLine], hardware: Hardware, price: Price) -> Refit:
    """Fit factors on the rates of ``hardware`` to measured steps.

    Args:
        lines: Measured steps; those on other devices are left out.
        hardware: Table with the name of the lines' device.
        price: Function that returns the foreseen seconds of a step.

    Raises:
        ConfigError: if no line was measured on the device.
    """
    used = [line for line in lines if line.device == hardware.name]
    if not used:
        devices = ", ".join(sorted({line.device for line in lines})) or "none"
        raise ConfigError(
            f"refit: no line was measured on {hardware.name!r}; devices of the lines: {devices}"
        )

    pull = _PULL if len(used) > len(FACTORS) else _PULL_OF_FEW

    def errors(logs: Sequence[float]) -> list[float]:
        """Return the logarithm of foreseen over measured of each line, and the pulls of the factors."""
        table = scaled(hardware, _factors(logs))
        return [math.log(price(line, table) / line.step_s) for line in used] + [pull * log for log in logs]

    logs = [0.0] * len(FACTORS)
    now, damping = errors(logs), 1e-3
    before = now[: len(used)]
    for _ in range(_ROUNDS):
        slopes = []
        for place in range(len(logs)):
            moved = [log + _DIFFERENCE * (place == other) for other, log in enumerate(logs)]
            slopes.append([(b - a) / _DIFFERENCE for a, b in zip(now, errors(moved), strict=True)])
        step = _step(slopes, now, damping)
        tried = [min(max(log + move, -_MOST), _MOST) for log, move in zip(logs, step, strict=True)]
        then = errors(tried)
        if _squares(then) < _squares(now):
            gained, logs, now, damping = _squares(now) - _squares(then), tried, then, damping / 10
            if gained <= 1e-9 * _squares(now):
                break
        else:
            damping *= 10
            if damping > 1e6:
                break
    factors = _factors(logs)
    told = f"refitted to {len(used)} measured steps"
    return Refit(
        _named(scaled(hardware, factors), factors, told),
        factors,
        tuple(map(math.exp, before)),
        tuple(math.exp(error) for error in now[: len(used)]),
    )


def scaled(hardware: Hardware, factors: Mapping[str, float]) -> Hardware:
    """Return hardware with its rates times ``factors``; no operation exceeds its peak.

    Args:
        hardware: The table.
        factors: Factors by name in ``FACTORS``; one that is left out is 1.
    """
    product, memory = factors.get("product", 1.0), factors.get("memory", 1.0)
    links = dict(hardware.links)
    for level in ("host", "cluster"):
        link = hardware.links[level]  # type: ignore[index]
        links[level] = link._replace(bytes_s=link.bytes_s * factors.get(level, 1.0))  # type: ignore[index]
    return replace(
        hardware,
        efficiency={
            kind: tuple((size, min(share * product, 1.0)) for size, share in table)
            for kind, table in hardware.efficiency.items()
        },
        memory_bytes_s={**hardware.memory_bytes_s, "device": hardware.memory_bytes_s["device"] * memory},
        operations={
            name: tuple((size, rate * memory) for size, rate in table)
            for name, table in hardware.operations.items()
        },
        links=links,
        exchanges={
            operation: tuple((size, seconds / factors.get("host", 1.0)) for size, seconds in table)
            for operation, table in hardware.exchanges.items()
        },
    )


_PLACES = {
    "product": "efficiency.",
    "memory": "memory.device.rate",
    "host": "links.host.rate",
    "cluster": "links.cluster.rate",
}
"""Figures that a factor changes, by their place in a file of hardware."""


def _named(hardware: Hardware, factors: Mapping[str, float], told: str) -> Hardware:
    """Return hardware whose sources say which figures were refitted, and by which factor."""
    sources = {}
    for place, source in hardware.sources.items():
        factor = next((factors[name] for name, start in _PLACES.items() if place.startswith(start)), 1.0)
        sources[place] = source if abs(factor - 1) < 1e-3 else f"{told}, times {factor:.3g} of: {source}"
    return replace(hardware, sources=sources)


def _factors(logs: Sequence[float]) -> dict[str, float]:
    return {name: math.exp(log) for name, log in zip(FACTORS, logs, strict=True)}


def _squares(errors: Sequence[float]) -> float:
    return sum(error * error for error in errors)


def _step(slopes: Sequence[Sequence[float]], errors: Sequence[float], damping: float) -> list[float]:
    """Solve (JᵀJ + damping · diagonal) x = -Jᵀ errors; ``slopes`` are the columns of J."""
    count = len(slopes)
    rows = []
    for i in range(count):
        row = [sum(a * b for a, b in zip(slopes[i], slopes[j], strict=True)) for j in range(count)]
        row[i] *= 1 + damping
        rows.append([*row, -sum(a * b for a, b in zip(slopes[i], errors, strict=True))])
    for i in range(count):
        pivot = max(range(i, count), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for other in range(count):
            if other != i:
                factor = rows[other][i] / rows[i][i]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[i], strict=True)]
    return [rows[i][count] / rows[i][i] for i in range(count)]
