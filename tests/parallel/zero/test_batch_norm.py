"""Batch norm: per rank by default, or of the joint batch, exactly as one process has it."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import UsageError
from shardwise.parallel.zero.batch_norm import synchronize_batch_norm
from tests.comm.test_collectives import group_of
from tests.engine.nets import seeded
from tests.engine.plain import train, worst
from tests.parallel.zero.cuda_batch_norm import on_the_cpu

LIMIT = 1e-10
SIZES = (5, 2)
"""Samples of rank 0 and 1: uneven."""


class Images(nn.Module):
    """Two and one dimensions, with and without weights, running averages by factor and by count, none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm2d(3),
                nn.BatchNorm2d(3, affine=False),
                nn.BatchNorm2d(3, momentum=None),
                nn.BatchNorm2d(3, track_running_stats=False),
            ]
        )
        self.last = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = torch.tanh(norm(x)) + x
        result: Tensor = (self.last(x.flatten(1)).squeeze(1) - target).square().mean()
        return result


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SIZES), 2, 4, 4, generator=generator, dtype=torch.float64)
    return x * 3 + 1, torch.randn(sum(SIZES), generator=generator, dtype=torch.float64)


def mine(step: int, rank: int) -> tuple[Tensor, Tensor]:
    start = sum(SIZES[:rank])
    x, target = batch(step)
    return x[start : start + SIZES[rank]], target[start : start + SIZES[rank]]


def synchronized(world: Any, stage: int, compile: str = "none") -> None:
    plain = seeded(Images)
    truth = train(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.05),
        [[(batch(step), 1.0)] for step in range(3)],
        lambda model, given: model(*given),
    )
    config = {
        "zero": {"stage": stage} | ({} if compile == "none" else {"units": ["last"]}),
        "batch_norm": "synchronized",
        "compile": {"scope": compile, "backend": "aot_eager"} if compile != "none" else {},
        "optimizer": {"type": "sgd", "lr": 0.05},
    }
    engine = shardwise.initialize(seeded(Images), config, world=world)
    for step, wanted in enumerate(truth):
        x, target = mine(step, world.rank)
        engine.backward(engine((x, target)), weight=len(x))
        # A bias before a batch norm has the gradient 0, up to rounding: errors are measured against 1 there.
        ones = {name: torch.ones_like(gradient) for name, gradient in wanted.gradients.items()}
        assert worst(engine.gradients(), wanted.gradients, ones) <= LIMIT
        result = engine.step()
        assert abs(result.loss - wanted.loss) <= LIMIT * wanted.loss
    state = engine.state_dict()
    assert worst(state, plain.state_dict()) <= LIMIT
    assert state["norms.0.num_batches_tracked"] == 3
    # In evaluation the running averages are used, and nobody waits for anybody.
    plain.eval()
    engine.eval()
    x, target = mine(9, world.rank)
    with torch.no_grad():
        assert abs(float(engine((x, target)) - plain(x, target))) <= LIMIT
        if world.rank == 0 and stage < 3:
            engine((x, target))
    engine.close()


@pytest.mark.parametrize("stage", range(4))
def test_synchronized_equals_one_process(ranks: Any, stage: int) -> None:
    ranks(2).run(synchronized, stage)


def fused(world: Any, stage: int) -> None:
    with on_the_cpu():
        synchronized(world, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_kernels_of_a_device_equal_one_process(ranks: Any, stage: int) -> None:
    """torch has the kernels for CUDA; here they are formulas in fp64."""
    ranks(2).run(fused, stage)


def by_both_forms(
    world: Any, sizes: tuple[int, ...], dtype: torch.dtype, channels_last: bool
) -> list[list[Tensor]]:
    """Return (output, gradients, running averages) by the plain form and by the kernels."""
    group = group_of(world, "auto")
    found = []
    for form in (nullcontext(), on_the_cpu()):
        with form:
            norm = nn.BatchNorm2d(3).to(dtype if dtype == torch.float64 else torch.float32)
            with torch.no_grad():
                norm.weight.copy_(torch.tensor([0.5, -2.0, 1.5]))
                norm.bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
            synchronize_batch_norm(norm, group)
            start = sum(sizes[: world.rank])
            every = torch.randn(
                sum(sizes), 3, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
            x = (every * 3 + 1)[start : start + sizes[world.rank]].to(dtype)
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            x.requires_grad_()
            y = norm(x)
            (
                y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
            ).sum().backward()
            gradients = [x.grad, norm.weight.grad, norm.bias.grad]
            assert all(each is not None for each in gradients)
            assert y.dtype == x.dtype
            found.append([y.detach(), *gradients, norm.running_mean, norm.running_var])
    return found


@pytest.mark.parametrize(
    ("sizes", "dtype", "channels_last", "limit"),
    [
        ((3, 2), torch.float64, False, 1e-12),
        ((3, 2), torch.float64, True, 1e-12),
        ((0, 3), torch.float64, False, 1e-12),
        ((3, 0), torch.float64, False, 1e-12),
        ((3, 2), torch.float32, False, 1e-5),
        ((3, 2), torch.bfloat16, False, 2e-2),
    ],
)
def test_both_forms_agree(
    ranks: Any, sizes: Any, dtype: torch.dtype, channels_last: bool, limit: float
) -> None:
    """A rank without samples takes part, and its gradients are 0."""
    for plain, kernels in ranks(2).run(by_both_forms, sizes, dtype, channels_last):
        for a, b in zip(plain, kernels, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.allclose(a.double(), b.double(), rtol=limit, atol=limit), (a, b)


def compiled(world: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # dynamo's own
        synchronized(world, 0, "blocks")


def test_synchronized_in_compiled_blocks(ranks: Any) -> None:
    """The compiler traced into the collective and ended in "all_reduce of batch statistics failed"."""
    ranks(2).run(compiled)


def test_per_rank_is_the_mean_of_the_ranks(ranks: Any) -> None:
    for errors in ranks(2).run(per_rank_gradients):
        assert max(errors) <= LIMIT


def per_rank_gradients(world: Any) -> list[float]:
    errors = []
    for stage in range(4):
        plain = seeded(Images)
        truth = train(
            plain,
            torch.optim.SGD(plain.parameters()),
            [[(mine(0, rank), 1.0) for rank in range(2)]],
            lambda model, given: model(*given),
        )[0]
        engine = shardwise.initialize(seeded(Images), {"zero": {"stage": stage}}, world=world)
        engine.backward(engine(mine(0, world.rank)))
        errors.append(worst(engine.gradients(), truth.gradients, truth.addends))
        engine.step()
        # Running averages are those of this rank's own batches.
        alone = seeded(Images)
        alone(*mine(0, world.rank))
        state = engine.state_dict()
        errors.append(worst({n: state[n] for n, _ in alone.named_buffers()}, dict(alone.named_buffers())))
        engine.close()
    return errors


def test_there_must_be_a_batch_norm() -> None:
    with pytest.raises(UsageError, match="no batch norm"):
        shardwise.initialize(nn.Linear(2, 1), {"batch_norm": "synchronized"})
