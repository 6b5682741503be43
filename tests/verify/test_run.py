"""A clean layout passes; a seeded bug, a refusal and a model that is no function of its batch are told apart."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardwise
from shardwise.base.errors import UsageError
from shardwise.cli.main import app
from shardwise.engine.state import state
from shardwise.optim.flat_state import FlatState
from shardwise.verify.run import verify
from shardwise.verify.verdict import Verdict

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "max_grad_norm": 0.5,
    "batch": {"accumulation": 2},
}


class Net(nn.Module):
    """A network with dropout; ``counts``: its output depends on how often it was called."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)
        self.counts, self.calls = counts, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        x = self.second(self.drop(torch.tanh(self.first(x)))) * (self.calls if self.counts else 1)
        return nn.functional.cross_entropy(x, y * 0)


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def verified(**more: Any) -> Verdict:
    return verify(more.pop("make", Net), {**CONFIG, **more}, example(), layout="dp=2,zero=2", steps=2)


@pytest.mark.soak
def test_a_clean_layout_is_equal() -> None:
    found = verified()
    assert found.verdict == "pass", found.lines()
    assert [each.name for each in found.passes] == ["fp64", "own", "bitwise"]
    assert found.passes[0].compared["gradients"] == 2 * 4
    assert found.exit_code == 0 and callable(shardwise.verify)


def test_gradients_that_are_summed_twice_are_found_and_explained() -> None:
    right = state.gradients

    def wrong(*given: Any) -> dict[str, Tensor]:
        found = right(*given)
        return found | {"second.weight": 2 * found["second.weight"]}

    with patch.object(state, "gradients", wrong):
        found = verified()
    assert (found.verdict, found.failed_in, found.exit_code) == ("fail", "fp64", 1)
    first = found.first
    assert first is not None and (first.kind, first.module) == ("gradient", "second"), found.lines()
    assert first.explanation == "it is the right tensor times dp = microbatches = 2"


def test_a_model_that_counts_its_calls_is_no_reference() -> None:
    found = verified(make=lambda: Net(counts=True))
    assert found.first is not None and found.first.kind == "reference"
    assert found.verdict == "fail"


class Narrow(Net):
    """A network whose kernel has no fp64."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float32, got Double")
        return super().forward(x, y)


def test_a_model_that_fails_in_fp64_cannot_be_verified() -> None:
    found = verified(make=Narrow)
    assert (found.verdict, found.exit_code) == ("unverifiable", 2)
    assert found.left_out[-1].endswith("RuntimeError: expected Float32, got Double"), found.left_out


def test_too_few_samples_and_too_few_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="fewer than the 18 microbatches"):
        verify(Net, {**CONFIG, "batch": {"accumulation": 9}}, example(), layout="dp=2")
    with pytest.raises(UsageError, match="steps is 1"):
        verify(Net, CONFIG, example(), layout="dp=2", steps=1)


def test_a_rank_that_has_not_joined_its_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="this process is a rank of a job"):
        verified()


def test_optimizers_without_a_plain_loop_cannot_be_verified() -> None:
    for more, said in (
        ({"optimizer": {"type": "lamb"}}, "torch has no optimizer 'lamb'"),
        (
            {"schedule": {"type": "torch", "scheduler": "StepLR", "arguments": {"step_size": 1}}},
            "schedule.type",
        ),
        ({"offload": {"optimizer": "host", "step": "delayed"}}, "one step late"),
    ):
        found = verified(**more)
        assert (found.verdict, found.exit_code, found.passes) == ("unverifiable", 2, [])
        assert said in found.left_out[-1], found.left_out


@pytest.mark.soak
def test_another_layout_is_the_reference_where_torch_has_no_optimizer() -> None:
    keys = {**CONFIG, "optimizer": {"type": "lamb", "lr": 0.01}}
    found = verify(Net, keys, example(), layout="dp=2,zero=2", against="dp=1", steps=2)
    assert found.verdict == "pass", found.lines()
    assert [each.name for each in found.passes] == ["fp64", "bitwise"]
    assert found.passes[0].compared["gradients"] == 2 * 4
    assert any(each.startswith("pass own: torch has no optimizer") for each in found.left_out)
    right = state.gradients

    def wrong(parts: Any, divisor: float) -> dict[str, Tensor]:
        scale = 2 if parts.dp.size == 2 else 1
        return {name: scale * each for name, each in right(parts, divisor).items()}

    with patch.object(state, "gradients", wrong):
        found = verify(Net, keys, example(), layout="dp=2,zero=2", against="dp=1", steps=2)
    assert (found.verdict, found.failed_in) == ("fail", "fp64"), found.lines()
    with pytest.raises(UsageError, match="cannot be dealt to dp=3"):
        verify(Net, keys, example(), layout="dp=2", against="dp=3", steps=2)


@pytest.mark.soak
def test_a_checkpoint_that_another_layout_changes_is_found() -> None:
    """Moments that a layout of one rank loads into the wrong places come back changed."""
    right = FlatState.restore

    def wrong(self: FlatState, moments: Any, ends: Any) -> None:
        right(self, moments, ends)
        if os.environ["WORLD_SIZE"] == "1":
            for _, _, _, held in self.moments():
                held.copy_(held.roll(1))

    with patch.object(FlatState, "restore", wrong):
        found = verified()
    assert (found.verdict, found.failed_in) == ("fail", "bitwise"), found.lines()
    assert found.first is not None and found.first.kind == "moment"
    assert "another layout" in found.first.explanation


@pytest.mark.soak
def test_a_model_of_transformers_is_made_smaller_and_another_runs_whole(
    tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for target, words in (("llama", '"hidden_size"'), ("net", "runs whole")):
        given = ["verify", f"tests.verify.made:{target}", "--example", f"tests.verify.made:{target}_batch"]
        result = CliRunner().invoke(app, [*given, "--layout", "dp=2", "--steps", "2", "--json"])
        assert result.exit_code == 0 and words in result.output, result.output
    assert len([*tmp_path.glob(".cache/shardwise/verified/*.json")]) == 2


@pytest.mark.soak
def test_the_command_verifies_an_example_on_three_axes() -> None:
    result = CliRunner().invoke(app, ["verify", "gpt_stdlib", "--layout", "pp=2,dp=2,tp=2", "--json"])
    assert result.exit_code == 0, result.output
    assert '"verdict": "pass"' in result.output


def test_the_static_part_needs_no_rank_and_names_blooms_bug() -> None:
    given = ["verify", "gpt_stdlib", "--layout", "tp=2", "--static", "--json"]
    clean = CliRunner().invoke(app, given)
    assert clean.exit_code == 0 and '"problems": []' in clean.output, clean.output
    keys = ["--set", "tensor.sequence_parallel=true", "--set", "tensor.table={blocks.*.mlp_norm: replicate}"]
    bug = CliRunner().invoke(app, [*given, *keys])
    assert bug.exit_code == 1 and "blocks.0.mlp_norm.weight" in bug.output, bug.output
    sums = CliRunner().invoke(app, ["verify", "gpt_stdlib", "--layout", "dp=2", "--static"])
    assert sums.exit_code == 0 and "0 problems" in sums.output, sums.output
    nothing = CliRunner().invoke(app, ["verify", "gpt_stdlib", "--layout", "dp=1", "--static"])
    assert nothing.exit_code == 2 and "cannot be verified" in nothing.output
    stages = CliRunner().invoke(app, ["verify", "gpt_stdlib", "--layout", "pp=2,tp=2", "--static"])
    assert stages.exit_code == 0 and "0 unknown, 0 problems" in stages.output, stages.output
