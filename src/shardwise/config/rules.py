"""Rules that span several policies: a table of (name, predicate, sentence).

A rule holds if its predicate is True; else its sentence, filled in, is the error.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.compiler

from shardwise.base.errors import ConfigError
from shardwise.base.policy import nearest
from shardwise.config.run import RunConfig
from shardwise.data.clicks.policy import ClickPolicy
from shardwise.data.images.policy import ImagePolicy
from shardwise.data.policy import DataPolicy
from shardwise.models.bert import BertPolicy
from shardwise.models.gpt import GptPolicy
from shardwise.models.policy import reads_clicks, reads_images
from shardwise.optim.schedule_policy import SchedulePolicy
from shardwise.parallel.embedding.policy import TableOptions


class ConfigRule(NamedTuple):
    """A rule across policies: a name, a predicate, and the sentence of the error."""

    name: str
    holds: Callable[[RunConfig], bool]
    sentence: Callable[[RunConfig], str]


def _backends() -> list[str]:
    return torch.compiler.list_backends(exclude_tags=())


def _metrics_of(config: RunConfig) -> tuple[str, ...]:
    """Return the metrics that every evaluation on the configuration's data has."""
    if isinstance(config.data, ClickPolicy):
        return ("auc", "log_loss")
    return ("accuracy", "loss") if isinstance(config.data, ImagePolicy) else ("loss",)


