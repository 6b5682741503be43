"""The Plan of a job that has not begun: what its ranks would hold, said by one process without any of them.

The Plan is made of the model's description, as in ``build``. For what cutting a model refuses it is cut too, on meta,
for one rank of each pipeline stage, with groups that have ranks and no transport. So it costs names and shapes,
whatever the size of the job.

Bytes are those of model state (weights, gradients, masters, moments, padding included). Activations are not among them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from shardwise.checkpoint.files import Files
from shardwise.checkpoint.steps import Folder, open_step, steps_at
from shardwise.comm.collectives import Clock, Group
from shardwise.comm.trace import Traffic
from shardwise.compose.apply import apply_to_model
from shardwise.compose.describe import describe, describe_cut
from shardwise.compose.plan import Policies, make_plan
from shardwise.config.auto import resolve
from shardwise.config.run import InitFromPolicy, RunConfig
from shardwise.engine.differences import Differences
from shardwise.engine.named import check_named, methods_of
from shardwise.engine.recipe import recipe_of
from shardwise.engine.saving import compare
from shardwise.engine.start_weights import start_weights
from shardwise.engine.tables import check_mesh, chosen_for, register_tables, tables_of
from shardwise.memory.activations import check_blocks
from shardwise.memory.recompute import chosen
from shardwise.memory.replay import Replay
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.zero.modules import repeated_blocks
from shardwise.plan.errors import CheckpointError
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.precision.resolve import resolved


class Outlook(NamedTuple):
    """What the ranks of a job would hold."""

    plan: Plan
    """Of all ranks."""

    def bytes_per_rank(self) -> dict[str, int]:
        """On the rank that holds most; dynamic tables when they are full, those without a limit left out."""
        found: list[dict[str, int]] = []
        plan, mesh = self.plan, self.plan.mesh
        has_tables = bool(plan.registry.of_kind("table"))
        for first in mesh.ranks("pp", 0):
            found += map(plan.bytes_per_rank, mesh.ranks("dp", first) if has_tables else (first,))
        return max(found, key=lambda kinds: sum(kinds.values()))


def foresee(make: Callable[[], nn.Module], config: RunConfig, ranks: int, device: torch.device) -> Outlook:
    """The outlook of a job of ``ranks``; ``make`` builds the model anew each time.

    Errors: as ``initialize``'s, for everything that does not depend on weights or messages.
    """
    settings, mesh, _ = resolve(config, ranks, device.type)
    model = make()
    check_named(model, settings)
    check_mesh(model, mesh, settings)
    described = describe_cut(model, mesh, settings.zero, settings.tensor, settings.pipeline)
    units = ("", *described.spec.units)
    methods_of({name: model.get_submodule(name) for name in units}, settings.zero, mesh)
    blocks = repeated_blocks(model) or described.spec.units
    chosen(blocks, settings.recompute)
    check_blocks(blocks, settings.offload)
    if settings.init_from is not None:
        _check_start(model, settings, settings.init_from)
    recipe = recipe_of(model, settings)
    policies = Policies(
        settings.zero,
        settings.pipeline,
        resolved(settings.precision, model)[0],
        recipe.group_of(model, described.spec),
        recipe.updates,
        settings.batch.accumulation or 1,
        settings.tokens_per_step,
        settings.experts.exchange == "blocks",
        settings.offload,
    )
    plan = make_plan(described.spec, mesh, policies)
    starts = described.spec.stage_starts(settings.pipeline, mesh.pp)
    tables = chosen_for(model, described.spec.stage_of_tables(starts), settings, mesh.size("dp"), device)
    register_tables(plan, tables, policies.microbatches)
    for rank in mesh.ranks("pp", 0):
        _cut(make(), starts, settings, mesh, rank)
    return Outlook(replace(plan, notes=(*plan.notes, *tables.choices)))


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


def _cut(model: nn.Module, starts: tuple[str, ...], settings: RunConfig, mesh: Mesh, rank: int) -> None:
    """For what cutting refuses alone."""
    described = describe_cut(model, mesh, settings.zero, settings.tensor, settings.pipeline)
    groups = {axis: _silent(mesh, axis, rank) for axis in ("dp", "tp", "pp", "ep", "etp")}
    replay = Replay()
    loads = ExpertLoads(described.spec.experts_of, replay)
    apply_to_model(model, described, starts, groups, settings.train.seed, replay, loads)


def _silent(mesh: Mesh, axis: str, rank: int) -> Group:
    """The ranks along an axis, with nothing between them."""
    ranks = mesh.ranks(axis, rank)
    return Group(axis, ranks, ranks.index(rank), None, Clock(0.0), Traffic())
