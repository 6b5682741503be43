"""Streams of the pretended device: every use of memory is ordered, whatever the order in which streams run.

The bench's timelines (timelines.py) tell of two uses that no event orders; what other streams copy comes as late as it
may. Each planted mistake takes one wait, or one record of a stream's use, out of the package's code, and is seen.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import NonFiniteError
from shardwise.comm import duals, exchange, two_levels
from shardwise.comm.peers import PointToPoint
from shardwise.engine.fit.foresee import foresee
from shardwise.engine.step.end import StepEndHandlers
from shardwise.memory import streams
from shardwise.parallel.embedding import ways
from shardwise.parallel.zero.gradient import Gradient
from shardwise.parallel.zero.weight import Weight
from shardwise.parallel.zero.windows import UnitWindows
from shardwise.tiers import activations
from shardwise.tiers.activations import ActivationOffload
from tests.accelerator import test_tables
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.engine import test_offload
from tests.engine.fit import test_foresee
from tests.engine.test_offload import Case
from tests.ranks import RankPool


class Scene(NamedTuple):
    """A way to train that uses streams."""

    size: int
    case: Case | None
    """None: tables whose keys go ahead."""
    offload: dict[str, Any] = {}  # noqa: RUF012 - never changed
    more: dict[str, Any] = {}  # noqa: RUF012
    hosts: int = 1
    """Hosts on which the ranks pretend to lie."""


HOST = {"optimizer": "host"}
SCENES = {
    "batches": Scene(1, Case(accumulation=2)),
    "stage 3": Scene(2, Case(3, accumulation=2, prefetch=1 << 20)),
    "stage 2": Scene(2, Case(2, accumulation=2)),
    "stage 1": Scene(2, Case(1, accumulation=2, prefetch=1 << 20)),
    "stage 1, at once": Scene(2, Case(1)),
    "stage 0": Scene(2, Case(accumulation=2)),
    "two hosts": Scene(4, Case(3, accumulation=2, prefetch=1 << 20), hosts=2),
    "bf16": Scene(2, Case(2, precision="bf16", accumulation=2)),
    "pipeline": Scene(2, Case(pp=2, accumulation=3)),
    "tensor": Scene(2, Case(tp=2)),
    "tensor, whole": Scene(2, Case(tp=2), more={"tensor": {"sequence_parallel": False}}),
    "tables": Scene(2, None),
    "activations": Scene(1, Case(), {"activations": "host"}),
    "activations in parts": Scene(
        2, Case(tp=2, recompute="full"), {"activations": "host"}, {"tensor": {"sequence_parallel": False}}
    ),
    "activations in a pipeline": Scene(2, Case(pp=2, accumulation=3), {"activations": "host"}),
    "masters": Scene(1, Case(accumulation=2), HOST),
    "masters at stage 2": Scene(2, Case(2, accumulation=2), HOST),
    "masters, late": Scene(2, Case(2), HOST | {"step": "delayed"}),
    "weights": Scene(2, Case(3, prefetch=4000), HOST | {"parameters": "host"}),
    "weights of one": Scene(1, Case(accumulation=2, prefetch=1 << 20), HOST | {"parameters": "host"}),
}


def train(world: Any, scene: Scene) -> list[Any]:
    """Losses, norms and weights of three steps, to the bit."""
    if scene.case is None:
        return list(test_tables.ahead(world, 2))
    config = scene.case.config(None) | {"offload": scene.offload} | scene.more
    world.hosts = tuple(rank * scene.hosts // world.size for rank in range(world.size))
    engine = shardwise.initialize(test_offload.gpt(), config, world=world)
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
    before, activations.SMALL_BYTES = activations.SMALL_BYTES, 64
    try:
        with Bench(hurry) as bench:
            results = Crew(scene.size, device).run(train, scene)
    finally:
        activations.SMALL_BYTES = before
    assert not bench.misplaced
    return bench.races, results


def plain(_: Any, name: str, orders: int) -> list[Any]:
    """Races of a scene in several orders, and whether all have the same bits."""
    runs = [told(SCENES[name], hurry) for hurry in (None, *range(orders))]
    return [sum((races for races, _ in runs), []), all(results == runs[0][1] for _, results in runs)]


def some(names: Mapping[str, str]) -> list[Any]:
    """The names, by the scene of each; all but those of quick scenes are of a long run."""
    quick = {"stage 3", *(name for name, scene in SCENES.items() if scene.size == 1)}
    return [
        name if scene in quick else pytest.param(name, marks=pytest.mark.soak)
        for name, scene in names.items()
    ]


@pytest.mark.parametrize("name", some({name: name for name in SCENES}))
def test_every_use_is_ordered(device_process: RankPool, name: str) -> None:
    assert device_process.run(plain, name, 1) == [[[], True]]


@pytest.mark.soak
@pytest.mark.parametrize("name", SCENES)
def test_twenty_orders_have_the_same_bits(device_process: RankPool, name: str) -> None:
    assert device_process.run(plain, name, 20, timeout_s=900.0) == [[[], True]]


# Planted mistakes ---------------------------------------------------------------------------------------------------


class Mistake(NamedTuple):
    """What is taken out of a function, and the scene that shows it."""

    scene: str
    function: Callable[..., Any]
    right: str
    wrong: str = "pass"


_HERE = "torch.accelerator.current_stream({}.device)"
MISTAKES = {
    "a batch is read before it has come": Mistake("batches", streams.to_device, "here.wait_stream(stream)"),
    "a batch's memory is given away": Mistake("batches", streams.to_device, "keep_for(here, (there,))"),
    "a slot is written while it is read": Mistake(
        "weights", streams.to_be_filled, f"free.record({_HERE.format('into')})"
    ),
    "a weight is read before it has come": Mistake(
        "weights of one",
        streams.to_be_filled,
        f"return lambda: {_HERE.format('into')}.wait_event(arrived)",
        "return lambda: None",
    ),
    "a copy does not wait for readers": Mistake("weights", streams._copy_behind, "stream.wait_event(free)"),
    "an event stands before its copy": Mistake(
        "weights of one",
        streams._copy_behind,
        "        into.copy_(source, non_blocking=True)\n        arrived = torch.Event(into.device)\n"
        "        arrived.record(stream)\n",
        "        arrived = torch.Event(into.device)\n        arrived.record(stream)\n"
        "        into.copy_(source, non_blocking=True)\n",
    ),
    "an activation leaves before it is computed": Mistake(
        "activations", streams.begin_down, f"stream.wait_stream({_HERE.format('tensor')})"
    ),
    "an activation is dropped under its copy": Mistake(
        "activations",
        streams.down_by_now,
        "return lambda: torch.accelerator.current_stream(device).wait_event(arrived)",
        "return lambda: None",
    ),
    "a gradient's memory is given away": Mistake("masters", streams.to_host, "keep_for(stream, (tensor,))"),
    "a gradient is read before it has come": Mistake("masters", streams.to_host, "arrived.synchronize()"),
    "an event of the wrong stream": Mistake(
        "masters", streams.to_host, "arrived.record(stream)", f"arrived.record({_HERE.format('tensor')})"
    ),
    "a late weight is written while it is read": Mistake(
        "masters, late", streams.reached, "return here.synchronize", "return lambda: None"
    ),
    "an update is over before its copy": Mistake(
        "masters", streams.to_be_written, "target).synchronize()", "target)"
    ),
    "an activation is read before it is back": Mistake(
        "activations", activations._MovedStorage.memory, "self._arrive()"
    ),
    "a part is gathered before it is back": Mistake(
        "activations in parts", activations._MovedStorage.gather, "self._arrive()\n", "pass\n"
    ),
    "a gathered activation is not waited for": Mistake(
        "activations in parts",
        activations._MovedStorage.gather,
        'self._over.all_gather(self._here, self._part, self._what, "activations").wait',
        '(self._over.all_gather(self._here, self._part, self._what, "activations"), lambda: None)[1]',
    ),
    "a release does not wait": Mistake("activations", activations._BlockPass.release, "self.is_down()"),
    "a backward pass frees what still leaves": Mistake(
        "activations in a pipeline", ActivationOffload.reload, "call.is_down()"
    ),
    "a gather is not waited for": Mistake("stage 3", Weight.finish_unshard, "self._gathering.wait()"),
    "a shard is sent before it has come": Mistake(
        "weights", Weight._come_from, "arrive()\n    return self._around", "return self._around"
    ),
    "a shard's slot is used again too early": Mistake(
        "weights",
        Weight.start_unshard,
        "self._gathering = self._come_from(held, self._full)",
        "self._gathering = self._come_from(held, self._full); self._let_go()",
    ),
    "an update is not waited for": Mistake("masters", Weight.finish_update, "self._updating.result()"),
    "a gather of updated weights is not waited for": Mistake(
        "stage 1", Weight.finish_unshard, "self._gathering.wait()"
    ),
    "a sum of a host is not waited for": Mistake(
        "two hosts", two_levels._exchanged, "purpose).wait()", "purpose)"
    ),
    "a sum over hosts is not waited for": Mistake(
        "two hosts",
        streams.run_beside,
        f"return lambda: {_HERE.format('stream')}.wait_event(arrived)",
        "return lambda: None",
    ),
    "a sum over hosts begins before its gradients": Mistake(
        "two hosts", streams.run_beside, f"stream.wait_stream({_HERE.format('stream')})"
    ),
    "a sum's slot is used again too early": Mistake("stage 2", Gradient.arrive, "self._reducing.wait()"),
    "a sum is read before it is there": Mistake("stage 0", Gradient.settle, "self._reducing.wait()"),
    "a late update overwrites its weight": Mistake(
        "masters, late", StepEndHandlers._step_beside, "is_free()"
    ),
    "a gradient leaves before it is summed": Mistake(
        "masters at stage 2", UnitWindows._let_arrive, "bucket.gradient.arrive()"
    ),
    "updated weights are used before they are gathered": Mistake(
        "stage 1, at once", UnitWindows.finish_updates, "pending.wait()"
    ),
    "what is sent is read before it has come": Mistake(
        "tables", exchange.send, "what, purpose).wait()", "what, purpose)"
    ),
    "a message is read before it has come": Mistake(
        "pipeline",
        PointToPoint.receive,
        'self._followed(pending, "receive", source, said).wait()',
        'self._followed(pending, "receive", source, said)',
    ),
    "a sum along tp is not waited for": Mistake("tensor, whole", duals.start_sum, "pending.wait()"),
    "a gather along tp is not waited for": Mistake("tensor", duals.start_gather, "pending.wait()"),
    "a scatter along tp is not waited for": Mistake("tensor", duals.start_scatter, "pending.wait()"),
    "gradients of rows are not waited for": Mistake(
        "tables", ways.GatheredKeysExchange.deliver, '"gradients").wait()', '"gradients")'
    ),
}


@contextmanager
def planted(mistake: Mistake) -> Iterator[None]:
    function = inspect.unwrap(mistake.function)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(mistake.right) == 1, f"{function.__qualname__} has changed"
    made: dict[str, Any] = {}
    exec(text.replace(mistake.right, mistake.wrong), {**function.__globals__}, made)
    right = function.__code__
    function.__code__ = inspect.unwrap(made[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = right


_RUNS = 5
"""Of a mistake: what two threads of the host do in the wrong order shows where the machine happens to run them so."""


@cache
def right_results(name: str) -> list[Any]:
    return told(SCENES[name])[1]


def seen(_: Any, name: str) -> list[str]:
    """How a mistake shows."""
    mistake = MISTAKES[name]
    wanted = right_results(mistake.scene)
    for _ in range(_RUNS):
        try:
            with planted(mistake):
                races, results = told(SCENES[mistake.scene])
        except (NonFiniteError, IndexError) as error:  # of NaNs, and of keys that are still to come
            return [f"{type(error).__name__}: {str(error)[:200]}"]
        if races or results != wanted:
            return [*races, *["other numbers"] * (results != wanted)]
    return []


@pytest.mark.parametrize("name", some({name: each.scene for name, each in MISTAKES.items()}))
def test_a_mistake_is_seen(device_process: RankPool, name: str) -> None:
    [how] = device_process.run(seen, name)
    assert how


# Memory -------------------------------------------------------------------------------------------------------------


ROWS, WIDTH = 1024, 64
"""So many rows that what a block saves is larger than what stays (``SMALL_BYTES``)."""


class Block(nn.Module):
    """A block without attention, for which torch would take another kernel on a device that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.inner(x)
        return found


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x).square().mean()
        return found


def peak_of(world: Any, given: dict[str, Any]) -> int:
    """Bytes that come and go in a step, at most, of the allocator."""
    batches = [torch.ones(ROWS, WIDTH)]
    engine = shardwise.initialize(Net(), given | {"check_first_step": "off"}, world=world)
    engine.train_step(batches)
    engine.train_step(batches)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_stats()["active_bytes.all.current"]
    engine.train_step(batches)
    most = torch.accelerator.memory_stats()["active_bytes.all.peak"] - before
    engine.close()
    return most


def peaks_of(_: Any, given: dict[str, Any], size: int) -> list[int]:
    device = register()
    with Bench():
        return list(Crew(size, device).run(peak_of, given))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloaded_activations_take_what_is_foreseen(device_process: RankPool, recompute: str) -> None:
    """The host runs a whole pass ahead: memory that waits for it would be as much as without the offload."""
    given = {"offload": {"activations": "host"}, "recompute": recompute}
    foreseen = foresee(Net, given, example=torch.ones(ROWS, WIDTH), device=torch.device("cuda")).step
    assert foreseen is not None
    [[most]] = device_process.run(peaks_of, given, 1)
    assert most == pytest.approx(test_foresee.passing(foreseen), rel=0.02)
