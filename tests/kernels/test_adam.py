"""The plain step of Adam on a flat shard: torch's own."""

import pytest
import torch

from shardwise.kernels.adam import AdamRule, adam_step

RULE = AdamRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str)
def test_equals_torch(decoupled: bool, dtype: torch.dtype, bound: float) -> None:
    w = torch.randn(50, dtype=dtype)
    theirs = w.clone().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    m, v, step, cast = torch.zeros_like(w), torch.zeros_like(w), torch.zeros(()), torch.empty(50).bfloat16()
    for _ in range(4):
        grad = torch.randn(50, dtype=dtype)
        theirs.grad = grad / 7
        optimizer.step()
        adam_step(RULE._replace(decoupled=decoupled), w, grad, m, v, step, 7.0, cast)
    assert torch.allclose(w, theirs.detach(), rtol=bound, atol=bound)
    assert torch.equal(cast, w.bfloat16())
    assert step == 4


def test_sizes_that_differ_are_refused() -> None:
    w = torch.zeros(4)
    with pytest.raises(ValueError, match="of one size"):
        adam_step(RULE, w, torch.zeros(5), w, w, torch.zeros(()))
