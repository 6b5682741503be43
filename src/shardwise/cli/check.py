"""``shardwise train --check``: all that can be known of a run before its first step, without starting a rank.

    configuration   every key, every rule, and the numbers that follow from the ranks
    data            opened as the run would: text is tokenised and clicks are packed into the cache that it then uses
    model           built on meta (the user's own as it comes), cut for one rank of each pipeline stage
    bytes           of model state on a rank, beside what is free here
    memory          with --memory: the report that ``shardwise plan`` prints: a step's memory and seconds, and changes
                    that make it fit

Every fault ends the check as it would end the run, with the same message and exit code. Nothing else is written.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from shardwise.base.errors import MismatchError
from shardwise.base.words import bytes_text
from shardwise.cli.click_trainer import with_steps
from shardwise.cli.evaluations import notes_on
from shardwise.cli.image_trainer import side_of
from shardwise.cli.outlook.job_shapes import on_meta, shapes_of
from shardwise.cli.outlook.planned import report_of
from shardwise.cli.outlook.planned_job import PlannedJob, PlanRequest, PlanSetting
from shardwise.cli.request import CommandRequest
from shardwise.cli.runs.run_folder import RunFolder, differences, without_start
from shardwise.cli.text_trainer import context_of, with_mask
from shardwise.cli.trainer import ConversionProgress, nothing_left, on_command_line
from shardwise.config.auto import ResolvedConfig, resolve
from shardwise.config.run import RunConfig, read_file
from shardwise.data import DataPolicy, build
from shardwise.data.clicks import ClickPolicy, build_clicks
from shardwise.data.images import ImagePolicy, build_images
from shardwise.engine.fit.fits import Memory, budget
from shardwise.engine.fit.foresee import MemoryEstimate, examine_step, foresee
from shardwise.engine.fit.report import JobReport
from shardwise.launch.local import check_ranks
from shardwise.models import BertPolicy, GptPolicy, TargetPolicy, build_ctr, build_image_model
from shardwise.models import build as build_model
from shardwise.models.ctr.policy import CtrPolicy
from shardwise.models.images.policy import ImageModelPolicy
from shardwise.observe.memory import available_bytes
from shardwise.observe.progress import count_text
from shardwise.plan.plan import bytes_by_tier
from shardwise.simulate.calibration import cpu_hardware
from shardwise.simulate.rates import measured_hardware, with_disk
from shardwise.tiers.scratch_folder import check_folder
from shardwise.verify.passed import sentence_of_run


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """Facts about a run that are known before its first step."""

    config: RunConfig
    ranks: int
    choices: tuple[str, ...]
    start: str
    """Description of the place from which the run would start."""
    samples: int | None
    """Number of training samples; None if the data does not contain it."""
    validation_samples: int | None
    parameters: int
    outlook: MemoryEstimate
    free_bytes: int | None
    """Free memory of this host, or of the accelerator."""
    changes: tuple[str, ...] = ()
    """Keys that differ from those of the run's last start, and state of a resumed step that this run does not use."""
    report: JobReport | None = None
    """With ``--memory``: what ``shardwise plan`` foresees of the job; else None."""
    verified: str = ""
    """The layout on which ``shardwise verify`` has passed, or the command that verifies the run; empty for one rank."""

    @property
    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes of model state on the rank that holds most, by kind."""
        return self.outlook.bytes_per_rank()

    def lines(self) -> list[str]:
        """Return the facts as lines for people."""
        tiers = bytes_by_tier(self.bytes_per_rank)
        apart = f" and {bytes_text(tiers['host'])} in its host's memory" if "host" in tiers else ""
        apart += f" and {bytes_text(tiers['disk'])} on a disk" if "disk" in tiers else ""
        said = [*self.choices, f"start: {self.start}", *self.changes]
        if self.samples is not None:
            held_out = "" if self.validation_samples is None else f", {self.validation_samples:,} held out"
            said.append(f"data: {self.samples:,} samples to learn from{held_out}")
        else:
            said.append("data: opened; it does not say how many samples it has")
        said.append(f"model: {count_text(self.parameters)} parameters")
        said += str(self.outlook.plan).splitlines()
        free = "" if self.free_bytes is None else f"; {bytes_text(self.free_bytes)} are free here"
        said.append(
            f"model state: {bytes_text(tiers['device'])} on a rank{apart}, activations not counted{free}"
        )
        said += [self.verified] if self.verified else []
        return said if self.report is None else [*said, *self.report.lines()]

    def to_json(self) -> str:
        """Return the facts as JSON for programs."""
        facts = {
            "config": self.config.model_dump(mode="json", exclude_none=True),
            "ranks": self.ranks,
            "start": self.start,
            "since_last_start": list(self.changes),
            "samples": self.samples,
            "validation_samples": self.validation_samples,
            "parameters": self.parameters,
            "bytes_per_rank": self.bytes_per_rank,
            "free_bytes": self.free_bytes,
            "exchanges": [each._asdict() for each in self.outlook.plan.exchanges],
            "tokens": self.outlook.plan.tokens,
            "notes": list(self.outlook.plan.notes),
            "verified": self.verified,
        }
        return json.dumps(facts | ({} if self.report is None else self.report.plain()), indent=2)


def check(request: CommandRequest, memory: Memory | None = None) -> RunEstimate:
    """Check a run without starting it.

    Args:
        request: The user's request.
        memory: Memory of a rank into which the run should fit; None: not checked.

    Raises:
        ShardwiseError: as the run itself before its first step.
    """
    if request.ranks is not None:
        check_ranks(request.ranks)
    ranks = request.ranks or 1
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    wanted = request.load()
    folder = RunFolder(Path(wanted.output_dir))
    start = folder.start_from(request.resume, request.step)
    resolved = resolve(wanted, ranks, device.type)
    config, make, samples, held_out = _opened(resolved.config, folder)
    begins = config if start is None else without_start(config)
    if config.offload.disk_path is not None and config.offload.optimizer == "disk":
        check_folder(config.offload.disk_path)
    for key, path in config.tables.disk_folders.items():
        check_folder(path, key)
    outlook = foresee(make, begins, ranks, device)
    changes: list[str] = []
    step = None
    if start is not None:
        try:
            found = examine_step(make, outlook.plan, start)
        except MismatchError as error:
            raise on_command_line(error, start) from None
        if found is not None:
            step, changes = found
        changes = [
            f"since the last start of this run: {each}" for each in _changed_keys(folder, wanted)
        ] + changes
        if step is not None and step >= config.train.steps:
            changes.append(nothing_left(step, config.train.steps))
    changes += notes_on(config)
    report = None
    if memory is not None:
        report = _report(request, resolved, begins, make, device, memory)
    parameters = sum(math.prod(info.shape) for info in outlook.plan.registry.of_kind("parameter"))
    return RunEstimate(
        config,
        ranks,
        resolved.choices,
        _start_text(config, start, step),
        samples,
        held_out,
        parameters,
        outlook,
        available_bytes(device),
        tuple(changes),
        report,
        sentence_of_run(wanted, ranks),
    )


def memory_of(words: Sequence[str]) -> Memory:
    """Return the memory that words such as ``16GiB`` (of the device), ``host=64GiB`` and ``disk=1TB`` describe.

    Raises:
        ConfigError: if a word is not such a size.
    """
    found: dict[Any, str] = {}
    for word in words:
        tier, _, size = word.rpartition("=")
        found[tier or "device"] = size
    budget(found)
    return found


def _report(
    request: CommandRequest,
    resolved: ResolvedConfig,
    config: RunConfig,
    make: Callable[[], nn.Module],
    device: torch.device,
    memory: Memory,
) -> JobReport:
    """Return what ``shardwise plan`` foresees of the job whose data was opened."""
    micro_size = resolved.config.batch.micro_size
    assert micro_size is not None, "resolve fills it in where a batch size is given"
    shapes = shapes_of(config, micro_size)._replace(config=config, make=make)
    dtype = config.precision.compute_dtype or torch.float32
    hardware, said = (
        cpu_hardware(dtype)
        if device.type == "cpu"
        else (measured_hardware(device, dtype), "rates of this machine were measured here in a second")
    )
    for key, path in config.tables.disk_folders.items():
        hardware = with_disk(hardware, path, key)
    ranks = request.ranks or 1
    job = PlannedJob(config, resolved, ranks, shapes, None)
    wanted = PlanRequest(request.config, ranks=ranks, device=device.type, memory=memory)
    return report_of(wanted, job, PlanSetting(hardware, device), budget(memory), (said,))


def _changed_keys(folder: RunFolder, wanted: RunConfig) -> list[str]:
    """Return the differences between the configuration and that of the run's last start, a line per key."""
    if not folder.config.is_file():
        return []
    return differences(read_file(folder.config), yaml.safe_load(wanted.to_yaml()))


