"""Jobs: the facts about many configurations of one model, with everything that they have in common computed once.

    description     by the axes that cut the model (pp or not, tp, ep, etp) and what else changes Units and policies
    pass            by what changes a microbatch on one rank: micro size, tp, ep, etp, recomputation, tiles, rows of
                    experts, dtypes, and the stage, if stages are not alike (alike_passes.py)
    the rest        from the configuration alone: mesh, stages, policies of the Plan

The facts are those that ``foresee.read`` returns for the configuration by itself.

Cost: a pass on shapes for each different key of a pass; the rest is small.
"""

import math
from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, ShardwiseError, UsageError
from shardwise.base.pytree import rebuilt, tensors_in
from shardwise.base.ragged import Ragged
from shardwise.compose.plan import context_mesh
from shardwise.config.auto import ResolvedConfig, resolve
from shardwise.config.batch import BatchPolicy
from shardwise.config.run import RunConfig
from shardwise.engine.construction.outline import policies_of
from shardwise.engine.fit.alike_passes import MEASURED_STAGES, blocks_by_stage, can_share, shared_passes
from shardwise.engine.fit.foresee import JobFacts, process_bytes, read
from shardwise.engine.fit.hosts import cp_hosts, exchanges_on_hosts
from shardwise.engine.parts.inputs import Loss
from shardwise.models.layers import Head
from shardwise.parallel.context.policy import ContextPolicy
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.passes.recompute import RecomputePolicy, chosen
from shardwise.passes.tiles import TilesPolicy
from shardwise.plan.mesh import MeshPolicy
from shardwise.simulate.passes import MeasuredPass
from shardwise.tiers.activations import check_blocks
from shardwise.tiers.offload import OffloadPolicy

MicrobatchMaker = Callable[[int], Any]
"""Function from a number of samples to a microbatch, or to tensors of its shapes."""


class _Failed(NamedTuple):
    """Error with which a description or a pass ended."""

    error: ShardwiseError


