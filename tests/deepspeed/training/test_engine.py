"""A loop in DeepSpeed's names against plain torch on the same batches, and what such scripts read on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.world import World
from shardwise.deepspeed.calls.enums import OffloadStateTypeEnum
from tests.deepspeed.training.script import MICRO, PARTS, STEPS, configuration, made, net, samples
from tests.ranks import RankPool


class Seen(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    counters: list[tuple[int, int, int, int]]
    weights: list[Tensor]


def in_deepspeeds_names(world: World, stage: int) -> Seen:
    model = net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=samples(), config=configuration(stage)
    )
    losses, norms, counters = [], [], []
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        assert engine.backward(loss).item() == loss.item() / PARTS
        assert engine.is_gradient_accumulation_boundary() == (engine.micro_steps % PARTS == PARTS - 1)
        engine.step()
        assert engine.was_step_applied() == (engine.micro_steps % PARTS == 0)
        losses.append(loss.item())
        counters.append(
            (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
        )
        if engine.was_step_applied():
            norms.append(engine.get_global_grad_norm())
    assert engine.get_lr() == scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert engine.zero_optimization_stage() == stage and engine.train_batch_size() == MICRO * PARTS * 2
    weights = [*engine.module_state_dict().values()]
    engine.destroy()
    return Seen(losses, norms, counters, weights)


def in_plain_torch() -> Seen:
    """One process with the batches of both ranks: the same order in every pass."""
    model, data = net(), samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    orders = [list(DistributedSampler(data, 2, rank)) for rank in range(2)]  # type: ignore[arg-type]
    losses, norms = [], []
    rises = [0.001, 0.001, 0.01]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rises[step]
        optimizer.zero_grad()
        for part in range(PARTS):
            first = (step * PARTS + part) * MICRO
            for rank, order in enumerate(orders):
                chosen = [data[place] for place in order[first : first + MICRO]]
                inputs, labels = torch.stack([x for x, _ in chosen]), torch.tensor([y for _, y in chosen])
                loss = nn.functional.cross_entropy(model(inputs), labels)
                (loss / PARTS / 2).backward()
                if rank == 0:
                    losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    return Seen(losses, norms, [], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_of_deepspeeds(ranks: Callable[[int], RankPool], stage: int) -> None:
    """Data order, accumulation, clipping, rates and counters; samples go to ranks as a DistributedSampler deals."""
    found, _ = ranks(2).run(in_deepspeeds_names, stage)
    plain = in_plain_torch()
    torch.testing.assert_close(found.losses, plain.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.norms, plain.norms, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.weights, plain.weights, rtol=1e-10, atol=1e-14)
    assert found.counters == [(i // 2, i // 2 * 8, i, 0) for i in range(1, STEPS * PARTS + 1)]


def test_the_loader_begins_again_in_the_same_order() -> None:
    loader = deepspeed.DeepSpeedDataLoader(range(7), 2, (1, 2), workers=0)  # type: ignore[arg-type]
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == second and len(first) == len(loader) == 2
    endless = deepspeed.utils.RepeatingLoader(loader)
    assert [next(endless).tolist() for _ in range(4)] == first + first


def test_two_configurations_or_none() -> None:
    class Arguments:
        deepspeed_config = "ds.json"

    with pytest.raises(deepspeed.DeepSpeedConfigError, match="keep one"):
        made(args=Arguments(), config=configuration(0))
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="no configuration"):
        made()
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="neither train_batch_size"):
        made(config={"gradient_accumulation_steps": 2})
    with pytest.raises(UsageError, match=r"3 \(sequence_parallel_size\) and 2 \(mesh_param\)"):
        made(config=configuration(0, sequence_parallel_size=3), mesh_param=(1, 2))


def test_callables_make_optimizer_and_scheduler() -> None:
    keys = configuration(0, optimizer=None, scheduler=None)
    engine, optimizer, loader, scheduler = made(
        config=keys,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.9),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1),
    )
    assert loader is None and isinstance(optimizer, torch.optim.Optimizer)
    for _ in range(PARTS):
        engine.backward(engine(torch.ones(2, 4, dtype=torch.float64)).sum())
        engine.step()
    assert engine.get_lr() == [0.05] and engine.optimizer_name() == "SGD" and engine.get_mom() == [0.9]
    with pytest.raises(UsageError, match=r"engine\.step"):
        optimizer.step()
    engine.destroy()


def test_parameters_that_the_optimizer_lacks_do_not_train() -> None:
    model = net()
    before = model[0].weight.detach().clone()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": model[2].parameters(), "lr": 1.0}],
        config=configuration(0, gradient_accumulation_steps=1),
    )
    engine.backward(engine(torch.ones(2, 4, dtype=torch.float64)).square().sum())
    engine.step()
    assert torch.equal(model[0].weight, before)
    engine.destroy()


def test_what_the_engine_lacks_is_the_models() -> None:
    engine, *_ = made(config=configuration(0))
    engine.module.own_name = "mine"
    assert engine.own_name == "mine" and isinstance(engine, nn.Module)
    with pytest.raises(AttributeError, match="neither the engine nor the model"):
        engine.nothing_of_that_name  # noqa: B018
    assert not engine.fp16_enabled() and engine.zero_reduce_bucket_size() == 5e8
    engine.destroy()


def one_step(engine: Any, calls: Callable[[Any, Any], None]) -> Tensor:
    """The weights after a step in which ``calls(engine, loss_of)`` did what it does."""
    inputs = [torch.full((2, 4), 0.1 * place, dtype=torch.float64) for place in range(4)]
    calls(engine, lambda place: engine(inputs[place]).square().mean())
    assert engine.global_steps == 1
    found = torch.cat([tensor.flatten() for tensor in engine.module_state_dict().values()])
    engine.destroy()
    return found


def counted(engine: Any, loss_of: Any) -> None:
    for place in range(PARTS):
        engine.backward(loss_of(place))
        engine.step()


def boundary_of_the_script(engine: Any, loss_of: Any) -> None:
    """Accelerate's way: one call of step() for all microbatches."""
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss_of(0))
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(1))
    engine.step()


