"""Parameters and FLOPs of every module: those of one process on every mesh, exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import World
from shardwise.models import Gpt, GptPolicy, flops_per_token

POLICY = GptPolicy(family="llama", layers=2, width=16, heads=4, kv_heads=1, context=8, vocab=30)
"""One head of keys and values, which both ranks of tp 2 compute; a vocabulary of 30."""


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class Mixture(Gpt):
    """The same with experts in its second block."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(POLICY)
        self.blocks[1].mlp = shardwise.MixtureOfExperts(16, 8, 4, shared=1)

    def tensor_table(self) -> dict[str, str]:
        return {name: words for name, words in super().tensor_table().items() if ".1.mlp." not in name}


def counted(world: World, config: dict[str, Any], model: nn.Module | None = None) -> dict[str, list[int]]:
    """Parameters, FLOPs forward and backward by module in the second of two steps of 8 sequences."""
    accumulation = config.get("batch", {}).get("accumulation", 1)
    given = {"module_profile": {"output": "/dev/null"}, **config}
    engine = shardwise.initialize(model or Gpt(POLICY), given, loss=loss, world=world)
    x = torch.arange(64).reshape(8, 8) % 30
    mine = x.chunk(engine.dp_size)[engine.dp_index].chunk(accumulation)
    for step in range(2):
        assert engine.module_costs is None
        engine.train_step([(each + step) % 30 for each in mine])
    tree = engine.module_costs
    engine.train_step(list(mine))
    assert tree is not None and engine.module_costs is tree
    engine.close()
    return {
        row.name: [row.parameters, row.costs.forward, row.costs.backward]
        for row in tree.rows
        if row.parameters or row.costs.forward
    }


MESHES: list[dict[str, Any]] = [
    {"zero": {"stage": 3}, "batch": {"accumulation": 2}},
    {"mesh": {"tp": 2}},
    {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}, "recompute": "full"},
    {"mesh": {"pp": 2}, "batch": {"accumulation": 2}},
]


def of_meshes(world: World) -> list[dict[str, list[int]]]:
    return [counted(world, config) for config in MESHES]


def test_counts_are_those_of_one_process(ranks: Any) -> None:
    whole = counted(World(0, 1), {})
    tokens = 64
    assert sum(whole[""][1:]) == tokens * flops_per_token(POLICY, causal=False)
    assert whole[""][0] == sum(p.numel() for p in Gpt(POLICY).parameters())
    assert whole["blocks.1.attention.out"] == [256, 2 * tokens * 256, 4 * tokens * 256]
    for rank in ranks(2).run(of_meshes):
        for config, found in zip(MESHES, rank, strict=True):
            assert found == whole, json.dumps(config)


def with_experts(world: World) -> list[dict[str, list[int]]]:
    meshes: list[dict[str, Any]] = [{"ep": 2}, {"tp": 2, "etp": 2}]
    return [counted(world, {"mesh": mesh, "zero": {"stage": 1}}, Mixture()) for mesh in meshes]


def test_experts_count_where_their_tokens_came_from(ranks: Any) -> None:
    """Of all 4 experts the rows of 2 for each of 64 tokens, whichever ranks they lie on."""
    whole = counted(World(0, 1), {}, Mixture())
    forward = 6 * 64 * 2 * 16 * 8
    assert whole["blocks.1.mlp.experts"] == [4 * 3 * 16 * 8, forward, 2 * forward]
    for rank in ranks(2).run(with_experts):
        assert rank == [whole, whole]


def test_a_tree_is_written_or_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile" / "modules.txt"
    for wanted in ({"output": str(path)}, {"depth": 1, "top": 1, "tree": False}):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 1)))
        config = {"module_profile": {"step": 1, **wanted}}
        engine = shardwise.initialize(net, config, loss=lambda m, x: m(x).square().mean(), world=World(0, 1))
        engine.train_step([torch.ones(4, 8)])
        engine.close()
    text = path.read_text()
    lines = text.splitlines()
    assert lines[0].startswith("step 1 on 1 ranks: 161 parameters; forward 1.15 kFLOP (576 MAC)")
    assert [line.split()[:2] for line in lines if "Linear " in line] == [["0", "Linear"], ["0", "Linear"]]
    assert lines[-1].startswith("rank 0: forward ")
    printed = capsys.readouterr().out
    assert "most FLOPs: 0 1.02 kFLOP;" in printed and "Tanh" not in printed


def test_compiled_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="module_profile: modules of compiled blocks"):
        shardwise.initialize(nn.Linear(1, 1), {"module_profile": {}, "compile": "blocks"}, world=World(0, 1))
