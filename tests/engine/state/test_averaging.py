"""The moving average of the weights equals torch's AveragedModel at every stage, mesh and tier, and is saved and loaded
on any layout."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.world import World, join
from shardwise.models.gpt import Gpt, GptPolicy

SMALL = GptPolicy(layers=2, width=16, heads=2, context=8, vocab=20, hidden=24)
DECAY = 0.8
OPTIMIZER = {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1}


def model() -> nn.Module:
    made = Gpt(SMALL).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return made


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the two microbatches of a step over all ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 20, (4, 9), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(2)]


@cache
def truth(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Return what plain torch comes to: (weights, averages, loss of the averaged model)."""
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        optimizer.zero_grad()
        for x, y in batches(step):
            (plain(x, y) / 2).backward()
        optimizer.step()
        average.update_parameters(plain)
    with torch.no_grad():
        loss = sum(float(average.module(x, y)) for x, y in batches(99)) / 2
    return plain.state_dict(), average.module.state_dict(), loss


def start(world: World, config: dict[str, Any], **ema: Any) -> Any:
    dp = world.size // (config.get("mesh", {}).get("tp", 1) * config.get("mesh", {}).get("pp", 1))
    batch = {"micro_size": 2, "accumulation": 2 // dp}
    given = {"precision": "fp64", "optimizer": OPTIMIZER, "batch": batch, "ema": {"decay": DECAY, **ema}}
    return shardwise.initialize(model(), {**given, **config}, world=world)


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        all_batches = batches(engine.step_count)
        engine.train_step(all_batches if engine.dp_size == 1 else [all_batches[engine.dp_index]])


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest relative difference of any tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - t).norm() / t.norm()) for n, t in wanted.items())


def averages(
    world: World, config: dict[str, Any], folder: str = ""
) -> tuple[float, float, float, bool, bool]:
    """Train, look at the average, go on, and save."""
    engine = start(world, config)
    train(engine, 2)
    before = engine.state_dict()
    with engine.ema():
        pass
    back = all(torch.equal(before[name], each) for name, each in engine.state_dict().items())
    train(engine, 2)
    weights, average, loss = truth(4)
    off_weights = difference(engine.state_dict(), weights)
    with engine.ema():
        off_average = difference(engine.state_dict(), average)
        with engine.ema(), pytest.raises(UsageError, match=r"train_step: inside engine.ema\(\)"):
            train(engine, 1)
        with pytest.raises(UsageError, match="save: inside"):
            engine.save("nowhere")
    held = batches(99)
    pairs = [(each, 1) for each in (held if engine.dp_size == 1 else [held[engine.dp_index]])]
    off_loss = abs(engine.evaluate(pairs) - loss)
    bytes_are_planned = engine.held_bytes().get("moments", 0) == engine.plan.bytes_per_rank().get(
        "moments", 0
    )
    if folder:
        engine.save(folder, asynchronous=False)
    engine.close()
    return off_weights, off_average, off_loss, back, bytes_are_planned


LAYOUTS: list[dict[str, Any]] = [
    *({"zero": {"stage": stage}} for stage in (0, 1, 2, 3)),
    {"mesh": {"tp": 2}},
    {"mesh": {"pp": 2}},
    {"zero": {"stage": 3}, "offload": {"optimizer": "disk", "parameters": "disk"}},
    {"zero": {"stage": 1}, "offload": {"optimizer": "host"}},
]


def with_folder(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    if config.get("offload", {}).get("optimizer") != "disk":
        return config
    return config | {"offload": config["offload"] | {"disk_path": str(folder)}}


@pytest.mark.parametrize("config", LAYOUTS, ids=str)
def test_the_average_is_that_of_averaged_model(ranks: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    for found in ranks(2).run(averages, with_folder(config, tmp_path)):
        *off, back, bytes_are_planned = found
        assert max(off) < 1e-10, off
        assert back and bytes_are_planned


def goes_on(world: World, config: dict[str, Any], folder: str) -> float:
    engine = start(world, config)
    engine.load(folder)
    train(engine, 2)
    with engine.ema():
        off = difference(engine.state_dict(), truth(6)[1])
    engine.close()
    return off


def test_it_is_saved_and_goes_on_in_any_layout(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "steps")
    solo = join(quiet=True)
    averages(solo, {}, folder)
    for config in LAYOUTS[3], LAYOUTS[5], LAYOUTS[6]:
        assert max(ranks(2).run(goes_on, with_folder(config, tmp_path), folder)) < 1e-10
    ranks(2).run(averages, LAYOUTS[4], folder + "_tp")
    assert goes_on(solo, {}, folder + "_tp") < 1e-10


@pytest.mark.parametrize("config", [{}, {"offload": {"optimizer": "host"}}], ids=str)
def test_a_step_without_an_average_begins_one_and_one_with_may_drop_it(
    tmp_path: Path, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    solo, folder = join(quiet=True), tmp_path / "steps"
    without = start(solo, {**config, "ema": None})
    train(without, 2)
    without.save(folder, asynchronous=False)
    engine = start(solo, config)
    engine.load(folder)
    assert "holds no average of the weights (ema): it starts with the weights" in caplog.text
    with engine.ema():
        assert difference(engine.state_dict(), without.state_dict()) == 0
    train(engine, 1)
    engine.save(folder, asynchronous=False)
    without.load(folder)
    assert "holds an average of the weights (ema): it is dropped" in caplog.text
    assert difference(without.state_dict(), engine.state_dict()) == 0


def test_masters_and_coded_moments_have_an_exact_average(tmp_path: Path) -> None:
    """bf16 weights: the average is of the fp32 masters; moments in int8 leave it in fp32."""
    solo = join(quiet=True)
    for state in ("fp32", "int8"):
        config = {"precision": "bf16", "offload": {"state": state}}
        engine = start(solo, config)
        averages: dict[str, Tensor] = {}
        for step in range(3):
            train(engine, 1)
            for name in engine.state_dict():
                master = engine.full_tensor(name).float()
                averages[name] = master if step == 0 else torch.lerp(averages[name], master, 1 - DECAY)
        for name, wanted in averages.items():
            assert torch.equal(engine.full_tensor(name, "ema"), wanted), (state, name)
        engine.save(tmp_path / state, asynchronous=False)
        again = start(solo, config)
        again.load(tmp_path / state)
        assert all(torch.equal(again.full_tensor(n, "ema"), each) for n, each in averages.items())


def test_what_cannot_be_is_refused() -> None:
    solo = join(quiet=True)
    engine = start(solo, {"ema": None})
    with pytest.raises(UsageError, match=r"set ema: \{decay: 0.999\}"), engine.ema():
        pass
    engine = start(solo, {})
    engine.backward(engine(batches(0)[0]))
    with pytest.raises(UsageError, match="ema: in the middle of a step"), engine.ema():
        pass
    with pytest.raises(ConfigError, match="ema.decay"):
        start(solo, {}, decay=1.5)
