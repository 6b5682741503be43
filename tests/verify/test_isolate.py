"""Fed by the reference, a module is wrong only by itself."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.passes.replay import BatchPosition, DrawReplay
from shardwise.plan.placement import Partial, PerRank
from shardwise.verify import run
from shardwise.verify.activations import ActivationRecorder
from shardwise.verify.isolate import FedTensors, IsolatingRecorder
from tests.verify.bugs import BY_NAME
from tests.verify.test_bugs_verify import planted
from tests.verify.test_ranks import placed

PLACE = BatchPosition(1, 0, 4)


class Net(nn.Module):
    """Three layers; ``wrong``: the first one returns twice its output, and the model adds to that of the second."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 6).double() for _ in range(3))
        self.wrong = wrong
        if wrong:
            self.first.forward = lambda x: 2 * nn.Linear.forward(self.first, x)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.third(x + 1 if self.wrong else x)


def recorded(model: nn.Module, recorder: ActivationRecorder, replay: DrawReplay) -> ActivationRecorder:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    with recorder.recording(model), replay.at(PLACE):
        model(x).square().sum().backward()
    return recorder


def fed(truth: ActivationRecorder, **more: Any) -> FedTensors:
    given: dict[str, Any] = {"divisor": 1.0, "tp": (0, 1), "placements": {}, "rows": {}} | more
    return FedTensors(truth.inputs, truth.outputs, truth.gradients, **given)


def test_only_what_is_wrong_by_itself_is_wrong() -> None:
    replay, right, wrong = DrawReplay(), Net(), Net(wrong=True)
    truth = recorded(right, ActivationRecorder(replay, 4), replay)
    found = recorded(wrong, IsolatingRecorder(replay, 4, fed=fed(truth)), replay)

    def differ(of: str) -> list[str]:
        mine, theirs = getattr(found, of), getattr(truth, of)
        return [key.partition(" ")[0] for key in theirs if not torch.allclose(mine[key], theirs[key])]

    assert differ("outputs") == ["first"]
    assert differ("inputs") == ["third#0"]
    gradients = {name: p.grad for name, p in right.named_parameters()}
    off = [
        n for n, p in wrong.named_parameters() if p.grad is None or not torch.allclose(p.grad, gradients[n])
    ]
    assert off == ["first.weight", "first.bias"]


def test_a_rank_is_fed_its_own_part() -> None:
    replay = DrawReplay()
    truth = recorded(Net(), ActivationRecorder(replay, 4), replay)
    rows = {"qkv": torch.tensor([1, 3, 5])}
    recorder = IsolatingRecorder(replay, 4, fed=fed(truth, tp=(1, 2), rows=rows))
    whole = torch.arange(12.0).view(2, 6)
    part = whole[:, 3:]
    in_order = recorder._piece(whole, part, None, None)
    by_rows = recorder._piece(whole, part, None, rows["qkv"])
    assert in_order is not None and torch.equal(in_order, part)
    assert by_rows is not None and torch.equal(by_rows, whole[:, [1, 3, 5]])
    addend = recorder._piece(whole, whole, placed(Partial()), None)
    assert addend is not None and torch.equal(addend, whole / 2)
    assert recorder._piece(whole, whole, placed(PerRank()), None) is None


@pytest.mark.soak
def test_an_isolated_run_lists_each_wrong_sum() -> None:
    bug = BY_NAME["row output not summed"]
    case = bug.case
    with patch.object(run, "run_rank", planted(bug)):
        found = run.verify(
            case.make,
            case.config(dict(bug.keys)),
            case.arranged(*case.batch(0)),
            layout=case.layout,
            steps=2,
            isolate=True,
            explains=True,
        )
    names = [each.partition(",")[0] for each in found.wrong]
    assert found.isolated and names == [f"activation blocks.{i}.mlp.down" for i in range(4)], found.lines()
    assert "no Action and no collective" in found.between[-1]
