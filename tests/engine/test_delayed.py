"""``offload.step: delayed``: each update counts one step late, and is else that of any run."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.world import World
from shardwise.optim.classes import from_policy
from shardwise.optim.clip import clip_factor, square_sum
from shardwise.optim.flat import FlatOptimizer
from shardwise.precision.loss_scale import LossScale
from tests.engine import tables_net
from tests.engine.test_offload import Case, batches, gpt, state_of, train


def small() -> nn.Module:
    """No padding between its parameters: the loop here has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16))


def inputs(step: int) -> list[Tensor]:
    return list(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step)))


STEPS = 8
CONFIG: dict[str, Any] = {
    "zero": {"units": []},
    "batch": {"accumulation": 2},
    "optimizer": {"type": "adamw", "lr": 0.1},
    "schedule": {"type": "linear", "warmup_steps": 2, "total_steps": STEPS},
    "max_grad_norm": 0.1,
}
HALF: dict[str, Any] = {"compute": "fp16", "loss_scale": {"init_scale": 2.0**20, "hysteresis": 1}}


def one_late(engine: Any) -> tuple[list[str], Tensor, int]:
    """A plain loop that applies the update of a step after the backward pass of the next one: (losses and norms, final
    masters, skipped steps). The configuration, and rates by step, are the engine's."""
    model, config = small(), engine.config
    dtype = config.precision.compute_dtype or torch.float32
    model.to(dtype)
    scale = LossScale(config.precision.loss_scale) if dtype == torch.float16 else None
    master = torch.cat([p.detach().flatten() for p in small().parameters()])
    optimizer = FlatOptimizer(master, from_policy(config.optimizer), 0)
    weights = master.to(dtype, copy=True)
    for parameter, view in zip(
        model.parameters(), weights.split([p.numel() for p in model.parameters()]), strict=True
    ):
        parameter.data = view.view_as(parameter)
    pending: tuple[Any, ...] | None = None
    applied, skipped, found = 0, 0, []

    def apply() -> None:
        if pending is None:
            return
        optimizer.step(*pending)
        weights.copy_(master)

    for step in range(STEPS):
        total, losses, factor = torch.zeros_like(master), [], scale.scale if scale else 1.0
        for batch in inputs(step):
            loss = model(batch.to(dtype)).float().square().mean()
            for parameter, grad in zip(
                model.parameters(),
                torch.autograd.grad(loss, [*model.parameters()], torch.tensor(factor / 2)),
                strict=True,
            ):
                parameter.grad = grad
            total += torch.cat([p.grad.flatten().float() for p in model.parameters()])
            losses.append(float(loss.detach()))
        norm = math.sqrt(float(square_sum(total))) / factor
        apply()
        pending = None
        if math.isfinite(norm):
            rates = engine._parts.optimizer_groups.rates(applied)
            pending = (total, factor / clip_factor(norm, config.max_grad_norm), rates)
            applied += 1
        skipped += pending is None
        if scale:
            scale.update(math.isfinite(norm))
        found.append((sum(losses) / 2).hex() + (norm.hex() if math.isfinite(norm) else "skipped"))
    apply()
    return found, master, skipped


