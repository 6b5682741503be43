"""What a user's own loop takes from the engine: data, metrics, and a word on rank 0."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shardwise
from shardwise.base.errors import ConfigError, DataError, UsageError
from shardwise.comm.world import World
from shardwise.data.batched import BatchedDataset
from shardwise.models import Gpt, GptPolicy

SAMPLES = 22


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def dataset() -> TensorDataset:
    index = torch.arange(SAMPLES)
    return TensorDataset(torch.stack([index, -index], 1).float() + 1, index)


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (dataset()[i] for i in range(SAMPLES))


def start(world: World, **config: Any) -> Any:
    return shardwise.initialize(Net(), {"batch": {"accumulation": 2}, **config}, world=world)


def loop(engine: Any, loader: Any, passes: int) -> list[list[int]]:
    """Samples of this rank by pass."""
    seen: list[list[int]] = []
    for _ in range(passes):
        seen.append([])
        for x, index in loader:
            seen[-1] += index.tolist()
            engine.backward(engine(x, index))
            engine.step()
    return seen


def plain_loop(world: World, kind: str) -> tuple[list[list[int]], int, list[int], list[int]]:
    engine = start(world)
    data: Any = {
        "dataset": dataset(),
        "loader": DataLoader(dataset(), batch_size=2, shuffle=True),
        "in order": DataLoader(dataset(), batch_size=2),
        "stream": DataLoader(Counting(), batch_size=2),
    }[kind]
    loader = engine.loader(data, batch_size=2 if kind == "dataset" else None)
    seen = loop(engine, loader, 2)
    length = len(loader) if kind != "stream" else 0
    steps = engine.step_count
    assert kind == "stream" or loader.count_steps(2) == steps, "what a scheduler is told"
    more = [index for batches in loader.steps() for _, each in batches for index in each.tolist()]
    engine.close()
    return seen, length, more, [steps]


@pytest.mark.parametrize("kind", ["dataset", "loader", "in order", "stream"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_gets_samples_of_its_own(ranks: Any, kind: str, size: int) -> None:
    """Two passes over 22 samples by 8 (4 on one rank): no sample twice in a step, all in the passes together."""
    found = ranks(size).run(plain_loop, kind)
    step = 4 * size
    together = [sorted(i for seen, *_ in found for i in seen[number]) for number in range(2)]
    if kind == "stream":
        # Of a stream's 11 whole batches a pass takes those of whole steps, and the step that first reads past its end.
        assert len(together[0]) % step == 0 and set(together[0]) == set(range(SAMPLES))
        return
    steps = [-(-SAMPLES // step), -(-2 * SAMPLES // step) - -(-SAMPLES // step)]
    assert [len(each) for each in together] == [count * step for count in steps]
    assert set(together[0]) == set(range(SAMPLES))
    counts = torch.bincount(torch.tensor(together[0] + together[1]), minlength=SAMPLES)
    assert counts.min() >= 2 and counts.sum() == sum(steps) * step
    assert [length for _, length, _, _ in found] == [2 * steps[0]] * size
    assert found[0][3] == [sum(steps)]
    assert sum(len(more) for *_, more, _ in found) % step == 0
    if kind == "in order":
        first = [found[rank][0][0][:2] for rank in range(size)]
        assert first == [[2 * rank, 2 * rank + 1] for rank in range(size)]
    else:
        assert together[0] != sorted(together[0]) or found[0][0][0] != sorted(found[0][0][0])


def resumed(world: World, folder: str) -> bool:
    """Left after three steps, saved, gone on with by a new engine: the samples of a loop that was not left."""

    def begin() -> tuple[Any, Any, Any]:
        engine = start(world)
        return (
            engine,
            engine.loader(dataset(), batch_size=2),
            engine.loader(dataset(), batch_size=1, shuffle=False),
        )

    engine, loader, _ = begin()
    wanted = [i for part in loop(engine, loader, 3) for i in part]
    engine.close()
    engine, loader, other = begin()
    got: list[int] = []
    for x, index in loader:
        got += index.tolist()
        engine.backward(engine(x, index))
        if engine.step() and engine.step_count == 2:
            other.loader.step_batches()
            engine.save(folder, asynchronous=False)
            break
    engine.close()
    # A loader made before the step is loaded, and one made after it.
    engine = start(world)
    loader = engine.loader(dataset(), batch_size=2)
    engine.load(folder)
    later = engine.loader(dataset(), batch_size=1, shuffle=False)
    assert later.loader.step == 1
    first_epoch = loader.loader.epoch
    for _ in range(first_epoch, 3):
        for x, index in loader:
            got += index.tolist()
            engine.backward(engine(x, index))
            engine.step()
    engine.close()
    return got == wanted


@pytest.mark.parametrize("size", [1, 2])
def test_the_position_is_saved_with_the_engine(ranks: Any, tmp_path: Path, size: int) -> None:
    assert ranks(size).run(resumed, str(tmp_path)) == [True] * size


class Numbers(BatchedDataset):
    """Read ahead by a thread."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, samples: npt.NDArray[np.int64]) -> Any:
        return torch.from_numpy(samples)

    def fingerprint(self) -> str:
        return "numbers"


