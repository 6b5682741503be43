"""``--profile N``: a torch trace of N steps of every rank, for chrome://tracing or Perfetto."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_log = logging.getLogger(__name__)
_SKIPPED_STEPS = 2
"""Number of steps before the first traced step: they allocate, compile and connect."""


class StepProfile:
    """Starts and stops the profiler between steps; with ``steps`` 0 it does nothing."""

    def __init__(self, path: Path, steps: int, device: torch.device) -> None:
        self._path, self._steps = path, steps
        self._seen = 0
        self._profiler: profile | None = None
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)

    def before_step(self) -> None:
        """Start the profiler if the warm-up is over."""
        if self._steps and self._profiler is None and self._seen == _SKIPPED_STEPS:
            self._profiler = profile(activities=self._activities, record_shapes=True)
            self._profiler.start()

    def after_step(self) -> None:
        """Stop the profiler and write the trace if enough steps were traced."""
        self._seen += 1
        if self._seen == _SKIPPED_STEPS + self._steps:
            self.close()

    def close(self) -> None:
        """Write the trace, also if the run ended early."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        _log.info("trace of %d steps: %s", self._seen - _SKIPPED_STEPS, self._path)
