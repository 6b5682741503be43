"""The dtype of each operation at the four levels, on running engines; the numbers of a plain loop with these casts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.plain import worst
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World, join
from shardwise.kernels.attention import causal_attention
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.rms_norm import rms_norm
from shardwise.kernels.rotary import angles, rotate
from shardwise.kernels.tables.pairwise_dots import pairwise_dots
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.precision import operations
from shardwise.precision.operations import DtypeByOperation

F16, F32, F64, B16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
LABELS = torch.tensor([0, 3, 1])

# x [3, 4], image [3, 4, 6, 6], w [4, 4]: parameters or what parameters made, in the dtype of the level's weights
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, image, w: F.linear(x, w, w[0]),
    "linear of a parameter": lambda x, image, w: nn.Linear.forward(w.module, x),
    "@": lambda x, image, w: x @ w,
    "mm": lambda x, image, w: torch.mm(x, w),
    "addmm": lambda x, image, w: torch.addmm(w[0], x, w),
    "bmm": lambda x, image, w: x[None].bmm(w[None]),
    "einsum": lambda x, image, w: torch.einsum("bi,ij->bj", x, w),
    "conv2d": lambda x, image, w: F.conv2d(image, w[:, :, None, None]),
    "conv1d": lambda x, image, w: F.conv1d(image[:, :, 0], w[:, :, None]),
    "conv_transpose2d": lambda x, image, w: F.conv_transpose2d(image, w[:, :, None, None]),
    "attention": lambda x, image, w: F.scaled_dot_product_attention(
        x[None, None], (x @ w)[None, None], x[None, None]
    ),
    "our attention": lambda x, image, w: causal_attention(*[x[None, None]] * 3),
    "pairs": lambda x, image, w: pairwise_dots(image[:, :, 0]),
    "lstm": lambda x, image, w: torch.lstm(
        x[None], [x.new_zeros(1, 3, 1)] * 2, [w, w[:, :1]], False, 1, 0.0, False, False, False
    )[0],
}
IN_FP32: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x, image, w: (x @ w).softmax(-1),
    "log_softmax": lambda x, image, w: F.log_softmax(x @ w, -1),
    "layer_norm": lambda x, image, w: F.layer_norm(x @ w, (4,), w[0], w[1]),
    "group_norm": lambda x, image, w: F.group_norm(image, 2, w[0], w[1]),
    "batch_norm": lambda x, image, w: F.batch_norm(image, None, None, w[0], w[1], training=True),
    "our rms_norm": lambda x, image, w: rms_norm(x @ w, w[0], 1e-5),
    "norm": lambda x, image, w: (x @ w).norm(),
    "cross_entropy": lambda x, image, w: F.cross_entropy(x @ w, LABELS),
    "mse_loss": lambda x, image, w: F.mse_loss(x @ w, torch.zeros_like(x @ w)),
    "sum": lambda x, image, w: (x @ w).sum(),
    "mean": lambda x, image, w: torch.mean(x @ w),
    "cumsum": lambda x, image, w: (x @ w).cumsum(0),
    "exp": lambda x, image, w: (x @ w).exp(),
    "log": lambda x, image, w: (x @ w).abs().add(1).log(),
    "pow": lambda x, image, w: (x @ w) ** 2,
    "softplus": lambda x, image, w: F.softplus(x @ w),
    "fft": lambda x, image, w: torch.fft.rfft(x).real,
    "vector_norm": lambda x, image, w: torch.linalg.vector_norm(x @ w),
}
AS_INPUTS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda x, image, w: F.relu(x @ w),
    "gelu": lambda x, image, w: F.gelu(x @ w),
    "our rotation": lambda x, image, w: rotate(
        (x @ w)[None, None], angles(0, 3, 4, 1e4, torch.device("cpu"))
    ),
}
ALWAYS_FP32: dict[str, Callable[..., Tensor]] = {
    "our cross_entropy": lambda x, image, w: cross_entropy(x @ w, LABELS),
}


class Parts(nn.Module):
    """Runs every operation and notes the dtype of its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Linear(4, 4)
        self.norm = nn.BatchNorm2d(4)
        self.seen: dict[str, torch.dtype] = {}
        self.told: dict[str, str] = {}

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        w: Any = self.w.weight * 1.0
        w.module = self.w
        image = image + 0 * self.norm(image).to(image.dtype)
        total = torch.zeros(())
        for name, run in {**PRODUCTS, **IN_FP32, **AS_INPUTS, **ALWAYS_FP32}.items():
            try:
                result = run(x, image, w)
            except RuntimeError as error:  # fp16 has no such operation on this device
                self.told[name] = str(error)
                continue
            self.seen[name] = result.dtype
            total = total + result.float().square().mean()
        return total


