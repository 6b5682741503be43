"""Linear layers in fp8: the numbers of torchao alone on every layout, bytes of their gathers, and what is refused."""

import copy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from tests.engine.conformance import Conformance
from tests.engine.nets import seeded
from tests.precision.fp8_net import (
    FP8,
    HIDDEN,
    LAYERS,
    WIDTH,
    Curve,
    batch,
    grow,
    net,
    optimizer_of,
    plain,
)
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.comm.world import World, join
from shardwise.engine.fit.foresee import foresee
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.zero.cost import unit_bytes
from shardwise.plan.action import Kind
from shardwise.precision.fp8 import check_device, check_pieces, fp8_layers
from shardwise.precision.policy import PrecisionPolicy

STEPS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def trained(
    world: World, compute: str, recipe: str = "tensorwise", writes: tuple[int, ...] = (), **config: Any
) -> Curve:
    """The curve of an engine whose dp ranks get one microbatch each."""
    model = net(DTYPES[compute])
    precision = {"compute": compute, "master": compute, "grad": compute, "fp8_recipe": recipe, **FP8}
    settings = {"precision": precision, "check_first_step": "off", **config}
    engine = shardwise.initialize(model, settings, world=world, optimizer=optimizer_of)
    losses = []
    for step in range(STEPS):
        if step in writes:
            with engine.full_parameters(write=True):
                grow(model)
        losses.append(engine.train_step([batch(step, engine.dp_index)]).loss)
    engine.close()
    return Curve(losses, {name: each.detach().clone() for name, each in model.named_parameters()})


def assert_equal(found: Curve, wanted: Curve) -> None:
    assert found.losses == wanted.losses
    unlike = [name for name, each in found.weights.items() if not torch.equal(each, wanted.weights[name])]
    assert not unlike, unlike


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_one_process_equals_torchao_to_the_bit(compute: str, recipe: str) -> None:
    found = trained(join(quiet=True), compute, recipe)
    assert_equal(found, plain(DTYPES[compute], recipe, STEPS, parts=1))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_two_ranks_equal_torchao_on_their_own_tokens_to_the_bit(ranks: Any, stage: int, recipe: str) -> None:
    truth = plain(torch.float32, recipe, STEPS, parts=2)
    for found in ranks(2).run(trained_at, stage, recipe):
        assert_equal(found, truth)


def trained_at(world: World, stage: int, recipe: str, writes: tuple[int, ...] = ()) -> Curve:
    return trained(world, "fp32", recipe, writes, zero={"stage": stage})


def test_changed_weights_get_new_scales(ranks: Any) -> None:
    """A script makes a weight 4 times as large between two steps: its scale is no longer that of the last update."""
    truth = plain(torch.float32, "tensorwise", STEPS, parts=2, writes=(1,))
    for found in ranks(2).run(trained_at, 3, "tensorwise", (1,)):
        assert_equal(found, truth)


# Slices and stages -------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """One step of a GPT: its loss and its gradients."""

    loss: float
    gradients: dict[str, Tensor]


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "tp, whole sequences": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}},
    "pp": {"mesh": {"pp": 2}, "batch": {"accumulation": 2}},
    "tp, zero 3": {"mesh": {"tp": 2, "dp": 2}, "zero": {"stage": 3}},
    "pp, zero 3": {"mesh": {"pp": 2, "dp": 2}, "zero": {"stage": 3}, "batch": {"accumulation": 1}},
}
SMALL = GptPolicy(layers=2, width=32, heads=2, hidden=32, context=16, vocab=17)


def one_step(world: World, *layouts: dict[str, Any]) -> list[Figures]:
    return [figures(world, FP8, each) for each in layouts]


