"""Pairwise dots: both forms equal torch's own differentiation, for any number of vectors, width and thread."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from shardwise.kernels.tables import pairwise_dots as module
from shardwise.kernels.tables.pairwise_dots import dots_beside, pairwise_dots, pairwise_dots_plain

SHAPES = [(0, 3, 2), (5, 1, 3), (4, 2, 3), (3, 7, 4), (2, 17, 16), (3, 27, 16), (2, 36, 8), (2, 50, 19)]
"""Numbers of vectors on both sides of whole tiles of 4 rows and 16 columns."""


@pytest.fixture(params=["loops", "products"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "products":
        monkeypatch.setattr(module, "_is_one_loop", lambda *tensors: False)
    return str(request.param)


def gradients(of: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(of.shape, dtype=of.dtype, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((of * weights).sum(), inputs))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dots_equal_the_plain_form(shape: tuple[int, int, int], form: str) -> None:
    torch.manual_seed(0)
    z = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dots, plain = pairwise_dots(z), pairwise_dots_plain(z)
    assert dots.shape == (shape[0], shape[1] * (shape[1] - 1) // 2)
    assert torch.allclose(dots, plain, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(gradients(dots, [z]), gradients(plain, [z]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dots_beside_the_first_vector_equal_concatenations(shape: tuple[int, int, int], form: str) -> None:
    torch.manual_seed(0)
    first = torch.randn(shape[0], shape[2], dtype=torch.float64, requires_grad=True)
    rest = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    beside = dots_beside(first, rest)
    plain = torch.cat([first, pairwise_dots_plain(torch.cat([first[:, None], rest], 1))], 1)
    assert torch.allclose(beside, plain, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(gradients(beside, [first, rest]), gradients(plain, [first, rest]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-13)


def test_other_numbers_of_samples_are_refused(form: str) -> None:
    for first in (torch.zeros(1, 3), torch.zeros(4, 2)):
        with pytest.raises(ValueError, match="expected"):
            dots_beside(first, torch.zeros(4, 2, 3))


def test_pairs_stand_row_by_row(form: str) -> None:
    z = torch.tensor([[[1.0], [10.0], [100.0]]])
    assert pairwise_dots(z).tolist() == [[10.0, 100.0, 1000.0]]


def test_samples_are_dealt_to_threads_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(37, 9, 16, requires_grad=True)
    alone = pairwise_dots(z)
    before = gradients(alone, [z])
    monkeypatch.setattr(module, "_LEAST_SAMPLES", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    dealt = pairwise_dots(z)
    assert torch.equal(dealt, alone)
    assert all(map(torch.equal, gradients(dealt, [z]), before))


def test_a_view_with_other_strides_gives_the_same(form: str) -> None:
    z = torch.randn(6, 5, 8, dtype=torch.float64)
    turned = z.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert torch.allclose(pairwise_dots(turned), pairwise_dots(z), rtol=1e-14)


def test_a_gradient_of_a_gradient_is_refused(form: str) -> None:
    z = torch.randn(2, 3, 4, requires_grad=True)
    (once,) = torch.autograd.grad(pairwise_dots(z).square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")
def test_a_compiled_graph_contains_the_loop_as_one_operation() -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    first, rest = torch.randn(4, 8, requires_grad=True), torch.randn(4, 5, 8, requires_grad=True)
    compiled = torch.compile(
        dots_beside, fullgraph=True, backend=aot_autograd(fw_compiler=look, bw_compiler=look)
    )
    ours, plain = compiled(first, rest), dots_beside(first, rest)
    assert torch.equal(ours, plain)
    assert all(map(torch.equal, gradients(ours, [first, rest]), gradients(plain, [first, rest])))
    assert any("pairwise_dots.default" in each for each in seen)
    assert any("pairwise_dots_gradients.default" in each for each in seen)


def test_an_exported_graph_contains_torch_operations_alone() -> None:
    class Beside(torch.nn.Module):
        def forward(self, first: Tensor, rest: Tensor) -> Tensor:
            return dots_beside(first, rest)

    given = (torch.randn(4, 8), torch.randn(4, 5, 8))
    graph = torch.export.export(Beside(), given)
    assert "shardwise" not in str(graph.graph)
    assert torch.allclose(graph.module()(*given), dots_beside(*given), rtol=1e-5, atol=1e-5)