@pytest.mark.parametrize("precision", ["fp32", HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_loop_that_applies_each_update_a_step_late(tmp_path: Path, tier: str, precision: Any) -> None:
    offload = {"optimizer": tier, "step": "delayed", "disk_path": str(tmp_path)}
    config = {**CONFIG, "precision": precision, "offload": offload}
    engine = shardwise.initialize(small(), config, loss=lambda model, batch: model(batch).square().mean())
    state = engine._parts.trained[0].bucket.state
    arrive = state.arrive
    state.arrive = lambda: (time.sleep(0.01), arrive())  # an update is still under way when gradients come
    results = [engine.train_step(inputs(step)) for step in range(STEPS)]
    mine = torch.cat([engine.full_tensor(name).flatten() for name, _ in engine.module.named_parameters()])
    found, master, skipped = one_late(engine)
    assert [
        each.loss.hex() + (each.grad_norm.hex() if not each.skipped else "skipped") for each in results
    ] == found
    assert torch.equal(mine, master)
    assert engine.skipped_steps == skipped and (skipped > 0) == (precision is HALF)
    engine.close()


def overridden(
    world: World, case: Case, offload: dict[str, Any], steps: int
) -> tuple[list[tuple[str, str]], dict[str, Tensor]]:
    """Updates at each step's end, and weights put back to those before the last one for every pass."""
    config = case.config(None) | {"offload": {**offload, "step": "at_end"}}
    engine = shardwise.initialize(gpt(), config, world=world)
    held = [bucket.weight for bucket, _ in engine._parts.trained]
    before = after = [weight.shard.clone() for weight in held]
    results = []
    for step in range(steps):
        for weight, old in zip(held, before, strict=True):
            weight.shard.copy_(old)
            weight.renew()
        before = after
        results.append(engine.train_step(batches(engine._parts.dp.index, step, case.accumulation)))
        after = [weight.shard.clone() for weight in held]
    found = state_of(engine)
    engine.close()
    return [(result.loss.hex(), result.grad_norm.hex()) for result in results], found


LAYOUTS = [Case(1, accumulation=2), Case(3, precision="bf16", prefetch=1), Case(0, pp=2)]


def unlike(world: World, folder: str) -> list[list[str]]:
    answers = []
    for case in LAYOUTS:
        late = train(world, case._replace(step="delayed"), folder, steps=3)
        steps, state = overridden(world, case, {"optimizer": "disk", "disk_path": folder}, 3)
        found = [name for name, tensor in late.state.items() if not torch.equal(tensor, state[name])]
        assert {row: late.rows.get(row, 0) for row in late.predicted} == late.predicted, case
        answers.append(found + ["losses and norms"] * (late.steps != steps))
    return answers


def test_on_every_layout(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(unlike, str(tmp_path)) == [[[]] * len(LAYOUTS)] * 2


def test_who_looks_at_the_weights_has_the_update_counted_first(tmp_path: Path) -> None:
    """A save, and what resumes from it, go on alike; so does a run that evaluated there."""
    config = Case(step="delayed", precision="bf16").config(str(tmp_path))

    def run(look: Any, steps: range, folder: Path | None = None) -> list[str]:
        engine = shardwise.initialize(gpt(), config)
        if folder is not None:
            engine.load(folder)
        found = []
        for step in steps:
            found.append(engine.train_step(batches(0, step, 1)).loss.hex())
            if step == 2:
                look(engine)
        engine.close()
        return found

    def looks(engine: Any) -> None:
        weights = {name: tensor.float() for name, tensor in engine.state_dict().items()}
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter.float(), weights[name])
            assert torch.equal(engine.full_tensor(name).bfloat16(), parameter)

    folder = tmp_path / "saved"
    saved = run(lambda engine: engine.save(folder), range(6))
    assert run(lambda engine: None, range(3, 6), folder) == saved[3:]
    assert run(lambda engine: engine.evaluate([(batches(0, 9, 1)[0], None)]), range(6)) == saved
    assert run(looks, range(6)) == saved
    # From the step behind on: the one after that has other weights.
    assert run(lambda engine: None, range(6))[3:] != saved[3:]


def test_in_the_middle_of_a_step_weights_stay(tmp_path: Path) -> None:
    engine = shardwise.initialize(gpt(), Case(step="delayed").config(str(tmp_path)))
    engine.train_step(batches(0, 0, 1))
    engine.backward(engine(batches(0, 1, 1)[0]))
    before = engine.state_dict()
    for call in (lambda: engine.save(tmp_path / "saved"), lambda: engine.full_tensor("embed.weight")):
        with pytest.raises(UsageError, match="in the middle of a step"):
            call()
    engine.step()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
    engine.close()


@pytest.mark.parametrize(
    ("offload", "why"),
    [
        ({"optimizer": "device"}, "stands in nobody's way"),
        ({"parameters": "disk"}, "the weights of all Units stay on the device"),
        ({"fraction": 0.5}, "the weights of all Units stay on the device"),
    ],
)
def test_what_cannot_be_late_is_refused(tmp_path: Path, offload: dict[str, Any], why: str) -> None:
    wanted = {"optimizer": "disk", "disk_path": str(tmp_path), "step": "delayed", **offload}
    with pytest.raises(ConfigError, match=why):
        shardwise.initialize(small(), {"offload": wanted})


def test_tables_would_be_a_step_ahead(tmp_path: Path) -> None:
    offload = {"optimizer": "disk", "disk_path": str(tmp_path), "step": "delayed"}
    with pytest.raises(ConfigError, match="rows of embedding tables are updated at once"):
        shardwise.initialize(tables_net.Net({}), {"offload": offload})