def figures(world: World, precision: dict[str, Any], layout: dict[str, Any]) -> Figures:
    """The step on four sequences, one in each microbatch, or fewer microbatches of more."""
    model = seeded(Gpt, SMALL, dtype=torch.float32)
    config = {"precision": {"compute": "fp32", **precision}, **layout}
    engine = shardwise.initialize(model, config, world=world)
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(17, (2, 16), generator=generator) for _ in range(2))
    parts = engine.plan.mesh.size("dp") * (layout.get("batch", {}).get("accumulation") or 1)
    mine = [(a, b) for a, b in zip(tokens.chunk(parts), targets.chunk(parts), strict=True)]
    mine = mine[engine.dp_index :: engine.plan.mesh.size("dp")]
    gradients: dict[str, Tensor] = {}
    end = engine._training.step

    def with_gradients() -> Any:
        if engine._parts.accumulation.is_complete:
            gradients.update(engine.gradients())
        return end()

    with patch.object(engine._training, "step", with_gradients):
        loss = engine.train_step(mine).loss
    engine.close()
    return Figures(loss, gradients)


def error(found: Figures, truth: Figures) -> float:
    """The largest relative error of a gradient."""
    assert found.gradients.keys() == truth.gradients.keys()
    errors = [(found.gradients[name] - each).norm() / each.norm() for name, each in truth.gradients.items()]
    return float(max(errors))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cut_model_computes_what_one_process_does(ranks: Any, name: str) -> None:
    """Sums in another order move some numbers across a boundary of fp8; scales of slices alone would move most."""
    layout = LAYOUTS[name]
    size = layout["mesh"].get("tp", 1) * layout["mesh"].get("pp", 1) * layout["mesh"].get("dp", 1)
    parts = layout["mesh"].get("dp", 1) * layout.get("batch", {}).get("accumulation", 1)
    alone = join(quiet=True)
    truth = figures(alone, FP8, {"batch": {"accumulation": parts}})
    rough = figures(alone, {}, {"batch": {"accumulation": parts}})
    for (found,) in ranks(size).run(one_step, layout):
        assert error(found, truth) < 2e-3 < 2e-2 < error(rough, truth)
        assert found.loss == pytest.approx(truth.loss, rel=1e-5)


# Bytes and the list ------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What one step sends for weights, in bytes, and what the Plan says of it."""

    counted: int
    planned: int
    elements_in_fp8: int
    scales: int
    """Number of SCALEs in the trace."""
    departures: list[str]
    """Differences between the trace and the Plan's list, in Actions and in bytes."""


