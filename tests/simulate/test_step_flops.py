"""FLOPs of a step: the formula of the model, what is recomputed, and what is executed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.models import Gpt, GptPolicy
from shardwise.models.gpt import flops_per_token
from shardwise.simulate.step_flops import StepFlops, run_time, seconds_at, step_flops
from tests.simulate.given import hardware

POLICY = GptPolicy(layers=2, width=64, heads=4, context=64, vocab=256)
TOKENS = 2 * 4 * 64


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(POLICY)


def known(config: dict[str, Any]) -> JobFacts:
    ids: Tensor = torch.arange(4 * 64).view(4, 64)
    return read(
        gpt, {"tiles": {"logits": "off"}} | config, 1, torch.device("cpu"), {"tokens": ids, "targets": ids}
    )


def test_the_four_counts_of_a_gpt() -> None:
    per_token, causal = flops_per_token(POLICY, causal=False), flops_per_token(POLICY, causal=True)
    plain = step_flops(known({}).passed, 2, 1, tokens=TOKENS, per_token=per_token, causal_per_token=causal)
    assert plain.model_per_token == per_token and plain.model_per_step == per_token * TOKENS
    assert plain.causal_per_step == plain.model_per_step - 6 * 2 * 64 * 64 * TOKENS
    assert plain.hardware_per_step == plain.model_per_step, "nothing is recomputed"
    assert plain.executed_per_step == pytest.approx(plain.model_per_step, rel=0.01)
    again = step_flops(known({"recompute": "full"}).passed, 2, 1, tokens=TOKENS, per_token=per_token)
    blocks = again.hardware_per_step - plain.hardware_per_step
    assert blocks == again.executed_per_step - plain.executed_per_step
    layers = {
        name: each.numel() for name, each in gpt().named_parameters() if "blocks" in name and each.dim() == 2
    }
    # Nothing needs the result of a block's last layer, so the second run stops in front of it.
    repeated = sum(size for name, size in layers.items() if not name.endswith("down.weight"))
    assert repeated < sum(layers.values())
    assert blocks == 2 * TOKENS * repeated + 2 * 4 * TOKENS * 64 * 64


def test_ranks_add_up_and_a_model_without_formula_is_counted() -> None:
    passed = known({}).passed
    one = step_flops(passed, 2, 1)
    assert step_flops(passed, 2, 3, slices=2).executed_per_step == 6 * one.executed_per_step
    assert one.model_per_token is None and one.model_per_step == one.executed_per_step
    assert step_flops(passed, 2, 1, tokens=TOKENS).model_per_token == one.model_per_step / TOKENS


def test_utilisation_and_seconds_replace_one_another() -> None:
    flops = StepFlops(10.0, 1000.0, 900.0, 1300.0, 1300.0)
    rates = hardware(flops_s=100.0)
    found = run_time(flops, 5.0, rates, "fp32", 4, tokens=100, steps=86_400)
    assert (found.mfu, found.hfu) == (pytest.approx(0.5), pytest.approx(0.65))
    assert (found.tokens_per_s, found.days, found.device_hours) == (20.0, 5.0, 5 * 24 * 4)
    assert seconds_at(0.5, flops, rates, "fp32", 4) == pytest.approx(5.0)
    assert flops.pf_days(steps=10) == pytest.approx(10_000 / 8.64e19)
    with pytest.raises(UsageError, match="0 is no share"):
        seconds_at(0.0, flops, rates, "fp32", 4)
