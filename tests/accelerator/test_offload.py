"""Masters and moments in host memory beside a pretended device: the bits of a run that keeps them on the device."""

from typing import Any

import pytest
import torch

import shardwise
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.engine import test_offload
from tests.engine.test_offload import Case
from tests.ranks import RankPool


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
        (2, [Case(3, parameters="host"), Case(2, precision="bf16")]),
    ],
)
def test_masters_in_host_memory(device_process: RankPool, size: int, cases: list[Case]) -> None:
    [found] = device_process.run(compare_on, size, cases)
    assert found == [[True, [], ["cpu"], True, []]] * size * len(cases)


def test_a_part_of_the_units(device_process: RankPool) -> None:
    [found] = device_process.run(compare_on, 1, [Case(fraction=0.5)])
    assert found == [[True, [], ["cpu", "pretend"], True, []]]