def sent_by(world: World, precision: dict[str, Any]) -> Sent:
    engine = shardwise.initialize(
        net(), {"precision": precision, "zero": {"stage": 3}}, world=world, optimizer=optimizer_of
    )
    conformance = Conformance(engine)
    for step in range(3):
        before = engine.traffic.total("weights").bytes
        engine.train_step([batch(step, world.rank)])
    own = engine.plan.own
    gathers = Counter(action.unit for action in own.actions if action.kind is Kind.UNSHARD)
    planned = sum(
        times * unit_bytes(own.units[unit], own.strategies[unit], engine.plan.mesh).gather
        for unit, times in gathers.items()
    )
    buckets = [(unit.index, each) for unit in own.units for each in unit.buckets if each.key.gather_dtype]
    elements = sum(gathers[unit] * each.elements // world.size for unit, each in buckets)
    scales = sum(action.kind is Kind.SCALE for action in engine.trace.actions)
    counted = engine.traffic.total("weights").bytes - before
    found = Sent(counted, planned, elements, scales, conformance.departures)
    engine.close()
    return found


def test_gathers_in_fp8_send_one_byte_an_element_as_the_plan_says(ranks: Any) -> None:
    for found in ranks(2).run(sent_by, {"compute": "bf16", **FP8}):
        plain = 2 * (WIDTH * HIDDEN * 2 * 3 * 2) // 2
        assert found.elements_in_fp8 >= plain // 2
        assert found.counted == found.planned
        assert (found.scales, found.departures) == (1, [])
    (first, *_) = ranks(2).run(sent_by, {"compute": "bf16"})
    assert first.counted - found.counted == found.elements_in_fp8, "half of the bytes of bf16"


def test_only_what_can_be_gathered_in_fp8_is(tmp_path: Path) -> None:
    def planned(config: dict[str, Any], **precision: Any) -> tuple[set[str], str]:
        policy = {"compute": "bf16", **FP8, **precision}
        plan = foresee(net, {"zero": {"stage": 3}, **config, "precision": policy}, ranks=2).plan
        buckets = [each for unit in plan.own.units for each in unit.buckets if each.key.gather_dtype]
        return {slot.name for each in buckets for slot in each.slots}, " ".join(plan.notes)

    gathered, notes = planned({})
    assert gathered == {f"{name}.weight" for name in LAYERS}
    assert "6 linear layers multiply in fp8: blocks.0.up" in notes
    assert "and their weights are gathered in fp8" in notes
    for others in (
        planned({"compile": "blocks"}),
        planned({"offload": {"optimizer": "disk", "disk_path": str(tmp_path)}}),
        planned({"zero": {"stage": 2}}),
        planned({}, fp8_recipe="rowwise"),
    ):
        assert not others[0]
        assert "multiply in fp8" in others[1]
        assert "gathered in fp8" not in others[1]


# What is done to a model -------------------------------------------------------------------------------------------


def test_close_gives_the_model_back_and_copies_are_refused_before(ranks: Any) -> None:
    ranks(2).run(closed)


def closed(world: World) -> None:
    model = net()
    engine = shardwise.initialize(
        model, {"precision": {"compute": "fp32", **FP8}, "zero": {"stage": 3}}, world=world
    )
    engine.train_step([batch(0, world.rank)])
    with (
        engine.full_parameters(),
        pytest.raises(UsageError, match="forward of module blocks.0.up was replaced"),
    ):
        copy.deepcopy(model)
    engine.close()
    assert not [each for each in model.modules() if "forward" in vars(each)]
    own, x = model.blocks[0].up, batch(0, 0)
    assert torch.equal(own(x), torch.nn.functional.linear(x, own.weight, own.bias))


def test_weights_that_change_before_the_backward_pass_are_refused(ranks: Any) -> None:
    ranks(2).run(changed_between)


def changed_between(world: World) -> None:
    model = net()
    engine = shardwise.initialize(
        model, {"precision": {"compute": "fp32", **FP8}, "zero": {"stage": 3}}, world=world
    )
    loss = engine(batch(0, world.rank))
    with engine.full_parameters(write=True):
        grow(model)
    with pytest.raises(
        (UsageError, RuntimeError), match="has changed between|modified by an inplace operation"
    ):
        engine.backward(loss)
    with pytest.raises(UsageError, match="gathered in fp8 for the products of its layer alone"):
        model.blocks[0].up.weight + 1
    engine.close(whole=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every input
def test_compiled_blocks_compute_the_same() -> None:
    found = trained(join(quiet=True), "fp32", compile={"scope": "blocks", "backend": "eager"})
    assert_equal(found, plain(torch.float32, "tensorwise", STEPS, parts=1))


def test_recomputed_blocks_compute_the_same(ranks: Any) -> None:
    truth = plain(torch.float32, "tensorwise", STEPS, parts=2)
    for found in ranks(2).run(recomputed):
        assert_equal(found, truth)


def recomputed(world: World) -> Curve:
    return trained(world, "fp32", zero={"stage": 3, "debug": True}, recompute="full")


# Which layers, and what is refused ---------------------------------------------------------------------------------


UNITS = ("blocks.0", "blocks.1", "blocks.2")


def chosen(model: nn.Module, units: tuple[str, ...] = UNITS, **keys: Any) -> tuple[str, ...]:
    return fp8_layers(model, units, PrecisionPolicy.model_validate({"compute": "bf16", **FP8, **keys}))


def test_linear_layers_inside_units_are_chosen() -> None:
    assert chosen(net()) == LAYERS
    assert chosen(net(), ("blocks.1",)) == LAYERS[2:4]
    assert chosen(net(), fp8_skip=["*.up", "blocks.0.*"]) == ("blocks.1.down", "blocks.2.down")
    assert chosen(net(), keep_fp32=["*.down.weight"]) == LAYERS[::2]
    model = net()
    model.blocks[0].up = nn.Linear(WIDTH, HIDDEN - 8)
    model.blocks[1].up = nn.modules.linear.NonDynamicallyQuantizableLinear(WIDTH, HIDDEN)
    model.blocks[2].up.weight = model.head.weight = nn.Parameter(torch.zeros(HIDDEN, WIDTH))
    model.blocks[0].add_module("router", nn.Linear(WIDTH, HIDDEN))
    model.blocks[0].add_module("gate", nn.Linear(WIDTH, HIDDEN))
    assert chosen(model) == LAYERS[1::2]
    assert chosen(net(), linear=None, fp8_emulate=False) == ()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"precision": {"linear": "fp8"}}, "computes on cpu, and products in fp8 run on CUDA devices"),
        ({"precision": {"compute": "fp16", **FP8}}, "multiplies weights of bf16 or fp32, and compute: fp16"),
        ({"precision": {"operations": "bf16", **FP8}}, "operations: bf16 is given"),
        ({"precision": {"amp": "O2", **FP8}}, "compute: fp16 is given"),
        ({"precision": {"fp8_emulate": True}}, "no product is in fp8"),
        ({"precision": {**FP8, "fp8_skip": ["blocks.*"]}}, "no plain nn.Linear inside a Unit below the root"),
        ({"precision": FP8, "tiles": {"mlp": 8}}, "tiles.mlp computes some of them at a time"),
        ({"precision": {**FP8, "fp8_recipe": "rowwise"}, "mesh": {"tp": 2}}, "mesh.tp: 2 cuts rows"),
    ],
)
def test_what_cannot_be_served_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shardwise.initialize(net(), config, world=join(quiet=True))


