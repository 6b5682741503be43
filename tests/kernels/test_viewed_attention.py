"""Attention with documents, windows and sinks on one rank equals plain operations, with the gradients of all inputs."""

import itertools

import pytest
import torch
from torch import Tensor

from shardwise.kernels.attention import causal_attention, plain_attention
from shardwise.kernels.attention_view import AttentionView, PackedDocuments


def gradients(function: object, tensors: list[Tensor], view: AttentionView, grad: Tensor) -> list[Tensor]:
    out = function(*tensors[:3], view=view)  # type: ignore[operator]
    used = tensors if view.sink is not None else tensors[:3]
    return [out.detach(), *torch.autograd.grad(out, used, grad)]


@pytest.mark.parametrize(
    ("window", "has_sink", "starts"),
    list(itertools.product((None, 1, 5), (False, True), (None, ((0,), (0, 1, 20))))),
)
def test_equals_plain_operations(
    window: int | None, has_sink: bool, starts: tuple[tuple[int, ...], ...] | None
) -> None:
    torch.manual_seed(0)
    q, k, v, sink, grad = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 6, 37, 4), (2, 2, 37, 4), (2, 2, 37, 4), (6,), (2, 6, 37, 4))
    )
    documents = None if starts is None else PackedDocuments(starts, 37)
    view = AttentionView(window, sink if has_sink else None, documents)
    tensors = [q, k, v, sink]
    found, wanted = (
        gradients(function, tensors, view, grad) for function in (causal_attention, plain_attention)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    # The last queries alone, as generation with a cache asks for them.
    last = causal_attention(q[:, :, -3:], k, v, view=view)
    torch.testing.assert_close(last, found[0][:, :, -3:], rtol=1e-12, atol=1e-12)