def test_a_closed_engine_reads_nothing_ahead() -> None:
    """Its loaders' threads lived on until somebody collected garbage."""
    before = set(threading.enumerate())
    engine = shardwise.initialize(Net(), {"batch": {"micro_size": 2}})
    loader = engine.loader(Numbers(), shuffle=False)
    first = next(iter(loader)).tolist()
    assert set(threading.enumerate()) - before, "a loop that is left goes on with what was read ahead"
    engine.close()
    assert set(threading.enumerate()) <= before
    assert [first, next(iter(loader)).tolist()] == [[0, 1], [2, 3]], "the position stays"
    loader.loader.close()


def sizes(world: World) -> dict[str, Any]:
    said: dict[str, Any] = {}
    engine = start(world)
    for name, call in {
        "none": lambda: engine.loader(dataset()),
        "small": lambda: engine.loader(TensorDataset(torch.zeros(1, 2)), batch_size=2),
        "iterator": lambda: engine.loader(iter([1]), batch_size=2),
    }.items():
        with pytest.raises((ConfigError, DataError)) as caught:
            call()
        said[name] = str(caught.value)
    engine.close()
    engine = shardwise.initialize(Net(), {"batch": {"global_size": 4 * world.size}}, world=world)
    said["wins"] = [len(index) for _, index in engine.loader(DataLoader(dataset(), batch_size=2))][0]
    with pytest.raises(
        ConfigError, match="batch_size is 2, but a rank's microbatch is 4 .*batch.global_size: "
    ):
        engine.loader(dataset(), batch_size=2)
    with pytest.raises(ConfigError, match="batch_size is 2, but the micro batch is 4"):
        engine.loader(DataLoader(Counting(), batch_size=2))
    engine.close()
    return said


def test_batch_sizes(ranks: Any) -> None:
    for said in ranks(2).run(sizes):
        assert "no batch size" in said["none"] and "holds 1 samples" in said["small"]
        assert "cannot be read again" in said["iterator"] and said["wins"] == 4


def metrics(world: World) -> tuple[list[int], list[float], list[list[float]], Any, str]:
    engine = start(world)
    indices, counted = [], []
    for (x, index), samples in engine.evaluation_loader(dataset(), batch_size=3):
        got, twice = engine.gather_metrics(index, x, samples=samples)
        indices += got.tolist()
        assert twice.shape == (len(got), 2)
    counted = engine.gather_metrics(torch.tensor(float(world.rank))).tolist()
    empty = engine.gather_metrics(torch.full((world.rank, 2), 1.0)).tolist()
    half = (
        engine.gather_metrics(torch.tensor([True, False])).dtype,
        engine.gather_metrics(torch.ones(2, dtype=torch.bfloat16)).dtype,
    )
    with pytest.raises(UsageError, match="3 samples shall count, but the tensor has 2 rows"):
        engine.gather_metrics(torch.zeros(2), samples=3)
    engine.print("only", world.rank)
    engine.barrier()
    said = repr(engine)
    assert engine.is_main == (world.rank == 0) and engine.device.type == "cpu"
    engine.close()
    return indices, counted, empty, half, said


