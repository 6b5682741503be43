"""Backward passes in two parts equal one process and 1f1b: I gives gradients of inputs, W later those of weights."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.kernels import deferred
from shardwise.kernels.deferred import ProductQueue
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import Kind
from tests.engine.conformance import Conformance
from tests.engine.halves import in_halves
from tests.engine.nets import LLAMA, seeded
from tests.engine.test_experts import Mixture
from tests.engine.test_model_parallel import Figures, Layout, measure

LAYOUTS = [
    (Layout(pp=2, microbatches=1), 0),
    (Layout(pp=2, microbatches=3, tile=5), 1),
    (Layout(pp=2, microbatches=4, schedule="zb_v", recompute="full"), -1),
    (Layout(pp=2, dp=2, stage=3, microbatches=3), 1),
    (Layout(pp=2, dp=2, stage=2, microbatches=3, schedule="zb_h1", family="gpt2"), -1),
    (Layout(pp=2, dp=2, stage=3, microbatches=3, schedule="zb_v", recompute="full"), -1),
    (Layout(pp=2, tp=2, microbatches=3, sequence=False, schedule="zb_h1", family="gpt2"), -1),
    (Layout(pp=2, tp=2, microbatches=4, schedule="zb_h1", recompute="selective"), -1),
    (Layout(pp=2, cp=2, microbatches=3, schedule="zb_h1", recompute="full"), -1),
]
"""Layouts, and the number of microbatches by which W is behind I; -1: the schedule itself has I and W."""
EVERY = [
    *(
        (
            Layout(pp=pp, microbatches=m, schedule=name, recompute=how, layers=2 * pp, family=family),
            -1,
        )
        for pp, how, family in ((2, "none", "llama"), (3, "full", "gpt2"), (4, "selective", "llama"))
        for m in range(1, 9)
        for name in ("zb_h1", "zb_v", "dualpipe_v", "zb_greedy")
    ),
    *(
        (Layout(pp=2, **{axis: 2}, stage=stage, microbatches=3, schedule=name, recompute=how), -1)
        for axis in ("dp", "tp", "cp")
        for stage in range(4)
        for name in ("zb_h1", "zb_v", "dualpipe_v")
        for how in ("none", "full", "selective")
    ),
    *(
        (Layout(pp=2, tp=2, sequence=False, microbatches=3, schedule=name, kv_heads=1), -1)
        for name in ("zb_h1", "zb_v", "zb_greedy")
    ),
    (
        Layout(pp=2, dp=2, stage=3, microbatches=4, schedule="zb_h1", reshard_after_forward=False),
        -1,
    ),
    *((Layout(pp=2, dp=2, tp=2, stage=stage, microbatches=3, schedule="zb_v"), -1) for stage in range(4)),
]


def measure_halves(world: Any, layouts: list[tuple[Layout, int]]) -> list[Figures]:
    found = []
    for layout, delay in layouts:
        with in_halves(delay):
            found.append(measure(world, layout))
    return found


def check(ranks: Any, table: list[tuple[Layout, int]], size: int) -> None:
    here = [each for each in table if each[0].size == size]
    by_rank = ranks(size).run(measure_halves, here, timeout_s=600.0)
    worst = {
        str(layout): Figures(*(max(column) for column in zip(*rows, strict=True)))
        for (layout, _), *rows in zip(here, *by_rank, strict=True)
    }
    assert not {name: each for name, each in worst.items() if max(each) > 1e-10}


@pytest.mark.parametrize("size", [2, 4])
def test_halves_equal_one_process(ranks: Any, size: int) -> None:
    check(ranks, LAYOUTS, size)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_layout_in_halves_equals_one_process(ranks: Any, size: int) -> None:
    check(ranks, EVERY, size)


# Planted bugs --------------------------------------------------------------------------------------------------------


def forgotten(queue: ProductQueue, microbatch: int, unit: int) -> Any:
    """W is left out."""
    RIGHT_TAKE(queue, microbatch, unit)
    return iter(())


def of_another(grad: Tensor, x: Tensor, transposed: bool = False) -> Tensor:
    """W multiplies by the input of another sample."""
    return RIGHT_PRODUCT(grad, x.roll(1, 0), transposed)


def twice(queue: ProductQueue, parameter: nn.Parameter, product: Any, *held: Tensor) -> None:
    """A gradient that came in I is counted again in W."""
    for _ in range(1 + (parameter.dim() == 1)):
        RIGHT_PUT(queue, parameter, product, *held)


RIGHT_TAKE, RIGHT_PUT, RIGHT_PRODUCT = ProductQueue.take, ProductQueue.put, deferred.weight_product
BUGS: dict[str, tuple[Any, str, Any]] = {
    "forgotten": (ProductQueue, "take", forgotten),
    "of_another": (deferred, "weight_product", of_another),
    "twice": (ProductQueue, "put", twice),
    "none": (ProductQueue, "put", RIGHT_PUT),
}


def measure_bugs(world: Any) -> dict[str, float]:
    layout, found = Layout(pp=2, microbatches=4, stage=0, schedule="zb_h1", family="gpt2"), {}
    for name, (owner, method, wrong) in BUGS.items():
        with patch.object(owner, method, wrong):
            found[name] = max(measure(world, layout, check="off", steps=1)[:4])
    return found


def test_a_bug_in_w_is_seen(ranks: Any) -> None:
    by_rank = ranks(2).run(measure_bugs)
    worst = {name: max(found[name] for found in by_rank) for name in by_rank[0]}
    assert worst.pop("none") <= 1e-10 and min(worst.values()) > 1e-4, worst


def count_forwards(world: Any, schedule: str) -> list[int]:
    model = plain(width=32)
    config = {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": schedule, "partition": "uniform"},
        "batch": {"accumulation": MICROBATCHES},
        "recompute": "full",
        "check_first_step": "off",
    }
    engine = shardwise.initialize(model, config, world=world)
    tokens = torch.zeros(2 * MICROBATCHES, 6, dtype=torch.long)
    parts = [(part, part) for part in tokens.chunk(MICROBATCHES)]
    engine.train_step(parts)
    calls: Counter[int] = Counter()
    for stage in engine._parts.stages:
        for name, module in stage.module.named_modules():
            if name.endswith("attention_norm") and type(module).__name__ == "RmsNorm":
                module.register_forward_hook(lambda *given, name=name: calls.update([name]))
    engine.train_step(parts)
    engine.close()
    return sorted(calls.values())


def test_a_recomputed_block_runs_its_forward_pass_twice(ranks: Any) -> None:
    for schedule in ("zb_h1", "zb_v"):
        for found in ranks(2).run(count_forwards, schedule):
            assert found == [2 * MICROBATCHES] * 2, schedule


# Beside other techniques, against 1f1b -------------------------------------------------------------------------------

SIZES = {"layers": 4, "width": 16, "heads": 2, "context": 8, "vocab": 17, "hidden": 24}
MICROBATCHES = 4


class Adapter(nn.Module):
    """A frozen linear layer with two trained matrices of low rank beside it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 2, bias=False)
        self.up = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.up(self.down(x))
        return y


