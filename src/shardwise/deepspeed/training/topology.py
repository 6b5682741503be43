"""Coordinates of ranks on named axes, under DeepSpeed's names.

The last axis varies fastest, as in an array:    rank = Σ coordinate_i · Π dims after i

    ProcessTopology(axes=["pipe", "data"], dims=[2, 3])      pipe 0: ranks 0 1 2     pipe 1: ranks 3 4 5

``ProcessTopology`` makes no process groups; ``PipelineParallelGrid`` does.
"""

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any

from shardwise.comm import default_group
from shardwise.deepspeed.calls.unmet import UnmetError


class ProcessTopology:
    """An arrangement of ranks on named axes."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # noqa: PYI024
        self.mapping = {self._at(at): rank for rank, at in enumerate(product(*map(range, dims)))}

    def _at(self, places: Iterable[int]) -> Any:
        return self.ProcessCoord(*places)

    def get_rank(self, **at: int) -> int:
        """Return the rank at the given coordinates.

        Args:
            **at: One coordinate for every axis.

        Raises:
            ValueError: if an axis is missing or unknown, or a coordinate is outside of its axis.
        """
        if set(at) != set(self.axes):
            raise ValueError(f"get_rank: given {sorted(at)}, expected one coordinate for each of {self.axes}")
        place = self.ProcessCoord(**at)
        if place not in self.mapping:
            raise ValueError(f"get_rank: {at} lies outside of {dict(zip(self.axes, self.dims, strict=True))}")
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return a rank's coordinates as text for file names, such as ``model_00``.

        Args:
            rank: The rank.
            omit_axes: Axes to leave out.
            inner_sep: The text between an axis and its coordinate.
            outer_sep: The text between two axes.
        """
        at = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(at, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of ``rank`` as a named tuple.

        Raises:
            ValueError: if the topology has no such rank.
        """
        if not 0 <= rank < self.world_size():
            raise ValueError(f"get_coord: rank {rank} is not among the {self.world_size()} of this topology")
        at = []
        for dim in reversed(self.dims):
            rank, place = divmod(rank, dim)
            at.append(place)
        return self._at(reversed(at))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks whose coordinates differ only on ``axis``; empty if there is no such axis."""
        if axis not in self.axes:
            return []
        lists: dict[tuple[int, ...], list[int]] = {}
        place = self.axes.index(axis)
        for at, rank in self.mapping.items():
            lists.setdefault(at[:place] + at[place + 1 :], []).append(rank)
        return [lists[others] for others in sorted(lists)]

    def filter_match(self, **at: int) -> list[int]:
        """Return the ranks with these coordinates, whatever their other coordinates are."""
        return [
            rank for each, rank in self.mapping.items() if all(getattr(each, k) == v for k, v in at.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose coordinate on ``axis`` is ``idx``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks of the topology."""
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A topology of several pipelines, in which the ranks of one stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology of several pipelines in which several ranks share a stage."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _balanced(ranks: int) -> PipeDataParallelTopology:
    """Return a topology with similar numbers of stages and replicas: prime factors alternate, smallest first."""
    shares = [1, 1]
    for place, prime in enumerate(_prime_factors(ranks)):
        shares[place % 2] *= prime
    return PipeDataParallelTopology(*shares)


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, smallest first.

    Raises:
        UsageError: if the number is below 1.
    """
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
    """Coordinates of this rank in a topology, with the interface of a model-parallel unit (``mpu``).

    The process groups are torch's; the constructor makes them, so all ranks must call it together.
    """

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
        """Return True if the topology and the job have the same number of ranks."""
        return self._topo.world_size() == default_group.size()

    @property
    def is_first_stage(self) -> bool:
        """True if this rank is on the first stage, which reads the inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank is on the last stage, which computes the loss."""
        return self.stage_id == self.pipe_parallel_size - 1

    @property
    def slice_parallel_size(self) -> int:
        """The number of ranks that share a stage."""
        return self.model_parallel_size

    @property
    def dp_group(self) -> list[int]:
        """The ranks that run the same stage as this rank, one of each pipeline."""
        return self._groups["data"][1]

    @property
    def pp_group(self) -> list[int]:
        """The ranks of this rank's pipeline."""
        return self._groups["pipe"][1]

    def get_stage_id(self) -> int:
        """Return the index of this rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Return the index of this rank's pipeline."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """Return the rank that runs the stage ``stage_id`` in this rank's pipeline.

        Args:
            stage_id: The index of the stage.
            **others: Coordinates on other axes that replace this rank's.
        """
        at = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **others)
        return self._topo.get_rank(**at._asdict())

    def topology(self) -> ProcessTopology:
        """Return the topology of the job's ranks."""
        return self._topo

    def get_global_rank(self) -> int:
        """Return the index of this rank in the job."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Return the index of this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Return the process group of this rank's pipeline."""
        return self._groups["pipe"][0]

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's pipeline."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the ranks that run this rank's stage, one of each pipeline."""
        return self._groups["data"][0]

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks that run this rank's stage, one of each pipeline."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Return the index of this rank among the ranks that hold one copy of the model together."""
        return self._groups["one model"][1].index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that hold one copy of the model together."""
        return len(self._groups["one model"][1])

    def get_model_parallel_group(self) -> Any:
        """Return the process group of the ranks that hold one copy of the model together."""
        return self._groups["one model"][0]

    def get_slice_parallel_rank(self) -> int:
        """Return the index of this rank among the ranks that share its stage."""
        return int(getattr(self._topo.get_coord(self.global_rank), "model", 0))

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of ranks that share a stage."""
        return self.model_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Return the process group of the ranks that share this rank's stage."""
        return self._groups["model"][0]

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
