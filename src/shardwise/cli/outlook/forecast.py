"""What a run foresees of itself before its first step, and keeps beside what it then takes (cli/outlook/outcome.py).

Rank 0 measures the passes of its first microbatch on shapes and prices them with the rates of this machine, a second or
so. The result is a line at the start, and the column ``foreseen`` of ``outcome.json``. It never refuses a run: a model
that cannot be foreseen (its pass depends on numbers, or it cannot be copied) has no forecast.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import UsageError
from shardwise.base.pytree import tensors_in
from shardwise.base.words import bytes_text, in_words
from shardwise.cli.outlook import history
from shardwise.cli.outlook.model_copy import ModelCopy
from shardwise.cli.outlook.outcome import outcome_of, write_outcome
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.config.run import RunConfig
from shardwise.data.draws import GeneratorContext
from shardwise.engine.engine import Engine
from shardwise.engine.fit.foresee import read
from shardwise.engine.fit.kernel_code import load_kernels
from shardwise.engine.fit.outside import HOLES_ROW
from shardwise.engine.parts.rank_phases import phase_of_axis
from shardwise.memory.ledger import STEP_ROWS
from shardwise.observe.memory import available_bytes, give_back_free, peak_resident_bytes, resident_bytes
from shardwise.observe.timeline_picture import draw_lanes
from shardwise.plan.norm_numbers import PhaseSeconds
from shardwise.plan.timeline import Timeline
from shardwise.simulate.calibration import cpu_hardware
from shardwise.simulate.passes import MeasuredPass
from shardwise.simulate.price import StepSeconds, step_seconds, step_timeline
from shardwise.simulate.rates import measured_hardware
from shardwise.simulate.timeline import StepMemory

_log = logging.getLogger(__name__)


class RunOutlook:
    """Holds what rank 0 foresees of a run before its first step, and writes it beside what the run took.

    Args:
        engine: The run's engine.
        folder: Folder of the run.
        config: Configuration of the run.
        copied: A copy of the model, taken before the engine cut it; None on other ranks, or if nothing is foreseen.
    """

    def __init__(self, engine: Engine, folder: RunFolder, config: RunConfig, copied: ModelCopy | None):
        self._engine = engine
        self._folder = folder
        self._config = config
        self._begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._copied = copied
        self.begins_at = engine.step_count
        """Steps before those of this process."""
        self.forecast: RunForecast | None = None
        """What was foreseen; None if nothing was."""
        self._measured: Timeline | None = None
        """The step that ``look_back`` has looked at."""
        self._held: Mapping[str, int] = {}
        """Bytes by row behind the step that was measured; a loader that has been closed holds nothing."""

    def foresee(self, example: Any, steps_ahead: int = 0, predictions_bytes: int = 0) -> None:
        """Say on rank 0, in front of the first step of the process, what a step will take.

        Args:
            example: The first microbatch.
            steps_ahead: Steps that the loader reads before their use.
            predictions_bytes: Bytes of host memory that an evaluation takes for its predictions behind its passes.
        """
        world, copied = self._engine.world, self._copied
        if copied is None or self._engine.step_count != self.begins_at:
            return
        self._copied = None
        self.forecast = forecast_of(
            copied, self._config, world.size, world.device, example, self._process_bytes
        )
        if self.forecast is None:
            return
        step_bytes = self._engine.accumulation * sum(tensor.nbytes for tensor in tensors_in(example))
        is_cpu = world.device.type == "cpu"
        self.forecast = self.forecast.with_batches_ahead(steps_ahead * step_bytes, is_cpu)
        self.forecast = self.forecast.with_predictions(predictions_bytes, is_cpu)
        self._engine.expect_bytes(self.forecast.rows)
        has = free_bytes(world.device, world.local_size)
        too_many = has is not None and self.forecast.peak_bytes > has
        _log.log(logging.WARNING if too_many else logging.INFO, "%s", self.forecast.line(has))

    @contextlib.contextmanager
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
        """Write the outcome so far on rank 0, also into the machine's history.

        A file that cannot be written does not end the run.
        """
        world, device = self._engine.world, self._engine.world.device
        steps = self._engine.measured_steps
        path = self._folder.outcome
        if world.rank != 0 or (not steps and path.exists()):
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
            write_outcome(path, outcome)
        except OSError as error:
            _log.warning("%s cannot be written: %s", path, in_words(error))
        if steps:
            # A machine without a home folder, or with one that is read-only, keeps no history.
            with contextlib.suppress(OSError, RuntimeError):
                history.keep(self._folder.root, self._config, outcome, self._begun)

    def look_back(self) -> None:
        """Keep the lanes of rank 0 in the step that has just ended, for ``draw``."""
        if self._engine.world.rank == 0:
            self._measured = Timeline.of(self._engine.trace.spans(0))

    def draw(self, path: Path) -> None:
        """Draw the lanes of rank 0 in a step into a PNG file: as foreseen, and as measured in the last step.

        Args:
            path: The file, which is not written if no step was looked at.
        """
        if self._measured is None:
            return
        foreseen = {} if self.forecast is None else {"foreseen": self.forecast.timeline}
        draw_lanes({**foreseen, "measured": self._measured}, path, 0, f"step {self._engine.step_count}")

    def _process_bytes(self) -> int:
        """Return the bytes of this process beside its engine's memory, on a CPU; 0 on a device."""
        if self._engine.world.device.type != "cpu":
            return 0
        gc.collect()
        give_back_free(torch.device("cpu"))  # what the passes on shapes have freed
        held = sum(size for row, size in self._engine.held_bytes().items() if row != "disk")
        return max((resident_bytes() or 0) - held, 0)


