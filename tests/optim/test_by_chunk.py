"""A step by chunks has the bits of torch's call on whole tensors, and rounds the weight on its way."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.optim import flat
from shardwise.optim.classes import from_policy
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.policy import OptimizerPolicy
from shardwise.tiers.tier import TierResources, threads_beside

TOTAL = 5 * 64 + 37
UNUSED: list[list[tuple[int, int]]] = [[], [(70, 211)], [(0, 3), (300, TOTAL)], []]
"""By step; from the second on there are segments."""
POLICIES: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw", "weight_decay": 0.3},
    "amsgrad": {"type": "adam", "weight_decay": 0.1, "amsgrad": True},
    "plain": {"type": "sgd", "weight_decay": 0.1},
    "momentum": {"type": "sgd", "momentum": 0.9, "nesterov": True},
    "dampening": {"type": "sgd", "momentum": 0.9, "dampening": 0.5},
}


def run(
    policy: OptimizerPolicy, master: torch.dtype, grad: torch.dtype, weight: torch.dtype, divisor: float
) -> tuple[dict[Any, Tensor], list[Any], list[bool]]:
    """(tensors, single numbers, by step whether the weight was rounded on the way)."""
    generator = torch.Generator().manual_seed(1)
    held = torch.randn(TOTAL, generator=generator).to(master)
    optimizer = FlatOptimizer(held, from_policy(policy), 0)
    rounded, told = torch.full((TOTAL,), 7, dtype=weight), []
    for step, unused in enumerate(UNUSED):
        incoming = torch.randn(TOTAL, generator=generator).to(grad)
        told.append(optimizer.step(incoming, divisor, [{"lr": 0.1 / (step + 1)}], unused, rounded))
        if not told[-1]:
            rounded.copy_(held)
    tensors = {(label, start): moment for label, start, _, moment in optimizer.state.moments()}
    return tensors | {"master": held, "weight": rounded}, optimizer.state.scalars(), told


@pytest.mark.parametrize("name", POLICIES)
def test_chunks_have_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "CHUNK", 64)
    policy = OptimizerPolicy(lr=0.1, **POLICIES[name])
    fp32, fp64, fp16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
    cases = [
        *product([fp32], [fp32, bf16], [bf16, fp16, fp32], [1.0, 3.7]),
        *product([fp64], [fp64, fp32], [fp32], [1.0, 3.7]),
    ]
    for case in cases:
        tensors, numbers, told = run(policy, *case)
        with monkeypatch.context() as patch:
            patch.setattr(flat, "chunk_kernel", lambda optimizer: None)
            expected, expected_numbers, nothing = run(policy, *case)
        # torch makes the momentum of a dampened SGD in the first steps of a part
        late = name == "dampening"
        assert all(told[3 if late else 0 :]) and not any(nothing), (case, told)
        assert numbers == expected_numbers, case
        assert tensors.keys() == expected.keys()
        unlike = [key for key, tensor in tensors.items() if not torch.equal(tensor, expected[key])]
        assert not unlike, (case, unlike)


def test_the_thread_of_the_tiers_has_threads_of_its_own() -> None:
    """What torch is told in one thread holds for threads that start later: not here."""
    before = torch.get_num_threads()
    tiers, found = TierResources(None, 1, threads=before + 1), []
    tiers.begin(lambda: found.append(torch.get_num_threads())).result()
    with ThreadPoolExecutor(1) as fresh:
        found.append(fresh.submit(torch.get_num_threads).result())
    tiers.close()
    assert [*found, torch.get_num_threads()] == [before + 1, before, before]


def test_updates_take_no_core_from_those_who_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(96), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    device, host = torch.device("meta"), torch.device("cpu")
    assert threads_beside(device, 8) == 11
    assert threads_beside(device, 1) == 12  # OMP_NUM_THREADS
    assert threads_beside(host, 8) == 1  # nothing is free
    assert threads_beside(host, 4) == 12
    assert threads_beside(device, 200) == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(6), raising=False)
    assert threads_beside(device, 8) == 5  # bound to cores of its own
