"""``init_inference``: logits are those of the training engine, from every kind of checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
import shardwise.deepspeed as deepspeed
from shardwise.base.errors import ConfigError
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.models.gpt import Gpt
from tests.ranks import RankPool

SIZES = {"layers": 2, "width": 16, "heads": 4, "vocab": 24, "context": 12}
TOKENS = torch.arange(16).view(2, 8) % 24


def gpt(seed: int) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(RunConfig.parse({"model": SIZES}, "test").model)


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def answers(world: World, folder: str, tp: int) -> tuple[Tensor, list[Tensor]]:
    """(logits of the training engine, of inference from each checkpoint)."""
    engine = shardwise.initialize(gpt(1), {"mesh": {"tp": tp}}, world=world, loss=loss_of)
    engine.train_step([(TOKENS + engine.dp_index) % 24])
    engine.save(f"{folder}/ours", asynchronous=False)
    whole = engine.state_dict()
    if engine.is_main:
        torch.save({"module": whole}, f"{folder}/weights.pt")
    engine.barrier()
    trained = engine.eval().predict([TOKENS], lambda model, tokens: model(tokens))[0]
    engine.close()
    found = []
    for checkpoint in ("ours", "weights.pt"):
        made = deepspeed.init_inference(
            gpt(2), tensor_parallel={"tp_size": tp}, dtype="fp32", checkpoint=checkpoint, base_dir=folder
        )
        found.append(made(TOKENS))
        made.destroy()
    return trained, found


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_those_of_training(ranks: Callable[[int], RankPool], tmp_path: Path, tp: int) -> None:
    for trained, found in ranks(2).run(answers, str(tmp_path), tp):
        for logits in found:
            assert logits.shape == (2, 8, 24)
            torch.testing.assert_close(logits, trained, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtpye": "fp16"}, "unknown key 'dtpye'; did you mean 'dtype'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"mp_size": 2, "tensor_parallel": {"tp_size": 4}}, "are one thing"),
        ({"enable_cuda_graph": True}, "enable_cuda_graph is not supported"),
        ({"config": {"dtype": "fp32"}, "dtype": "fp16"}, "in config and beside it"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        deepspeed.init_inference(gpt(0), **options)