def seen(world: World, precision: Any, stage: int, **config: Any) -> dict[str, torch.dtype]:
    model = Parts()
    settings = {"precision": precision, "zero": {"stage": stage}, "optimizer": {"type": "sgd"}, **config}
    engine = shardwise.initialize(model, settings, world=world)
    generator = torch.Generator().manual_seed(world.rank)
    batch = (torch.randn(3, 4, generator=generator), torch.randn(3, 4, 6, 6, generator=generator))
    result = engine.train_step([batch])
    assert result.loss < 1e3
    assert set(model.told) <= {"fft"}, model.told
    dtypes = {"weights": model.w.weight.dtype, "norms": model.norm.weight.dtype, **model.seen}
    dtypes["statistics"] = model.norm.running_var.dtype
    engine.close()
    return dtypes


def wanted(products: torch.dtype, in_fp32: torch.dtype) -> dict[str, torch.dtype]:
    return (
        dict.fromkeys(PRODUCTS, products)
        | dict.fromkeys(IN_FP32, in_fp32)
        | dict.fromkeys(AS_INPUTS, products)
        | dict.fromkeys(ALWAYS_FP32, F32)
    )


LEVELS = {
    "O0": {**wanted(F32, F32), "weights": F32, "norms": F32, "statistics": F32},
    "O1": {**wanted(F16, F32), "weights": F32, "norms": F32, "statistics": F32},
    "O2": {**wanted(F16, F16), "weights": F16, "norms": F32, "statistics": F32},
    "O3": {**wanted(F16, F16), "weights": F16, "norms": F16, "statistics": F16},
}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_levels(level: str, stage: int) -> None:
    found = seen(join(quiet=True), {"amp": level}, stage)
    assert found == {name: dtype for name, dtype in LEVELS[level].items() if name in found}
    assert len(found) >= len(PRODUCTS) + len(IN_FP32)


