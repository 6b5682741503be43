"""What a run foresees of itself before its first step, and keeps beside what it then takes (cli/outcome.py).

Rank 0 measures the passes of its first microbatch on shapes and prices them with the rates of this machine, a second or
so. The result is a line at the start, and the column ``foreseen`` of ``outcome.json``. It never refuses a run: a model
that cannot be foreseen (its pass depends on numbers, or it cannot be built on meta) has no forecast.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import ShardwiseError
from shardwise.base.words import bytes_text
from shardwise.config.run import RunConfig
from shardwise.engine.fit.foresee import read
from shardwise.engine.parts.rank_phases import PhaseSeconds, phase_of_axis
from shardwise.observe.memory import available_bytes
from shardwise.simulate.calibration import cpu_hardware
from shardwise.simulate.price import StepSeconds, step_seconds
from shardwise.simulate.rates import measured_hardware

_log = logging.getLogger(__name__)


class RunForecast(NamedTuple):
    """Memory and seconds of a step of a run, foreseen on its first rank."""

    rows: Mapping[str, int]
    """Bytes of rank 0 by row."""
    peak_bytes: int
    """Most bytes of rank 0's device at once."""
    lanes: Mapping[str, float]
    """Seconds of a step by phase, as ``PhaseSeconds`` names them."""
    step_s: float
    low_s: float
    high_s: float

    def plain(self) -> dict[str, Any]:
        """Return the numbers that ``outcome.json`` keeps."""
        return {
            "rows": dict(self.rows),
            "lanes": dict(self.lanes),
            "peak_bytes": self.peak_bytes,
            "step_s": self.step_s,
        }

    def line(self, has_bytes: int | None) -> str:
        """Return the forecast in one line.

        Args:
            has_bytes: Bytes that rank 0 may use, or None if they are unknown.
        """
        said = f"foreseen: {bytes_text(self.peak_bytes)} at most on rank 0"
        if has_bytes is not None:
            margin = has_bytes - self.peak_bytes
            word = "free" if margin >= 0 else "too many, so this run may run out of memory"
            said += f", {bytes_text(abs(margin))} {word}"
        return f"{said}; {self.step_s:.3g} s a step ({self.low_s:.3g} to {self.high_s:.3g})"


def forecast_of(
    make: Callable[[], nn.Module],
    config: RunConfig,
    ranks: int,
    device: torch.device,
    example: Any,
    process_bytes: int = 0,
) -> RunForecast | None:
    """Return the forecast of a run; None if it cannot be foreseen.

    Args:
        make: Function that builds the model; it is called on meta.
        config: Configuration of the run.
        ranks: Ranks of the run.
        device: Device of rank 0.
        example: A microbatch.
        process_bytes: Bytes that the process held before its engine, on a CPU.
    """

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return make()

    try:
        known = read(on_meta, config, ranks, device, example)._replace(process_bytes=process_bytes)
        outlook = known.outlook(known.settings.offload)
        dtype = config.precision.compute_dtype or torch.float32
        hardware = cpu_hardware(dtype)[0] if device.type == "cpu" else measured_hardware(device, dtype)
        policies = known.policies_with(known.settings.offload)
        seconds = step_seconds(outlook.plan, policies, known.passed, hardware, device.type)
    except (ShardwiseError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        _log.info(
            "this run is not foreseen: %s", str(error).splitlines()[0] if str(error) else type(error).__name__
        )
        return None
    step = outlook.steps[0]
    return RunForecast(
        dict(step.peak.rows),
        step.bytes_by_tier["device"],
        lanes_of(seconds),
        seconds.total,
        seconds.low_s,
        seconds.high_s,
    )


def lanes_of(seconds: StepSeconds) -> dict[str, float]:
    """Return foreseen seconds by the phases that ranks measure."""
    found = dict.fromkeys(PhaseSeconds._fields, 0.0)
    spent = seconds.spent
    found |= {"data": spent["data"], "update": spent["update"], "rest": spent["rest"]}
    found["compute"] = spent["compute"] + spent["waits"]
    for axis, each_s in seconds.exposed.items():
        found[phase_of_axis(axis)] += each_s
    return found


def free_bytes(device: torch.device, sharers: int) -> int | None:
    """Return the bytes that rank 0 may use: what it holds and its share of what is free now; None if unknown."""
    free = available_bytes(device)
    return None if free is None else free // (sharers if device.type == "cpu" else 1)
