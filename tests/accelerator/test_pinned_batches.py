"""Batches that a loader's threads pin: no copy by the launching thread, and no page that is used again too early."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.base.errors import UsageError
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.data.batched import BatchedDataset
from shardwise.data.loader import Loader
from shardwise.memory import pinned, streams
from shardwise.memory.pinned import check_copies, is_pinned_batch, pin_batch
from shardwise.memory.streams import to_device
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, on_host, register
from tests.ranks import RankPool

STEPS = 4


class Numbers(BatchedDataset):
    """Samples that contain their own number."""

    def __len__(self) -> int:
        return 64

    def batch(self, samples: np.ndarray) -> dict[str, Tensor]:
        return {"x": torch.from_numpy(samples)[:, None].expand(-1, 4).float().contiguous()}

    def fingerprint(self) -> str:
        return "numbers"


class Samples(torch.utils.data.Dataset[Tensor]):
    """The same samples, one by one, read in the caller's thread."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def loader(data: Any, device: torch.device) -> Loader:
    return Loader(data, global_batch=8, micro_batch=4, shuffle=False, device=device)


def used(data: Any, reuses_pages: bool) -> tuple[list[str], list[list[float]], list[str]]:
    """Return the races of some steps, the numbers that arrived, and the threads that copied to pinned memory."""
    device, threads, pages = register(), [], {}
    copy = pinned.pinned_copy

    def counted(tensor: Tensor) -> Tensor:
        threads.append("the launching thread" if threading.current_thread() is main else "a loader's thread")
        if not reuses_pages or tensor.shape not in pages:
            pages[tensor.shape] = copy(tensor)
            return pages[tensor.shape]
        pages[tensor.shape].data.copy_(tensor)  # as an allocator would, which no version counter counts
        return pages[tensor.shape]

    main, found = threading.current_thread(), []
    with pytest.MonkeyPatch.context() as patch, Bench() as bench:
        patch.setattr(pinned, "pinned_copy", counted)
        patch.setattr(streams, "pinned_copy", counted)
        read = loader(data, device)
        for _ in range(STEPS):
            for batch in read.step_batches():
                there = to_device(batch["x"] if isinstance(batch, dict) else batch, device)
                found.append(there.sum(1) / 4)
                del there, batch
        read.close()
        numbers = [on_host(each).tolist() for each in found]
        torch.accelerator.synchronize()
        return bench.races, numbers, sorted(set(threads))


def of_numbers(_: Any, reuses_pages: bool) -> Any:
    return used(Numbers(), reuses_pages)


def of_samples(_: Any) -> Any:
    return used(Samples(), False)


EXPECTED = [[float(4 * k + i) for i in range(4)] for k in range(2 * STEPS)]


def test_a_loaders_threads_pin_and_nobody_copies_again(device_process: RankPool) -> None:
    [(races, numbers, threads)] = device_process.run(of_numbers, False)
    assert not races and numbers == EXPECTED
    assert threads == ["a loader's thread"]


def test_a_page_that_is_used_again_too_early_is_a_race(device_process: RankPool) -> None:
    [(races, _, _)] = device_process.run(of_numbers, True)
    assert any("the host" in race and "copy" in race for race in races), races


def test_what_no_thread_reads_is_copied_by_the_launching_thread(device_process: RankPool) -> None:
    [(races, numbers, threads)] = device_process.run(of_samples)
    assert not races and numbers == EXPECTED and threads == ["the launching thread"]


def marks(_: Any) -> list[bool]:
    device = register()
    with Bench():
        batch = {"x": torch.ones(4, 2), "f": Ragged(torch.ones(3), torch.tensor([0, 3])), "n": 5}
        there = pin_batch(batch, device)
        x = there["x"]
        found = [
            is_pinned_batch(x),
            is_pinned_batch(x[1:]),
            not is_pinned_batch(x[:, 1:]),
            not is_pinned_batch(batch["x"]),
            there["f"] is batch["f"] and there["n"] == 5,
            pin_batch(there, device)["x"] is x,
            not is_pinned_batch(torch.ones(2, pin_memory=True)),
            pin_batch(batch, torch.device("cpu")) is batch,
        ]
        x.add_(1)
        return [*found, not is_pinned_batch(x)]