class JobShelf:
    """Makes the facts about configurations of one model, and keeps what they have in common.

    Args:
        make: function that builds the model anew each time, on meta or not.
        device: device of the ranks.
        example: a microbatch, or tensors of its shapes, whose first dim counts samples; or a function from a number of
            samples to such a microbatch.
        loss: the loss function, as ``initialize`` takes it.
        per_host: ranks of one host; None: all ranks lie on one host.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        device: torch.device,
        example: Any,
        loss: Loss | None = None,
        per_host: int | None = None,
    ):
        self.device = device
        self.passes = 0
        """Number of passes on shapes that were measured."""
        self._make = make
        self._loss = loss
        self._per_host = per_host
        self._example: MicrobatchMaker = example if callable(example) else partial(resized, example)
        self._described: dict[Hashable, JobFacts | _Failed] = {}
        self._passed: dict[Hashable, JobFacts | _Failed] = {}
        self._process_bytes: dict[bool, int] = {}

    @cached_property
    def gives_loss(self) -> bool:
        """True if the model ends in a head of ours, whose loss is computed with it by tiles unless they are off."""
        return any(isinstance(module, Head) for module in self._make().modules())

    @cached_property
    def longest_sequence(self) -> int:
        """Tokens of a sequence of the example: the largest dim 1 of its tensors of whole numbers; 0 without any."""
        whole = (
            each for each in tensors_in(self._example(1)) if each.dim() > 1 and not each.is_floating_point()
        )
        return max((each.shape[1] for each in whole), default=0)

    def facts(self, config: RunConfig, ranks: int) -> JobFacts:
        """Return the facts about a job without its passes.

        Raises:
            ShardwiseError: as ``foresee``.
        """
        found = resolve(config, ranks, self.device.type)
        base = self._description(found)
        settings = found.config.model_copy(update={"precision": base.settings.precision})
        check_blocks(base.blocks, settings.offload)
        policies = policies_of(settings, base.policies.group_of, base.policies.updates, base.blocks)
        exchanges = exchanges_on_hosts(found.mesh, settings.zero.exchange, self._per_host, self.device.type)
        return base._replace(
            settings=settings,
            mesh=found.mesh,
            policies=policies._replace(exchanges=exchanges, cp_hosts=cp_hosts(found.mesh, self._per_host)),
            per_host=self._per_host,
            starts=base.spec.stage_starts(settings.pipeline, found.mesh.pp),
            process_bytes=self.process_bytes(settings.offload.optimizer == "disk"),
        )

    def job(self, config: RunConfig, ranks: int) -> JobFacts:
        """Return the facts about a job with the passes of all its stages.

        Raises:
            ShardwiseError: as ``foresee``.
        """
        facts = self.facts(config, ranks)
        return facts._replace(passed=self._passes(facts, resolve(config, ranks, self.device.type).config))

    def whole_pass(self, config: RunConfig, ranks: int) -> MeasuredPass:
        """Return the pass of the whole model with the axes of ``config`` except "pp".

        Raises:
            ShardwiseError: as ``foresee``.
        """
        found = resolve(config, ranks, self.device.type)
        return self._measured(found.config, 1).passed[0]

    def process_bytes(self, with_disk: bool) -> int:
        """Return the bytes of a rank's process beside the engine, measured once; 0 on a device."""
        if self.device.type != "cpu":
            return 0
        if with_disk not in self._process_bytes:
            self._process_bytes[with_disk] = process_bytes(with_disk)
        return self._process_bytes[with_disk]

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _description(self, found: ResolvedConfig) -> JobFacts:
        settings, mesh = found.config, found.mesh
        ours = self._neutral(settings, min(mesh.pp, 2))
        if self._has_tables(ours):
            ours = settings.model_copy(update={"offload": OffloadPolicy(), "recompute": RecomputePolicy()})
        return _taken(
            self._described, _key(ours), lambda: read(self._make, ours, _ranks_of(ours), self.device)
        )

    def _has_tables(self, ours: RunConfig) -> bool:
        base = _taken(
            self._described, _key(ours), lambda: read(self._make, ours, _ranks_of(ours), self.device)
        )
        return bool(base.tables.everywhere)

    def _passes(self, facts: JobFacts, settings: RunConfig) -> dict[int, MeasuredPass]:
        mesh = facts.mesh
        if mesh.cp > 1 and settings.context.method == "auto":
            # The pass is measured on fewer ranks, which may lie on hosts in another way.
            heads = context_mesh(facts.spec, mesh, facts.policies)[0].cp_heads
            context = ContextPolicy(method="planned", ulysses=heads)
            settings = settings.model_copy(update={"context": context})
        if mesh.pp == 1:
            return dict(self._measured(settings, 1).passed)
        recomputed = chosen(facts.blocks, settings.recompute)
        wanted = blocks_by_stage(facts.spec, facts.starts, recomputed)
        if wanted is not None:
            pipeline = PipelinePolicy(
                partition=settings.pipeline.partition, seconds=settings.pipeline.seconds
            )
            try:
                starts = facts.spec.stage_starts(pipeline, MEASURED_STAGES)
            except ShardwiseError:
                starts = ()
            measured = blocks_by_stage(facts.spec, starts, recomputed) if starts else None
            if measured is not None and can_share(measured, wanted):
                return shared_passes(self._measured(settings, MEASURED_STAGES).passed, measured, wanted)
        return dict(self._measured(settings, mesh.pp, settings.pipeline.stages_per_rank).passed)

    def _measured(self, settings: RunConfig, stages: int, virtual: int = 1) -> JobFacts:
        """Return the facts about a job like that of ``settings`` with ``stages`` ranks on "pp" and one microbatch."""
        ours = self._neutral(settings, stages).model_copy(
            update={
                "recompute": settings.recompute,
                "tiles": settings.tiles,
                "batch": BatchPolicy(micro_size=settings.batch.micro_size),
                "init_from": None,
            }
        )
        pipeline = settings.pipeline
        if stages > 1:
            shape: dict[str, Any] = {
                "schedule": "1f1b" if pipeline.keeps_one_pass else "gpipe",
                "virtual_stages": 1,
            }
            if virtual > 1:
                # All schedules in a V have the passes of one of them.
                name = "zb_v" if pipeline.folded else pipeline.schedule
                shape = {"schedule": name, "virtual_stages": pipeline.virtual_stages, "live": None}
            ours = ours.model_copy(update={"pipeline": pipeline.model_copy(update=shape)})
        rows = settings.batch.micro_size
        if rows is None:
            raise UsageError("batch: the samples of a microbatch are not known; set batch.micro_size")

        def measure() -> JobFacts:
            self.passes += 1
            return read(self._make, ours, _ranks_of(ours), self.device, self._example(rows), self._loss)

        return _taken(self._passed, _key(ours), measure)

    def _neutral(self, settings: RunConfig, stages: int) -> RunConfig:
        """Return the configuration on as few ranks as can be, without keys that change no description and no pass."""
        mesh, zero = settings.mesh, settings.zero
        slices = mesh.ep * mesh.etp
        copies = slices // math.gcd(slices, mesh.tp)
        default = ZeroPolicy()
        kept = {
            "prefetch_bytes",
            "reductions_under_way",
            "stage",
            "reduce",
            "exchange",
            "reshard_after_forward",
        }
        return settings.model_copy(
            update={
                "mesh": MeshPolicy(pp=stages, dp=copies, tp=mesh.tp, ep=mesh.ep, etp=mesh.etp, cp=mesh.cp),
                "zero": zero.model_copy(update={key: getattr(default, key) for key in kept}),
                "offload": OffloadPolicy(state=settings.offload.state),
                "pipeline": PipelinePolicy(
                    partition=settings.pipeline.partition,
                    seconds=settings.pipeline.seconds,
                    shapes=settings.pipeline.shapes,
                ),
                "batch": BatchPolicy(),
                "recompute": RecomputePolicy(),
                "tiles": TilesPolicy(),
            }
        )


def resized(example: Any, rows: int) -> Any:
    """Return tensors of the shapes of ``example`` with another number of samples, which dim 0 of each tensor counts.

    A feature has as many keys for a sample as in ``example``, on average.
    """
    if isinstance(example, Ragged):
        keys = round(example.values.numel() / max(example.samples, 1) * rows)
        sizes = {"values": keys, "offsets": rows + 1, "weights": keys}
        found = {name: resized(getattr(example, name), size) for name, size in sizes.items()}
        return Ragged(**found)
    if isinstance(example, Tensor):
        if example.dim() == 0:
            return example
        return torch.empty((rows, *example.shape[1:]), dtype=example.dtype, device="meta")
    return rebuilt(example, lambda inner: resized(inner, rows))


def _taken(kept: dict[Hashable, JobFacts | _Failed], key: Hashable, make: Callable[[], JobFacts]) -> JobFacts:
    """Return what is kept under ``key``, made once; an error is kept and raised again."""
    if key not in kept:
        try:
            kept[key] = make()
        except ShardwiseError as error:
            kept[key] = _Failed(error)
    found = kept[key]
    if isinstance(found, _Failed):
        raise found.error
    return found


def _key(config: RunConfig) -> str:
    return config.model_dump_json()


def _ranks_of(config: RunConfig) -> int:
    mesh = config.mesh
    if not isinstance(mesh.dp, int):
        raise ConfigError("mesh.dp: expected a number of ranks")
    return mesh.pp * mesh.dp * mesh.cp * mesh.tp
