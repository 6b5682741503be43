"""Embedding tables in the plain loop: rows learn as under an engine of one rank, and count in the norm."""

import torch

import shardwise
from shardwise.config.run import load
from shardwise.engine.parts.inputs import apply
from shardwise.verify.reference import run_reference
from shardwise.verify.rows import row_pairs, rows_here
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
