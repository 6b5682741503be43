"""Grouped products equal plain ones, whatever the counts, and keep the same tensors."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels import choice, grouped
from shardwise.kernels.grouped import (
    GroupSizes,
    gated_experts,
    grouped_product,
    is_one_launch,
    plain_gated_experts,
    plain_grouped_product,
    stretches,
)
from shardwise.precision.operations import DtypeByOperation

COUNTS = [(3, 4), (7, 0), (0, 7), (0, 0, 5, 2, 0), (0, 0), (1,)]


def parts(counts: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(counts), 6), (len(counts), 4, 6), (sum(counts), 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_equals_the_plain_form(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, weights, grad = parts(counts, dtype)
    rows.requires_grad_(), weights.requires_grad_()
    found, expected = grouped_product(rows, weights, counts), plain_grouped_product(rows, weights, counts)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad(found, [rows, weights], grad)
    theirs = torch.autograd.grad(expected, [rows, weights], grad)
    torch.testing.assert_close(ours, theirs)


def test_a_frozen_side_has_no_gradient() -> None:
    rows, weights, grad = parts((3, 4), torch.float64)
    weights.requires_grad_()
    grouped_product(rows, weights, (3, 4)).backward(grad)
    expected = torch.stack([grad[:3].T @ rows[:3], grad[3:].T @ rows[3:]])
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, expected)
    assert rows.grad is None


def gated(counts: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(counts), 6), (len(counts), 8, 6), (len(counts), 6, 4), (sum(counts), 6)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gated_experts_equal_the_plain_form(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    *leaves, grad = gated(counts, dtype)
    found, expected = gated_experts(*leaves, counts), plain_gated_experts(*leaves, counts)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    )
    with torch.no_grad():
        torch.testing.assert_close(gated_experts(*leaves, counts), found.detach())


@pytest.mark.parametrize("counts", [counts for counts in COUNTS if len(counts) == 2], ids=str)
def test_as_many_tensors_are_kept_whatever_the_counts(counts: tuple[int, ...]) -> None:
    """A rank without rows would end a recomputation before the others, which then wait for it."""
    rows, weights, down, _ = gated(counts, torch.float64)
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        grouped_product(rows, weights, counts)
        gated_experts(rows, weights, down, counts)
    assert kept == 2 + 4


def test_dtypes_by_operation_are_those_of_a_product() -> None:
    *leaves, _ = gated((3, 4), torch.float32)
    expected = gated_experts(*(leaf.bfloat16() for leaf in leaves), (3, 4))
    for mode in (DtypeByOperation("bf16"), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            found = gated_experts(*leaves, (3, 4))
            product = grouped_product(leaves[0], leaves[1], (3, 4))
        assert torch.equal(found, expected) and product.dtype == torch.bfloat16
        assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(found.sum(), leaves))


def test_stretches_cover_every_row_once() -> None:
    for shape in ((0, 4), (5, 1 << 16), (5, 1 << 20), (3, 0)):
        places = list(stretches(torch.empty(shape)))
        assert [row for place in places for row in range(place.start, place.stop)] == list(range(shape[0]))
    assert len(list(stretches(torch.empty(5, 1 << 16)))) == 3


@pytest.fixture
def one_launch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices are said to have torch's grouped product, which runs on a CPU too; the result names its calls."""
    calls: list[str] = []

    def noted(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        calls.append(f"{a.dim()}d {b.dim()}d")
        assert a.stride(-1) == 1 or b.dim() == 2, "torch's kernel for devices takes rows only as they lie"
        if (
            b.dim() == 2
        ):  # else torch's kernel refuses a group without rows, and one whose size 8 does not divide
            assert a.stride(0) == 1 and b.stride(1) == 1
        return mm(a, b, offs=offs)

    mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr(choice, "has_grouped_mm", lambda device: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    return calls


@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_one_launch_for_all_groups_gives_what_the_loop_gives(
    one_launch: list[str], monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], rest: int
) -> None:
    """Also if there are more rows than the groups have; these belong to none."""
    generator = torch.Generator().manual_seed(1)
    n, total = sum(counts), sum(counts) + rest
    shapes = [(total, 16), (len(counts), 16, 16), (len(counts), 16, 8), (total, 16)]
    *leaves, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    for leaf in leaves:
        leaf.requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()

    def run(sizes: object) -> list[Tensor]:
        found = []
        for function, inputs in ((gated_experts, leaves), (grouped_product, leaves[:2])):
            out = function(*inputs, sizes)  # type: ignore[operator]
            d_rows, *d_weights = torch.autograd.grad(out, inputs, grad)
            found += [out.detach()[:n], d_rows[:n], *d_weights]
        return found

    found = run(GroupSizes(None, ends))
    assert one_launch == ["2d 3d"] * 2 + ["2d 2d", "2d 3d", "2d 2d", "2d 3d"] + ["2d 3d", "2d 3d", "2d 2d"]
    assert all(torch.equal(a, b) for a, b in zip(found, run(counts), strict=True)), "numbers of the host"
    one_launch.clear()
    monkeypatch.setattr(choice, "has_grouped_mm", lambda device: False)
    for a, b in zip(found, run(counts), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-2)
    assert not one_launch


def test_a_frozen_stack_makes_no_product(one_launch: list[str]) -> None:
    rows, gate_up, down = (
        torch.ones(4, 8).bfloat16(),
        torch.ones(2, 16, 8).bfloat16(),
        torch.ones(2, 8, 8).bfloat16(),
    )
    down.requires_grad_()
    gated_experts(rows, gate_up, down, (1, 3)).sum().backward()
    assert len(one_launch) == 3 and down.grad is not None


@pytest.mark.parametrize(
    ("width", "hidden", "dtype", "start", "serves"),
    [
        (8, 8, torch.bfloat16, 0, True),
        (8, 8, torch.float32, 0, False),
        (8, 8, torch.float64, 0, False),
        (4, 8, torch.bfloat16, 0, False),
        (8, 4, torch.bfloat16, 0, False),
        (8, 8, torch.bfloat16, 4, False),
    ],
)
def test_one_launch_needs_bf16_that_begins_at_16_bytes(
    one_launch: list[str], width: int, hidden: int, dtype: torch.dtype, start: int, serves: bool
) -> None:
    """torch's kernel refuses, or fails on the device, what it does not serve."""
    stack = torch.zeros(start + 2 * hidden * width).to(dtype)[start:].view(2, hidden, width)
    rows = torch.zeros(3, width).to(dtype)
    assert is_one_launch(rows, stack) == serves
    grouped_product(rows, stack, (1, 2))
    assert bool(one_launch) == serves


def test_sizes_are_read_once_and_only_if_the_host_needs_them() -> None:
    sizes = GroupSizes(None, torch.tensor([2, 2, 5], dtype=torch.int32))
    assert len(sizes) == 3 and sizes._counts is None
    assert list(sizes) == [2, 0, 3] and sum(sizes) == 5 and sizes[1:] == (0, 3)
    assert GroupSizes((2, 0, 3)).ends(torch.device("cpu")).tolist() == [2, 2, 5]


@pytest.mark.parametrize("elements", [0, 1 << 30])
def test_the_gate_of_all_groups_at_once_or_of_each(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(grouped, "_STRETCH_ELEMENTS", elements)
    *leaves, grad = gated((3, 0, 4), torch.float64)
    found, expected = gated_experts(*leaves, (3, 0, 4)), plain_gated_experts(*leaves, (3, 0, 4))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    )
