"""The same samples on any number of ranks, and an exact resume on any other."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info

from shardwise.base.errors import ConfigError, DataError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.data.loader import Loader
from shardwise.data.sampler import Sampler
from shardwise.data.token_file import TokenFile, TokenWriter
from shardwise.data.windows import TokenSpan, TokenWindows

# Worker processes are forked, which newer Pythons remark upon when threads are alive.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Noisy(Dataset[dict[str, Any]]):
    """A user's dataset that draws from all three generators."""

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "noise": torch.tensor([float(torch.rand(())), np.random.rand(), random.random()]).double(),
            "worker": -1 if get_worker_info() is None else 1,
        }


class NoisyStream(IterableDataset[Tensor]):
    """A stream that draws: its order is a new permutation each epoch."""

    def __init__(self, size: int = 21) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(self.size))


def _windows(folder: Path, tokens: int = 1001, context: int = 10) -> TokenWindows:
    with TokenWriter(folder / "x.tokens", "numbers", 1 << 16) as writer:
        writer.append(np.arange(tokens))
    return TokenWindows([TokenSpan(TokenFile(folder / "x.tokens"), 0, tokens)], context)


def _ranks(data: Callable[[], Any], dp: int, micro: int, **options: Any) -> list[Loader]:
    return [
        Loader(data(), global_batch=8, micro_batch=micro, dp_index=rank, dp_size=dp, **options)
        for rank in range(dp)
    ]


def _samples(batch: Any) -> list[Any]:
    """Every sample of a batch as plain numbers."""
    if isinstance(batch, dict):
        keys = [key for key in batch if key != "worker"]
        return [tuple(map(str, each)) for each in zip(*(batch[key].tolist() for key in keys), strict=True)]
    if isinstance(batch, list | tuple):
        return batch[0].tolist()  # type: ignore[no-any-return]
    return batch.tolist()  # type: ignore[no-any-return]


def _steps(loaders: list[Loader], steps: int) -> list[list[Any]]:
    """For each step all samples in the order that layouts share: microbatch by microbatch, over the ranks."""
    result = []
    for _ in range(steps):
        ranks = [loader.step_batches() for loader in loaders]
        assert len({len(batches) for batches in ranks}) == 1
        result.append(
            [sample for turn in zip(*ranks, strict=True) for batch in turn for sample in _samples(batch)]
        )
    for loader in loaders:
        loader.close()
    return result


def test_a_step_of_text_is_read_ahead(tmp_path: Path) -> None:
    [loader] = _ranks(lambda: _windows(tmp_path), 1, 2)
    [own] = _ranks(Noisy, 1, 2)
    assert loader.steps_ahead == 1 and own.steps_ahead == 0
    size = sum(tensor.nbytes for batch in loader.step_batches() for tensor in batch.values())
    deadline = time.monotonic() + 20
    while loader.ahead_bytes != size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader.ahead_bytes == size > 0
    own.step_batches()
    assert own.ahead_bytes == 0
    loader.close()


LAYOUTS = [(1, 8), (1, 2), (2, 2), (4, 2), (2, 4), (8, 1)]


def _streams_of_batches() -> DataLoader[Any]:
    return DataLoader(NoisyStream(21), 2)


KINDS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "text": lambda folder: lambda: _windows(folder),
    "dataset": lambda folder: Noisy,
    "stream": lambda folder: NoisyStream,
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_same_for_any_layout(tmp_path: Path, kind: str) -> None:
    make = KINDS[kind](tmp_path)
    layouts = [_steps(_ranks(make, dp, micro, seed=3), 7) for dp, micro in LAYOUTS]
    assert all(len(step) == 8 for step in layouts[0])
    assert all(layout == layouts[0] for layout in layouts)
    assert _steps(_ranks(make, 1, 8, seed=4), 7) != layouts[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [((1, 2), (4, 2)), ((4, 2), (2, 1)), ((2, 4), (1, 8))])