def test_a_tensor_that_was_written_is_copied_again(device_process: RankPool) -> None:
    assert device_process.run(marks) == [[True] * 9]


def raised(call: Any) -> str:
    """Return the text of the UsageError that ``call`` raises; "" if it raises none."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def writes(_: Any) -> tuple[list[str], int]:
    """Return the errors of calls after writes into batches, and the number of waits for the device."""
    device = register()
    with Bench() as bench:
        first, second, third = (
            pin_batch({"x": torch.full((4, 2), i), "n": 5}, device) for i in (1.0, 2.0, 3.0)
        )
        to_device(first["x"], device)
        found = [raised(check_copies), raised(lambda: to_device(second["x"], device))]
        first["x"].add_(1)
        found += [raised(lambda: to_device(third["x"], device)), raised(check_copies)]
        to_device(pin_batch([torch.ones(3)], device)[0][1:], device).sum()  # a view, which nobody keeps
        second["x"][0].mul_(2)
        found.append(raised(check_copies))
        waits = bench.syncs.total()
        to_device(third["x"], device)
        torch.accelerator.synchronize()
        check_copies()  # the copies are over, and are forgotten
        third["x"].zero_()
        return [*found, raised(check_copies)], waits


def test_a_write_behind_the_begun_copy_is_an_error(device_process: RankPool) -> None:
    """The loop wrote into a batch while the device copied it, and trained on either numbers."""
    [(found, waits)] = device_process.run(writes)
    assert [bool(error) for error in found] == [False, False, True, False, True, False], found
    assert "entry 'x' of a batch (shape [4, 2], float32) was written after it was passed" in found[2]
    assert "clone" in found[2] and waits == 0


def writing(world: World, place: str) -> tuple[str, int, list[float]]:
    """Return the error of a loop that writes into its batch, the steps that were counted, and the weights' change."""
    engine = shardwise.initialize(
        torch.nn.Linear(4, 1), {"batch": {"accumulation": 1}}, loss=squares, world=world
    )
    with engine.full_parameters():
        before = on_host(engine.module.weight).clone()

    def loop() -> None:
        for _, batch in zip(range(2), engine.loader(Numbers(), batch_size=4), strict=False):
            if place == "before":
                batch["x"].div_(64)
            engine.backward(engine(batch))
            if place == "between":
                batch["x"].zero_()
            engine.step()
            if place == "behind":
                batch["x"].zero_()

    error, steps = raised(loop), engine.step_count
    with engine.full_parameters():
        change = (on_host(engine.module.weight) - before).abs().sum().item()
    if error:
        engine.discard()
    engine.close()
    return error, steps, change


def loops(_: Any) -> list[Any]:
    device = register()
    with Bench():
        return [Crew(1, device).run(writing, place)[0] for place in ("before", "between", "behind")]


def test_a_loop_that_writes_into_its_batch_fails_before_the_update(device_process: RankPool) -> None:
    [(before, between, behind)] = device_process.run(loops)
    assert before[:2] == behind[:2] == ("", 2) and before[2] > 0
    assert "entry 'x' of a batch" in between[0] and between[1] == 0 and between[2] == 0


def trained(world: World) -> int:
    engine = shardwise.initialize(
        torch.nn.Linear(4, 1), {"batch": {"accumulation": 2}}, loss=squares, world=world
    )
    before = threading.active_count()
    for step, batches in zip(range(3), _steps(engine.loader(Numbers(), batch_size=4)), strict=False):
        assert all(is_pinned_batch(batch["x"]) for batch in batches), step
        engine.train_step(batches)
    engine.close()
    return before


def _steps(passes: Any) -> Any:
    batches = iter(passes)
    while True:
        yield [next(batches), next(batches)]


def squares(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return torch.as_tensor(model(batch["x"]).square().mean())


def by_an_engine(_: Any) -> list[str]:
    device = register()
    with Bench() as bench:
        Crew(1, device).run(trained)
        return bench.races


def test_the_loader_of_an_engine_pins_for_its_device(device_process: RankPool) -> None:
    assert device_process.run(by_an_engine) == [[]]