def plain(**given: Any) -> nn.Module:
    return seeded(Gpt, GptPolicy(**{**SIZES, **given}))


def adapted() -> nn.Module:
    model = plain()
    model.requires_grad_(False)
    torch.manual_seed(1)
    for block in model.blocks:
        block.attention.qkv, block.mlp.down = Adapter(block.attention.qkv), Adapter(block.mlp.down)
    return model


def partly_frozen() -> nn.Module:
    model = plain()
    model.blocks[0].requires_grad_(False)
    model.blocks[3].mlp.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


def foreign(name: str, **given: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**given, vocab_size=17, tie_word_embeddings=False)
    made: nn.Module = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(
        config
    )
    return made


def llama() -> nn.Module:
    return foreign("Llama", **{**LLAMA, "num_hidden_layers": 4})


def gpt2() -> nn.Module:
    return foreign("GPT2", n_embd=16, n_layer=4, n_head=2, n_positions=8, attn_pdrop=0.0)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dropout": (lambda: plain(dropout=0.2), {"recompute": "full"}),
    "tied head": (lambda: plain(tied_head=True, family="gpt2"), {}),
    "frozen": (partly_frozen, {"zero": {"stage": 3}}),
    "adapters": (adapted, {"zero": {"stage": 2}, "recompute": "full"}),
    "fp16": (plain, {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0**8}}}),
    "offload": (
        plain,
        {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host", "activations": "host"}},
    ),
    "experts": (lambda: seeded(Mixture), {"mesh": {"pp": 2, "dp": 2, "ep": 2}, "recompute": "full"}),
    "transformers": (llama, {"recompute": "full"}),
    "Conv1D": (gpt2, {"zero": {"stage": 1}}),
    "unit norms": (plain, {"monitor": {"unit_norms": True}, "zero": {"stage": 2}}),
}
IN_SUITE = ("adapters", "offload", "experts")


