"""An opaque module in a compiled graph: no break, the gradients of uncompiled code, no graph that outlives its loss."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.kernels import opaque
from shardwise.kernels.opaque import OpaqueModule

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")


class Ragged(nn.Module):
    """A layer whose sizes depend on values, which the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self._opaque = OpaqueModule(self, Ragged.computed)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._opaque(x, mask) if torch.compiler.is_compiling() else self.computed(x, mask)

    def computed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        chosen = x[:, 0] > 0 if mask is None else mask
        rows = x[: int(chosen.sum())] @ self.weight
        return x * 2 + torch.cat([rows, rows.new_zeros(len(x) - len(rows), 3)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.ragged = nn.Linear(3, 3, dtype=torch.float64), Ragged()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.ragged(self.first(x).tanh(), mask).square().sum()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(net: nn.Module, run: nn.Module, *inputs: Tensor) -> list[Tensor]:
    net.zero_grad()
    run(*inputs).backward()
    return [torch.zeros(()) if each.grad is None else each.grad.clone() for each in net.parameters()]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "input without gradients"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_those_of_uncompiled_code(backend: str, masked: bool, frozen: bool) -> None:
    net = Net()
    net.first.requires_grad_(not frozen)
    x = torch.randn(5, 3, dtype=torch.float64)
    inputs = (x, torch.tensor([True, False, True, False, False])) if masked else (x,)
    wanted = gradients(net, net, *inputs)
    found = gradients(net, torch.compile(net, backend=backend, fullgraph=True), *inputs)
    assert any(each.any() for each in wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_graph_ends_with_its_loss() -> None:
    compiled, x = torch.compile(Net(), backend="aot_eager", fullgraph=True), torch.randn(5, 3).double()
    loss = compiled(x)
    assert len(opaque._PASSES) == 1
    del loss
    gc.collect()
    assert not opaque._PASSES, "a loss without a backward pass"
    with torch.no_grad():
        compiled(x)
    assert not opaque._PASSES, "a pass without gradients"


def test_a_second_backward_pass_is_refused() -> None:
    loss = torch.compile(Net(), backend="aot_eager", fullgraph=True)(torch.randn(5, 3).double())
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="runs its backward pass a second time"):
        loss.backward()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_runs_its_own_weights(how: Callable[[Ragged], Ragged]) -> None:
    layer, x = Ragged(), torch.randn(5, 3).double()
    other = how(layer)
    with torch.no_grad():
        other.weight.zero_()
        found = torch.compile(other, backend="eager", fullgraph=True)(x)
        assert torch.equal(found, other(x)) and not torch.equal(found, layer(x))
