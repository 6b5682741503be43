"""The rows of our own in the table of ``run.py``: what each trains, and on how many devices it makes sense.

A row is data: a title, the fewest devices, and functions of the number of ranks. jobs.py runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


def _nothing(ranks: int) -> dict[str, Any]:
    return {}


def _always(**config: Any) -> Callable[[int], dict[str, Any]]:
    return lambda ranks: config


def _along(axis: str, **config: Any) -> Callable[[int], dict[str, Any]]:
    """Return the configuration of a mesh with all ranks along one axis."""
    return lambda ranks: {"mesh": {axis: ranks}, **config}


def _hybrid(ranks: int) -> dict[str, Any]:
    return {"zero": {"stage": 3}, "mesh": {"dp": {"replicate": 2, "shard": ranks // 2}}}


class Row(NamedTuple):
    """One way to train."""

    title: str
    config: Callable[[int], Mapping[str, Any]] = _nothing
    """Configuration of the engine, by the number of ranks."""
    fewest: int = 1
    """Fewest devices on which the row runs."""
    why: str = ""
    """Reason why the row does not run on fewer devices."""
    is_even: bool = False
    """True if the row needs an even number of devices."""
    microbatches: Callable[[int], int] = lambda ranks: 1
    """Microbatches of a step, by the number of ranks."""
    smaller: int = 1
    """Divisor of the micro batch; a pipeline has more microbatches instead."""
    model: str = "gpt"
    """gpt, experts or tables."""
    cpu: Mapping[str, Any] = {}  # noqa: RUF012 - never changed
    """Keys that differ in a trial on CPU ranks."""


_TWICE = "with one device it does what stage 0 does"
_CUT = "the axis needs two ranks"

ROWS: dict[str, Row] = {
    "stage-0": Row("stage 0", _always(zero={"stage": 0})),
    "stage-1": Row("stage 1", _always(zero={"stage": 1}), 2, _TWICE),
    "stage-2": Row("stage 2", _always(zero={"stage": 2}), 2, _TWICE),
    "stage-3": Row("stage 3", _always(zero={"stage": 3})),
    "compile": Row(
        "stage 3, compiled blocks",
        _always(zero={"stage": 3}, compile={"scope": "blocks"}),
        # A trial shows that the blocks are traced; the compiler of C++ would take a minute.
        cpu={"compile": {"scope": "blocks", "backend": "eager"}},
    ),
    "host-optimizer": Row(
        "stage 2, optimizer state on the host", _always(zero={"stage": 2}, offload={"optimizer": "host"})
    ),
    "host-activations": Row(
        "stage 3, activations on the host", _always(zero={"stage": 3}, offload={"activations": "host"})
    ),
    "experts": Row("8 experts, stage 2, on every rank", _always(zero={"stage": 2}), model="experts"),
    "tables": Row("26 embedding tables", _always(precision="fp32"), model="tables"),
    "hsdp": Row("stage 3 in two copies (HSDP)", _hybrid, 4, "two copies of two pieces need four ranks", True),
    "tp": Row("tp, sequence cut", _along("tp"), 2, _CUT),
    "pp": Row(
        "pp, 1F1B", _along("pp"), 2, _CUT, microbatches=lambda ranks: 2 * ranks, smaller=4
    ),
    "pp-interleaved": Row(
        "pp, interleaved 1F1B, two stages a rank",
        _along("pp", pipeline={"schedule": "interleaved_1f1b", "virtual_stages": 2}),
        2,
        _CUT,
        microbatches=lambda ranks: 2 * ranks,
        smaller=4,
    ),
    "ep": Row("8 experts, stage 2, ep", _along("ep", zero={"stage": 2}), 2, _CUT, model="experts"),
}  # fmt: skip


def left_out(row: Row, devices: int) -> str:
    """Return why a row does not run on so many devices; "" if it runs."""
    if devices < row.fewest:
        return f"left out: {row.why}"
    if row.is_even and devices % 2:
        return f"left out: it needs an even number of devices, and {devices} are here"
    return ""
