"""What a policy names: modules by class, buffers, gradients on a narrow wire; what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.precision.modules import Router, model
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.comm.world import World, join
from shardwise.config.run import RunConfig
from shardwise.deepspeed.training.recompute_calls import checkpoint
from shardwise.kernels.rms_norm import rms_norm
from shardwise.precision import operations
from shardwise.precision.operations import DtypeByOperation, functions_named
from shardwise.precision.policy import PrecisionPolicy

F16, F32, B16 = torch.float16, torch.float32, torch.bfloat16


def squared(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def kept(world: World, stage: int) -> dict[str, torch.dtype]:
    net = model()
    keep = ["class:LayerNorm", "2.bias"]
    config = {
        "precision": {"compute": "bf16", "buffers": "bf16", "keep_fp32": keep},
        "zero": {"stage": stage},
    }
    engine = shardwise.initialize(net, config, loss=squared, world=world)
    engine.train_step([torch.randn(3, 4, generator=torch.Generator().manual_seed(world.rank))])
    dtypes = {name: tensor.dtype for name, tensor in engine.state_dict().items()}
    planned = {(info.kind, info.name): info.dtype for info in engine.plan.registry}
    assert all(planned.get(("buffer", name), dtype) == dtype for name, dtype in dtypes.items())
    engine.close()
    assert {tensor.dtype for tensor in net.state_dict().values()} == {F32, torch.int64}
    return dtypes


@pytest.mark.parametrize("stage", [0, 3])
def test_classes_and_buffers_that_stay_in_fp32(ranks: Any, stage: int) -> None:
    wanted = dict.fromkeys(model().state_dict(), B16)
    wanted |= dict.fromkeys(["1.weight", "1.bias", "2.bias"], F32)
    wanted |= dict.fromkeys(["2.count", "3.num_batches_tracked"], torch.int64)
    assert ranks(2).run(kept, stage) == [wanted] * 2


def sent(world: World, stage: int, narrow: list[str]) -> tuple[int, dict[str, Tensor]]:
    precision = {"compute": "fp32", "operations": "bf16", "narrow_reduce": narrow}
    engine = shardwise.initialize(
        model(), {"precision": precision, "zero": {"stage": stage}}, loss=squared, world=world
    )
    engine.traffic.clear()
    engine.backward(engine(torch.randn(3, 4, generator=torch.Generator().manual_seed(world.rank))))
    gradients = engine.gradients()
    engine.step()
    total = engine.traffic.total("gradients")
    engine.close()
    return total.bytes, gradients


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_of_products_on_a_narrow_wire(ranks: Any, stage: int) -> None:
    """Those of products are 16-bit numbers already: nothing is lost on the way, and half of the bytes."""
    (wide, wanted), (narrow, found) = (
        ranks(2).run(sent, stage, each)[0] for each in ([], ["class:Linear", "class:Conv1d"])
    )
    linears = 4 * (4 * 4 + 4) * 2
    assert narrow < wide - linears // 4
    for name, gradient in found.items():
        exact = "linear" not in name and not name.startswith("0")
        assert torch.allclose(gradient, wanted[name], rtol=0 if exact else 1e-2, atol=0 if exact else 1e-4), (
            name
        )


def in_kept_modules(world: World, config: dict[str, Any]) -> list[torch.dtype]:
    net, seen = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Router(), Router())), []
    engine = shardwise.initialize(
        net,
        {"precision": {"amp": "O1", "keep_fp32": ["class:Router"], "loss_scale": 8}, **config},
        loss=squared,
        world=world,
    )
    for name in ("0", "1.0.linear"):
        net.get_submodule(name).register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    engine.backward(engine(torch.randn(3, 4)))
    engine.step()
    engine.close()
    assert "forward" not in vars(net[1])
    return seen


@pytest.mark.parametrize(
    "config", [{"zero": {"stage": 2}}, {"recompute": "full", "zero": {"units": ["1"]}}], ids=str
)
def test_kept_modules_compute_in_fp32(config: dict[str, Any]) -> None:
    found = in_kept_modules(join(quiet=True), config)
    assert found == [F16, F32] + [F32] * (len(found) - 2) and (len(found) > 2) == ("recompute" in config)


# Lists -------------------------------------------------------------------------------------------------------------


def test_every_name_is_one_of_torchs() -> None:
    lists = (operations.PRODUCTS, operations.IN_FP32, operations.WIDEST, operations.IN_PLACE)
    names = [name for each in lists for name in each]
    assert [name for name in names if not list(functions_named(name))] == []
    assert len(names) == len(set(names))


def test_attention_in_parts() -> None:
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    with DtypeByOperation("bf16"):
        found, weights = attention(x, x, x)
        fast, _ = attention(x, x, x, need_weights=False)
    assert (found.dtype, weights.dtype, fast.dtype) == (B16, F32, B16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(x, x, x)[1].dtype == B16, "torch leaves softmax in 16 bits on the CPU"
    exact, of_exact = attention(x, x, x)
    assert torch.allclose(found.float(), exact, atol=2e-2) and torch.allclose(weights, of_exact, atol=2e-2)


def test_mixed_dtypes_meet() -> None:
    """Operations that take one dtype alone: the widest; in place, that of what is written."""
    x, index = torch.randn(3, 4), torch.tensor([0, 2])
    with DtypeByOperation("fp16"):
        half = x @ x.mT
        assert half.dtype == F16
        assert torch.zeros(3, 3).index_add(0, index, half[:2]).dtype == F32
        assert torch.zeros(3, 3).scatter_add(0, torch.zeros(3, 3, dtype=torch.int64), half).dtype == F32
        total = torch.zeros(3, 3)
        assert total.addmm_(half, half).dtype == F32 and total.index_add_(0, index, half[:2]).dtype == F32
        assert F.prelu(half, torch.ones(1)).dtype == F32
        assert half.sum(dtype=F16).dtype == F16 and half.double().sum().dtype == torch.float64
        assert (half.double() @ half.double()).dtype == torch.float64
        masked = torch.full((3, 3), torch.finfo(F32).min).triu(1)
        mixed = F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], attn_mask=masked)
        assert mixed.dtype == F16 and bool(mixed.isfinite().all())
    assert (x @ x.mT).dtype == F32


def test_linear_keeps_the_weight_and_no_copy() -> None:
    layer, x = nn.Linear(4, 8), torch.randn(3, 4)
    with DtypeByOperation("bf16"):
        y = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
    kept = y.grad_fn.saved_tensors
    assert kept[1] is layer.weight and kept[0].dtype == B16


class Mixed(nn.Module):
    """Parts that take one dtype, or fp32 alone, given what a product has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)
        self.losses = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 4], div_value=2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z, state = self.lstm(y)
        z, _ = self.lstm(y, state)
        kept = torch.zeros(3, 4)
        kept[torch.tensor([True, False, True])] = z[:2, 0]
        pooled = F.avg_pool3d(y[None, None], 1) + F.rrelu(y, training=True) + self.linear(x[0, 0])
        assert (y.dtype, z.dtype, pooled.dtype) == (F16, F16, F32)
        return kept.sum() + pooled.sum() + self.losses(z[:, 0], torch.tensor([0, 5, 3]))[1]


