"""Several ranks in one process, and tiny model states whose every element is known."""

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import FlatSlice, TensorPieces
from shardwise.checkpoint.layout import LayoutSizes

TINY = LayoutSizes(file_bytes=1500, piece_elements=100, block_bytes=512)
"""Several files, several pieces a tensor, many blocks, out of a few kilobytes."""


class Store:
    """What the ranks' texts travel through."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()


class ThreadPeers:
    """One rank of a crew of threads."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size, self._store = rank, size, store

    def barrier(self) -> None:
        raise AssertionError("a checkpoint meets through texts alone")

    def post(self, key: str, text: str) -> None:
        with self._store.changed:
            self._store.texts[f"{key}/{self.rank}"] = text
            self._store.changed.notify_all()

    def collect(self, key: str, timeout_s: float, what: str = "") -> list[str]:
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        with self._store.changed:
            if not self._store.changed.wait_for(lambda: all(k in self._store.texts for k in keys), timeout_s):
                missing = [rank for rank, k in enumerate(keys) if k not in self._store.texts]
                raise TimeoutError(f"no word from ranks {missing}")
            return [self._store.texts[k] for k in keys]

    def at_work(self, key: str, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def joining(self, thread: int) -> AbstractContextManager[None]:
        return nullcontext()

    def forget(self, key: str) -> None:
        with self._store.changed:
            for rank in range(self.size):
                del self._store.texts[f"{key}/{rank}"]

    def held(self) -> list[str]:
        """Keys whose texts the store has."""
        return sorted(self._store.texts)


class Died(BaseException):
    """A rank that is gone: it tells nobody."""


def crew(size: int, work: Callable[[ThreadPeers], Any]) -> list[Any]:
    """``work`` on every rank at once; what each returned, or the exception it raised."""
    store = Store()
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadPeers(rank, size, store))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def succeed(results: list[Any]) -> list[Any]:
    """The results of a crew none of whose ranks raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


SHAPES: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]] = {
    ("weight", "embed.weight"): ((40, 12), torch.bfloat16),
    ("weight", "blocks.0.norm"): ((12,), torch.bfloat16),
    ("weight", "blocks.0.up"): ((12, 36), torch.bfloat16),
    ("weight", "blocks.1.up"): ((12, 36), torch.bfloat16),
    ("weight", "scale"): ((), torch.float32),
    ("buffer", "counts"): ((7,), torch.int64),
    ("buffer", "mask"): ((3, 3), torch.bool),
    ("buffer", "empty"): ((0, 4), torch.float32),
    ("master", "embed.weight"): ((40, 12), torch.float32),
    ("master", "blocks.0.norm"): ((12,), torch.float32),
    ("master", "blocks.0.up"): ((12, 36), torch.float32),
    ("master", "blocks.1.up"): ((12, 36), torch.float32),
    ("exp_avg", "embed.weight"): ((40, 12), torch.float32),
    ("exp_avg", "blocks.0.norm"): ((12,), torch.float64),
    ("exp_avg", "none"): ((0,), torch.float32),
    ("exp_avg", "one"): ((), torch.float32),
}

State = dict[tuple[str, str], Tensor]


def make_state(seed: int) -> State:
    """Every tensor whole and flat, each element drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for (kind, name), (shape, dtype) in SHAPES.items():
        count = int(torch.Size(shape).numel())
        bits = torch.randint(0, 2**15, (count,), generator=generator, dtype=torch.int32)
        state[kind, name] = (bits % 2 == 1) if dtype == torch.bool else (bits.double() / 7).to(dtype)
    return state


def cut(elements: int, ranks: int, seed: int) -> list[tuple[int, int]]:
    """Uneven ranges, some empty, that tile ``elements``: one per rank."""
    draws = random.Random(seed)
    ends = sorted(draws.randint(0, elements) for _ in range(ranks - 1))
    return list(zip([0, *ends], [*ends, elements], strict=True))


def items_of(state: State, rank: int = 0, ranks: int = 1, seed: int = 0) -> list[TensorPieces]:
    """The pieces that ``rank`` writes; every tensor is cut elsewhere."""
    items = []
    for number, ((kind, name), tensor) in enumerate(state.items()):
        start, stop = cut(tensor.numel(), ranks, seed + 1000 * number)[rank]
        pieces = [FlatSlice(start, stop, tensor[start:stop].clone())] if stop > start else []
        items.append(TensorPieces(kind, name, SHAPES[kind, name][0], tensor.dtype, pieces))
    return items


def blank_items(
    rank: int = 0, ranks: int = 1, seed: int = 0, dtype: torch.dtype | None = None
) -> list[TensorPieces]:
    """Destinations, filled with what no state holds; ``dtype`` replaces float32."""
    items = []
    for item in items_of(make_state(0), rank, ranks, seed):
        wanted = dtype if dtype is not None and item.dtype == torch.float32 else item.dtype
        pieces = [FlatSlice(a, b, torch.full((b - a,), -1, dtype=wanted)) for a, b, _ in item.pieces]
        items.append(item._replace(dtype=wanted, pieces=pieces))
    return items


def assemble(all_items: list[list[TensorPieces]]) -> State:
    """The whole tensors out of every rank's items."""
    whole: State = {}
    for items in all_items:
        for item in items:
            key = (item.kind, item.name)
            whole.setdefault(key, torch.empty(int(torch.Size(item.shape).numel()), dtype=item.dtype))
            for start, stop, tensor in item.pieces:
                whole[key][start:stop] = tensor
    return whole


def assert_same(found: State, expected: State) -> None:
    """Equal to the bit."""
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key
