"""Embedding tables in the plain loop: rows learn as under an engine of one rank, and count in the norm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config.run import load
from shardwise.engine.parts.inputs import apply
from shardwise.verify.layout import parse_layout
from shardwise.verify.reference import run_reference
from shardwise.verify.rows import narrow_tables, row_pairs, rows_here
from shardwise.verify.run import verify
from shardwise.verify.subject import Verification
from tests.engine.tables_net import Net, batch


def test_the_plain_loop_trains_rows_as_an_engine_does() -> None:
    config = load(
        {
            "precision": "fp64",
            "optimizer": {"type": "sgd", "lr": 0.1},
            "max_grad_norm": 0.05,
            "schedule": {"type": "cosine", "warmup_steps": 2, "total_steps": 9},
            "batch": {"accumulation": 2},
        }
    )
    steps = [[(batch(step, 0, 6), 6.0), (batch(step, 6, 12), 3.0)] for step in range(3)]
    wanted = run_reference(
        Net({}).double(),
        config.optimizer,
        steps,
        lambda model, inputs: apply(model, inputs),
        clip=config.max_grad_norm,
        seed=0,
        rows=6,
        schedule=config.schedule,
    )
    engine = shardwise.initialize(Net({}), config)
    for place, step in enumerate(steps):
        result = engine.train_step([inputs for inputs, _ in step], [weight for _, weight in step])
        assert abs(result.grad_norm / wanted.steps[place].norm - 1) < 1e-12
        pairs = [*row_pairs([rows_here(engine.tables)], wanted.rows[place + 1])]
        assert {table for table, *_ in pairs} >= {
            "tables.large",
            "tables.grows",
            "tables.rare",
            "tables.wide",
        }
        for table, part, _, got, truth in pairs:
            assert got.shape == truth.shape and torch.allclose(got, truth, rtol=1e-10, atol=1e-13), (
                table,
                part,
            )
    engine.close()


def narrow_net() -> Net:
    """A net with rows in 16 bits, and in one table optimizer state too."""
    net = Net({})
    forms = {"large": {"dtype": "bf16"}, "grows": {"dtype": "bf16", "state_dtype": "bf16"}}
    net.tables.tables = tuple(
        table.model_copy(update=forms.get(table.name, {})) for table in net.tables.tables
    )
    return net


def verified(make: Callable[[], nn.Module], layout: str, **more: Any) -> Any:
    config = {"optimizer": {"type": "sgd", "lr": 0.1}, "batch": {"accumulation": 1}, **more}
    return verify(make, config, batch(0), layout=layout, steps=2)


def test_the_comparison_in_fp64_stores_narrow_rows_in_fp64() -> None:
    """Both sides do; the model itself is not changed."""
    assert narrow_tables(narrow_net()) == ["tables.large", "tables.grows"] and not narrow_tables(Net({}))
    subject = Verification(narrow_net, load({}), parse_layout("dp=2"), batch(0), 2, None)
    assert not narrow_tables(subject.made(torch.float64, True)())
    assert narrow_tables(subject.made(None, True)()) == ["tables.large", "tables.grows"]


@pytest.mark.parametrize("layout", ["dp=2", pytest.param("dp=2,zero=3", marks=pytest.mark.soak)])
def test_a_layout_with_narrow_rows_is_verified(layout: str) -> None:
    found = verified(narrow_net, layout)
    assert found.verdict == "pass", found.lines()
    assert any("rounding of tables.large and 1 more to 16 bits" in each for each in found.left_out)