def held_back(engine: Any, loss_of: Any) -> None:
    with engine.no_sync():
        engine.backward(loss_of(0))
        with pytest.raises(UsageError, match="no_sync"):
            engine.step()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(1))
    engine.step()


def divided_by_the_script(engine: Any, loss_of: Any) -> None:
    for place in range(PARTS):
        loss = loss_of(place) / PARTS
        assert engine.backward(loss, scale_wrt_gas=False) is loss
        engine.step()


def plain_backward(engine: Any, loss_of: Any) -> None:
    for place in range(PARTS):
        engine.scale(loss_of(place)).backward()
        engine.step()


def larger_batch(engine: Any, loss_of: Any) -> None:
    """Four microbatches of which two count as before: the others' losses are 0."""
    engine.set_train_batch_size(2 * engine.train_batch_size())
    assert engine.get_batch_info() == (8, 2, 4)
    for place in range(4):
        engine.backward(loss_of(place) * (2 if place < PARTS else 0))
        engine.step()
    assert engine.global_samples == 8


def another_loss_passed_through(engine: Any, loss_of: Any) -> None:
    """A generator's loss leaves gradients in the discriminator, which zero_grad() drops."""
    loss_of(3).backward()
    engine.zero_grad()
    counted(engine, loss_of)


@pytest.mark.parametrize(
    "calls",
    [
        boundary_of_the_script,
        held_back,
        divided_by_the_script,
        plain_backward,
        larger_batch,
        another_loss_passed_through,
    ],
)
def test_ways_to_the_same_step(calls: Callable[[Any, Any], None]) -> None:
    keys = configuration(1, optimizer={"type": "SGD", "params": {"lr": 0.5}}, gradient_clipping=0)
    usual, other = (one_step(made(config=keys)[0], each) for each in (counted, calls))
    torch.testing.assert_close(other, usual, rtol=1e-12, atol=1e-15)


def test_no_sync_where_gradients_lie_in_pieces() -> None:
    engine, *_ = made(config=configuration(2))
    with pytest.raises(UsageError, match="stage 2"), engine.no_sync():
        pass
    engine.destroy()


def test_a_pass_shorter_than_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """The accumulation goes on in the next pass, as DeepSpeed's does, and it is told."""
    engine, _, loader, _ = made(training_data=samples()[:MICRO], config=configuration(0, scheduler=None))
    assert "a pass has 1 microbatches for each rank, and a step takes 2" in caplog.text
    steps = []
    for _ in range(4):
        for inputs, labels in loader:
            engine.backward(nn.functional.cross_entropy(engine(inputs), labels))
            engine.step()
            steps.append(engine.global_steps)
    assert steps == [0, 1, 1, 2]
    engine.destroy()


def test_groups_of_parameters_keep_their_own_numbers() -> None:
    model = net()
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 0.5},
    ]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, config=configuration(0, scheduler=None)
    )
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.01, 0.1),
        (0.5, 0.0),
    ]
    assert engine.get_lr() == [0.01, 0.5] and engine.optimizer_name() == "AdamW"
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "parameters", "name"),
    [
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2}, "OneCycle"),
        ("StepLR", {"step_size": 1, "gamma": 0.1}, "StepLR"),
        ("LRRangeTest", {"lr_range_test_step_size": 1}, "LRRangeTest"),
    ],
)
def test_schedulers_of_the_configuration(kind: str, parameters: dict[str, Any], name: str) -> None:
    """An object that engine.step() steps; the optimizer's groups have its rates."""
    block = {"type": kind, "params": parameters}
    engine, optimizer, _, scheduler = made(config=configuration(0, scheduler=block))
    before, group = engine.get_lr(), optimizer.param_groups[0]
    assert type(scheduler).__name__ == name
    counted(engine, lambda place: engine(torch.ones(2, 4, dtype=torch.float64)).square().mean())
    assert engine.get_lr() == scheduler.get_last_lr() != before and group["lr"] == engine.get_lr()[0]
    if kind == "OneCycle":
        assert group["betas"] == (pytest.approx(0.85), 0.99) and before == [0.1]
    with pytest.raises(ConfigError, match="scheduler"):
        made(config=configuration(0, scheduler={"type": kind, "params": {"step_sice": 3}}))
    engine.destroy()


