"""The parity layouts with late collectives: every bit as without, so no wait is missing and nothing is used in flight.

``pytest --late`` runs any test so; here are a few of each kind.
"""

import hashlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

import shardwise
from shardwise.comm.world import World
from tests.comm import late
from tests.engine import test_experts, test_model_parallel, test_parity, test_tables_model_parallel

Row = tuple[Callable[[Any, Any], Any], Any]
Case = test_parity.Case
Model, Experts, Tables = test_model_parallel.Layout, test_experts.Layout, test_tables_model_parallel.Layout


def rows(size: int) -> list[Row]:
    """What is trained on ``size`` ranks, and how."""
    if size == 2:
        cases = [Case(stage, 1, 3, "adamw", "fp64") for stage in range(4)]
        cases += [Case(stage, 1, 1, "sgd", "fp32", "torch") for stage in (1, 3)]
        cases += [Case(3, 1, 3, "adamw", "fp64", "torch", ahead=2)]
        models = [Model(tp=2), Model(pp=2, microbatches=2, schedule="interleaved_1f1b", virtual_stages=2)]
        experts = [Experts(dp=2, ep=2, stage=3, recompute="full")]
        tables = [Tables(2, {"tp": 2})]
    else:
        cases = [Case(stage, 2, 3, "adamw", "fp64") for stage in (1, 3)]
        models = [Model(pp=4, microbatches=5, transport="torch")]
        experts = []
        tables = [Tables(4, {"dp": 2, "tp": 2}, "row", stage=3)]
    found: list[Row] = [(test_parity.measure, each) for each in cases]
    found += [(test_model_parallel.measure, each) for each in models]
    found += [(test_experts.measure, each) for each in experts]
    return found + [(test_tables_model_parallel.run, each) for each in tables]


def bits(world: World, row: Row) -> list[str]:
    """Of every step, and of what the run found."""
    measure, layout = row
    lines: list[str] = []

    def after(engine: Any, result: Any) -> None:
        digest = hashlib.sha256()
        for name, tensor in sorted(engine.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        lines.append(f"{result.loss.hex()} {result.grad_norm.hex()} {digest.hexdigest()}")

    def initialize(*args: Any, **keys: Any) -> Any:
        engine = initialized(*args, **keys)
        engine.on_step.append(after)
        return engine

    initialized = shardwise.initialize
    with patch.object(shardwise, "initialize", initialize):
        found = measure(world, layout)
    return [*lines, repr(found)]


def plain_and_late(world: World, size: int) -> list[tuple[str, list[str], list[str]]]:
    part, found = world.among(range(size)), []  # with transports of its own
    for row in rows(size):
        plain = bits(world, row)
        with late.installed():
            found.append((f"{row[0].__module__} {row[1]}", plain, bits(part, row)))
    part.release()
    return found


@pytest.mark.parametrize("size", (2, 4))
def test_every_bit_is_that_of_the_plain_run(ranks: Any, size: int) -> None:
    for found in ranks(size).run(plain_and_late, size):
        for name, plain, delayed in found:
            assert len(plain) > 3 and plain == delayed, name
