"""Masters and moments in host memory beside a pretended device: the bits of a run that keeps them on the device."""

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.base.errors import UsageError
from shardwise.engine.state.state import buckets
from shardwise.kernels.philox import key_of
from shardwise.memory import pinned
from shardwise.optim.classes import from_policy
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.rounding import RoundedPart, StochasticRounding
from shardwise.plan.placement import ContiguousRun
from shardwise.plan.state_form import StateForm
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.engine import test_delayed, test_offload
from tests.engine.test_offload import Case
from tests.ranks import RankPool

FORMS: list[StateForm] = ["bf16", "int8"]


def trained(world: Any, case: Case, offload: dict[str, Any]) -> tuple[Any, ...]:
    """(steps, state, where masters lie, rows of the ledger)."""
    config = case.config(None) | {"offload": offload}
    with Bench() as bench:
        engine = shardwise.initialize(test_offload.gpt(), config, world=world)
        data = engine._parts.dp.index
        results = [
            engine.train_step(test_offload.batches(data, step, case.accumulation)) for step in range(3)
        ]
        homes = {bucket.weight.master.device.type for bucket, _ in engine._parts.trained}
        state = {name: tensor.cpu() for name, tensor in test_offload.state_of(engine).items()}
        rows = engine._parts.site.ledger.bytes_by_row()
        with engine.full_parameters(write=True) as whole:
            next(iter(whole.values())).mul_(2)
        engine.close()
    steps = [(result.loss.hex(), result.grad_norm.hex()) for result in results]
    return steps, state, homes, rows, list(bench.misplaced)


def compare(world: Any, case: Case) -> list[Any]:
    """What differs, and where the masters lay."""
    plain = trained(world, case, {})
    offload = {
        "optimizer": "host",
        "parameters": case.parameters,
        "fraction": case.fraction,
        "step": case.step,
    }
    moved = trained(world, case, offload)
    unlike = [name for name, tensor in plain[1].items() if not torch.equal(tensor, moved[1][name])]
    return [plain[0] == moved[0], unlike, sorted(moved[2]), moved[3].get("host", 0) > 0, moved[4]]


def compare_on(_: Any, size: int, cases: list[Case]) -> list[Any]:
    device = register()
    return [found for case in cases for found in Crew(size, device).run(compare, case)]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (1, [Case(), Case(precision="bf16", step="at_end", accumulation=2, parameters="host")]),
        (2, [Case(3, parameters="host")]),
        pytest.param(2, [Case(2, precision="bf16")], marks=pytest.mark.soak),
    ],
)
def test_masters_in_host_memory(device_process: RankPool, size: int, cases: list[Case]) -> None:
    [found] = device_process.run(compare_on, size, cases)
    assert found == [[True, [], ["cpu"], True, []]] * size * len(cases)


def compare_disk(world: Any, case: Case, folder: str) -> list[Any]:
    """What differs where all state is on a disk."""
    plain = trained(world, case, {})
    moved = trained(world, case, {"optimizer": "disk", "parameters": "disk", "disk_path": folder})
    unlike = [name for name, tensor in plain[1].items() if not torch.equal(tensor, moved[1][name])]
    return [plain[0] == moved[0], unlike, moved[4]]


def compare_all_disk(_: Any, size: int, case: Case, folder: str) -> list[Any]:
    return list(Crew(size, register()).run(compare_disk, case, folder))


def test_a_disk_beside_the_device(device_process: RankPool, tmp_path: Path) -> None:
    """What goes there and comes from there passes through host memory."""
    case = Case(3, precision="bf16", accumulation=2, prefetch=1)
    [found] = device_process.run(compare_all_disk, 2, case, str(tmp_path))
    assert found == [[True, [], []]] * 2


def compare_late(world: Any, case: Case) -> list[Any]:
    """What differs from a loop that puts the weights before the last update back for every pass."""
    late = trained(world, case, {"optimizer": "host", "step": "delayed"})
    with Bench():
        steps, state = test_delayed.overridden(world, case, {"optimizer": "host"}, 3)
        unlike = [name for name, tensor in late[1].items() if not torch.equal(tensor, state[name].cpu())]
    return [late[0] == steps, unlike, sorted(late[2]), late[4]]


def compare_all_late(_: Any, size: int, cases: list[Case]) -> list[Any]:
    device = register()
    return [found for case in cases for found in Crew(size, device).run(compare_late, case)]


def test_updates_that_count_a_step_late(device_process: RankPool) -> None:
    [found] = device_process.run(compare_all_late, 1, [Case(precision="bf16", accumulation=2)])
    assert found == [[True, [], ["cpu"], []]]


