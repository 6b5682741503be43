"""Some parameters whole, edited, and read and written one by one: exact at every stage, under tp and pp."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.models import Gpt, GptPolicy
from tests.engine.nets import VOCABULARY, Language, seeded
from tests.engine.plain import worst

ADAMW = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1}
LIMIT = 1e-10


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
    return tokens, tokens.roll(1, 1)


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(parameter.shape)


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


def edit(name: str, tensor: Tensor) -> None:
    """In place, past the version counter, and in place of the memory."""
    if name.endswith("norm.weight"):
        tensor.data.mul_(1.5)
    elif name.endswith("up.bias"):
        tensor.data = torch.full_like(tensor, 0.25)
    else:
        tensor.mul_(1.5)


EDITED = ("embed.weight", "blocks.1.norm.weight", "blocks.1.up.bias")


def edited_plainly(ranks: int) -> dict[str, Tensor]:
    """Two steps of one process, the edit between them."""
    model = seeded(Language)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        sum((model(*data(step, rank)) / ranks for rank in range(ranks)), torch.zeros(())).backward()
        optimizer.step()
        with torch.no_grad():
            for name in EDITED if step == 0 else ():
                edit(name, model.get_parameter(name))
    return {name: each.detach() for name, each in model.named_parameters()}


def some(world: World, stage: int) -> dict[str, Any]:
    engine = shardwise.initialize(
        seeded(Language), {"zero": {"stage": stage}, "optimizer": ADAMW}, world=world
    )
    model: Any = engine.module
    engine.train_step([data(0, world.rank)])
    said: dict[str, Any] = {}
    before = engine.state_dict()
    sent = engine.traffic.bytes
    with engine.full_parameters("blocks.0.norm.bias") as whole:
        assert [*whole] == ["blocks.0.norm.bias"] and torch.equal(
            whole["blocks.0.norm.bias"], before["blocks.0.norm.bias"]
        )
        if stage == 3:
            said["others"] = raised(lambda: model.blocks[0].up.weight + 1)
            said["copy"] = raised(model.state_dict)
    said["bytes"] = engine.traffic.bytes - sent
    # One in another, by name, parameter and module; rank 1's edits count, and other ranks' do not.
    last = world.size - 1
    with engine.full_parameters([model.blocks[1]], from_rank=last) as outer:
        assert len(outer) == len([*model.blocks[1].parameters()])
        with engine.full_parameters(["head.weight", model.blocks[1].up.bias], from_rank=last) as inner:
            assert inner["head.weight"] is inner["embed.weight"] is model.embed.weight
            for name in EDITED:
                tensor = model.get_parameter(name)
                assert torch.equal(tensor, before[name])
                if world.rank == last:
                    edit(name, tensor)
                else:
                    tensor.add_(1.0)
        if stage == 3:
            assert "is released now" in raised(lambda: model.embed.weight + 1)
        assert model.blocks[1].norm.weight.sum() > 0
    engine.train_step([data(1, world.rank)])
    said["weights"] = engine.state_dict()
    said["name"] = raised(lambda: engine.full_parameters("blocks.7.norm.bias").__enter__())
    said["other"] = raised(lambda: engine.full_parameters(nn.Linear(1, 1)).__enter__())
    said["rank"] = raised(lambda: engine.full_parameters(from_rank=9).__enter__())

    def unlike() -> None:
        with engine.full_parameters("norm.bias", write=True) as whole:
            whole["norm.bias"].add_(float(world.rank))

    said["unlike"] = raised(unlike) if world.size > 1 else ""
    engine.close()
    return said


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_some_parameters(ranks: Any, size: int, stage: int) -> None:
    if size == 1 and stage:
        return
    wanted = edited_plainly(size)
    for said in ranks(size).run(some, stage):
        assert worst({name: said["weights"][name] for name in wanted}, wanted) <= LIMIT
        assert "no parameter is called 'blocks.7.norm.bias'" in said["name"]
        assert "a Linear that is not the engine's" in said["other"] and "0 to" in said["rank"]
        assert size == 1 or "unlike values" in said["unlike"]
        if stage == 3:
            assert "is released now" in said["others"] and "in pieces" in said["copy"]
            assert said["bytes"] <= 8 * 6  # of one norm's bias


def precise(world: World, stage: int) -> tuple[float, float, float]:
    """bf16 weights beside fp32 masters: a context for writing rounds no master that nobody edited."""
    engine = shardwise.initialize(
        seeded(Language, dtype=torch.float32),
        {"zero": {"stage": stage}, "optimizer": ADAMW, "precision": "bf16"},
        world=world,
    )
    engine.train_step([data(0, world.rank)])
    names = [name for name, _ in Language().named_parameters()]
    before = {name: engine.full_tensor(name) for name in names}
    with engine.full_parameters(write=True) as whole:
        whole["norm.bias"].fill_(0.3)
    after: dict[str, Any] = {name: engine.full_tensor(name) for name in names}
    bias = float((after.pop("norm.bias") - torch.tensor(0.3).bfloat16()).abs().max())
    kept = worst(after, {name: before[name] for name in after})
    weight: Any = engine.full_tensor("blocks.0.up.weight", "parameter")
    rounded = float((weight - after["blocks.0.up.weight"].bfloat16()).abs().max())
    engine.close()
    return bias, kept, rounded


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_masters_of_what_nobody_edited_stay(ranks: Any, stage: int) -> None:
    assert ranks(2).run(precise, stage) == [(0.0, 0.0, 0.0)] * 2


def one_by_one(world: World, config: dict[str, Any], gpt: bool) -> dict[str, Any]:
    """Every kind of tensor of every parameter beside a plain process; then other values, written, and one more step."""

    def make() -> nn.Module:
        if gpt:
            return seeded(
                Gpt, GptPolicy(layers=2, width=16, heads=4, kv_heads=2, context=8, vocab=VOCABULARY)
            )
        return seeded(Language)

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return model(*batch)

    plain = make()
    engine = shardwise.initialize(make(), {"optimizer": ADAMW, **config}, world=world, loss=loss_of)
    optimizer = optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    replicas, mine = engine.dp_size, engine.dp_index
    errors: dict[str, float] = {}

    def compare(what: str, got: Tensor | None, wanted: Tensor) -> None:
        assert got is not None and got.shape == wanted.shape, what
        errors[what] = float((got - wanted).norm() / max(float(wanted.norm()), 1e-3))

    def both(step: int) -> None:
        optimizer.zero_grad()
        sum(
            (loss_of(plain, data(step, rank)) / replicas for rank in range(replicas)), torch.zeros(())
        ).backward()
        if engine.config.mesh.pp == 1:
            engine.backward(engine(data(step, mine)))

    names = [name for name, _ in plain.named_parameters()]
    for step in range(2):
        both(step)
        is_whole = engine.config.mesh.pp == 1
        for name, parameter in plain.named_parameters() if is_whole else ():
            assert parameter.grad is not None
            compare(f"{step} gradient of {name}", engine.full_tensor(name, "gradient"), parameter.grad)
            if name == names[1]:
                engine.set_full_tensor(name, torch.full_like(parameter.grad, 0.5), "gradient")
                parameter.grad.fill_(0.5)
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), float("inf")))
        optimizer.step()
        result: Any = engine.step() if is_whole else engine.train_step([data(step, mine)])
        compare(f"{step} norm", torch.tensor(result.grad_norm), torch.tensor(norm))
        for name, parameter in plain.named_parameters():
            state = optimizer.state[parameter]
            compare(f"{step} {name}", engine.full_tensor(name), parameter.detach())
            compare(f"{step} parameter {name}", engine.full_tensor(name, "parameter"), parameter.detach())
            compare(
                f"{step} exp_avg_sq of {name}", engine.full_tensor(name, "exp_avg_sq"), state["exp_avg_sq"]
            )
            elements = engine.local_tensor(name)
            assert engine.config.mesh.pp > 1 or elements is not None
            with torch.no_grad():
                engine.set_full_tensor(name, parameter * 1.1)
                parameter.mul_(1.1)
                engine.set_full_tensor(name, state["exp_avg"] + 0.01, "exp_avg")
                state["exp_avg"] += 0.01
            if elements is not None:
                engine.set_local_tensor(name, elements * 1.1)  # writes the same once more
    state_dict = engine.state_dict()
    for name, parameter in plain.named_parameters():
        compare(f"in the end {name}", state_dict[name], parameter.detach())
    refusals = [
        raised(lambda: engine.full_tensor("nobody")),
        raised(lambda: engine.full_tensor(names[0], "exp_avg_of")),
        raised(lambda: engine.set_full_tensor(names[0], torch.zeros(3))),
        raised(lambda: engine.set_full_tensor(names[1], plain.get_parameter(names[1]) + world.rank)),
    ]
    engine.close()
    return {"errors": {name: error for name, error in errors.items() if error > LIMIT}, "refusals": refusals}


LAYOUTS: list[tuple[int, dict[str, Any], bool]] = [
    *((2, {"zero": {"stage": stage}}, False) for stage in range(4)),
    (4, {"zero": {"stage": 3}, "mesh": {"dp": {"replicate": 2, "shard": 2}}}, False),
    (4, {"zero": {"stage": 3}, "mesh": {"tp": 2}, "batch": {"weigh_by": "batches"}}, True),
    (2, {"zero": {"stage": 1}, "mesh": {"pp": 2}}, False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout[1]))
def test_tensors_one_by_one(ranks: Any, layout: tuple[int, dict[str, Any], bool]) -> None:
    size, *rest = layout
    for found in ranks(size).run(one_by_one, *rest):
        assert not found["errors"]
        unknown, moment, shape, unlike = found["refusals"]
        assert "no parameter is called 'nobody'" in unknown and "has a moment 'exp_avg_of'" in moment
        assert "has the shape" in shape and "unlike values" in unlike
