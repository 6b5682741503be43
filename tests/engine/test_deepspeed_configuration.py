"""A DeepSpeed configuration in place of ours: the same run, and what acts in it changes numbers."""

import copy
import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World, join
from tests.config.test_deepspeed import set_in

THEIRS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.99], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
}
OURS: dict[str, Any] = {
    "batch": {"micro_size": 4, "accumulation": 2},
    "max_grad_norm": 0.5,
    "zero": {"stage": 2},
    "optimizer": {"type": "adamw", "lr": 0.01, "betas": [0.8, 0.99], "weight_decay": 0.1},
    "schedule": {"type": "warmup", "warmup_steps": 4, "rise": "linear"},
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One process."""
    yield join(quiet=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.inner(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().pow(2).mean()


def trained(world: World, config: dict[str, Any], steps: int = 3) -> dict[str, Tensor]:
    """Weights after a few steps, and the norms of their gradients."""
    torch.manual_seed(0)
    model = Model()
    engine = shardwise.initialize(model, copy.deepcopy(config), world=world)
    generator, norms = torch.Generator().manual_seed(1), []
    for _ in range(steps * engine.config.batch.accumulation):
        loss = engine(torch.randn(4, 6, generator=generator))
        engine.backward(loss)
        if (result := engine.step()) is not None:
            norms.append(result.grad_norm)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return {**state, "norms": torch.tensor(norms)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_it_is_the_run_that_our_keys_say_and_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        theirs = trained(world, THEIRS)
    said = [record.getMessage() for record in caplog.records if "DeepSpeed" in record.getMessage()]
    assert (
        len(said) == 1
        and "12 keys act; 1 have no effect here: zero_optimization.contiguous_gradients" in said[0]
    )
    assert same(theirs, trained(world, OURS))


@pytest.mark.parametrize(
    ("path", "value", "beside"),
    [
        ("gradient_clipping", 0, {}),
        ("gradient_accumulation_steps", 1, {}),
        ("optimizer.type", "Lion", {}),
        ("optimizer.type", "Muon", {}),
        ("optimizer.type", "Lamb", {}),
        ("optimizer.params.lr", 0.02, {}),
        ("optimizer.params.betas", [0.9, 0.999], {}),
        ("optimizer.params.eps", 0.1, {}),
        ("optimizer.params.weight_decay", 0.0, {}),
        ("optimizer.params.adam_w_mode", False, {}),
        ("optimizer.params.amsgrad", True, {}),
        ("scheduler.type", "WarmupCosineLR", {"scheduler": {"params": {"total_num_steps": 9}}}),
        ("scheduler.params.warmup_num_steps", 9, {}),
        ("scheduler.params.warmup_max_lr", 0.5, {}),
        ("bf16.enabled", True, {}),
        ("data_types.keep_in_fp32_modules", ["norm"], {"bf16": {"enabled": True}}),
        ("data_types.grad_accum_dtype", "bf16", {"bf16": {"enabled": True}}),
        ("bf16.bf16_master_weights_and_grads", True, {"bf16": {"enabled": True}}),
        ("torch_autocast.enabled", True, {}),
        ("amp.enabled", True, {}),
        ("amp.opt_level", "O3", {"amp": {"enabled": True}}),
    ],
    ids=str,
)
def test_what_acts_changes_numbers(world: World, path: str, value: Any, beside: dict[str, Any]) -> None:
    config = {**THEIRS, **beside}
    other = set_in(config, path, value)
    if value == "Muon":
        other = set_in(other, "optimizer.params", {"lr": 0.01})
    if "warmup_max_lr" in path or path == "scheduler.type":
        config = THEIRS
    assert not same(trained(world, config), trained(world, other))


@pytest.mark.parametrize("key", ["partition_activations", "cpu_checkpointing", "number_checkpoints"])
def test_activation_checkpointing_runs_blocks_again(world: World, key: str) -> None:
    """With no call in the model; the weights stay those of the plain run."""
    counts = []
    original = Block.forward

    def counted(self: Block, x: Tensor) -> Tensor:
        counts.append(1)
        return original(self, x)

    Block.forward = counted  # type: ignore[method-assign]
    try:
        plain = trained(world, THEIRS, steps=1)
        first = len(counts)
        again = trained(world, {**THEIRS, "activation_checkpointing": {key: 1}}, steps=1)
    finally:
        Block.forward = original  # type: ignore[method-assign]
    assert (first, len(counts) - first) == (4, 8)
    assert same(plain, again)


def test_numbers_go_where_their_monitors_say(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = {
        **THEIRS,
        "steps_per_print": 2,
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "events"},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "numbers"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(tmp_path / "flops.txt")},
    }
    assert same(trained(world, THEIRS), trained(world, watched))
    with (tmp_path / "numbers" / "Train_Samples_lr.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["8", "16", "24"]
    (events,) = (tmp_path / "events").iterdir()
    written = events.read_bytes()
    assert b"Train/Samples/train_loss" in written and b"Train/Samples/lr" in written
    assert "Linear" in (tmp_path / "flops.txt").read_text()
    said = capsys.readouterr()
    assert "step 2" in said.out + said.err


def on_two_ranks(world: World) -> dict[str, Any]:
    """Norms, weights and bytes on the wire, by configuration."""
    found: dict[str, Any] = {}
    config = {key: value for key, value in THEIRS.items() if key != "scheduler"}
    for name, path, value in (
        ("stage 0", "zero_optimization.stage", 0),
        ("stage 2", "zero_optimization.stage", 2),
        ("stage 3", "zero_optimization.stage", 3),
        ("narrow", "communication_data_type", "bf16"),
    ):
        torch.manual_seed(0)
        engine = shardwise.initialize(Model(), set_in(config, path, value), world=world)
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(4):
            engine.backward(engine(torch.randn(4, 6, generator=generator)))
            engine.step()
        weights = {key: value.clone() for key, value in engine.state_dict().items()}
        found[name] = weights, engine.traffic.total().bytes, engine.config.batch.global_size
        engine.close()
    return found


def test_stages_and_the_wire_act_between_ranks(ranks: Any) -> None:
    for found in ranks(2).run(on_two_ranks):
        plain, sent, batch = found["stage 0"]
        assert batch == 16
        for name in ("stage 2", "stage 3"):
            assert all(torch.allclose(plain[key], found[name][0][key], atol=1e-5) for key in plain)
            assert found[name][1] != sent
        assert found["narrow"][1] < found["stage 2"][1]
        assert not same(found["narrow"][0], found["stage 2"][0])
