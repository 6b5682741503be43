"""Mesh: named axes over ranks, in closed form.

The ranks lie in a row-major array, slowest axis first:

    arange(world_size).view(pp, dp_replicate, dp_shard, tp)

so the index of a rank on an axis is a division and a remainder, and 131,072 ranks cost what 8 cost. Two more views show
the same ranks in the same order. Context parallelism cuts no state: ``cp`` neighbours along ``dp_shard`` have different
tokens of the same samples, and sum their gradients as all ranks along ``dp_shard`` do.

    arange(world_size).view(pp, dp_replicate, data_shard, cp, tp)  data_shard · cp = dp_shard

Neighbours along ``cp`` may exchange heads for tokens, in groups along ``cp_heads``; keys then travel along
``cp_tokens``:

    cp = cp_tokens · cp_heads

Experts use another view, within a stage and a copy of the sharded state:

    arange(world_size).view(pp, dp_replicate, edp, ep, etp)        edp · ep · etp = dp_shard · tp

so the ranks along ``ep``, which hold different experts, are neighbours, whatever they share in the other views.

"dp" names the two axes of state together: it is cut along ``dp_shard`` and copied along ``dp_replicate``. "data" names
the axes whose ranks have different samples. "expert_dp" names the axes whose ranks sum one expert's gradient. "model"
names the axes that share one model, "stage" those whose ranks hold the same stage, and "world" all axes.

Cost: O(number of axes) per call; ``ranks`` is O(size of the axis).
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from pydantic import PositiveInt

from shardwise.base.errors import MeshError
from shardwise.base.policy import Policy
from shardwise.base.words import counted
from shardwise.plan.stage_places import StagePlaces

StateAxes = tuple[str, str]
"""The axes over which ranks hold copies and shards of one state, the outer and the inner axis. The ranks of both
together sum the gradient of the state.
"""
DENSE: StateAxes = ("dp_replicate", "dp_shard")
EXPERT: StateAxes = ("dp_replicate", "edp")
_MODEL_AXES = {DENSE: ("tp",), EXPERT: ("ep", "etp")}
_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_DATA_AXES = ("pp", "dp_replicate", "data_shard", "cp", "tp")
_CONTEXT_AXES = ("pp", "dp_replicate", "data_shard", "cp_tokens", "cp_heads", "tp")
_EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
_VIEWS = (_AXES, _DATA_AXES, _CONTEXT_AXES, _EXPERT_AXES)
_TOGETHER = {
    "dp": ("dp_replicate", "dp_shard"),
    "data": ("dp_replicate", "data_shard"),
    "expert_dp": ("dp_replicate", "edp"),
    "model": ("pp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "tp"),
    "world": ("pp", "dp_replicate", "dp_shard", "tp"),
}


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, slowest first. ``Mesh(dp_shard=4)`` is plain data parallelism over four ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    """Ranks over which state is cut."""
    cp: int = 1
    """Ranks among those along ``dp_shard`` that have different tokens of the same samples."""
    tp: int = 1
    ep: int = 1
    """Ranks over which the experts are distributed."""
    etp: int = 1
    """Ranks over which every matrix of an expert is cut."""
    folded: bool = False
    """True if the pipeline stages lie on the ranks along "pp" in a V (``StagePlaces``)."""
    cp_heads: int = 1
    """Neighbours along ``cp`` that exchange heads for tokens (``context.ulysses``)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "folded":
                continue
            size = getattr(self, field.name)
            if not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"mesh: axis {field.name!r} has size {size!r}; expected a whole number of at least 1"
                )
        if self.dp_shard % self.cp:
            raise MeshError(
                f"mesh: cp={self.cp} does not divide dp_shard={self.dp_shard}, the ranks over which state is cut, "
                "which include those along cp; choose sizes so that it does"
            )
        if self.cp % self.cp_heads:
            raise MeshError(
                f"mesh: {self.cp_heads} ranks that exchange heads (context.ulysses) do not divide cp={self.cp}; choose "
                "a divisor"
            )
        ranks = self.dp_shard * self.tp
        if ranks % (self.ep * self.etp):
            raise MeshError(
                f"mesh: ep={self.ep} × etp={self.etp} = {self.ep * self.etp} does not divide the "
                f"{counted(ranks, 'rank')} that hold one copy of a stage (dp_shard={self.data_shard} × cp={self.cp} × "
                f"tp={self.tp}), to which experts are dealt; choose ep and etp so that it does"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the elementary axes, slowest first, without the axes of experts."""
        return _AXES

    @property
    def places(self) -> StagePlaces:
        """Placement of the pipeline stages on the ranks along "pp"."""
        return StagePlaces(self.pp, self.folded)

    @property
    def data_shard(self) -> int:
        """Number of ranks along ``dp_shard`` that have different samples."""
        return self.dp_shard // self.cp

    @property
    def cp_tokens(self) -> int:
        """Number of groups along ``cp`` between which keys travel."""
        return self.cp // self.cp_heads

    @property
    def edp(self) -> int:
        """Number of ranks that share the state of one expert."""
        return self.dp_shard * self.tp // (self.ep * self.etp)

    def model_axes(self, state: StateAxes = DENSE) -> tuple[str, ...]:
        """Return the axes whose ranks hold slices of one tensor whose shards lie on the axes ``state``."""
        return _MODEL_AXES[state]

    def stage_axes(self, state: StateAxes = DENSE) -> tuple[str, ...]:
        """Return all axes whose ranks hold the same stage, in the view that ``state`` belongs to."""
        return (*state, *_MODEL_AXES[state])

    def view(self, state: StateAxes = DENSE) -> str:
        """Return the view that ``state`` belongs to, within a stage, as text: ``edp=2 × ep=4``."""
        return self._sizes(self.stage_axes(state)) or "1 rank"

    @property
    def world_size(self) -> int:
        """Number of ranks that the mesh covers."""
        return math.prod(getattr(self, axis) for axis in self.axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``, which may name several axes together."""
        return math.prod(getattr(self, part) for part in self._parts(axis))

    def index(self, axis: str, rank: int) -> int:
        """Return the index of ``rank`` on ``axis``, from 0."""
        index = 0
        for part in self._parts(axis):
            index = index * getattr(self, part) + rank // self._stride(part) % getattr(self, part)
        return index

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the group of ``rank`` on ``axis``, in order of the index on it.

        The group holds the ranks that differ from ``rank`` only in their index on ``axis``.
        """
        ranks = [rank]
        for part in self._parts(axis):
            stride, size = self._stride(part), getattr(self, part)
            ranks = [r + (i - r // stride % size) * stride for r in ranks for i in range(size)]
        return tuple(ranks)

    def neighbours(self, rank: int, counts: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks, ascending, that share a block of neighbours with ``rank`` on each of the named axes.

        Args:
            rank: Global rank.
            counts: Size of a block of neighbours, by axis.
        """
        ranks = [rank]
        for axis, count in counts.items():
            first = self.index(axis, rank) // count * count
            along = self.ranks(axis, rank)[first : first + count]
            ranks = [each + other - rank for each in ranks for other in along]
        return tuple(sorted(ranks))

    def along(self, axis: str, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that correspond to ``ranks`` at each index of ``axis``: at index 0, then at 1 ..."""
        rows = [self.ranks(axis, rank) for rank in ranks]
        return tuple(row[index] for index in range(self.size(axis)) for row in rows)

    def stage_ranks(self, rank: int, stages: Collection[int]) -> tuple[int, ...]:
        """Return the ranks, ascending, that hold ``stages`` of the same model as ``rank``.

        The ranks have the same index as ``rank`` on all axes but "pp".
        """
        along = self.ranks("pp", rank)
        return tuple(sorted(along[place] for place in self.places.of_each(stages)))

    def last_place(self, stages_per_rank: int) -> int:
        """Return the index on "pp" of the rank that holds the last pipeline stage, which computes the loss."""
        return self.places.last_place(self.pp * stages_per_rank)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return every group of ``axis``; together the groups cover each rank once."""
        return tuple(self.ranks(axis, rank) for rank in range(self.world_size) if self.index(axis, rank) == 0)

    def check(self, world_size: int) -> None:
        """Check that the mesh covers a job of ``world_size`` ranks exactly.

        Raises:
            MeshError: if the numbers of ranks differ.
        """
        if self.world_size == world_size:
            return
        model = self.pp * self.cp * self.tp
        advice = (
            f"with this model part of {model}, dp must be {world_size // model}, or leave dp out"
            if world_size % model == 0
            else f"pp × cp × tp = {model} does not divide {world_size}"
        )
        raise MeshError(
            f"mesh: {self} covers {counted(self.world_size, 'rank')} but the job has {world_size}; {advice}"
        )

    def name_of(self, axes: Sequence[str]) -> str:
        """Return the name of an axis or of several axes together.

        Raises:
            MeshError: if the combination of ``axes`` has no name.
        """
        names = {parts: name for name, parts in _TOGETHER.items()}
        names |= {(axis,): axis for view in _VIEWS for axis in view}
        if tuple(axes) not in names:
            raise MeshError(
                f"mesh: the axes {' and '.join(axes)} together have no name; known: {', '.join(_TOGETHER)}"
            )
        return names[tuple(axes)]

    def _parts(self, axis: str) -> tuple[str, ...]:
        parts = _TOGETHER.get(axis, (axis,))
        if not any({*parts} <= {*view} for view in _VIEWS):
            known = dict.fromkeys((*itertools.chain(*_VIEWS), *_TOGETHER))
            raise MeshError(f"mesh: there is no axis {axis!r}; known: {', '.join(known)}")
        return parts

    def _stride(self, axis: str) -> int:
        view = next(each for each in _VIEWS if axis in each)
        return math.prod(getattr(self, faster) for faster in view[view.index(axis) + 1 :])

    def __str__(self) -> str:
        if self.dp_replicate > 1:
            axes = {
                "pp": "pp",
                "dp_replicate": "dp_replicate",
                "dp_shard": "data_shard",
                "cp": "cp",
                "tp": "tp",
            }
        else:
            axes = {"pp": "pp", "dp": "data", "cp": "cp", "tp": "tp"}
        sizes = {name: self.size(axis) for name, axis in axes.items()}
        dense = " × ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "1 rank"
        return f"{dense} (experts {self._sizes(_EXPERT_AXES[2:])})" if self.ep * self.etp > 1 else dense

    def _sizes(self, axes: Sequence[str]) -> str:
        return " × ".join(f"{axis}={self.size(axis)}" for axis in axes if self.size(axis) > 1)


class DataParallelPolicy(Policy):
    """Keys under ``mesh.dp``, which split the data-parallel ranks into two axes: HSDP."""

    replicate: Literal["auto"] | PositiveInt = 1
    """Ranks over which the sharded state is copied; ``auto``: all remaining ranks."""
    shard: PositiveInt = 1
    """Ranks over which one copy is cut."""

    def of(self, ranks: int) -> tuple[int, int]:
        """Return the sizes of ``replicate`` and ``shard`` for ``ranks`` data-parallel ranks."""
        remain = max(ranks // self.shard, 1)
        return remain if self.replicate == "auto" else self.replicate, self.shard


class MeshPolicy(Policy):
    """Keys under ``mesh:``, in ranks."""

    pp: PositiveInt = 1
    """Ranks in a row, each with its own layers (pipeline parallelism)."""
    dp: PositiveInt | DataParallelPolicy | None = None
    """Data-parallel ranks; if left out, all remaining ranks; ``{replicate: 2, shard: 4}`` for HSDP."""
    cp: PositiveInt = 1
    """Ranks over which every sequence is cut (context parallelism). State is cut over these ranks too."""
    tp: PositiveInt = 1
    """Ranks over which every matrix is cut (tensor parallelism)."""
    ep: PositiveInt = 1
    """Ranks over which the experts of a layer are distributed (expert parallelism), among the ranks of dp and tp."""
    etp: PositiveInt = 1
    """Ranks over which every matrix of an expert is cut."""

    def mesh(self, world_size: int, folded: bool = False) -> Mesh:
        """Return the mesh over ``world_size`` ranks.

        Args:
            world_size: Number of ranks of the job.
            folded: True if the schedule of the pipeline places its stages in a V.

        Raises:
            MeshError: if the axes do not cover the ranks.
        """
        model = self.pp * self.cp * self.tp
        dp = self.dp
        if dp is None:
            dp = max(world_size // model, 1)
        replicate, shard = dp.of(world_size // model) if isinstance(dp, DataParallelPolicy) else (1, dp)
        mesh = Mesh(pp=self.pp, dp_replicate=replicate, dp_shard=shard * self.cp, cp=self.cp, tp=self.tp)
        mesh.check(world_size)
        return replace(mesh, ep=self.ep, etp=self.etp, folded=folded and self.pp > 1)
