"""What a run foresees of itself before its first step, and keeps beside what it then takes (cli/outlook/outcome.py).

Rank 0 measures the passes of its first microbatch on shapes and prices them with the rates of this machine, a second or
so. The result is a line at the start, and the column ``foreseen`` of ``outcome.json``. It never refuses a run: a model
that cannot be foreseen (its pass depends on numbers, or it cannot be built on meta) has no forecast.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.pytree import tensors_in
from shardwise.base.words import bytes_text, in_words
from shardwise.cli.outlook.outcome import outcome_of, write_outcome
from shardwise.config.run import RunConfig
from shardwise.data.draws import GeneratorContext
from shardwise.engine.engine import Engine
from shardwise.engine.fit.foresee import read
from shardwise.engine.parts.rank_phases import PhaseSeconds, phase_of_axis
from shardwise.observe.memory import available_bytes, peak_resident_bytes, resident_bytes
from shardwise.simulate.calibration import cpu_hardware
from shardwise.simulate.price import StepSeconds, step_seconds
from shardwise.simulate.rates import measured_hardware

_log = logging.getLogger(__name__)


class RunOutlook:
    """Holds what rank 0 foresees of a run before its first step, and writes it beside what the run took.

    Args:
        engine: The run's engine.
        path: The file.
    """

    def __init__(self, engine: Engine, path: Path):
        self._engine = engine
        self._path = path
        self.begins_at = engine.step_count
        """Steps before those of this process."""
        self.forecast: RunForecast | None = None
        """What was foreseen; None if nothing was."""
        self._held: Mapping[str, int] = {}
        """Bytes by row behind the step that was measured; a loader that has been closed holds nothing."""

    def foresee(
        self, make: Callable[[], nn.Module], config: RunConfig, example: Any, steps_ahead: int = 0
    ) -> None:
        """Say on rank 0, in front of the first step of the process, what a step will take.

        Args:
            make: Function that builds the model.
            config: Configuration of the run.
            example: The first microbatch.
            steps_ahead: Steps that the loader reads before their use.
        """
        world = self._engine.world
        if world.rank != 0 or self._engine.step_count != self.begins_at:
            return
        self.forecast = forecast_of(make, config, world.size, world.device, example, self._process_bytes)
        if self.forecast is None:
            return
        step_bytes = self._engine.accumulation * sum(tensor.nbytes for tensor in tensors_in(example))
        self.forecast = self.forecast.with_batches_ahead(steps_ahead * step_bytes, world.device.type == "cpu")
        self._engine.expect_bytes(self.forecast.rows)
        has = free_bytes(world.device, world.local_size)
        too_many = has is not None and self.forecast.peak_bytes > has
        _log.log(logging.WARNING if too_many else logging.INFO, "%s", self.forecast.line(has))

    @contextmanager
    def measuring(self, batches: Sequence[Any]) -> Iterator[None]:
        """Measure the memory of the first step of the process on rank 0; later steps run as they are.

        Args:
            batches: Microbatches of the step that runs in the context.
        """
        if self.forecast is None or self._engine.step_count != self.begins_at:
            yield
            return
        with self._engine.measure_memory(batches):
            yield
        self._held = self._engine.held_bytes()

    def keep(self) -> None:
        """Write the outcome so far on rank 0; a file that cannot be written does not end the run."""
        world, device = self._engine.world, self._engine.world.device
        steps = self._engine.measured_steps
        if world.rank != 0 or (not steps and self._path.exists()):
            return  # a run that has just resumed keeps what it measured before
        is_cpu = device.type == "cpu"
        outcome = outcome_of(
            ranks=world.size,
            device=device.type,
            forecast=None if self.forecast is None else self.forecast.plain(),
            held={row: max(size, self._held.get(row, 0)) for row, size in self._engine.held_bytes().items()},
            peak_bytes=peak_resident_bytes() if is_cpu else torch.accelerator.max_memory_allocated(device),
            phases=[each._asdict() for each in self._engine.rank_seconds()],
            steps=steps,
        )
        try:
            write_outcome(self._path, outcome)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, in_words(error))

    def _process_bytes(self) -> int:
        """Return the bytes of this process beside its engine's memory, on a CPU; 0 on a device."""
        if self._engine.world.device.type != "cpu":
            return 0
        held = sum(size for row, size in self._engine.held_bytes().items() if row != "disk")
        return max((resident_bytes() or 0) - held, 0)


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

    def with_batches_ahead(self, size: int, is_cpu: bool) -> "RunForecast":
        """Return the forecast with a row of batches that are read ahead into host memory."""
        rows = {**self.rows, "batches ahead": size} if size else self.rows
        return self._replace(rows=rows, peak_bytes=self.peak_bytes + size * is_cpu)

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
    process_bytes: Callable[[], int] = lambda: 0,
) -> RunForecast | None:
    """Return the forecast of a run; None if it cannot be foreseen.

    The user's function that builds the model is called once more and may draw random numbers or fail in any way; the
    run's own generators and steps must not notice.

    Args:
        make: Function that builds the model; it is called on meta.
        config: Configuration of the run.
        ranks: Ranks of the run.
        device: Device of rank 0.
        example: A microbatch.
        process_bytes: Function that returns the bytes of the process beside its engine, on a CPU. It is called behind
            the pass, which loads code of torch that stays.
    """

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return make()

    try:
        with GeneratorContext(0):
            known = read(on_meta, config, ranks, device, example)._replace(process_bytes=process_bytes())
        outlook = known.outlook(known.settings.offload)
        dtype = config.precision.compute_dtype or torch.float32
        hardware = cpu_hardware(dtype)[0] if device.type == "cpu" else measured_hardware(device, dtype)
        policies = known.policies_with(known.settings.offload)
        seconds = step_seconds(outlook.plan, policies, known.passed, hardware, device.type)
    except Exception as error:
        _log.info(
            "this run is not foreseen: %s", str(error).splitlines()[0] if str(error) else type(error).__name__
        )
        return None
    step = outlook.steps[0]
    return RunForecast(
        outlook.rows(step),
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