def test_muon_takes_every_matrix_but_embeddings_and_heads() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 5)}
    ).double()
    model.forward = lambda tokens: model.lm_head(model.body(model.embed(tokens)))
    block = {"type": "Muon", "params": {"lr": 0.1, "momentum": 0.9, "muon_lr": 0.02, "adam_lr": 0.01}}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, config=configuration(0, optimizer=block, scheduler=None)
    )
    kinds = {group["type"]: (group["lr"], len(group["params"])) for group in optimizer.param_groups}
    assert kinds["muon"] == (0.02, 1) and kinds["adamw"][0] == 0.01
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 5
    counted(engine, lambda place: engine(torch.arange(5)).square().mean())
    engine.destroy()


def test_numbers_and_clocks_of_a_script(tmp_path: Path) -> None:
    """A script's own numbers go where the configuration's monitors write."""
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine, *_ = made(config=configuration(0, tensorboard=block, csv_monitor=block))
    counted(engine, lambda place: engine(torch.ones(2, 4, dtype=torch.float64)).square().mean())
    engine.monitor.write_events([("Train/own", 0.5, engine.global_samples)])
    boundary_of_the_script(
        engine, lambda place: engine(torch.ones(2, 4, dtype=torch.float64)).square().mean()
    )
    spent = engine.get_wall_clock_timers()
    assert set(spent) == {"fwd", "bwd", "step"} and min(spent.values()) > 0
    for words in ({}, {"include": ["optim_states", "lp_grads"]}, {"include": []}, {"device": "none"}):
        engine.offload_states(**words)
        engine.reload_states()
    with pytest.raises(UsageError, match="say the folder"):
        engine.offload_states(device="nvme")
    with pytest.raises(UsageError, match="include: 'optim' is none of optim_states"):
        engine.offload_states(include=["optim"])
    engine.destroy()
    events = b"".join(file.read_bytes() for file in tmp_path.rglob("events*"))
    assert b"Train/own" in events and b"Train/Samples/lr" in events
    rates, own = (tmp_path / "job" / f"Train_{name}.csv" for name in ("Samples_lr", "own"))
    assert [row.split(",")[0] for row in rates.read_text().split()] == ["step", "4", "8"]
    assert own.read_text() == "step,own\n4,0.5\n"


def trained_with_nvme(world: World, stage: int, block: dict[str, Any], folder: str) -> list[Any]:
    """Losses, norms and weights of some steps, with an edit and a look at moments between them."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    blocks = {name: {**keys, "nvme_path": folder} for name, keys in block.items()}
    keys = configuration(stage, zero_optimization={"stage": stage, **blocks}, bf16={"enabled": True})
    keys["aio"] = {"block_size": 262144, "queue_depth": 8, "thread_count": 1}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=keys)
    assert engine.zero_has_nvme_offload() == bool(block)
    assert engine.ours.config.offload.optimizer == ("disk" if block else "device")
    seen: list[Any] = []
    for step in range(STEPS * PARTS):
        torch.manual_seed(10 * step + world.rank)
        loss = engine(torch.randn(MICRO, 4)).float().square().mean()
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
        if engine.was_step_applied():
            seen.append(engine.get_global_grad_norm())
            moment = deepspeed.utils.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
            assert moment is not None
            deepspeed.utils.safe_set_full_fp32_param(model[0].weight, moment + 0.125)
            seen += [moment, deepspeed.utils.safe_get_full_fp32_param(model[2].weight)]
            if block:
                engine.offload_states(device="nvme", include=[OffloadStateTypeEnum.lp_params])
                with pytest.raises(UsageError, match="reload_states"):
                    engine(torch.randn(MICRO, 4))
                engine.reload_states()
    seen += [*engine.module_state_dict().values()]
    engine.destroy()
    return seen


@pytest.mark.parametrize(
    ("size", "stage", "block"),
    [
        (1, 2, {"offload_optimizer": {"device": "nvme", "pin_memory": True, "pipeline_read": True}}),
        (2, 2, {"offload_optimizer": {"device": "nvme", "buffer_count": 8, "fast_init": True, "ratio": 0.5}}),
        (
            2,
            3,
            {
                "offload_optimizer": {"device": "nvme"},
                "offload_param": {"device": "nvme", "buffer_size": 1e8},
            },
        ),
        (2, 3, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}),
    ],
)
def test_state_on_an_nvme_trains_to_the_same_bits(
    ranks: Callable[[int], RankPool], tmp_path: Path, size: int, stage: int, block: dict[str, Any]
) -> None:
    pool = ranks(size)
    found, wanted = (pool.run(trained_with_nvme, stage, each, str(tmp_path)) for each in (block, {}))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