def without_pins(_: Any, cases: list[Case]) -> tuple[list[Any], int, int]:
    """(what differs on a host that pins no page, warnings, tensors for which it was asked)."""
    device, refused = register(), []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log, empty = logging.getLogger("shardwise.memory.pinned"), torch.empty

    def refuses(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            refused.append(args)
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")
        return empty(*args, **options)

    log.addHandler(handler)
    try:
        with mock.patch.object(torch, "empty", refuses):
            found = [each for case in cases for each in Crew(1, device).run(compare, case)]
    finally:
        log.removeHandler(handler)
        pinned._tell.cache_clear()
    told = [
        text for text in said if "pins no more memory (CUDA error: out of memory): pageable memory" in text
    ]
    return found, len(told), len(refused)


def test_a_host_that_pins_no_pages_is_slower_and_exact(device_process: RankPool) -> None:
    cases = [Case(precision="bf16", parameters="host")]
    [(found, told, refused)] = device_process.run(without_pins, cases)
    assert found == [[True, [], ["cpu"], True, []]] * len(cases)
    assert told == 1 and refused > 10


def test_a_part_of_the_units(device_process: RankPool) -> None:
    [found] = device_process.run(compare_on, 1, [Case(fraction=0.5)])
    assert found == [[True, [], ["cpu", "pretend"], True, []]]


def rounded(device: torch.device) -> dict[str, Any]:
    """Master and moments after steps with moments in 16 and 8 bits there."""
    found: dict[str, Any] = {}
    key = key_of(0, "w")
    for form in FORMS:
        rounding = StochasticRounding([RoundedPart(0, 200, key, lambda a, b: [ContiguousRun(a, a, b - a)])])
        held = torch.linspace(-1, 1, 200).to(device)
        optimizer = FlatOptimizer(held, from_policy(OptimizerPolicy(lr=0.1)), 0, form, rounding)
        for step in range(2):
            grad = torch.linspace(3, -2, 200).to(device).square_()
            optimizer.step(grad, 2.0, [{}], [(32, 50)] if step else [], steps=step)
        found |= {f"{form} {label}": optimizer.state.read(label).cpu() for label in optimizer.state.labels}
        found[f"{form} master"] = held.cpu()
        found[f"{form} counts"] = [row.scalars for row in optimizer.state.scalars()]
    return found


def compare_rounded(_: Any) -> list[str]:
    here, device = rounded(torch.device("cpu")), register()
    with Bench() as bench:
        there = rounded(device)
    assert here.keys() == there.keys()
    return list(bench.misplaced) + [
        name
        for name, mine in here.items()
        if not (torch.equal(mine, there[name]) if isinstance(mine, torch.Tensor) else mine == there[name])
    ]


def test_moments_in_fewer_bits_on_a_device(device_process: RankPool) -> None:
    """Updated by torch's class and not by the chunk kernel, rounded by numbers that are drawn there: the same bits."""
    assert device_process.run(compare_rounded) == [[]]


def away(world: Any, case: Case, moves: bool) -> tuple[Any, ...]:
    """(steps, state, bytes of the engine's flat tensors on the device while they are away, what was misplaced)."""
    with Bench() as bench:
        engine = shardwise.initialize(test_offload.gpt(), case.config(None), world=world)
        steps, left = [], 0
        for step in range(3):
            result = engine.train_step(test_offload.batches(engine._parts.dp.index, step, case.accumulation))
            steps.append((result.loss.hex(), result.grad_norm.hex()))
            if moves:
                engine.offload_states("host")
                rows = engine.held_bytes()
                left += sum(
                    rows[row]
                    for row in ("weights", "master", "moments", "gathered", "staging")
                    if row in rows
                )
                left += sum(each.untyped_storage().nbytes() for each in held_on_the_device(engine))
                with pytest.raises(UsageError, match="reload_states"):
                    next(engine.module.parameters()).sum()
                engine.reload_states()
        state = {name: tensor.cpu() for name, tensor in test_offload.state_of(engine).items()}
        engine.close()
    return steps, state, left, list(bench.misplaced)


def held_on_the_device(engine: Any) -> list[torch.Tensor]:
    """Tensors that buckets and optimizers have there."""
    found = [
        moment for _, optimizer in engine._parts.trained for _, _, _, moment in optimizer.state.moments()
    ]
    for bucket in buckets(engine._parts):
        found += [each for each in (bucket.weight._shard, bucket.weight.master) if each is not None]
    return found


def compare_away(world: Any, case: Case) -> list[Any]:
    kept, moved = away(world, case, False), away(world, case, True)
    unlike = [name for name, tensor in kept[1].items() if not torch.equal(tensor, moved[1][name])]
    return [kept[0] == moved[0], unlike, *moved[2:]]


def compare_all_away(_: Any, size: int, cases: list[Case]) -> list[Any]:
    device = register()
    return [found for case in cases for found in Crew(size, device).run(compare_away, case)]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (1, [Case()]),
        (2, [Case(3, precision="bf16")]),
        pytest.param(1, [Case(precision="bf16")], marks=pytest.mark.soak),
        pytest.param(2, [Case(2)], marks=pytest.mark.soak),
    ],
)
def test_state_that_leaves_between_steps(device_process: RankPool, size: int, cases: list[Case]) -> None:
    [found] = device_process.run(compare_all_away, size, cases)
    assert found == [[True, [], 0, []]] * size * len(cases)
