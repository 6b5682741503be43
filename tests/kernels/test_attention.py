"""Blocked causal attention against the formula, in values and in gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels import attention
from shardwise.kernels.attention import causal_attention, plain_attention


def inputs(
    t: int, heads: int = 4, kv_heads: int = 2, keys: int | None = None, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(t)
    shapes = [(2, heads, t, 8), (2, kv_heads, keys or t, 8), (2, kv_heads, keys or t, 8)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(function, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    out = function(q, k, v)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def worst(given: list[Tensor], expected: list[Tensor]) -> float:
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("t", [1, 2, 63, 64, 65, 200, 300])
def test_equals_the_formula(t: int, kv_heads: int) -> None:
    q, k, v = inputs(t, kv_heads=kv_heads)
    assert worst(gradients(causal_attention, q, k, v), gradients(plain_attention, q, k, v)) < 1e-13


def test_weights_computed_again_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(130)
    kept = gradients(causal_attention, q, k, v)
    monkeypatch.setattr(attention, "_KEEP_UP_TO", 1)
    again = gradients(causal_attention, q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_only_short_sequences_keep_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def saved_elements() -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
            causal_attention(*inputs(130))
        return sum(sizes)

    assert saved_elements() > 2 * 4 * 130 * 130 // 2
    monkeypatch.setattr(attention, "_KEEP_UP_TO", 129)
    assert saved_elements() == 2 * (4 + 2 + 2) * 130 * 8


@pytest.mark.parametrize("t", [17, 300])
def test_bf16_is_as_close_as_the_fused_kernel(t: int) -> None:
    q, k, v = inputs(t, dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = gradients(plain_attention, *wide)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    assert worst(gradients(causal_attention, q, k, v), truth) < 2 * worst(gradients(fused, q, k, v), truth)


def test_many_blocks_add_up_without_loss_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early keys get a gradient from every block: summed in bf16, 64 blocks would lose what the later ones add."""
    q, k, v = inputs(512, dtype=torch.bfloat16)
    truth = gradients(plain_attention, *[x.detach().double().requires_grad_() for x in (q, k, v)])
    few = worst(gradients(causal_attention, q, k, v)[2:], truth[2:])
    monkeypatch.setattr(attention, "_blocks", lambda t: [(i, i + 8) for i in range(0, t, 8)])
    assert worst(gradients(causal_attention, q, k, v)[2:], truth[2:]) < 1.3 * few


@pytest.mark.parametrize(("t", "keys"), [(1, 9), (3, 9), (9, 9)])
def test_fewer_queries_than_keys_are_the_last_places(t: int, keys: int) -> None:
    q, k, v = inputs(9)
    whole = causal_attention(q, k, v)
    assert torch.allclose(causal_attention(q[:, :, -t:], k, v), whole[:, :, -t:], atol=1e-14)
    assert torch.allclose(plain_attention(q[:, :, -t:], k, v), whole[:, :, -t:], atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_left_to_torch_equals_the_formula(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(attention, "_BLOCKED_UP_TO", {})
    q, k, v = inputs(70, dtype=dtype)
    wide = [x.detach().double() for x in (q, k, v)]
    assert worst([causal_attention(q, k, v).detach()], [plain_attention(*wide)]) < 2e-3


def test_the_result_needs_no_copy_to_join_the_heads() -> None:
    assert causal_attention(*inputs(65)).transpose(1, 2).is_contiguous()


def test_strided_inputs() -> None:
    q, k, v = inputs(65)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    assert worst(gradients(causal_attention, *strided), gradients(plain_attention, q, k, v)) < 1e-13


class Elsewhere:
    """The inputs of ``_repeats_keys`` as a device would have them."""

    def __init__(self, t: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda"), dtype, (1, 8, t, size)


def test_keys_are_repeated_where_torch_would_keep_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    q: Any = Elsewhere(4096, 64)
    takes = [False]
    monkeypatch.setattr(attention, "_takes_groups", lambda *_: takes[0])
    assert attention._repeats_keys(q, q, q)
    assert not attention._repeats_keys(Elsewhere(4096, 64, torch.bfloat16), q, q), (
        "flash takes groups in 16 bits"
    )
    assert not attention._repeats_keys(Elsewhere(128, 64), q, q), "the copies are as large as the scores"
    assert not attention._repeats_keys(torch.randn(1, 8, 4096, 64), q, q), (
        "the CPU's flash kernel takes groups"
    )
    takes[0] = True
    assert not attention._repeats_keys(q, q, q)


@pytest.mark.parametrize("keys", [None, 1100])
def test_repeated_keys_give_the_gradients_of_the_shared_ones(
    keys: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(1090, keys=keys)
    with_groups = gradients(causal_attention, q, k, v)
    monkeypatch.setattr(attention, "_repeats_keys", lambda *_: True)
    assert worst(gradients(causal_attention, q, k, v), with_groups) < 1e-13


def test_the_cpu_takes_groups_without_a_copy_and_without_scores() -> None:
    """The CPU's flash kernel saves the grouped keys; repeated keys would be four times as large."""
    sizes: list[int] = []
    q, k, v = inputs(1090, heads=4, kv_heads=1, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        causal_attention(q, k, v)
    assert max(sizes) == q.numel() and sum(sizes) <= 2 * (q.numel() + k.numel() + v.numel())