def test_weights_of_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks.0.up has a weight of torch.float64"):
        shardwise.initialize(net(torch.float64), {"precision": FP8}, world=join(quiet=True))


def test_pieces_that_are_no_multiples_of_16_are_refused() -> None:
    with pytest.raises(PlanError, match=r"mesh.tp cuts the weight of a into pieces of \[24, 32\]"):
        check_pieces([("b", (16, 32)), ("a", (24, 32))])


def test_tokens_that_are_no_multiple_of_16_are_refused_in_training_alone() -> None:
    engine = shardwise.initialize(net(), {"precision": FP8}, world=join(quiet=True))
    with pytest.raises(UsageError, match=r"blocks.0.up got \[3, 32\], which is 3 tokens"):
        engine(batch(0, 0)[:3])
    with torch.no_grad():
        assert float(engine(batch(0, 0)[:3])) > 0
    engine.close()


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_devices_without_fp8_are_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    policy = PrecisionPolicy.model_validate({"linear": "fp8"})
    if not refused:
        check_device(policy, torch.device("cuda", 0))
        return
    with pytest.raises(ConfigError, match=r"compute capability 8.0, and products in fp8 need 8.9"):
        check_device(policy, torch.device("cuda", 0))


def test_without_torchao_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="pip install --no-deps torchao"):
        check_device(PrecisionPolicy.model_validate(FP8), torch.device("cpu"))


def test_torchao_is_imported_quietly_and_only_for_fp8() -> None:
    code = (
        "import sys, torch\n"
        "import shardwise\n"
        "from shardwise import initialize\n"
        "engine = initialize(torch.nn.Linear(16, 16), {}, loss=lambda model, x: model(x).sum())\n"
        "print('torchao' in sys.modules)\n"
        "from shardwise.precision.fp8 import Float8Products\n"
        "from shardwise.precision.policy import PrecisionPolicy\n"
        "Float8Products(PrecisionPolicy(linear='fp8'))\n"
        "print('torchao' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["False", "True"]
    assert "torchao" not in done.stderr
    assert "deprecated" not in done.stderr
