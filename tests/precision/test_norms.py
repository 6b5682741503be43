"""Norms with running statistics under 16-bit compute: fp32 weights beside 16-bit inputs, as autocast has it."""

from typing import Any

import pytest
import torch
from tests.engine.nets import seeded
from tests.engine.plain import worst
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import join

F32 = torch.float32
SCALE = 512.0
"""Of one piece's loss, by hand and in the engine, which divides its scale by the weight of two pieces: fp16 rounds what
is small by where it stands."""


class Stage(nn.Module):
    """A convolution and its norm around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.relu(self.norm(self.conv(x)))
        return y


class Vision(nn.Module):
    """Blocks with batch norms, one instance norm with statistics, one layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, bias=False)
        self.blocks = nn.ModuleList(Stage() for _ in range(2))
        self.inner = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(self.inner(x).mean((2, 3))))
        return nn.functional.cross_entropy(logits.float(), labels)


def images(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(4, 1, 6, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def by_hand(dtype: torch.dtype, pieces: int) -> dict[str, Tensor]:
    """Mean gradients of a 16-bit model whose norms with statistics are left in fp32."""
    model = seeded(Vision, dtype=F32).to(dtype)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.float()
    sums = {name: torch.zeros_like(p, dtype=F32) for name, p in model.named_parameters()}
    for i in range(pieces):
        model.zero_grad()
        pictures, labels = images(i)
        (model(pictures.to(dtype), labels) * SCALE).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad.float() / (pieces * SCALE)
    return sums


def trained(world: Any, precision: str, config: dict[str, Any]) -> tuple[float, list[str]]:
    """It was "expected scalar type BFloat16 but found Float" at the first norm."""
    settings = {"precision": precision, "optimizer": {"type": "sgd", "lr": 0.1}, **config}
    if precision == "fp16":
        settings["precision"] = {"compute": "fp16", "loss_scale": {"init_scale": 2 * SCALE}}
    model = seeded(Vision, dtype=F32)
    engine = shardwise.initialize(model, settings, world=world)
    engine.backward(engine(*images(world.rank)))
    error = worst(engine.gradients(), by_hand(torch.bfloat16 if precision == "bf16" else torch.float16, 2))
    engine.step()
    assert model.blocks[0].norm.weight.dtype == F32
    assert model.norm.weight.dtype == model.blocks[0].conv.weight.dtype != F32
    engine.evaluate([(images(5), 1.0)])
    notes = list(engine.plan.notes)
    engine.close()
    return error, notes


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 0), ("bf16", 3), ("fp16", 2)])
def test_batch_norms_train_in_16_bits(ranks: Any, precision: str, stage: int) -> None:
    for error, notes in ranks(2).run(trained, precision, {"zero": {"stage": stage}, "recompute": "full"}):
        assert error <= 1e-6
        assert (
            "3 norms with running statistics keep fp32 weights: blocks.0.norm, blocks.1.norm, inner" in notes
        )


def staged(world: Any) -> list[float]:
    config = {"mesh": {"pp": world.size}, "precision": "bf16", "batch": {"accumulation": 2}}
    model = seeded(lambda: nn.Sequential(*(Stage() for _ in range(4))), dtype=F32)
    engine = shardwise.initialize(model, config, world=world, loss=lambda model, batch: model(batch).mean())
    batches = [torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    result = engine.train_step(batches)
    engine.close()
    return [result.loss, result.grad_norm]


def test_batch_norms_in_a_pipeline(ranks: Any) -> None:
    alone = staged(join(quiet=True))
    for found in ranks(2).run(staged):
        assert found == pytest.approx(alone, rel=1e-6)
