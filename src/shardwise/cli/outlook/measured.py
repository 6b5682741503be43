"""``shardwise plan --measure``: configurations run for a few steps on this machine, beside what was foreseen of them.

    found = measure([MeasuredLayout(config, set, foreseen_s, foreseen_bytes), ...], ranks=2, device="cpu")
    found[0].step_s.actual                  # the fastest first

The ranks that run are started by ``shardwise launch`` (measure_rank.py), for one configuration after another. A machine
that is not the one of the plan is refused by name, before anything runs.

Cost: some seconds to start the ranks of each configuration, and seven steps of each.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import RankError, UsageError
from shardwise.base.strict_json import read_object
from shardwise.base.words import bytes_text, counted
from shardwise.cli.outlook.outcome import Compared
from shardwise.config.run import RunConfig
from shardwise.observe.flops import hardware_name
from shardwise.simulate.calibration import run_ranks, this_machine

STEPS = 5
"""Steps that count."""
_RANK_MODULE = "shardwise.cli.outlook.measure_rank"
_PATIENCE_S = 3600.0


class Layout(NamedTuple):
    """A configuration to measure, with what is foreseen of it."""

    config: RunConfig
    set: tuple[str, ...]
    """Overrides that make it from the configuration of the request, as ``--set`` takes them."""
    step_s: float
    peak_bytes: int


class MeasuredLayout(NamedTuple):
    """The seconds and bytes of a configuration that ran on this machine, beside those that were foreseen."""

    set: tuple[str, ...]
    """Overrides that make it from the configuration of the request, as ``--set`` takes them."""
    step_s: Compared
    """Seconds of a step, the median of the steps on the slowest rank."""
    peak_bytes: Compared
    """Most bytes that a rank held."""

    def plain(self) -> dict[str, Any]:
        """Return the figures as values for JSON."""
        return {
            "set": list(self.set),
            "step_s": self.step_s.model_dump(),
            "peak_bytes": self.peak_bytes.model_dump(),
        }

    def line(self) -> str:
        """Return the figures as a line for people."""
        words = " ".join(f"--set {each}" for each in self.set) or "as it is"
        step_s, peak = self.step_s, self.peak_bytes
        assert step_s.actual and step_s.foreseen and peak.actual and peak.foreseen, "measured and foreseen"
        return (
            f"{words}: {step_s.actual:.3g} s a step, foreseen {step_s.foreseen:.3g} s "
            f"({step_s.foreseen / step_s.actual:.2f}); {bytes_text(int(peak.actual))}, "
            f"foreseen {bytes_text(int(peak.foreseen))} ({peak.foreseen / peak.actual:.2f})"
        )


def check_machine(ranks: int, device: str) -> None:
    """Check that this machine can run ``ranks`` ranks of a device by themselves.

    Args:
        ranks: Number of ranks.
        device: Name of the device, as ``--device`` takes it.

    Raises:
        UsageError: if the machine has another device, or not a core or device for each rank.
    """
    if device == "cpu":
        cores = this_machine(1).cores
        if ranks > cores:
            raise UsageError(
                f"--measure: {counted(ranks, 'rank')} would take turns on the {counted(cores, 'core')} of this "
                f"machine, so their seconds would be no measure of a step; measure at most --ranks {cores} here"
            )
        return
    has_cuda = torch.cuda.is_available()
    here = torch.cuda.get_device_name() if has_cuda else "no accelerator"
    if not has_cuda or hardware_name(here) != device:
        raise UsageError(
            f"--measure: the plan is for {device}, and this machine has {here}; call it on a machine with that device, "
            "or plan with --device cpu"
        )
    devices = torch.cuda.device_count()
    if ranks > devices:
        raise UsageError(
            f"--measure: {counted(ranks, 'rank')} need as many devices, and this machine has {devices}; measure at "
            f"most --ranks {devices} here"
        )


def measure(
    layouts: Sequence[Layout], ranks: int, device: str, steps: int = STEPS
) -> tuple[MeasuredLayout, ...]:
    """Run configurations for a few steps each on this machine, and return what they took, the fastest first.

    Args:
        layouts: The configurations.
        ranks: Number of ranks.
        device: Name of the device, as ``--device`` takes it.
        steps: Steps that count.

    Raises:
        UsageError: if this machine is not that of the plan.
        RankError: if the ranks of a configuration failed.
    """
    check_machine(ranks, device)
    found = []
    for layout in layouts:
        figures = _run(layout, ranks, device, steps)
        found.append(
            MeasuredLayout(
                layout.set,
                Compared(foreseen=layout.step_s, actual=max(each["step_s"] for each in figures)),
                Compared(foreseen=layout.peak_bytes, actual=max(each["peak_bytes"] for each in figures)),
            )
        )
    return tuple(sorted(found, key=lambda each: each.step_s.actual or 0.0))


def _run(layout: Layout, ranks: int, device: str, steps: int) -> list[dict[str, Any]]:
    """Return the figures of all ranks of a configuration."""
    comm = layout.config.comm.model_copy(update={"device": "cpu" if device == "cpu" else "cuda"})
    config = layout.config.model_copy(update={"comm": comm})
    plain = config.model_dump(mode="json", exclude_none=True)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"config": plain, "steps": steps}))
        paths = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        who = f"--measure: the ranks of {_named(layout)}"
        run_ranks(who, _RANK_MODULE, [str(job), folder], ranks, paths, _PATIENCE_S)
        return [read_object(path.read_bytes(), "--measure", kind=RankError) for path in paths]


def _named(layout: Layout) -> str:
    return " ".join(f"--set {each}" for each in layout.set) or "the configuration as it is"