def _start_text(config: RunConfig, start: Path | None, step: int | None) -> str:
    if start is not None:
        return f"from the newest whole step in {start}" + (f", step {step}" if step is not None else "")
    return "afresh" if config.init_from is None else f"afresh, from the weights in {config.init_from.path}"


def _opened(
    config: RunConfig, folder: RunFolder
) -> tuple[RunConfig, Callable[[], nn.Module], int | None, int | None]:
    """Open the data; return the configuration, the model's maker, and the numbers of training and held-out samples."""
    model, data, seed = config.model, config.data, config.train.seed
    if isinstance(data, ClickPolicy):
        clicks = build_clicks(data, folder.cache, ConversionProgress("packing clicks"))
        config = with_steps(config, len(clicks.train), data.epochs)
        sizes: tuple[int | None, int | None] = len(clicks.train), len(clicks.validation)
        if isinstance(model, CtrPolicy):
            made = lambda: build_ctr(model, clicks.schema, config.tables, clicks.table_rows, seed)  # noqa: E731
            return config, on_meta(made), *sizes
    elif isinstance(data, ImagePolicy):
        images = build_images(data, side_of(config))
        sizes = len(images.train), _size(images.validation or ())
        if isinstance(model, ImageModelPolicy):
            classes = len(images.class_names)
            return config, lambda: build_image_model(model, classes, seed), *sizes
    else:
        assert isinstance(data, DataPolicy), "data is text, clicks or images"
        corpus = build(data, context_of(config, data), folder.cache, ConversionProgress("tokenising"))
        sizes = _size(corpus.train), _size(corpus.validation)
        if isinstance(model, GptPolicy):
            whole = model.resolved(corpus.vocab_size)
            return config.model_copy(update={"model": whole}), on_meta(lambda: build_model(whole)), *sizes
        if isinstance(model, BertPolicy):
            config, _ = with_mask(config, model, corpus)
            masked = model.resolved(corpus.vocab_size or 0)
            return config, on_meta(lambda: build_model(masked)), *sizes
    assert isinstance(model, TargetPolicy), (
        "rules of the configuration: text for a gpt, clicks for a ctr model, pictures for one of images"
    )
    return config, lambda: build_model(model, seed=seed), *sizes


def _size(data: Any) -> int | None:
    """Return the number of samples of a dataset; None if the dataset does not report it."""
    data = getattr(data, "dataset", data)  # the dataset of a DataLoader, whose own length counts batches
    try:
        return len(data)
    except TypeError:
        return None
