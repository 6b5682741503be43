"""The Plan of a job that has not begun: what its ranks would hold, said by one process without any of them.

The Plan is made of the model's description, as in ``build``. For what cutting a model refuses it is cut too, on meta,
for one rank of each pipeline stage, with groups that have ranks and no transport. So it costs names and shapes,
whatever the size of the job.

Bytes of model state (weights, gradients, masters, moments, padding included) are the Plan's. With an example batch the
cut model runs one pass on shapes, with everything that is done to its modules (tiles, recomputation, casts), and the
Plan's list is walked with what it held: the peak of a step, by row (simulate/).
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.checkpoint.files import Files
from shardwise.checkpoint.steps import Folder, open_step, steps_at
from shardwise.comm.collectives import Clock, Group, NoTransport, Transport
from shardwise.comm.trace import Traffic
from shardwise.compose.apply import Stages, apply_to_model, recompute_blocks
from shardwise.compose.describe import describe, describe_cut
from shardwise.compose.plan import Policies, make_plan
from shardwise.compose.spec import ModelSpec
from shardwise.config.auto import resolve
from shardwise.config.run import InitFromPolicy, RunConfig, load
from shardwise.engine.differences import Differences
from shardwise.engine.inputs import Loss, call_model, cast_at_the_root, find_loss
from shardwise.engine.named import check_named, methods_of
from shardwise.engine.outline import policies_of
from shardwise.engine.recipe import recipe_of
from shardwise.engine.saving import compare
from shardwise.engine.start_weights import start_weights
from shardwise.engine.tables import Tables, check_mesh, chosen_for, register_tables, tables_of
from shardwise.kernels.crc import crc32
from shardwise.memory.activations import check_blocks
from shardwise.memory.offload import OffloadPolicy
from shardwise.memory.recompute import chosen
from shardwise.memory.replay import BatchPosition, Replay
from shardwise.observe.memory import resident_bytes
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.zero.modules import repeated_blocks
from shardwise.plan.errors import CheckpointError, UsageError
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.plan.unit import Unit
from shardwise.precision.operations import Operations
from shardwise.precision.policy import PrecisionPolicy
from shardwise.precision.resolve import resolved
from shardwise.simulate.passes import MeasuredPass, measure, strip, stripped, without_numbers
from shardwise.simulate.timeline import StepMemory, step_memory


class Outlook(NamedTuple):
    """What the ranks of a job would hold."""

    plan: Plan
    """Of all ranks."""
    step: StepMemory | None = None
    """What a step takes on the first rank, where an example was given."""
    flops: int = 0
    """Floating-point operations of a microbatch on that rank, executed; 0 without an example."""

    def bytes_per_rank(self) -> dict[str, int]:
        """On the rank that holds most; dynamic tables when they are full, those without a limit left out."""
        found: list[dict[str, int]] = []
        plan, mesh = self.plan, self.plan.mesh
        has_tables = bool(plan.registry.of_kind("table"))
        for first in mesh.ranks("pp", 0):
            found += map(plan.bytes_per_rank, mesh.ranks("dp", first) if has_tables else (first,))
        return max(found, key=lambda kinds: sum(kinds.values()))


def foresee(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    ranks: int = 1,
    device: torch.device | None = None,
    *,
    example: Any = None,
    loss: Loss | None = None,
) -> Outlook:
    """The outlook of a job of ``ranks``; ``make`` builds the model anew each time, on meta or not.

    config   as ``initialize``'s
    example  a microbatch, or tensors of its shapes; with it the outlook has the memory of a step
    loss     as ``initialize``'s

    Errors: as ``initialize``'s, for everything that does not depend on weights or messages; UsageError where a pass
    cannot be foreseen from shapes.
    """
    device = device or torch.device("cpu")
    known = read(make, config, ranks, device, example, loss)
    for rank in known.mesh.ranks("pp", 0):
        _cut(make(), known.starts, known.settings, known.mesh, rank)
    return known.outlook(known.settings.offload)


class Known(NamedTuple):
    """What a job's outlook is made of, whatever lies on which tier."""

    settings: RunConfig
    mesh: Mesh
    spec: ModelSpec
    policies: Policies
    starts: tuple[str, ...]
    """Of pipeline stages but the first."""
    tables: Tables
    blocks: Sequence[str]
    device: torch.device
    passed: MeasuredPass | None
    """Of one microbatch on the first rank, where an example was given."""
    process_bytes: int
    """What lies in the rank's memory beside the engine: on CPU ranks what this process held when it was asked."""

    def policies_with(self, offload: OffloadPolicy) -> Policies:
        """Those of the Plan."""
        return self.policies._replace(offload=offload)

    def outlook(self, offload: OffloadPolicy) -> "Outlook":
        """With state and activations where ``offload`` has them. Errors: ConfigError, PlanError."""
        policies = self.policies_with(offload)
        plan = make_plan(self.spec, self.mesh, policies)
        register_tables(plan, self.tables, policies.microbatches)
        plan = replace(plan, notes=(*plan.notes, *self.tables.choices))
        if self.passed is None:
            return Outlook(plan)
        moved = check_blocks(self.blocks, offload)
        step = step_memory(plan, policies, self.passed, self.device.type, 0, moved, self.process_bytes)
        return Outlook(plan, step, self.passed.flops)


