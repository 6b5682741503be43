"""The pass in own dtypes: a clean step is within the noise of a plain loop, and small mistakes in 16 bits are not."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from shardwise.config.run import load
from shardwise.engine.construction.build import initialize
from shardwise.verify.layout import parse_layout
from shardwise.verify.own import OwnJob, hold_to_noise, measure, why_not
from shardwise.verify.record import LayoutJob, _recorded
from shardwise.verify.subject import Verification
from tests.verify.test_run import CONFIG, Net, example

STEPS = 2


@cache
def run(precision: str) -> tuple[OwnJob, dict[str, Any]]:
    """Return what one rank has recorded of a clean run, and the job of its plain side."""
    config = load({**CONFIG, "precision": precision, "check_first_step": "off"})
    held = Verification(Net, config, parse_layout("dp=1"), example(), STEPS, None)
    make = held.made(None, False)
    job = LayoutJob(make, config, held.batches(None), held.rows, None, held.weights, 60, records=False)
    engine = initialize(make(), config)
    record = _recorded(engine, job)
    engine.close()
    return OwnJob(make, config, held.batches(None), held.weights, held.rows, held.loss, False), record


def wrong(precision: str, change: Callable[[dict[str, Any]], None] = lambda step: None) -> list[str]:
    """Return the kinds of tensors that are wrong after a change of the first step's record."""
    job, clean = run(precision)
    record = copy.deepcopy(clean)
    change(record["steps"][0])
    return [each.what for each in hold_to_noise([*measure(job, record)]).wrong]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_clean_run_is_within_the_noise(precision: str) -> None:
    assert not wrong(precision)


def test_masters_that_are_rounded_are_seen() -> None:
    def lose(step: dict[str, Any]) -> None:
        step["masters"] = {name: each.bfloat16().float() for name, each in step["masters"].items()}

    assert "master" in wrong("bf16", lose)


def test_a_norm_that_still_has_the_loss_scale_is_seen() -> None:
    """The norm of gradients before unscaling: the moments are then those of gradients that are clipped to nothing."""

    def scaled(step: dict[str, Any]) -> None:
        step["norm"] *= 2.0**16

    assert wrong("fp16", scaled)[0] == "norm"


@pytest.mark.parametrize(
    ("kind", "factor", "what"),
    [("gradients", 1.1, "gradient"), ("moments", 1.001, "moment"), ("weights", 1.02, "weight")],
)
def test_a_factor_beyond_the_noise_is_seen(kind: str, factor: float, what: str) -> None:
    def scaled(step: dict[str, Any]) -> None:
        step[kind] = {name: each * factor for name, each in step[kind].items()}

    assert wrong("bf16", scaled)[0] == what


def test_a_step_that_is_skipped_without_an_overflow_is_seen() -> None:
    assert "norm" in wrong("fp16", lambda step: step.update(skipped=True))


def test_what_has_no_plain_loop_is_left_out_by_name() -> None:
    wide, narrow = [torch.float64, torch.int64], [torch.bfloat16]
    assert "as the pass fp64 does" in why_not(load({}), wide, False)
    assert not why_not(load({}), narrow, False) and "rows of tables" in why_not(load({}), narrow, True)
    operations = load({"precision": {"operations": "bf16"}})
    assert "precision.operations" in why_not(operations, narrow, False)
    assert "offload.state: int8" in why_not(load({"offload": {"state": "int8"}}), narrow, False)