def test_resume_on_other_ranks_goes_on_exactly(
    tmp_path: Path, kind: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    make = KINDS[kind](tmp_path)
    undisturbed = _steps(_ranks(make, 1, 8), 9)
    first = _ranks(make, *before)
    assert _steps(first, 4) == undisturbed[:4]
    states = [json.dumps(loader.state()) for loader in first]
    assert len(set(states)) == 1
    second = _ranks(make, *after)
    for loader in second:
        loader.load_state(json.loads(states[0]))
        assert (loader.step, loader.samples) == (4, 32)
    assert _steps(second, 5) == undisturbed[4:]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_stream_of_batches_is_dealt_and_resumes(dp: int) -> None:
    """21 samples in batches of 2: the incomplete eleventh of each epoch is left out, and epochs join within a step."""
    undisturbed = _steps(_ranks(_streams_of_batches, 1, 2), 6)
    loaders = _ranks(_streams_of_batches, dp, 2)
    assert _steps(loaders, 3) == undisturbed[:3]
    resumed = _ranks(_streams_of_batches, dp, 2)
    for loader in resumed:
        loader.load_state(loaders[-1].state())
    assert _steps(resumed, 3) == undisturbed[3:]
    first_epoch = [sample for step in undisturbed for sample in step][:20]
    assert len(set(first_epoch)) == 20


def test_a_batch_is_whole_with_fewer_keys_than_samples() -> None:
    def bags(samples: list[Tensor]) -> dict[str, Ragged]:
        return {"a": Ragged.of_lists([[int(each)] * (int(each) % 2) for each in samples])}

    [loader] = _ranks(lambda: DataLoader(NoisyStream(16), 2, collate_fn=bags), 1, 2)
    found = [batch["a"] for _ in range(2) for batch in loader.step_batches()]
    assert [each.samples for each in found] == [2] * 8
    assert sorted(torch.cat([each.values for each in found]).tolist()) == list(range(1, 16, 2))
    loader.close()


def test_own_sampler_gives_all_ranks_one_stream() -> None:
    """A WeightedRandomSampler draws from the process's generator; ranks in different states must agree all the same."""

    def make() -> DataLoader[Any]:
        torch.rand(random.randrange(1, 9))
        return DataLoader(Noisy(), 2, sampler=WeightedRandomSampler([1.0] * 50, 50))

    assert _steps(_ranks(make, 4, 2), 5) == _steps(_ranks(make, 1, 2), 5)


def test_each_epoch_sees_every_sample_once(tmp_path: Path) -> None:
    seen = [sample for step in _steps(_ranks(lambda: _windows(tmp_path), 2, 2), 25) for sample in step]
    assert len(set(seen[:100])) == len(set(seen[100:])) == 100
    assert seen[:100] != seen[100:]


def test_order_is_the_samplers(tmp_path: Path) -> None:
    windows = _windows(tmp_path)
    loader = Loader(windows, global_batch=8, micro_batch=8, seed=5)
    for step in (0, 1, 2):
        starts = loader.step_batches(step)[0]["tokens"][:, 0]
        assert (starts // 10).tolist() == Sampler(100, seed=5).indices(step, 8)
    loader.close()


def test_any_step_can_be_asked_for(tmp_path: Path) -> None:
    windows = _windows(tmp_path)
    straight = _steps([Loader(windows, global_batch=8, micro_batch=8)], 6)
    loader = Loader(windows, global_batch=8, micro_batch=8)
    for step in (5, 0, 1, 3, 2):
        assert _samples(loader.step_batches(step)[0]) == straight[step]
        assert (loader.step, loader.samples) == (step + 1, 8 * (step + 1))
    loader.close()


def test_global_batch_may_change_at_a_resume(tmp_path: Path) -> None:
    windows = _windows(tmp_path)
    straight = [s for step in _steps([Loader(windows, global_batch=8, micro_batch=8)], 6) for s in step]
    loader = Loader(windows, global_batch=8, micro_batch=8)
    _steps([loader], 2)
    other = Loader(windows, global_batch=16, micro_batch=4)
    other.load_state(loader.state())
    assert [s for step in _steps([other], 2) for s in step] == straight[16:48]


@pytest.mark.parametrize(
    "make", [Noisy, lambda: DataLoader(Noisy(), 4, shuffle=True)], ids=["dataset", "loader"]
)
def test_worker_processes_change_nothing(make: Callable[[], Any]) -> None:
    alone = _steps(_ranks(make, 1, 4), 4)
    loader = _ranks(make, 1, 4, workers=2)[0]
    assert loader.step_batches()[0]["worker"].unique().tolist() == [1]
    state = loader.state()
    assert (state["step"], state["cursor"]) == (1, {"position": 8}), (
        "counts what was handed out, not what was read ahead"
    )
    assert _steps([loader], 3) == alone[1:]


def test_one_worker_reads_a_stream() -> None:
    assert len(_steps(_ranks(NoisyStream, 2, 2, workers=1), 6)) == 6


def test_a_users_dataset_is_read_in_the_callers_thread_and_leaves_its_draws_alone() -> None:
    class Watching(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            assert threading.current_thread() is threading.main_thread()
            return super().__getitem__(index)

    for data, workers in ((Watching(), 0), (Noisy(), 1), (NoisyStream(), 0), (_streams_of_batches(), 0)):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        Loader(data, global_batch=4, micro_batch=2, workers=workers).step_batches()
        assert torch.equal(torch.rand(3), expected)


def test_text_is_read_ahead_by_a_thread_but_not_counted(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    loader = Loader(_windows(tmp_path), global_batch=8, micro_batch=8)
    loader.step_batches()
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert any(name.startswith("shardwise-data") for name in names)
    assert loader.state()["cursor"] == {"position": 8}
    loader.close()
    assert set(threading.enumerate()) <= before


def test_damage_met_by_the_thread_reaches_the_caller(tmp_path: Path) -> None:
    _windows(tmp_path)
    content = bytearray((tmp_path / "x.tokens").read_bytes())
    content[5000] ^= 1
    (tmp_path / "y.tokens").write_bytes(content)
    windows = TokenWindows([TokenSpan(TokenFile(tmp_path / "y.tokens"), 0, 1001)], 10)
    loader = Loader(windows, global_batch=8, micro_batch=8)
    for _ in range(2):
        with pytest.raises(DataError, match=r"y\.tokens is damaged"):
            loader.step_batches()


def test_iteration_gives_microbatches_and_counts_whole_steps() -> None:
    straight = _steps(_ranks(Noisy, 1, 4), 3)
    loader = Loader(Noisy(), global_batch=8, micro_batch=4)
    seen, positions = [], []
    for batch in loader:
        seen += _samples(batch)
        positions.append(loader.samples)
        if len(positions) == 5:
            break
    assert positions == [0, 8, 8, 16, 16]
    assert seen == [sample for step in straight for sample in step][:20]
    assert _samples(next(iter(loader))) == straight[2][:4], "a step left in the middle is read again"


def test_collate_fn_of_the_user_may_draw() -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "index": torch.tensor([sample["index"] for sample in samples]),
            "mask": torch.rand(len(samples)),
        }

    layouts = [_steps(_ranks(Noisy, dp, 2, collate_fn=collate), 3) for dp in (1, 2, 4)]
    assert layouts[0] == layouts[1] == layouts[2]


def test_each_epoch_draws_anew() -> None:
    """Augmentation that repeated itself every epoch would be none."""
    samples = [
        sample for step in _steps([Loader(Noisy(8), global_batch=8, micro_batch=8)], 2) for sample in step
    ]
    assert len({index for index, _ in samples}) == 8
    assert len({noise for _, noise in samples}) == 16
    first, second = _steps([Loader(NoisyStream(8), global_batch=8, micro_batch=8)], 2)
    assert sorted(first) == sorted(second)
    assert first != second


def test_state_of_other_data_is_refused(tmp_path: Path) -> None:
    state = Loader(Noisy(50), global_batch=8, micro_batch=8).state()
    other = Loader(Noisy(51), global_batch=8, micro_batch=8)
    with pytest.raises(DataError, match="samples 50 then, 51 now"):
        other.load_state(state)
    other.load_state(state, strict=False)
    with pytest.raises(DataError, match="a map dataset, the data now is a stream"):
        Loader(NoisyStream(), global_batch=8, micro_batch=8).load_state(state, strict=False)
    text = Loader(_windows(tmp_path), global_batch=8, micro_batch=8)
    assert text.state()["data"]["content"] == _windows(tmp_path).fingerprint()


@pytest.mark.parametrize(
    ("data", "error", "expected"),
    [
        (Noisy(7), DataError, "holds 7 samples; give more data or a smaller batch.global_size, which is 8"),
        (NoisyStream(7), DataError, "stream holds 7 samples, fewer than the 8 of one step"),
        (NoisyStream(0), DataError, "stream holds 0 samples"),
        (DataLoader(NoisyStream(7), 2), DataError, "holds 3 whole batches, fewer than the 4"),
        (DataLoader(NoisyStream(), 4), ConfigError, "batch_size is 4, but the micro batch is 2"),
    ],
)
def test_too_little_data_is_refused(data: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        Loader(data, global_batch=8, micro_batch=2).step_batches()


def test_too_little_text_names_the_context(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds 2 samples \(windows of context 10\); give more text"):
        Loader(_windows(tmp_path, tokens=25), global_batch=8, micro_batch=2)


def test_streams_that_cannot_start_anew_or_shrank_are_named() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.rest = iter(range(10))

        def __iter__(self) -> Iterator[int]:
            return self.rest

    loader = Loader(Once(), global_batch=8, micro_batch=8)
    loader.step_batches()
    with pytest.raises(DataError, match="nothing when it was read again for epoch 1"):
        loader.step_batches()
    longer = Loader(NoisyStream(30), global_batch=8, micro_batch=8)
    _steps([longer], 3)
    shorter = Loader(NoisyStream(21), global_batch=8, micro_batch=8)
    shorter.load_state(longer.state())
    with pytest.raises(DataError, match="ended after 21 items, but 24 had been read"):
        shorter.step_batches()


def test_a_stream_does_not_jump() -> None:
    loader = Loader(NoisyStream(), global_batch=8, micro_batch=8)
    with pytest.raises(UsageError, match="read in order"):
        loader.step_batches(2)


def test_a_stream_is_told_its_epoch() -> None:
    class Told(NoisyStream):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    _steps([Loader(Told(), global_batch=8, micro_batch=8)], 5)
    assert Told.epochs == [0, 1]


def test_an_error_in_the_users_dataset_comes_through() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise KeyError("the user's own error")

    for workers in (0, 1):
        with pytest.raises(KeyError, match="the user's own error"):
            Loader(Broken(), global_batch=8, micro_batch=8, workers=workers).step_batches()