def read(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    ranks: int,
    device: torch.device,
    example: Any = None,
    loss: Loss | None = None,
) -> Known:
    """Everything of a job that does not depend on tiers. Errors: as ``foresee``'s, but for those of cutting a model."""
    settings, mesh, _ = resolve(load(config), ranks, device.type)
    model = make()
    check_named(model, settings)
    check_mesh(model, mesh, settings)
    described = describe_cut(model, mesh, settings.zero, settings.tensor, settings.pipeline)
    spec = described.spec
    units = ("", *spec.units)
    methods_of({name: model.get_submodule(name) for name in units}, settings.zero, mesh)
    blocks = repeated_blocks(model) or spec.units
    to_recompute = chosen(blocks, settings.recompute)
    if settings.init_from is not None:
        _check_start(model, settings, settings.init_from)
    recipe = recipe_of(model, settings)
    precision = resolved(settings.precision, model)[0]
    settings = settings.model_copy(update={"precision": precision})
    policies = policies_of(settings, recipe.group_of(model, spec), recipe.updates)
    starts = spec.stage_starts(settings.pipeline, mesh.pp)
    tables = chosen_for(model, spec.stage_of_tables(starts), settings, mesh.size("dp"), device)
    passed = None
    if example is not None:
        plan = make_plan(spec, mesh, policies._replace(offload=OffloadPolicy()))
        passed = _pass(make(), settings, plan, precision, to_recompute, example, loss)
    check_blocks(blocks, settings.offload)
    beside = process_bytes(settings.offload.optimizer == "disk") if device.type == "cpu" else 0
    return Known(settings, mesh, spec, policies, starts, tables, blocks, device, passed, beside)


def process_bytes(with_disk: bool) -> int:
    """What this process holds, standing for a rank's without its engine; with what a disk's checksums load."""
    if with_disk:
        crc32(np.zeros(1 << 20, dtype=np.uint8))  # fewer bytes load nothing
    return resident_bytes() or 0


def _check_start(model: nn.Module, settings: RunConfig, wanted: InitFromPolicy) -> None:
    """By the headers and manifests alone. Errors: MismatchError, CheckpointError."""
    whole = describe(model)
    where = steps_at(Path(wanted.path))
    if where is None:
        start_weights(model, settings, None, whole)
        return
    manifest = (
        open_step(where, Files())
        if (where / "manifest.json").is_file()
        else next((each.manifest for each in Folder(where, Files()).scan()), None)
    )
    if manifest is None:
        raise CheckpointError(f"init_from: {where}: no step there can be read")
    compare(whole, tables_of(model), manifest, True, Differences(wanted.missing, wanted.unexpected))


def _cut(
    model: nn.Module,
    starts: tuple[str, ...],
    settings: RunConfig,
    mesh: Mesh,
    rank: int,
    replay: Replay | None = None,
    transport: Transport | None = None,
) -> Stages:
    """As the rank would have it: all of it where ``starts`` are none. Without ``replay`` for what cutting refuses."""
    described = describe_cut(model, mesh, settings.zero, settings.tensor, settings.pipeline)
    groups = {axis: _silent(mesh, axis, rank, transport) for axis in ("dp", "tp", "pp", "ep", "etp")}
    if not starts:
        groups["pp"] = Group.alone("pp")
    replay = replay or Replay()
    loads = ExpertLoads(described.spec.experts_of, replay)
    return apply_to_model(
        model,
        described,
        starts,
        groups,
        settings.train.seed,
        replay,
        loads,
        experts=settings.experts,
        tiles=settings.tiles,
        keeps_one_pass=settings.pipeline.keeps_one_pass,
    )


def _pass(
    model: nn.Module,
    settings: RunConfig,
    plan: Plan,
    precision: PrecisionPolicy,
    to_recompute: Sequence[str],
    example: Any,
    loss: Loss | None,
) -> MeasuredPass:
    """Of one microbatch on the first rank, on shapes."""
    if plan.mesh.pp > 1:
        raise UsageError(
            f"foresee: the passes of {plan.mesh.pp} stages cannot be foreseen yet; leave the example out, and count "
            "model state alone"
        )
    device = torch.device("cpu")
    operations = Operations(precision)
    replay = Replay(operations)
    dtypes = {
        name: info.dtype for info in plan.registry.of_kind("parameter") for name in (info.name, *info.aliases)
    }

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        return dtypes.get(name) or precision.buffer_dtype(name, tensor.dtype)

    def loss_of(module: nn.Module, batch: Any) -> Tensor:
        with replay.at(BatchPosition(0, 0)):
            return find_loss(call_model(module, loss, batch, device))

    (module, _), *_ = _cut(model, (), settings, plan.mesh, 0, replay, NoTransport()).values()
    with without_numbers():
        strip(module, dtype_of, device)
        operations.apply_to(module)
        recompute_blocks(module, to_recompute, settings.recompute, replay)
        cast_at_the_root(module, precision, device, loss is not None)
        units = {unit.name: _kind_of(unit, module, to_recompute) for unit in plan.units if unit.name}
        return measure(module.train(), units, stripped(example, device), loss_of)


def _kind_of(unit: Unit, module: nn.Module, to_recompute: Collection[str]) -> Hashable:
    """What Units have in common that hold and compute alike."""
    own = module.get_submodule(unit.name)
    parameters = tuple((name, tuple(each.shape), each.dtype) for name, each in own.named_parameters())
    return type(own), parameters, unit.name in to_recompute


def _silent(mesh: Mesh, axis: str, rank: int, transport: Transport | None = None) -> Group:
    """The ranks along an axis, with nothing between them, or with ``transport`` where they are several."""
    ranks = mesh.ranks(axis, rank)
    between = transport if len(ranks) > 1 else None
    return Group(axis, ranks, ranks.index(rank), between, Clock(0.0), Traffic())
