"""Adam on a flat shard in one launch: the plain form's numbers but for the last bit."""

import pytest
import torch

from shardwise.kernels.adam import AdamRule, adam_step
from shardwise.optim import flat as flats
from shardwise.optim.classes import from_policy
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.policy import OptimizerPolicy

from .cases import DEVICE, DTYPES, plain


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("elements", "beta1"), [(1, 0.9), (1500, 0.0)])
def test_the_plain_forms_numbers(decoupled: bool, dtype: torch.dtype, elements: int, beta1: float) -> None:
    rule = AdamRule(3e-3, beta1, 0.999, 1e-8, 0.1, decoupled)
    w, m, v = torch.randn(3, elements, device=DEVICE).abs()
    grad = torch.randn(elements, device=DEVICE).to(dtype)
    ours, theirs = ([each.clone() for each in (w, m, v)] for _ in range(2))
    for held in (ours, theirs):
        held += [torch.zeros(elements, dtype=torch.bfloat16, device=DEVICE), torch.zeros((), device=DEVICE)]
    for _ in range(2):
        adam_step(rule, ours[0], grad, *ours[1:3], ours[4], 0.3, ours[3])
        with plain():
            adam_step(rule, theirs[0], grad, *theirs[1:3], theirs[4], 0.3, theirs[3])
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert torch.allclose(a, b, rtol=5e-7, atol=1e-7)
    assert torch.equal(ours[3], ours[0].bfloat16())
    assert torch.equal(ours[1], theirs[1]), "no root, no quotient: the same bits"
    assert ours[4] == 2


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_flat_optimizer_takes_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, numbers of the step, state and all as with torch's; the rounded weight is written on the way."""
    masters = [torch.linspace(-1, 1, 12, device=DEVICE) for _ in range(2)]
    make = from_policy(OptimizerPolicy(type=kind, lr=0.1, weight_decay=0.2))
    ours, theirs = (FlatOptimizer(master, make, 0) for master in masters)
    weight = masters[0].bfloat16()
    with monkeypatch.context() as patch:
        for step, unused in enumerate([[], [(3, 7)], []]):
            grad = torch.randn(12, device=DEVICE).bfloat16()
            rates = [{"lr": 0.1 / (1 + step)}]
            assert ours.step(grad.clone(), 4.0, rates, unused, weight)
            with plain():
                assert not theirs.step(grad.clone(), 4.0, rates, unused)
        patch.setattr(flats, "adam_step", None)
        with pytest.raises(TypeError):
            ours.step(grad, 4.0, rates)
    assert torch.allclose(masters[0], masters[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(weight, masters[0].bfloat16())
    assert [scalars[:2] + (scalars.scalars["step"],) for scalars in ours.state.scalars()] == [
        (0, 3, 3.0), (3, 7, 2.0), (7, 12, 3.0)
    ]  # fmt: skip
    assert [row[:3] for row in ours.state.scalars()] == [row[:3] for row in theirs.state.scalars()]