def test_parts_that_take_one_dtype() -> None:
    config = {"precision": {"amp": "O1", "loss_scale": 8.0}}
    engine = shardwise.initialize(Mixed(), config, world=join(quiet=True))
    assert not engine.train_step([torch.randn(3, 2, 4)]).skipped
    engine.close()
    assert "forward" not in vars(engine.module.lstm)


def test_gradients_inside_a_pass_keep_their_dtypes() -> None:
    """A penalty on a gradient, taken by the loss: backward passes are not cast once more, and twice differentiable."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())

    def penalty(linear: Any) -> Tensor:
        (grad,) = torch.autograd.grad(linear(x).float().pow(2).sum(), x, create_graph=True)
        return grad.square().sum()

    with DtypeByOperation("bf16"):
        penalty(layer).backward()
    penalty(lambda x: F.linear(x.bfloat16(), plain.weight.bfloat16(), plain.bias.bfloat16())).backward()
    assert layer.weight.grad is not None and plain.weight.grad is not None
    assert torch.allclose(layer.weight.grad, plain.weight.grad, rtol=2e-2)


def test_the_backward_of_a_function_in_python_is_let_alone() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    exact = torch.autograd.grad(rms_norm(x, weight, 0.0).square().sum(), x)[0]
    with DtypeByOperation("bf16"):
        assert torch.equal(torch.autograd.grad(rms_norm(x, weight, 0.0).square().sum(), x)[0], exact)


def test_deepspeeds_checkpoint_runs_again_in_the_same_dtypes() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    seen: list[torch.dtype] = []

    def block(x: Tensor) -> Tensor:
        y = layer(x)
        seen.append(y.dtype)
        return y.exp()

    with DtypeByOperation("bf16"):
        y = checkpoint(block, x)
    y.sum().backward()
    assert seen == [B16, B16] and y.dtype == F32


# Refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"amp": "O5"}, "precision.amp: .*'O0', 'O1', 'O2' or 'O3'.*'O5'"),
        ({"amp": "O2", "compute": "fp32"}, "amp: O2 sets compute: fp16, beside which compute: fp32 is given"),
        ({"amp": "O3", "loss_scale": 8}, "amp: O3 sets loss_scale: 1.0, beside which loss_scale: 8 is given"),
        ({"operations": "bf16", "compute": "fp16"}, "operations: bf16 narrows products of fp32 weights"),
        ({"operations": "bf16", "compute": "fp64"}, "set compute: fp32 or bf16"),
        ({"narrow_reduce": ["*"]}, "narrow_reduce: .*operations, which is not set"),
        ({"loss_scale": 0}, "precision.loss_scale.init_scale"),
    ],
    ids=str,
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        RunConfig.parse({"precision": given})
    assert "\n" not in str(error.value)


def test_levels_with_bf16_and_again() -> None:
    """``compute: bf16`` (O1: ``operations``) beside a level takes bf16 for fp16; a printed policy reads back."""
    o1, o3 = {"amp": "O1", "operations": "bf16"}, {"amp": "O3", "compute": "bf16"}
    for given, key in ((o3, "master"), (o1, "operations")):
        policy = PrecisionPolicy.model_validate(given)
        assert getattr(policy, key) == "bf16"
        assert PrecisionPolicy.model_validate(policy.model_dump()) == policy
    assert PrecisionPolicy.model_validate({"amp": "O1"}).compute == "fp32"
