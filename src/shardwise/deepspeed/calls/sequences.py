"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: sequences cut over ranks, for scripts written for Ulysses.

    mpu = UlyssesSPAttentionHF.register_with_transformers(model, core_attn_implementation="sdpa",
                                                          sequence_parallel_size=2, micro_batch_size=1)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)        # mesh.cp: 2
    for batch in UlyssesSPDataLoaderAdapter(loader, mpu.get_sequence_parallel_rank(), group, 2, device): ...

In DeepSpeed the script cuts each batch and every rank calls the model with its part. Here every rank calls the model
with whole sequences, the same on the ranks that share them, and the engine cuts them (``mesh.cp``). So the adapter
gives whole batches, in DeepSpeed's order: that of the first rank, then that of the second and so on. Logits are whole
too, so a loss that a script averages over the ranks by their numbers of labels is the same number.
"""

from collections import deque
from collections.abc import Iterator
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.comm import default_group

_IGNORE = -100


class SequenceRanks:
    """The ranks that share a sequence, in the names of a model-parallel unit.

    Args:
        size: Number of ranks that share a sequence; consecutive ranks share one.

    Raises:
        UsageError: if torch's default group has not begun, or ``size`` does not divide its ranks.
    """

    def __init__(self, size: int) -> None:
        world = default_group.size()
        if not default_group.is_begun() or world % size:
            raise UsageError(
                f"register_with_transformers: sequence_parallel_size is {size} in a job of {world} ranks"
                f"{'' if default_group.is_begun() else ' that have not begun'}; call deepspeed.init_distributed() "
                "first, with a number of ranks that it divides"
            )
        self._size = size
        lists = [range(first, first + size) for first in range(0, world, size)]
        self._group = default_group.group.WORLD if size == world else default_group.own_group(lists)[0]

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        """Return the index of this rank among those that share its sequences."""
        return default_group.rank() % self._size

    def get_sequence_parallel_group(self) -> Any:
        """Return torch's process group of the ranks that share sequences with this rank."""
        return self._group

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of ranks that share the model's state: all."""
        return default_group.size()

    def get_sequence_data_parallel_rank(self) -> int:
        """Return the index of this rank among those that share the model's state."""
        return default_group.rank()

    def get_sequence_data_parallel_group(self) -> Any:
        """Return torch's process group of the ranks that share the model's state."""
        return default_group.group.WORLD


class UlyssesSPAttentionHF:
    """The registration of sequences that are cut over ranks; the engine replaces the attention of a model itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError: the layer is not made by a script.

        Raises:
            UsageError: in every call.
        """
        raise UsageError(
            "UlyssesSPAttentionHF: the engine replaces the model's attention itself; call "
            "UlyssesSPAttentionHF.register_with_transformers, or give sequence_parallel_size in the configuration"
        )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceRanks | None:
        """Return a model-parallel unit of ranks that share sequences, for ``deepspeed.initialize(mpu=...)``.

        Collective: all ranks call this function. Nothing of transformers changes: ``initialize`` replaces the model's
        attention.

        Args:
            model_name_or_path: No effect.
            core_attn_implementation: No effect: attention over ranks has a kernel of its own.
            sequence_parallel_size: Number of ranks that share a sequence.
            micro_batch_size: No effect: any batch is served.
            seq_length: No effect: any length is served.
            seq_length_is_variable: No effect.
            disable_in_eval: No effect: evaluations give the numbers of one process.
            max_length: No effect.

        Returns:
            The unit; None if ``sequence_parallel_size`` is 1.
        """
        return None if sequence_parallel_size == 1 else SequenceRanks(sequence_parallel_size)


class UlyssesSPDataLoaderAdapter:
    """An iterator over the batches of all ranks that share sequences: each batch whole, on all of these ranks.

    ``labels`` become ``shift_labels``, as in DeepSpeed, and ``position_ids`` that count from 0 are left out, because
    the engine gives every token its position.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        """Make the iterator. All ranks of ``sp_group`` iterate together.

        Args:
            dl: The loader of this rank.
            sp_rank: No effect: every rank gets whole batches.
            sp_group: torch's process group of the ranks that share sequences.
            sp_world_size: Number of these ranks.
            device: Device on which the ranks exchange batches.
        """
        self.dl = dl
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = device
        self.iter = iter(dl)
        self.micro_batches: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Exchange the next batch of every rank that shares sequences.

        Raises:
            StopIteration: if the loader has ended; the next call starts it again.
            UsageError: if a batch has something else than tensors.
        """
        try:
            batch = dict(next(self.iter))
        except StopIteration:
            self.iter = iter(self.dl)
            raise
        others = sorted(name for name, value in batch.items() if not isinstance(value, Tensor))
        if others:
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter: {', '.join(others)} of a batch are no tensors, and only tensors travel "
                "between the ranks that share sequences; leave them out of the batches"
            )
        columns = {name: self._of_all(batch[name]) for name in sorted(batch)}
        for rank in range(self.sp_world_size):
            self.micro_batches.append(_whole_batch({name: each[rank] for name, each in columns.items()}))

    def _of_all(self, own: Tensor) -> list[Tensor]:
        """Return a tensor of each rank that shares sequences; their shapes may differ, but not the number of dims."""
        there = own.to(self.device)
        shape = torch.tensor(there.shape, dtype=torch.int64, device=self.device)
        shapes = [torch.empty_like(shape) for _ in range(self.sp_world_size)]
        default_group.all_gather(shapes, shape, group=self.sp_group)
        sizes = [each.tolist() for each in shapes]
        flat = there.new_zeros(max(map(prod, sizes)))
        flat[: there.numel()] = there.reshape(-1)
        parts = [torch.empty_like(flat) for _ in sizes]
        default_group.all_gather(parts, flat, group=self.sp_group)
        return [part[: prod(size)].view(size).cpu() for part, size in zip(parts, sizes, strict=True)]


def _whole_batch(batch: dict[str, Any]) -> dict[str, Any]:
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and bool((positions == torch.arange(positions.shape[-1])).all()):
        del batch["position_ids"]
    if isinstance(batch.get("labels"), Tensor):
        labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=_IGNORE)
        batch["shift_labels"] = labels[..., 1:].contiguous()
    return batch
