"""Cross layers by their formula, stacked and in parallel."""

import pytest
import torch

from shardwise.models.ctr.dcn import CrossLayer
from tests.models.ctr.parts import inputs, small


@pytest.mark.parametrize("rank", [None, 2])
def test_a_layer_is_its_formula(rank: int | None) -> None:
    layer = CrossLayer(5, rank).double()
    x0, x = torch.randn(2, 3, 5, dtype=torch.float64)
    matrix = layer.up.weight if layer.down is None else layer.up.weight @ layer.down.weight
    assert torch.allclose(layer(x0, x), x0 * (x @ matrix.T + layer.up.bias) + x)


@pytest.mark.parametrize(("structure", "hidden"), [("stacked", (6,)), ("parallel", (6,)), ("parallel", ())])
def test_the_network_reads_the_cross_layers_or_their_input(structure: str, hidden: tuple[int, ...]) -> None:
    model = small("dcn", width=4, cross_layers=2, hidden=hidden, structure=structure)
    dense, rows = inputs(4)
    x0 = torch.cat([dense, rows.flatten(1)], 1)
    x = model.cross[1](x0, model.cross[0](x0, x0))
    deep = {"stacked": lambda: model.deep(x), "parallel": lambda: torch.cat([x, model.deep(x0)], 1)}
    read = deep[structure]() if hidden else x
    assert torch.allclose(model.logits(dense, rows), model.head(read).squeeze(1))
    if hidden:
        assert float(model.deep(x0).detach().min()) == 0, "the network ends in a ReLU"