@pytest.mark.parametrize("size", [1, 2, 4])
def test_metrics_of_every_sample_once(ranks: Any, size: int) -> None:
    for indices, counted, empty, half, said in ranks(size).run(metrics):
        assert sorted(indices) == list(range(SAMPLES))
        assert counted == [float(rank) for rank in range(size)]
        assert empty == [[1.0, 1.0]] * sum(range(size))
        assert half == (torch.bool, torch.bfloat16)
        assert "Engine(Net: 3 parameters, 3 trained" in said and f"of {size} on cpu" in said


def again(world: World, stage: int) -> tuple[list[float], list[float], str]:
    """A cell that runs twice: the second engine goes on with the weights of the first, which is closed."""
    model = Net()
    config = {"zero": {"stage": stage}, "optimizer": {"type": "sgd", "lr": 0.1}}
    x, index = torch.full((2, 2), 1.0 + world.rank), torch.arange(2)
    first = shardwise.initialize(model, config, world=world)
    first.train_step([(x, index)])
    before = first.state_dict()["linear.weight"].flatten().tolist()
    second = shardwise.initialize(model, config, world=world)
    after = second.state_dict()["linear.weight"].flatten().tolist()
    with pytest.raises(UsageError, match="this engine is closed") as caught:
        first.train_step([(x, index)])
    second.train_step([(x, index)])
    second.close()
    third = shardwise.initialize(model, config, world=world)  # after close() there is nothing to say
    third.train_step([(x, index)])
    third.close()
    return before, after, str(caught.value)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_initialize_twice_on_one_model(ranks: Any, size: int, stage: int) -> None:
    for before, after, _ in ranks(size).run(again, stage):
        assert before == after


def cut_twice(world: World) -> str:
    model = Gpt(GptPolicy(layers=2, width=16, heads=4, context=8, vocab=19))
    engine = shardwise.initialize(model, {"mesh": {"tp": 2}}, world=world)
    engine.close()
    with pytest.raises(UsageError) as caught:
        shardwise.initialize(model, {}, world=world)
    return str(caught.value)


def test_a_model_that_was_cut_is_refused(ranks: Any) -> None:
    for said in ranks(2).run(cut_twice):
        assert "was cut along tp, pp or ep by an engine before" in said


def best_kept(world: World, folder: str) -> list[list[int]]:
    """Steps in the folder after each save; keep_last is 2, and the run is resumed after the fourth."""
    found = []
    engine = start(world, batch={})
    x, index = torch.full((2, 2), 1.0 + world.rank), torch.arange(2)
    for step, score in enumerate([3.0, 1.0, 2.0, float("nan"), 1.5, 0.5, None, 0.7], 1):
        if step == 5:
            engine.close()
            engine = start(world, batch={})
            engine.load(folder)
            assert engine.best == (2, 1.0)
        engine.train_step([(x, index)])
        engine.save(folder, asynchronous=False, score=score)
        engine.barrier()
        found.append(sorted(int(path.name.split("_")[1]) for path in Path(folder).glob("step_*")))
        engine.barrier()
    assert not engine.is_best(0.6) and engine.is_best(0.4) and not engine.is_best(0.5)
    assert engine.is_best(9.0, higher_is_better=True) and not engine.is_best(
        float("inf"), higher_is_better=True
    )
    engine.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_the_best_step_is_kept(ranks: Any, tmp_path: Path, size: int) -> None:
    for found in ranks(size).run(best_kept, str(tmp_path)):
        assert found == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8]]
