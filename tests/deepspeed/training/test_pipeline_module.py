"""A PipelineModule: its start weights by the seeds, and lists of layers that are refused."""

from typing import Any

import pytest
import torch
from shardwise.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.deepspeed.training.topology import PipeModelDataParallelTopology


def test_start_weights_follow_the_seeds() -> None:
    def first(**more: Any) -> Tensor:
        return PipelineModule([LayerSpec(nn.Linear, 2, 2), nn.ReLU()], 1, **more).get_parameter("0.weight")

    torch.manual_seed(1240)
    wanted = nn.Linear(2, 2).weight
    assert torch.equal(first(seed_layers=True, base_seed=1240), wanted)
    torch.manual_seed(1)
    one, same = first(), first()
    torch.manual_seed(2)
    assert torch.equal(one, same) and not torch.equal(one, first())


@pytest.mark.parametrize(
    ("layers", "more", "text"),
    [
        ([nn.Linear(2, 2)], {}, "give num_stages, or a topology"),
        ([nn.Linear(2, 2)], {"num_stages": 0}, "num_stages 0; expected"),
        ([nn.Linear(2, 2), 3], {"num_stages": 1}, "layer 1 is a int"),
        ([nn.Linear(2, 2)], {"topology": PipeModelDataParallelTopology(1, 2, 1)}, "autotp_size"),
        ([nn.Linear(2, 2)], {"num_stages": 1, "activation_checkpoint_func": print}, "leave it out"),
        (
            [TiedLayerSpec("k", nn.ReLU)],
            {"num_stages": 1},
            "tied_weight_attr 'weight' is no parameter of ReLU",
        ),
    ],
)
def test_lists_that_are_refused(layers: list[Any], more: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        PipelineModule(layers, **more)
