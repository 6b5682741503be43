"""``save_checkpoint`` and ``load_checkpoint`` in DeepSpeed's names, on ours and on a step of theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shardwise.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, MultiStepLR, OneCycleLR, SequentialLR

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import CheckpointError, UsageError
from shardwise.comm.world import World
from tests.deepspeed.files import test_their_checkpoint as theirs
from tests.deepspeed.files.test_their_checkpoint import pickled, plain  # noqa: F401  fixtures
from tests.ranks import RankPool


class Net(nn.Module):
    """With a tied weight, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.embed(tokens)).tanh())


def made(stage: int, seed: int, dtype: str = "bf16") -> Any:
    torch.manual_seed(seed)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    draws = torch.Generator().manual_seed(engine.global_steps)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(11, (2, 3), generator=draws)
        loss = nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def saves_and_goes_on(world: World, folder: str) -> tuple[list[float], list[float], dict[str, Any], Any]:
    engine = made(3, seed=world.rank)
    train(engine, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 2, "best": {"at": [1, 2]}, "mask": torch.ones(2)})
    went_on = train(engine, 2)
    whole = engine.module_state_dict()
    engine.destroy()
    again = made(1, seed=9)
    path, client = again.load_checkpoint(folder)
    assert path == f"{folder}/global_step3" and again.lr_scheduler.last_batch_iteration >= 2
    counters = (again.global_steps, again.global_samples, again.micro_steps, again.skipped_steps)
    assert counters == (3, 12, 3, 0)
    rates = again.get_lr()
    weights_alone = made(2, seed=9)
    _, told = weights_alone.load_checkpoint(folder, load_module_only=True)
    assert told["epoch"] == 2 and weights_alone.global_steps == 0
    weights_alone.destroy()
    repeated = train(again, 2)
    assert all(torch.equal(value, whole[name]) for name, value in again.module_state_dict().items())
    again.destroy()
    return went_on, repeated, client, rates


def test_a_run_goes_on_at_another_stage(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    for went_on, repeated, client, rates in ranks(2).run(saves_and_goes_on, str(tmp_path)):
        assert repeated == went_on and rates[0] < 0.05
        assert (
            client["epoch"] == 2
            and client["best"] == {"at": [1, 2]}
            and torch.equal(client["mask"], torch.ones(2))
        )
    file = tmp_path / "global_step3" / "mp_rank_00_model_states.pt"
    for_torch = torch.load(file, weights_only=True)
    assert for_torch["epoch"] == 2 and for_torch["global_steps"] == 3
    plain_model = Net()
    plain_model.load_state_dict(for_torch["module"])
    masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert masters.keys() == plain_model.state_dict().keys()
    assert masters["embed.weight"].dtype == torch.float32
    assert torch.equal(masters["embed.weight"].bfloat16(), for_torch["module"]["embed.weight"])
    assert not torch.equal(masters["embed.weight"], for_torch["module"]["embed.weight"].float())


def warming(step: int) -> Any:
    """As scripts write it: with NumPy, whose numbers land in the scheduler's state."""
    return np.minimum(np.float64(step + 1) / 4, 1.0)


OWN = {
    "function": lambda optimizer: LambdaLR(optimizer, warming),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 4]),
    "cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer), LambdaLR(optimizer, warming)], [2]
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_scheduler_of_the_scripts_own_goes_on(tmp_path: Path, name: str) -> None:
    """Given to ``initialize``, it is saved and restored with the rest, as data."""

    def engine_of(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=OWN[name](optimizer),
            config={"train_batch_size": 2},
        )[0]

    def trains(engine: Any) -> list[Any]:
        return [(*train(engine, 1), *engine.get_lr(), *engine.get_mom()) for _ in range(3)]

    engine = engine_of(1)
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    went_on = trains(engine)
    engine.destroy()
    again = engine_of(2)
    again.load_checkpoint(tmp_path)
    assert trains(again) == went_on
    again.destroy()


def saves_by_two_tags(world: World, folder: str) -> str:
    engine = made(0, seed=1)
    try:
        engine.save_checkpoint(folder, tag=f"tag-{world.rank}")
    except AssertionError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_ranks_with_unlike_tags_are_refused_before_a_byte_is_written(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for rank, said in enumerate(ranks(2).run(saves_by_two_tags, str(tmp_path))):
        assert f"'tag-{rank}'" in said and "one tag" in said
    assert not list(tmp_path.iterdir())


def test_what_would_need_code_to_be_read_is_refused_by_key(tmp_path: Path) -> None:
    engine = made(0, seed=1)
    with pytest.raises(UsageError, match=r"client_state\['run'\]\['args'\] is a pathlib.*Path"):
        engine.save_checkpoint(tmp_path, client_state={"run": {"args": tmp_path}})
    with pytest.raises(UsageError, match=r"client_state\['module'\] is the engine's own key"):
        engine.save_checkpoint(tmp_path, client_state={"module": 1})
    for nothing in (None, ""):
        with pytest.raises(ValueError, match="save_dir is"):
            engine.save_checkpoint(nothing)
    with pytest.raises(UsageError, match="not a plain name"):
        engine.save_checkpoint(tmp_path, tag="../up")
    engine.lr_scheduler.state_dict = lambda: {"since": {"when": tmp_path}}
    with pytest.raises(UsageError, match=r"lr_scheduler.state_dict\(\)\['since'\]\['when'\] is a pathlib"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    assert engine.load_checkpoint(tmp_path) == (None, {})
    with pytest.raises(CheckpointError, match="holds no step"):
        engine.load_checkpoint(tmp_path, tag="none")
    engine.destroy()


def test_a_step_of_theirs_is_loaded(tmp_path: Path, plain: Any, pickled: None) -> None:  # noqa: F811
    model, optimizer = plain
    theirs.save(tmp_path / "global_step3", 0, model, optimizer, epoch=5)
    torch.manual_seed(7)
    fresh = theirs.Net()
    engine, *_ = deepspeed.initialize(
        model=fresh, optimizer=theirs.optimizer_of(fresh), config={"train_batch_size": 2}
    )
    path, client = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step3") and client == {"epoch": 5}
    assert engine.global_steps == 3 and engine.global_samples == 12
    for name, value in model.state_dict().items():
        assert torch.equal(engine.module_state_dict()[name], value), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "latest"]
    engine.destroy()
