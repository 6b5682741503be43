"""The Plan of a job that has not begun: what its ranks would hold, said by one process without any of them.

A model on meta goes through the steps of ``build``, for one rank of each pipeline stage, with groups that have ranks
and no transport: nothing is cut by talking to anybody. So it costs names and shapes, whatever the size of the job.

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
from shardwise.compose.cut import cut_model
from shardwise.compose.draft import draft, full_step, names_of_units
from shardwise.compose.whole import describe, register
from shardwise.config.auto import resolve
from shardwise.config.run import InitFromPolicy, RunConfig
from shardwise.engine.differences import Differences
from shardwise.engine.named import check_named, methods_of
from shardwise.engine.saving import compare
from shardwise.engine.start_weights import start_weights
from shardwise.engine.tables import check_mesh, chosen_for, register_tables, tables_of
from shardwise.memory.recompute import chosen
from shardwise.memory.replay import Replay
from shardwise.optim.flat import from_policy, moment_names
from shardwise.parallel.zero import layout
from shardwise.parallel.zero.modules import repeated_blocks
from shardwise.plan.errors import CheckpointError
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan, merged


class Outlook(NamedTuple):
    """What the ranks of a job would hold."""

    plans: tuple[Plan, ...]
    """One per rank along "pp"; ranks that differ on other axes hold as much, but for embedding tables."""

    def bytes_per_rank(self) -> dict[str, int]:
        """On the rank that holds most; dynamic tables when they are full, those without a limit left out."""
        found: list[dict[str, int]] = []
        for plan, first in zip(self.plans, self.plans[0].mesh.ranks("pp", 0), strict=True):
            has_tables = bool(plan.registry.of_kind("table"))
            found += map(plan.bytes_per_rank, plan.mesh.ranks("dp", first) if has_tables else (first,))
        return max(found, key=lambda kinds: sum(kinds.values()))


def foresee(make: Callable[[], nn.Module], config: RunConfig, ranks: int, device: torch.device) -> Outlook:
    """The outlook of a job of ``ranks``; ``make`` builds the model anew each time.

    Errors: as ``initialize``'s, for everything that does not depend on weights or messages.
    """
    settings, mesh, _ = resolve(config, ranks, device.type)
    model = make()
    check_named(model, settings)
    units = ("", *names_of_units(model, settings.zero))
    methods_of({name: model.get_submodule(name) for name in units}, settings.zero, mesh)
    if settings.init_from is not None:
        _check_start(model, settings, settings.init_from)
    return Outlook(tuple(_plan(make(), settings, mesh, rank) for rank in mesh.ranks("pp", 0)))


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


def _plan(model: nn.Module, settings: RunConfig, mesh: Mesh, rank: int) -> Plan:
    check_mesh(model, mesh, settings)
    policy, moments = settings.optimizer, moment_names(from_policy(settings.optimizer))
    whole = describe(model)
    units = names_of_units(model, settings.zero)
    chosen(repeated_blocks(model) or units, settings.recompute)
    tp, pp = (_silent(mesh, axis, rank) for axis in ("tp", "pp"))
    stages = cut_model(
        model, whole, settings.tensor, settings.pipeline, tp, pp, settings.train.seed, Replay()
    )
    tables = chosen_for(model, whole.stages, settings, mesh.size("dp"))
    drafts = []
    for module, _ in stages.values():
        strategy = layout.strategy_of(settings.zero, mesh)
        registry = register(whole, mesh, strategy, settings.precision, moments)
        register_tables(registry, tables, mesh.size("dp"))
        drafts.append(
            draft(
                module,
                whole,
                registry,
                mesh,
                settings.zero,
                settings.precision,
                units,
                policy.group_of,
                moments,
            )
        )
    plan = merged([each.plan for each in drafts])
    actions = {}
    if mesh.pp == 1:
        accumulation, ahead = settings.batch.accumulation or 1, int(settings.zero.prefetch_units)
        actions = {"all": full_step(plan.units, drafts[0].strategy, accumulation, None, ahead)}
    return replace(plan, actions=actions, notes=(*plan.notes, *tables.choices))


def _silent(mesh: Mesh, axis: str, rank: int) -> Group:
    """The ranks along an axis, with nothing between them."""
    ranks = mesh.ranks(axis, rank)
    return Group(axis, ranks, ranks.index(rank), None, Clock(0.0), Traffic())
