"""A key of the configuration that differs on one rank is refused when the engine is built, by its name."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import ConfigError, PlanError
from shardwise.comm.world import World
from shardwise.config.run import load
from shardwise.engine.construction.agreement import PER_RANK, digest_of, stated_settings

UNLIKE: list[tuple[str, Any, Any]] = [
    ("max_grad_norm", 0.5, 0.01),
    ("max_grad_norm", None, 1.0),
    ("batch.accumulation", 1, 2),
    ("batch.weigh_by", "auto", "batches"),
    ("batch.duplicates", "error", "allow"),
    ("batch.micro_size", 1, 2),
    ("mesh.pp", 1, 2),
    ("mesh.tp", 1, 2),
    ("mesh.dp", None, 2),
    ("zero.stage", 0, 3),
    ("zero.stage", 1, 2),
    ("zero.prefetch_bytes", "auto", 1024),
    ("zero.reductions_under_way", 0, 1),
    ("zero.reduce", "step", "microbatch"),
    ("zero.reshard_after_forward", True, False),
    ("zero.reuse_buffers", True, False),
    ("zero.units", [], ["Linear"]),
    ("tensor.sequence_parallel", True, False),
    ("tensor.gather_logits", True, False),
    ("tensor.table", {}, {"a.weight": "replicate"}),
    ("experts.rows", None, 64),
    ("experts.exchange", "counted", "blocks"),
    ("pipeline.schedule", "1f1b", "gpipe"),
    ("pipeline.shapes", "agreed", "described"),
    ("tables.defaults.pooling", "sum", "mean"),
    ("tables.optimizer.lr", 0.1, 0.2),
    ("tables.prefetch_steps", 0, 1),
    ("tables.memory_bytes", None, 1 << 20),
    ("recompute.scope", "none", "full"),
    ("recompute.blocks", "all", 1),
    ("tiles.logits", None, 2),
    ("tiles.mlp", "off", 2),
    ("offload.optimizer", "device", "host"),
    ("offload.activations", "device", "host"),
    ("offload.fraction", 1.0, 0.5),
    ("offload.buffers", 2, 3),
    ("offload.state", "fp32", "int8"),
    ("precision.compute", "fp32", "bf16"),
    ("precision.reduce", None, "fp32"),
    ("precision.grad", None, "fp32"),
    ("precision.master", "fp32", "fp64"),
    ("precision.buffers", "fp32", "bf16"),
    ("precision.keep_fp32", [], ["norm"]),
    ("precision.loss_scale.init_scale", 65536.0, 2.0),
    ("precision.loss_scale.growth_interval", 2000, 10),
    ("precision.loss_scale.dynamic", True, False),
    ("precision.nonfinite", "raise", "skip"),
    ("optimizer.type", "adamw", "sgd"),
    ("optimizer.lr", 0.1, 0.2),
    ("optimizer.betas", [0.9, 0.999], [0.9, 0.99]),
    ("optimizer.eps", 1e-8, 1e-6),
    ("optimizer.weight_decay", 0.0, 0.1),
    ("optimizer.amsgrad", False, True),
    ("schedule.type", "constant", "cosine"),
    ("schedule.warmup_steps", 0, 5),
    ("schedule.total_steps", None, 9),
    ("schedule.min_ratio", 0.0, 0.1),
    ("ema", None, {"decay": 0.9}),
    ("compile.scope", "none", "blocks"),
    ("compile.backend", "inductor", "eager"),
    ("attention.backend", "auto", "math"),
    ("batch_norm", "per_rank", "synchronized"),
    ("check_first_step", "auto", "off"),
    ("deterministic", False, True),
    ("comm.transport", "auto", "torch"),
    ("comm.timeout_s", "auto", 30),
    ("train.steps", 1, 2),
    ("train.seed", 0, 1),
    ("train.eval_every", 2, 3),
    ("checkpoint.every", None, 3),
    ("checkpoint.keep_last", 2, 3),
    ("checkpoint.asynchronous", True, False),
]
"""A key, its value on rank 0, and its value on the last rank."""
ALIKE: dict[str, tuple[Any, Any]] = {
    "output_dir": ("runs/0", "runs/1"),
    "monitor": ({"csv": False}, {"csv": False, "print_every": 3}),
    "comm.join_timeout_s": (60.0, 61.0),
    "data.workers": (0, 2),
}
"""Keys that ranks may set differently, with a value of rank 0 and one of the last rank."""


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return ``a.b: value`` as ``{"a": {"b": value}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def built(world: World, config: dict[str, Any], **arguments: Any) -> str:
    """Return what ``initialize`` raised, "" if it made an engine."""
    torch.manual_seed(0)
    try:
        engine = shardwise.initialize(nn.Linear(4, 4), config, world=world, **arguments)
    except ConfigError as error:
        return str(error)
    engine.close()
    return ""


def refusals(world: World, rows: list[tuple[str, Any, Any]]) -> list[str]:
    """Return what each row of keys ends in on this rank."""
    place = 2 if world.rank == world.size - 1 else 1
    return [built(world, nested(row[0], row[place])) for row in rows]


def test_every_key_that_differs_on_one_rank_is_named(ranks: Any) -> None:
    for said in zip(UNLIKE, *ranks(2).run(refusals, UNLIKE), strict=True):
        (key, *_), first, last = said
        assert first == last, "all ranks are told the same"
        assert f"config: {key}" in first and "on rank 0" in first and "on rank 1" in first, (key, first)


def test_the_ranks_with_each_value_are_named(ranks: Any) -> None:
    (said, *_), *others = ranks(4).run(refusals, [("max_grad_norm", 0.5, 0.01)])
    assert "max_grad_norm is 0.5 on ranks 0, 1, 2 and 0.01 on rank 3;" in said
    assert others == [[said]] * 3


def test_keys_of_a_rank_alone_may_differ(ranks: Any) -> None:
    rows = [(key, *values) for key, values in ALIKE.items()]
    assert ranks(2).run(refusals, rows) == [[""] * len(rows)] * 2
    base = stated_settings(load({}))
    for key in PER_RANK:
        assert not [name for name in base if name == key or name.startswith(f"{key}.")], key


def unlike_arguments(world: World) -> list[str]:
    """Return the refusals of arguments that the last rank gives otherwise."""
    is_last = world.rank == world.size - 1

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch).sum()

    return [
        built(world, {}, loss=loss if is_last else None),
        built(world, {}, optimizer=torch.optim.SGD if is_last else None),
        built(world, {}, elementwise=is_last),
    ]


def test_arguments_that_differ_are_named(ranks: Any) -> None:
    for said in ranks(2).run(unlike_arguments):
        for text, name in zip(said, ("loss", "optimizer", "elementwise"), strict=True):
            assert text.startswith(f"config: initialize({name}=) is "), text


def another_model(world: World) -> str:
    """Return the refusal of a model whose second layer is wider on the last rank."""
    width = 6 + 2 * (world.rank == world.size - 1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, width))
    with pytest.raises(PlanError) as caught:
        shardwise.initialize(model, {}, world=world)
    return str(caught.value)


def test_the_first_parameter_that_differs_is_named(ranks: Any) -> None:
    for said in ranks(2).run(another_model):
        assert "the parameter 1.weight is (6, 6)" in said or '"(6, 6)' in said, said
        assert "on rank 0" in said and "(8, 6)" in said


def test_a_digest_depends_on_every_entry() -> None:
    assert digest_of({"a": "1", "b": "2"}) == digest_of({"b": "2", "a": "1"})
    assert len({digest_of(each) for each in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {})}) == 4