RULES = (
    ConfigRule(
        "compile backend",  # listing the backends imports torch's compiler (a second), so the default skips it
        lambda c: c.compile.backend == "inductor" or c.compile.backend in _backends(),
        lambda c: (
            f"compile.backend: torch has no backend {c.compile.backend!r}{nearest(c.compile.backend, _backends())}"
        ),
    ),
    ConfigRule(
        "CUDA graphs of what is compiled",
        lambda c: (
            not c.compile.cuda_graphs or (c.compile.scope != "none" and c.compile.backend == "inductor")
        ),
        lambda c: (
            "compile.cuda_graphs: graphs are recorded of what inductor compiles; set compile.scope: blocks and "
            "compile.backend: inductor, or leave cuda_graphs out"
        ),
    ),
    ConfigRule(
        "CUDA graphs of weights that stay in their place",
        lambda c: not c.compile.cuda_graphs or (c.zero.stage < 3 and c.offload.parameters == "device"),
        lambda c: (
            "compile.cuda_graphs: a graph reads weights where they lay when it was recorded, and zero.stage: 3 and "
            "offload.parameters bring them to other memory each time; set zero.stage: 2 or less and "
            "offload.parameters: device, or leave cuda_graphs out"
        ),
    ),
    ConfigRule(
        "CUDA graphs of one microbatch at a time",
        lambda c: not c.compile.cuda_graphs or (c.mesh.pp == 1 and c.recompute.scope == "none"),
        lambda c: (
            "compile.cuda_graphs: a graph writes its activations to the same memory each time, so a forward pass "
            "cannot come before the last one's backward pass, as with mesh.pp above 1 and in recompute; set mesh.pp: 1 "
            "and recompute: none, or leave cuda_graphs out"
        ),
    ),
    ConfigRule(
        "CUDA graphs of activations that stay in their place",
        lambda c: not c.compile.cuda_graphs or c.offload.activations == "device",
        lambda c: (
            "compile.cuda_graphs: a graph reads what it saved where it lay, and offload.activations: host brings it "
            "back elsewhere; leave one of them out"
        ),
    ),
    ConfigRule(
        "dtypes of operations",
        lambda c: c.precision.operations is None or c.compile.scope == "none",
        lambda c: (
            "precision.operations: a compiled block hides its operations, whose dtypes could not be chosen; set "
            "compile: none, or precision: bf16"
        ),
    ),
    ConfigRule(
        "fp8 rows of weights that tp cuts",
        lambda c: c.precision.linear is None or c.precision.fp8_recipe != "rowwise" or c.mesh.tp == 1,
        lambda c: (
            f"precision.fp8_recipe: rowwise has a scale for each row, and mesh.tp: {c.mesh.tp} cuts rows; set "
            "fp8_recipe: tensorwise, or mesh.tp: 1"
        ),
    ),
    ConfigRule(
        "fp8 of all tokens at once",
        lambda c: c.precision.linear is None or c.tiles.mlp == "off",
        lambda c: (
            "precision.linear: fp8 has one scale for all tokens of a microbatch, and tiles.mlp computes some of them "
            "at a time; leave one of them out"
        ),
    ),
    ConfigRule(
        "ranks that exchange heads",
        lambda c: c.context.ulysses is None or c.mesh.cp % c.context.ulysses == 0,
        lambda c: (
            f"context.ulysses: {c.context.ulysses} ranks that exchange heads do not divide mesh.cp: {c.mesh.cp}; "
            "choose a divisor, or leave it out"
        ),
    ),
    ConfigRule(
        "heads over all ranks",
        lambda c: c.context.method != "ulysses" or c.context.ulysses in (None, c.mesh.cp),
        lambda c: (
            f"context.method: ulysses exchanges heads over all {c.mesh.cp} ranks along cp, and context.ulysses "
            f"asks for {c.context.ulysses} of them; set method to planned or ring, by which keys travel between groups "
            f"of {c.context.ulysses}"
        ),
    ),
    ConfigRule(
        "virtual stages",
        lambda c: c.pipeline.stages_per_rank == 1 or c.mesh.pp > 1,
        lambda c: (
            f"pipeline: schedule {c.pipeline.schedule} with virtual_stages {c.pipeline.stages_per_rank} deals several "
            "stages to each rank along pp, but mesh.pp is 1; set mesh.pp: 2 or leave pipeline out"
        ),
    ),
    ConfigRule(
        "reshard after forward",
        lambda c: c.zero.reshard_after_forward or (c.mesh.pp > 1 and c.zero.stage == 3),
        lambda c: (
            "zero: reshard_after_forward: false keeps the weights of ZeRO-3 gathered through a pipeline's "
            f"microbatches; mesh.pp is {c.mesh.pp} and stage {c.zero.stage}; leave it out"
            + (", or use zero.stage: 2, which keeps weights whole" if c.zero.stage == 3 else "")
        ),
    ),
    ConfigRule(
        "whole logits by tiles",
        lambda c: not c.tensor.gather_logits or c.tiles.logits in (None, "off"),
        lambda c: (
            f"tiles.logits: {c.tiles.logits} never makes whole logits, which tensor.gather_logits asks for; leave one "
            "of them out"
        ),
    ),
    ConfigRule(
        "batch norm",
        lambda c: c.batch_norm == "per_rank" or c.mesh.pp == 1,
        lambda c: (
            "batch_norm: synchronized adds up statistics over dp within a forward pass, which stages at different "
            "microbatches would do in different order; set batch_norm: per_rank or mesh.pp: 1"
        ),
    ),
    ConfigRule(
        "deterministic attention",
        lambda c: not c.deterministic or "cudnn" not in c.attention.backend,
        lambda c: (
            "attention.backend: cudnn has no fixed order of its sums, and torch does not use it with deterministic: "
            "true; set attention.backend: flash, efficient, math or auto, or leave deterministic out"
        ),
    ),
    ConfigRule(
        "clicks",
        lambda c: isinstance(c.data, ClickPolicy) or not reads_clicks(c.model),
        lambda c: "data: a click-through model reads clicks; remove kind and target, or set kind: clicks",
    ),
    ConfigRule(
        "text",
        lambda c: isinstance(c.data, DataPolicy) or not isinstance(c.model, GptPolicy | BertPolicy),
        lambda c: (
            f"data: the model is a {getattr(c.model, 'name', '')}, which reads text; remove kind: {c.data.kind}, or "
            f"choose a model that reads {c.data.kind}"
        ),
    ),
    ConfigRule(
        "masked text",
        lambda c: not isinstance(c.model, BertPolicy) or getattr(c.data, "target", None) is None,
        lambda c: "data: a bert reads text that it masks itself; remove data.target and give data.source",
    ),
    ConfigRule(
        "documents of masked text",
        lambda c: not isinstance(c.model, BertPolicy) or not getattr(c.data, "documents", False),
        lambda c: (
            "data.documents: a bert sees tokens on both sides, and its attention does not take documents; leave "
            "data.documents out"
        ),
    ),
    ConfigRule(
        "images",
        lambda c: isinstance(c.data, ImagePolicy) or not reads_images(c.model),
        lambda c: "data: a model of images reads pictures; remove kind and target, or set kind: images",
    ),
    ConfigRule(
        "size of pictures",
        lambda c: (
            not isinstance(c.data, ImagePolicy)
            or c.data.size is None
            or c.data.size == getattr(c.model, "size", c.data.size)
        ),
        lambda c: (
            f"data.size is {getattr(c.data, 'size', 0)} and model.size {getattr(c.model, 'size', 0)}; leave data.size "
            "out, which follows from the model"
        ),
    ),
    ConfigRule(
        "metrics of your own",
        lambda c: c.train.metrics is None or isinstance(c.data, ImagePolicy),
        lambda c: (
            "train: metrics are computed from outputs and labels of pictures; set data.kind: images, or leave "
            "metrics out"
        ),
    ),
    ConfigRule(
        "best steps",
        lambda c: (
            c.checkpoint.keep_best > 0 or (c.checkpoint.best_metric is None and c.checkpoint.best_is is None)
        ),
        lambda c: (
            "checkpoint: best_metric and best_is say which steps are the best, and keep_best: 0 keeps none of them; "
            "set keep_best to the number of steps to keep, or leave them out"
        ),
    ),
    ConfigRule(
        "best metric",
        lambda c: c.checkpoint.best_metric in (None, *_metrics_of(c)) or c.train.metrics is not None,
        lambda c: (
            f"checkpoint.best_metric: {c.checkpoint.best_metric!r} is not a metric of an evaluation on this data"
            f"{nearest(str(c.checkpoint.best_metric), _metrics_of(c))}; expected {' or '.join(_metrics_of(c))}"
        ),
    ),
    ConfigRule(
        "direction of the best metric",
        lambda c: (
            c.checkpoint.best_metric in (None, *_metrics_of(c))
            or c.train.metrics is None
            or c.checkpoint.best_is is not None
        ),
        lambda c: (
            f"checkpoint.best_metric: {c.checkpoint.best_metric!r} is a metric of train.metrics; say in "
            "checkpoint.best_is if higher or lower values of it are better"
        ),
    ),
    ConfigRule(
        "tables of features",
        lambda c: (c.tables.defaults == TableOptions() and not c.tables.named) or reads_clicks(c.model),
        lambda c: (
            "tables: defaults and named are for the built-in click-through models, whose tables follow from the data; "
            "a model of your own says in its code what its tables are"
        ),
    ),
    ConfigRule(
        "module profile",
        lambda c: c.module_profile is None or c.compile.scope == "none",
        lambda c: "module_profile: modules of compiled blocks cannot be told apart; set compile: none for it",
    ),
    ConfigRule(
        "warm-up",
        lambda c: (
            not isinstance(c.schedule, SchedulePolicy)
            or c.schedule.total_steps is None
            or c.schedule.warmup_steps < c.schedule.total_steps
        ),
        lambda c: (
            f"schedule: warmup_steps {getattr(c.schedule, 'warmup_steps', 0)} must be less than total_steps "
            f"{getattr(c.schedule, 'total_steps', 0)}"
        ),
    ),
    ConfigRule(
        "decay",
        lambda c: (
            not isinstance(c.schedule, SchedulePolicy)
            or c.schedule.total_steps is None
            or c.schedule.warmup_steps + (c.schedule.decay_steps or 0) <= c.schedule.total_steps
        ),
        lambda c: (
            f"schedule: warmup_steps and decay_steps together must not be more than total_steps: {c.schedule!r}"
        ),
    ),
    ConfigRule(
        "learning rate",
        lambda c: c.optimizer.lr > 0 or any(group.lr for group in c.optimizer.groups),
        lambda c: "optimizer: lr is 0 for every group, so no weight would ever move; give an lr above 0",
    ),
    ConfigRule(
        "reduce",
        lambda c: (
            c.zero.reduce != "microbatch"
            or c.zero.stage >= (1 if c.batch.accumulation == 1 else 2)  # nothing to keep between microbatches
        ),
        lambda c: (
            f"zero: reduce: microbatch keeps gradients cut between microbatches, which is stage 2; stage is "
            f"{c.zero.stage}"
        ),
    ),
)


def check(config: RunConfig) -> None:
    """Raise ConfigError with the sentence of every rule that does not hold."""
    broken = [rule.sentence(config) for rule in RULES if not rule.holds(config)]
    if broken:
        raise ConfigError("; ".join(broken))