class Run:
    """Losses, norms, weights and departures of some steps, and the products that waited."""

    def __init__(self, world: Any, name: str, schedule: str) -> None:
        make, given = CASES[name]
        model = make()
        self.waited = 0
        put = ProductQueue.put

        def counted(queue: ProductQueue, *args: Any) -> None:
            self.waited += 1
            put(queue, *args)

        mesh = given.get("mesh", {"pp": 2, "dp": world.size // 2})
        config = {
            "mesh": mesh,
            "pipeline": {"schedule": schedule, "partition": "uniform"},
            "batch": {"accumulation": MICROBATCHES},
            "optimizer": {"type": "adamw", "lr": 0.01},
            "precision": given.get("precision", "fp32"),
            "comm": {"timeout_s": 20.0},
            "check_first_step": "off",
            **{key: value for key, value in given.items() if key not in ("mesh", "precision")},
        }
        with patch.object(ProductQueue, "put", counted):
            engine = shardwise.initialize(model, config, world=world)
            conformance = Conformance(engine)
            self.numbers = []
            for step in range(3):
                generator = torch.Generator().manual_seed(step * 10 + engine.dp_index)
                tokens = torch.randint(0, 13, (2 * MICROBATCHES, 6), generator=generator)
                parts = [self.batch(model, part) for part in tokens.chunk(MICROBATCHES)]
                result = engine.train_step(parts)
                self.numbers.append((result.loss, result.skipped))
            self.state = {name: tensor.flatten().tolist() for name, tensor in engine.state_dict().items()}
            self.departures = conformance.departures
            self.later = engine.plan.own.later_units
            self.stages = tuple(engine.plan.own.stages)
            self.kinds = Counter(action.kind for action in engine.plan.own.actions)
            self.notes = engine.plan.notes
            engine.close()

    @staticmethod
    def batch(model: nn.Module, tokens: Tensor) -> Any:
        is_foreign = type(model).__module__.startswith("transformers")
        return {"input_ids": tokens, "labels": tokens} if is_foreign else (tokens, tokens)


def compare(world: Any, name: str) -> list[str]:
    """What differs from 1f1b, in words."""
    wanted = Run(world, name, "1f1b")
    found = []
    for schedule in ("zb_h1", "zb_v"):
        got = Run(world, name, schedule)
        found += [f"{schedule}: {text}" for text in got.departures]
        if schedule == "zb_h1" and got.numbers != wanted.numbers:
            found.append(f"{schedule}: {got.numbers} where 1f1b has {wanted.numbers}")
        if schedule == "zb_h1" and got.state != wanted.state:
            found.append(f"{schedule}: other weights than 1f1b's")
        waits_for_none = got.stages == (0,)  # no rank waits for the gradient of the first stage's input: B
        if bool(got.kinds[Kind.W]) == waits_for_none or (got.later and not got.waited):
            found.append(f"{schedule}: nothing waited")
    return found


def compare_all(world: Any, names: list[str]) -> dict[str, list[str]]:
    return {name: compare(world, name) for name in names}


def differences(ranks: Any, names: list[str]) -> dict[str, list[str]]:
    by_rank = ranks(4).run(compare_all, names, timeout_s=600.0)
    return {name: every for name in names if (every := [text for found in by_rank for text in found[name]])}


def test_halves_beside_other_techniques_have_the_bits_of_1f1b(ranks: Any) -> None:
    assert not differences(ranks, list(IN_SUITE))


@pytest.mark.soak
def test_halves_beside_every_technique_have_the_bits_of_1f1b(ranks: Any) -> None:
    assert not differences(ranks, [name for name in CASES if name not in IN_SUITE])