class RunForecast(NamedTuple):
    """Memory and seconds of a step of a run, foreseen on its first rank."""

    rows: Mapping[str, int]
    """Bytes of rank 0 by row, each at its most."""
    peak_bytes: int
    """Most bytes of rank 0's device at once."""
    lanes: Mapping[str, float]
    """Seconds of a step by phase, as ``PhaseSeconds`` names them."""
    step_s: float
    low_s: float
    high_s: float
    timeline: Timeline
    """Lanes of the first rank of each pipeline stage in a step."""
    resting_bytes: int = 0
    """Bytes of rank 0's device between two passes."""

    def with_batches_ahead(self, size: int, is_cpu: bool) -> "RunForecast":
        """Return the forecast with a row of batches that are read ahead into host memory."""
        rows = {**self.rows, "batches ahead": size} if size else self.rows
        near = size * is_cpu
        return self._replace(
            rows=rows, peak_bytes=self.peak_bytes + near, resting_bytes=self.resting_bytes + near
        )

    def with_predictions(self, size: int, is_cpu: bool) -> "RunForecast":
        """Return the forecast with a row of the predictions of an evaluation, which no pass runs beside."""
        rows = {**self.rows, "predictions": size} if size else self.rows
        return self._replace(rows=rows, peak_bytes=max(self.peak_bytes, self.resting_bytes + size * is_cpu))

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
    copied: ModelCopy,
    config: RunConfig,
    ranks: int,
    device: torch.device,
    example: Any,
    process_bytes: Callable[[], int] = int,
) -> RunForecast | None:
    """Return the forecast of a run; None if it cannot be foreseen.

    The user's modules run on shapes and may draw random numbers or fail in any way; the run's own generators and steps
    must not notice.

    Args:
        copied: The model without weights.
        config: Configuration of the run.
        ranks: Ranks of the run.
        device: Device of rank 0.
        example: A microbatch.
        process_bytes: Function that returns the bytes of the process beside its engine, on a CPU. It is called after
            the passes and the first run of their kernels, whose code stays in the process.
    """
    try:
        with GeneratorContext(0):
            known = read(copied.make, config, ranks, device, example)
        if known.unforeseen:
            raise UsageError(known.unforeseen)
        if device.type == "cpu":
            load_kernels(_kinds_of(known.passed.values()))
        known = known._replace(
            process_bytes=process_bytes(),
            draws=copied.draws and config.init_from is None,
            given_bytes=copied.given_bytes,
        )
        outlook = known.outlook(known.settings.offload)
        dtype = config.precision.compute_dtype or torch.float32
        hardware = cpu_hardware(dtype)[0] if device.type == "cpu" else measured_hardware(device, dtype)
        policies = known.policies_with(known.settings.offload)
        given = outlook.plan, policies, known.passed, hardware, device.type
        seconds, timeline = step_seconds(*given), step_timeline(*given)
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
        timeline,
        _resting_bytes(step),
    )


def _resting_bytes(step: StepMemory) -> int:
    """Return the bytes that a rank holds between two passes of an evaluation."""
    point = step.points.get("evaluation", step.points["step"])
    rows = {row: size for row, size in point.rows.items() if row not in (*STEP_ROWS, HOLES_ROW)}
    return point._replace(rows=rows).bytes_on(step.near)


def _kinds_of(passes: Iterable[MeasuredPass]) -> set[tuple[str, str]]:
    """Return the kinds of products in passes, with their dtypes."""
    return {
        (product.kind, product.dtype)
        for each in passes
        for share in each.shares.values()
        for product in share.products
    }


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
