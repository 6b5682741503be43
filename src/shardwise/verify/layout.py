"""Parse ``--layout "pp=2,tp=2,dp=2x2,zero=3"`` into changes of a configuration and a number of ranks.

    word         keys of the configuration                              left out
    pp cp tp     mesh.pp, mesh.cp, mesh.tp                              1
    ep etp       mesh.ep, mesh.etp                                      1
    dp=4         mesh.dp: 4                                             1
    dp=2x2       mesh.dp: {replicate: 2, shard: 2}, which is HSDP
    virtual=2    pipeline.virtual_stages, with the schedule             1; interleaved_1f1b becomes 1f1b
                 interleaved_1f1b
    zero=3       zero.stage                                             the configuration's value
    recompute    recompute.scope                                        the configuration's value

Other keys of a configuration are no part of a layout; ``--set`` changes them. The rules for a possible layout are those
of ``plan/mesh.py`` and ``config/rules.py``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from shardwise.base.errors import ConfigError
from shardwise.base.policy import nearest
from shardwise.config.rules import check
from shardwise.config.run import RunConfig, load
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.passes.recompute import RecomputePolicy
from shardwise.plan.mesh import DataParallelPolicy, Mesh

_AXES = ("pp", "cp", "tp", "ep", "etp")
_STAGES = tuple(str(stage) for stage in get_args(ZeroPolicy.model_fields["stage"].annotation))
_SCOPES = get_args(RecomputePolicy.model_fields["scope"].annotation)
_WORDS = ("pp", "dp", "cp", "tp", "ep", "etp", "zero", "virtual", "recompute")
_LEAST_DP = 2
"""Data-parallel ranks that stand for ``mesh.dp`` left out, which means all ranks of a later run."""


@dataclass(frozen=True)
class VerifiedLayout:
    """The sizes of the axes, the stages per rank, and the two techniques that ``--layout`` has words for."""

    mesh: Mesh = Mesh()
    virtual_stages: int = 1
    """Pipeline stages of each rank along "pp"."""
    zero_stage: int | None = None
    """The value of ``zero.stage``; None: the configuration's own."""
    recompute: str | None = None
    """The value of ``recompute.scope``; None: the configuration's own."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the layout."""
        return self.mesh.world_size

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.mesh.pp * self.virtual_stages

    def overrides(self, config: RunConfig) -> list[str]:
        """Return the values that the layout sets in ``config``, in the form of ``--set``."""
        mesh = self.mesh
        dp = str(mesh.data_shard)
        if mesh.dp_replicate > 1:
            dp = f"{{replicate: {mesh.dp_replicate}, shard: {mesh.data_shard}}}"
        axes = ", ".join(f"{axis}: {mesh.size(axis)}" for axis in _AXES)
        found = [f"mesh={{{axes}, dp: {dp}}}"]
        if config.pipeline.folded and self.virtual_stages == 2:
            pass  # the schedule implies two stages per rank
        elif self.virtual_stages > 1:
            found += ["pipeline.schedule=interleaved_1f1b", f"pipeline.virtual_stages={self.virtual_stages}"]
        elif config.pipeline.stages_per_rank > 1:
            found += ["pipeline.schedule=1f1b", "pipeline.virtual_stages=1"]
        if self.zero_stage is not None:
            found.append(f"zero.stage={self.zero_stage}")
        if self.recompute is not None:
            found.append(f"recompute.scope={self.recompute}")
        return found

    def __str__(self) -> str:
        mesh = self.mesh
        dp = f"{mesh.dp_replicate}x{mesh.data_shard}" if mesh.dp_replicate > 1 else f"{mesh.data_shard}"
        found = [f"pp={mesh.pp}"] if mesh.pp > 1 else []
        found += [f"dp={dp}"] if mesh.size("data") > 1 or self.ranks == 1 else []
        found += [f"{axis}={mesh.size(axis)}" for axis in _AXES[1:] if mesh.size(axis) > 1]
        found += [f"virtual={self.virtual_stages}"] if self.virtual_stages > 1 else []
        found += [] if self.zero_stage is None else [f"zero={self.zero_stage}"]
        found += [] if self.recompute in (None, "none") else [f"recompute={self.recompute}"]
        return ",".join(found)


