"""Where the ranks stand on named axes, for scripts that ask for it in DeepSpeed's words.

The last axis runs fastest, as in an array:    rank = Σ coordinate_i · Π dims after i

    ProcessTopology(axes=["pipe", "data"], dims=[2, 3])      pipe 0: ranks 0 1 2     pipe 1: ranks 3 4 5

Pure: no process group is made here.
"""

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any

from shardwise.comm import default_group
from shardwise.deepspeed.unmet import UnmetError


class ProcessTopology:
    """Ranks on named axes."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # noqa: PYI024
        self.mapping = {self._at(at): rank for rank, at in enumerate(product(*map(range, dims)))}

    def _at(self, places: Iterable[int]) -> Any:
        return self.ProcessCoord(*places)

    def get_rank(self, **at: int) -> int:
        """The rank at one coordinate on every axis. Errors: ValueError."""
        if set(at) != set(self.axes):
            raise ValueError(f"get_rank: given {sorted(at)}, expected one coordinate for each of {self.axes}")
        place = self.ProcessCoord(**at)
        if place not in self.mapping:
            raise ValueError(f"get_rank: {at} lies outside of {dict(zip(self.axes, self.dims, strict=True))}")
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """The axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """A rank's place as a part of file names: ``model_00``."""
        at = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(at, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """Ranks along ``axis``; 0 where there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinates of ``rank``, by name. Errors: ValueError."""
        if not 0 <= rank < self.world_size():
            raise ValueError(f"get_coord: rank {rank} is not among the {self.world_size()} of this topology")
        at = []
        for dim in reversed(self.dims):
            rank, place = divmod(rank, dim)
            at.append(place)
        return self._at(reversed(at))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks that differ along ``axis`` alone, list by list; none where there is no such axis."""
        if axis not in self.axes:
            return []
        lists: dict[tuple[int, ...], list[int]] = {}
        place = self.axes.index(axis)
        for at, rank in self.mapping.items():
            lists.setdefault(at[:place] + at[place + 1 :], []).append(rank)
        return [lists[others] for others in sorted(lists)]

    def filter_match(self, **at: int) -> list[int]:
        """The ranks at these coordinates, whatever the others are."""
        return [
            rank for each, rank in self.mapping.items() if all(getattr(each, k) == v for k, v in at.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate on ``axis`` is ``idx``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """All ranks."""
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines side by side; the ranks of one stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines of stages that several ranks share."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _balanced(ranks: int) -> PipeDataParallelTopology:
    """Stages and replicas near one another: prime factors are dealt to them in turn, smallest first."""
    shares = [1, 1]
    for place, prime in enumerate(_prime_factors(ranks)):
        shares[place % 2] *= prime
    return PipeDataParallelTopology(*shares)


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, smallest first. Raises UsageError for a number below 1."""
    if number < 1:
        raise UnmetError(f"prime factors: {number}; expected at least 1")
    found, prime = [], 2
    while number > 1:
        if number % prime:
            prime += 1
        else:
            found.append(prime)
            number //= prime
    return found


class PipelineParallelGrid:
    """This rank's place in a topology, in the words of a model-parallel unit (``mpu``). Its process groups are torch's;
    all ranks make them together, here."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None):
        self.global_rank = default_group.rank()
        self.world_size = default_group.size()
        self._topo = _balanced(self.world_size) if topology is None else topology
        if self._topo.world_size() != self.world_size:
            axes = dict(zip(self._topo.axes, self._topo.dims, strict=True))
            raise ValueError(
                f"PipelineParallelGrid: {axes} are {self._topo.world_size()} ranks, and the job has {self.world_size}"
            )
        at = self._topo.get_coord(self.global_rank)
        self.stage_id = getattr(at, "pipe", 0)
        self.data_parallel_id = getattr(at, "data", 0)
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = (
            max(self._topo.get_dim(axis), 1) for axis in ("pipe", "data", "model")
        )
        every = (
            [sorted(self._topo.get_axis_list("data", i)) for i in range(self.data_parallel_size)]
            if "data" in self._topo.axes
            else [list(range(self.world_size))]
        )
        self._groups = {
            name: default_group.own_group(lists)
            for name, lists in {
                "one model": every,
                **{
                    axis: self._topo.get_axis_comm_lists(axis) or self._alone()
                    for axis in ("data", "pipe", "model")
                },
            }.items()
        }

    def _alone(self) -> list[list[int]]:
        return [[rank] for rank in range(self.world_size)]

    def _is_grid_valid(self) -> bool:
        """Return True if the topology has as many places as the job has ranks."""
        return self._topo.world_size() == default_group.size()

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage_id == self.pipe_parallel_size - 1

    @property
    def slice_parallel_size(self) -> int:
        """Ranks that share a stage."""
        return self.model_parallel_size

    @property
    def dp_group(self) -> list[int]:
        """Ranks of the same stage of all pipelines."""
        return self._groups["data"][1]

    @property
    def pp_group(self) -> list[int]:
        """Ranks of this rank's pipeline."""
        return self._groups["pipe"][1]

    def get_stage_id(self) -> int:
        """The stage of this rank."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """The pipeline of this rank."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """The rank of that stage in this rank's pipeline."""
        at = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **others)
        return self._topo.get_rank(**at._asdict())

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank among all."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """The stage of this rank."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """The ranks of this pipeline."""
        return self._groups["pipe"][0]

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_data_parallel_rank(self) -> int:
        """The pipeline of this rank."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The ranks of the same stage of all pipelines."""
        return self._groups["data"][0]

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their numbers."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that hold one model together."""
        return self._groups["one model"][1].index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """Ranks that hold one model together."""
        return len(self._groups["one model"][1])

    def get_model_parallel_group(self) -> Any:
        """Them."""
        return self._groups["one model"][0]

    def get_slice_parallel_rank(self) -> int:
        """This rank's place among those that share its stage."""
        return int(getattr(self._topo.get_coord(self.global_rank), "model", 0))

    def get_slice_parallel_world_size(self) -> int:
        """Ranks that share a stage."""
        return self.model_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Them."""
        return self._groups["model"][0]

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
