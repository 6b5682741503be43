"""Streams of the pretended device: every use of memory is ordered, whatever the order in which streams run.

The bench's timelines (timelines.py) tell of two uses that no event orders; what other streams copy comes as late as it
may. Each planted mistake takes one wait, or one record of a stream's use, out of the package's code, and is told of.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import shardwise
from shardwise.tiers import activations
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.engine import test_offload
from tests.engine.test_offload import Case
from tests.ranks import RankPool


class Scene(NamedTuple):
    """A way to train that uses streams."""

    size: int
    case: Case
    offload: dict[str, Any] = {}  # noqa: RUF012 - never changed


SCENES = {
    "batches": Scene(1, Case(accumulation=2)),
    "stage 3": Scene(2, Case(3, accumulation=2, prefetch=1 << 20)),
    "stage 2": Scene(2, Case(2, accumulation=2)),
    "stage 1": Scene(2, Case(1, accumulation=2, prefetch=1 << 20)),
    "bf16": Scene(2, Case(2, precision="bf16", accumulation=2)),
    "pipeline": Scene(2, Case(pp=2, accumulation=3)),
    "activations": Scene(1, Case(), {"activations": "host"}),
    "activations in parts": Scene(2, Case(tp=2), {"activations": "host"}),
    "activations in a pipeline": Scene(2, Case(pp=2, accumulation=3), {"activations": "host"}),
    "masters": Scene(1, Case(), {"optimizer": "host"}),
    "masters, late": Scene(2, Case(2), {"optimizer": "host", "step": "delayed"}),
    "weights": Scene(2, Case(3, prefetch=1 << 20), {"optimizer": "host", "parameters": "host"}),
    "weights of one": Scene(1, Case(accumulation=2), {"optimizer": "host", "parameters": "host"}),
}


def train(world: Any, scene: Scene) -> list[Any]:
    """Losses, norms and weights of three steps, to the bit."""
    engine = shardwise.initialize(
        test_offload.gpt(), scene.case.config(None) | {"offload": scene.offload}, world=world
    )
    data, found = engine._parts.dp.index, []
    for step in range(3):
        result = engine.train_step(test_offload.batches(data, step, scene.case.accumulation))
        found += [result.loss.hex(), result.grad_norm.hex()]
    found += [
        (name, tensor.cpu().view(torch.uint8).numpy().tobytes())
        for name, tensor in engine.state_dict().items()
    ]
    engine.close()
    return found


def told(scene: Scene, hurry: int | None = None) -> tuple[list[str], list[Any]]:
    """(races, results of the ranks)."""
    device = register()
    with Bench(hurry) as bench, small_storages_move():
        results = Crew(scene.size, device).run(train, scene)
    assert not bench.misplaced
    return bench.races, results


@contextmanager
def small_storages_move() -> Iterator[None]:
    before, activations.SMALL_BYTES = activations.SMALL_BYTES, 64
    try:
        yield
    finally:
        activations.SMALL_BYTES = before


def plain(_: Any, name: str, orders: int) -> list[Any]:
    """Races of a scene in several orders, and whether all have the same bits."""
    runs = [told(SCENES[name], hurry) for hurry in (None, *range(orders))]
    return [sum((races for races, _ in runs), []), all(results == runs[0][1] for _, results in runs)]


@pytest.mark.parametrize("name", SCENES)
def test_every_use_is_ordered(device_process: RankPool, name: str) -> None:
    assert device_process.run(plain, name, 1) == [[[], True]]
