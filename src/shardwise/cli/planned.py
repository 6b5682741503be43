"""A run as ``shardwise plan`` foresees it: configuration or run folder, shapes without data, and the report of both."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import UsageError
from shardwise.base.hardware import Hardware
from shardwise.cli.examples import named
from shardwise.cli.job_shapes import JobShapes, shapes_of
from shardwise.cli.outcome import read_outcome
from shardwise.cli.request import CommandRequest
from shardwise.cli.run_folder import RunFolder, differences
from shardwise.config.auto import ResolvedConfig, resolve
from shardwise.config.run import RunConfig, load
from shardwise.engine.fit.fits import Memory, budget, fits
from shardwise.engine.fit.foresee import foresee
from shardwise.engine.fit.report import JobFlops, JobReport, JobTime, restart_seconds, save_pace


class PlanRequest(NamedTuple):
    """The user's request on the command line of ``shardwise plan``."""

    config: str
    """A configuration, the name of an example, or the folder of a run."""
    overrides: tuple[str, ...] = ()
    ranks: int | None = None
    device: str = "cpu"
    per_host: int | None = None
    memory: Memory | None = None
    mfu: float | None = None
    step_s: float | None = None
    failures_per_day: float | None = None