@pytest.mark.parametrize("stage", [0, 2])
def test_o0_is_fp32_to_the_bit(stage: int) -> None:
    """The levels' table with all that changes: losses and weights of three steps."""

    def trained(precision: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4))
        config = {"precision": precision, "zero": {"stage": stage}, "optimizer": {"lr": 0.01}}
        engine = shardwise.initialize(model, config, loss=lambda m, x: F.cross_entropy(m(x), LABELS))
        losses = [torch.tensor(engine.train_step([torch.randn(3, 4)]).loss) for _ in range(3)]
        engine.close()
        return [*losses, *model.state_dict().values()]

    pairs = list(zip(trained({"amp": "O0"}), trained("fp32"), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(trained({"amp": "O1"}), trained("fp32"), strict=True))


class Net(nn.Module):
    """With ``narrow`` the casts of O1 are written out, and it is a plain model; without, the engine makes them."""

    def __init__(self, narrow: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.narrow = narrow
        self.conv, self.batch_norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(Mix(narrow) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        p, w = casts(self.narrow)
        x = F.conv1d(p(x), p(self.conv.weight), p(self.conv.bias), padding=1)
        x = self.batch_norm(w(x))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(p(self.norm(x)).mT.mT, p(self.head.weight), p(self.head.bias))
        return F.cross_entropy(w(logits).flatten(0, 1), labels.flatten()) + w(logits).exp().mean().log1p()


class Mix(nn.Module):
    def __init__(self, narrow: torch.dtype | None) -> None:
        super().__init__()
        self.narrow = narrow
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        p, w = casts(self.narrow)
        q, k, v = F.linear(p(self.norm(x)), p(self.qkv.weight), p(self.qkv.bias)).chunk(3, -1)
        scores = w(torch.matmul(p(q), p(k.mT))).softmax(-1)
        y = F.linear(p(torch.matmul(p(scores), p(v))), p(self.out.weight))
        return x + F.gelu(y) * w(y).pow(2).sum(-1, keepdim=True).rsqrt()


def casts(narrow: torch.dtype | None) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return (lambda x: x, lambda x: x) if narrow is None else (lambda x: x.to(narrow), lambda x: x.float())


def pieces(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 4, 4, generator=generator), torch.randint(0, 5, (3, 4), generator=generator)


def by_hand(narrow: torch.dtype, ranks: int, scale: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and weights after a step of SGD; each rank's batch with batch statistics of its own."""
    model = Net(narrow)
    for rank in range(ranks):
        (model(*pieces(rank)) * scale / ranks).backward()
    gradients = {name: each.grad / scale for name, each in model.named_parameters()}  # type: ignore[operator]
    return gradients, {name: each.detach() - 0.1 * gradients[name] for name, each in model.named_parameters()}


def equals_a_plain_loop(world: World, narrow: str, stage: int, config: dict[str, Any]) -> float:
    settings = {
        "precision": {"compute": "fp32", "operations": narrow, "loss_scale": 256.0},
        "zero": {"stage": stage},
        "optimizer": {"type": "sgd", "lr": 0.1},
        **config,
    }
    engine = shardwise.initialize(Net(), settings, world=world)
    wanted, after = by_hand(operations.DTYPES[narrow], world.size, 256.0 if narrow == "fp16" else 1.0)
    engine.backward(engine(*pieces(world.rank)))
    error = worst(engine.gradients(), wanted)
    engine.step()
    error = max(error, worst({name: engine.state_dict()[name] for name in after}, after))
    engine.close()
    return error


@pytest.mark.parametrize(
    ("narrow", "stage", "config"),
    [
        ("fp16", 0, {}),
        ("fp16", 3, {"zero": {"stage": 3, "units": ["blocks.*"]}}),
        ("bf16", 3, {"recompute": "full"}),
        ("fp16", 2, {"recompute": {"scope": "selective", "select": "operations"}}),
    ],
)
def test_o1_is_a_plain_loop_with_its_casts(
    ranks: Any, narrow: str, stage: int, config: dict[str, Any]
) -> None:
    for error in ranks(2).run(equals_a_plain_loop, narrow, stage, config):
        assert error <= 1e-6


def cut(
    world: World, narrow: str, mesh: dict[str, int], model: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of our language model; the first step is compared with the uncut model where it is cut."""
    policy = GptPolicy(layers=2, width=16, heads=2, context=8, vocab=12, **model)
    config = {
        "precision": {"compute": "fp32", "operations": narrow, "loss_scale": 256.0},
        "mesh": mesh,
        "batch": {"accumulation": 2},
        "zero": {"stage": 1},
    }
    engine = shardwise.initialize(Gpt(policy), config, world=world)
    batches = []
    for i in range(2):
        tokens = torch.randint(0, 12, (2, 8), generator=torch.Generator().manual_seed(i))
        batches.append((tokens, tokens.roll(1)))
    seen: list[dict[str, Tensor]] = []
    if mesh.get("pp", 1) == 1:
        for i, batch in enumerate(batches):
            engine.backward(engine(*batch))
            if i == 1:
                seen.append(engine.gradients())
            result = engine.step()
    else:
        result = engine.train_step(batches)
    seen.append(engine.state_dict())
    engine.close()
    return result.grad_norm + result.loss, seen[0]


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(
    ("narrow", "model"), [("bf16", {}), ("fp16", {"family": "gpt2"})], ids=["llama", "gpt2"]
)
def test_o1_of_cut_models(ranks: Any, narrow: str, mesh: dict[str, int], model: dict[str, Any]) -> None:
    wanted, whole = cut(join(quiet=True), narrow, {}, model)
    for found, gradients in ranks(2).run(cut, narrow, mesh, model):
        assert abs(found - wanted) <= (1e-6 if "pp" in mesh else 2e-2) * wanted
        if "tp" in mesh:
            assert worst(gradients, whole) <= 2e-2


def all_fp16(world: World, stage: int) -> float:
    """O3 on two ranks: gradients of a plain loop in fp16, summed in fp16."""
    engine = shardwise.initialize(
        Net(),
        {"precision": {"amp": "O3"}, "zero": {"stage": stage}, "optimizer": {"type": "sgd"}},
        world=world,
    )
    model = Net().half()
    for rank in range(world.size):
        x, labels = pieces(rank)
        (model(x.half(), labels) / world.size).backward()
    engine.backward(engine(*pieces(world.rank)))
    wanted = {name: each.grad for name, each in model.named_parameters()}
    error = worst(engine.gradients(), wanted)  # type: ignore[arg-type]
    engine.close()
    return error


@pytest.mark.parametrize("stage", [0, 2])
def test_under_two_ranks(ranks: Any, stage: int) -> None:
    """The levels' dtypes, and O3's numbers."""
    pool = ranks(2)
    for level in ("O1", "O3"):
        for found in pool.run(seen, {"amp": level}, stage):
            assert found == {name: dtype for name, dtype in LEVELS[level].items() if name in found}
    assert max(pool.run(all_fp16, stage)) <= 2e-3


def test_our_attention_is_the_formula_with_softmax_in_fp32() -> None:
    q, k, v = (torch.randn(2, 2, 70, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    with DtypeByOperation("bf16"):
        found = causal_attention(q, k, v)
    later = torch.ones(70, 70, dtype=torch.bool).triu(1)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    scores = ((q @ k.mT) * 8**-0.5).float().masked_fill(later, -torch.inf)
    assert torch.equal(found, scores.softmax(-1).bfloat16() @ v)