def parse_layout(text: str) -> VerifiedLayout:
    """Return the layout that ``text`` describes, in words as ``pp=2,dp=2x2,zero=3``.

    Raises:
        ConfigError: if a word is unknown, given twice, or has no possible value.
        MeshError: if the axes of experts do not divide the ranks that share a stage.
    """
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        word, separator, value = (each.strip() for each in part.partition("="))
        if not separator or not value:
            raise ConfigError(
                f"layout {text!r}: expected word=value between commas, found {part!r}; as in 'pp=2,dp=2x2,zero=3'"
            )
        if word not in _WORDS:
            raise ConfigError(f"layout {text!r}: unknown word {word!r}{nearest(word, _WORDS)}")
        if word in given:
            raise ConfigError(
                f"layout {text!r}: {word} is given twice, as {given[word]} and {value}; keep one"
            )
        given[word] = value
    replicate, _, shard = (given.get("dp") or "1").rpartition("x")
    sizes: dict[str, Any] = {axis: _count(text, axis, given[axis]) for axis in _AXES if axis in given}
    recompute = given.get("recompute")
    if recompute is not None and recompute not in _SCOPES:
        raise ConfigError(f"layout {text!r}: recompute is {recompute!r}{nearest(recompute, _SCOPES)}")
    stage = given.get("zero")
    if stage is not None and stage not in _STAGES:
        raise ConfigError(f"layout {text!r}: zero is {stage!r}; expected one of {', '.join(_STAGES)}")
    return VerifiedLayout(
        Mesh(
            dp_replicate=_count(text, "dp", replicate or "1"),
            dp_shard=_count(text, "dp", shard, "a whole number, or replicate x shard as 2x2")
            * sizes.get("cp", 1),
            **sizes,
        ),
        _count(text, "virtual", given.get("virtual", "1")),
        None if stage is None else int(stage),
        recompute,
    )


def _count(text: str, word: str, value: str, expected: str = "a whole number") -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
        raise ConfigError(f"layout {text!r}: {word} is {value!r}; expected {expected} of at least 1")
    return int(value)


def layout_of(config: RunConfig, ranks: int | None = None) -> VerifiedLayout:
    """Return the layout that a configuration describes.

    Args:
        config: The configuration.
        ranks: The number of ranks; None: ``mesh.dp`` left out, which means all remaining ranks, counts as the fewest
            ranks that are data-parallel and hold the experts.

    Raises:
        MeshError: if the axes do not cover the ranks.
    """
    policy = config.mesh
    if ranks is None:
        dp = policy.dp
        if isinstance(dp, DataParallelPolicy):
            size = dp.shard * (_LEAST_DP if dp.replicate == "auto" else dp.replicate)
        elif dp is None:
            experts = policy.ep * policy.etp
            size = next(
                n
                for n in range(_LEAST_DP, _LEAST_DP + experts + 1)
                if not n * policy.tp * policy.cp % experts
            )
        else:
            size = dp
        ranks = policy.pp * policy.cp * policy.tp * size
    return VerifiedLayout(
        policy.mesh(ranks), config.pipeline.stages_per_rank, config.zero.stage, config.recompute.scope
    )


def with_layout(config: str | Path | Mapping[str, Any] | RunConfig, layout: VerifiedLayout) -> RunConfig:
    """Return the configuration with the values of ``layout`` in place of its own.

    Raises:
        ConfigError: if a rule of ``config/rules.py`` does not hold.
        MeshError: if the axes do not cover the ranks.
    """
    own = load(config)
    changed = load(own, layout.overrides(own))
    check(changed)
    changed.mesh.mesh(layout.ranks)
    return changed
