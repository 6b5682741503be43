"""Graphs of a model that were made before ``initialize`` and are still alive."""

from typing import Any

from torch import nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests.engine.test_more_habits import PP, TP, Net, piece, seeded


def trained(world: World, config: dict[str, Any], keeps: bool) -> tuple[list[float], str]:
    """Return the losses of two steps, or what ``initialize`` says, where a loss of before is alive."""
    model: nn.Module = seeded(Net)
    loss = model(*piece(9, 0))
    if not keeps:
        loss = loss.detach()
    config = {"optimizer": {"type": "sgd", "lr": 0.1}, "batch": {"accumulation": 2}, **config}
    try:
        engine = shardwise.initialize(model, config, loss=lambda model, batch: model(*batch), world=world)
    except UsageError as error:
        return [], str(error)
    losses = [engine.train_step([piece(step, i) for i in range(2)]).loss for step in range(2)]
    engine.close()
    return losses, ""


def test_a_living_graph_of_parameters_that_are_cut_is_refused(ranks: Any) -> None:
    """The first backward pass ended in "invalid gradient ... expected shape"."""
    for losses, said in ranks(2).run(trained, TP, True):
        assert not losses
        assert "a graph of the model that was made before initialize() still holds blocks.0.up.weight" in said


def test_other_graphs_change_no_number(ranks: Any) -> None:
    truth = ranks(2).run(trained, TP, False)
    assert len(truth[0][0]) == 2
    assert ranks(2).run(trained, PP, True) == ranks(2).run(trained, PP, False)
