"""The pretended device itself: what it says of memory is so, what CUDA refuses it refuses, and what it counts is there.

Each function runs in the process that has the device.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.accelerator.pretend import Bench, Misplaced, is_on_device, on_host, register
from tests.ranks import RankPool


def views_and_versions(_world: Any) -> None:
    device = register()
    with Bench():
        full = torch.zeros(6, device=device)
        parameter = nn.Parameter(torch.ones(2, 2))
        assert not is_on_device(parameter)
        parameter.data = full[2:].view(2, 2)
        assert is_on_device(parameter)
        assert parameter.requires_grad
        assert parameter.data_ptr() == full.data_ptr() + 8
        before = full._version
        with torch.no_grad():
            full[2:].fill_(3.0)
        assert full._version == before + 1
        assert on_host(parameter.detach()).tolist() == [[3.0, 3.0], [3.0, 3.0]]
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        assert is_on_device(parameter.grad)
        kept = (parameter * parameter).sum()
        with torch.no_grad():
            parameter.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


def mixed_devices(_world: Any) -> None:
    device = register()
    with Bench() as bench:
        there = torch.ones(3, device=device)
        assert is_on_device(there * torch.tensor(2.0)), "a number of the host is no tensor on the wrong side"
        with pytest.raises(Misplaced, match=r"\(3,\) on cpu"):
            there + torch.ones(3)
        with pytest.raises(Misplaced, match="cpu"):
            torch.cat([there, torch.ones(3)])
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert len(bench.misplaced) == 2


def attention(_world: Any) -> None:
    """One operation each way where it is fused, with the numbers of the host; grouped heads too."""
    device = register()
    held = [torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2)]
    pull = torch.randn(2, 4, 8, 16)
    for is_causal in (True, False):
        expected = F.scaled_dot_product_attention(*held, is_causal=is_causal, enable_gqa=True)
        wanted = torch.autograd.grad(expected, held, pull)
        for fuses in (True, False):
            with Bench(fuses_attention=fuses) as bench:
                there = [each.detach().to(device).requires_grad_() for each in held]
                pull_there = pull.to(device)
                bench.clear()
                out = F.scaled_dot_product_attention(*there, is_causal=is_causal, enable_gqa=True)
                grads = torch.autograd.grad(out, there, pull_there)
                assert (bench.operations.total() == 2) == fuses
                for found, each in zip((out, *grads), (expected, *wanted), strict=True):
                    assert torch.allclose(on_host(found.detach()), each, atol=1e-5)


def _pinned(host: Tensor) -> Tensor:
    return host.pin_memory()


SYNCS: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "item": (lambda x: x.sum().item(), "item"),
    "bool": (lambda x: bool(x.any()), "item"),
    "tolist": (lambda x: x.tolist(), "copy to the host"),
    "equal": (lambda x: torch.equal(x, x + 1), "equal"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 0), "nonzero"),
    "mask": (lambda x: x[x > 0], "boolean index"),
    "mask of a number": (lambda x: x.clone().masked_fill_(x > 0, 1.0), None),
    "unique": (lambda x: x.unique(), "unique2"),
    "repeat": (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
    "repeat to a size": (lambda x: x.repeat_interleave(x.long(), output_size=3), None),
    "from pageable memory": (lambda x: torch.ones(3).to(x.device, non_blocking=True), "copy to the device"),
    "from pinned memory": (lambda x: _pinned(torch.ones(3)).to(x.device, non_blocking=True), None),
    "pinned and blocking": (lambda x: _pinned(torch.ones(3)).to(x.device), "copy to the device"),
    "into pinned memory": (lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), None),
    "into pageable memory": (lambda x: torch.empty(3).copy_(x, non_blocking=True), "copy to the host"),
    "a new number": (lambda x: torch.tensor(1.0, device=x.device), "copy to the device"),
    "filled": (lambda x: torch.full((3,), 1.0, device=x.device), None),
    "index by places": (lambda x: x[torch.arange(2, device=x.device)], None),
    "synchronize": (lambda x: torch.accelerator.synchronize(), "synchronize"),
    "sums": (lambda x: (x + x).sum() * 2, None),
}


def counted(_world: Any, name: str) -> list[tuple[str, str, int]]:
    device = register()
    with Bench() as bench:
        given = torch.ones(3, device=device)
        bench.clear()
        SYNCS[name][0](given)
        return [(what, where, count) for (what, where), count in bench.syncs.items()]


def operations(_world: Any) -> dict[str, int]:
    device = register()
    with Bench() as bench:
        given = torch.empty(4, device=device)  # no kernel
        given.view(2, 2).t()[0].add_(1)
        torch.zeros(3, device=device)
        return dict(bench.operations)


def other_threads(_world: Any) -> list[int]:
    device = register()
    found: list[Any] = []
    with Bench() as bench:
        given = torch.ones(3, device=device)
        thread = threading.Thread(target=lambda: found.append((given + 1).sum().item()))
        thread.start()
        thread.join()
        return [int(found[0]), bench.syncs["item", "autograd"]]


def test_memory_is_shared_as_on_a_device(device_process: RankPool) -> None:
    device_process.run(views_and_versions)


def test_tensors_on_both_sides_are_refused(device_process: RankPool) -> None:
    device_process.run(mixed_devices)


def test_attention_is_one_operation_where_it_is_fused(device_process: RankPool) -> None:
    device_process.run(attention)


def test_syncs_are_counted(device_process: RankPool) -> None:
    for name, (_, what) in SYNCS.items():
        wanted = [] if what is None else [(what, "the test", 1)]
        assert device_process.run(counted, name) == [wanted], name


def test_kernels_are_counted_and_views_are_not(device_process: RankPool) -> None:
    assert device_process.run(operations) == [{"add_": 1, "zeros": 1}]


def test_a_thread_has_the_device_too(device_process: RankPool) -> None:
    assert device_process.run(other_threads) == [[6, 1]]
