"""The bound of time is never above the price, whatever the layout, the work and the hardware."""

import random
from dataclasses import replace

import pytest

from shardwise.base.hardware import Neighbours, OperationClass, Product
from shardwise.plan.action import Kind
from shardwise.plan.exchange_calls import ExchangeCall
from shardwise.plan.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.simulate.bound import time_bound
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.price import StepSeconds
from shardwise.simulate.work import Work
from tests.plan.described import plan
from tests.simulate.given import RATES, hardware, one_pass, passes, timeline

CLASSES: tuple[OperationClass, ...] = ("arithmetic", "function", "copy")
LAYOUTS = [
    (Mesh(), 0, {}),
    (Mesh(dp_shard=2), 3, {}),
    (Mesh(dp_shard=2), 2, {"on_disk": 0.5}),
    (Mesh(), 1, {"on_disk": 1.0, "delayed": True}),
    (Mesh(dp_shard=2), 3, {"on_disk": 1.0, "weights_too": True}),
    (Mesh(dp_shard=2, tp=2), 1, {"saves": True}),
    (Mesh(pp=2), 0, {}),
    (Mesh(pp=4, dp_shard=2), 1, {"schedule": "gpipe"}),
    (Mesh(pp=2, dp_shard=2), 3, {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    (Mesh(pp=2, tp=2), 2, {}),
]


def drawn_pass(draw: random.Random) -> UnitPass:
    products = {Product("product", "fp32", 1 + int(10 ** draw.uniform(0, 6))): draw.randint(0, 3)}
    sends = (ExchangeCall("all_reduce", "activations", "tp", draw.randint(0, 2000), 4),) * draw.randint(0, 1)
    touched, calls = int(10 ** draw.uniform(0, 6)), draw.randint(0, 40)
    parts = {(name, 1 + touched // 4): 1 for name in CLASSES}
    others = {part: calls for part, calls in parts.items() if draw.random() < 0.5}
    work = Work(products, {}, calls, others=others)
    return UnitPass(0, draw.randint(0, 4000), 0, touched + 3, sends, work=work)


def drawn_step(draw: random.Random, made: dict[tuple[int, int], Plan]) -> tuple[float, float]:
    """Bound and price of a step that is drawn at random."""
    place, microbatches = draw.randrange(len(LAYOUTS)), 2 * draw.randint(1, 3)
    mesh, stage, given = LAYOUTS[place]
    if (place, microbatches) not in made:
        made[place, microbatches] = plan(mesh, stage, microbatches, **given)
    whole = made[place, microbatches]
    passed = {}
    for number, of_stage in passes(whole, one_pass(1), one_pass(1)).items():
        shares = {key: drawn_pass(draw) for key in of_stage.shares}
        passed[number] = of_stage._replace(shares=shares)
    rates = hardware(**{each: 10 ** draw.uniform(3, 8) for each in RATES})
    rates = replace(
        rates,
        operation_s=draw.choice([0.0, 1e-5]),
        action_s=draw.choice([0.0, 1e-4]),
        ending_action_s=draw.choice([0.0, 1e-3]),
        neighbours=Neighbours(
            draw.choice([(), ((1e-3, 0.1), (1.0, 0.02))]),
            draw.choice([(), ((1.0, 0.5),), ((1.0, 1.5), (2.0, 0.25)), ((2.0, 3.0), (4.0, 4.0))]),
        ),
        operations=draw.choice([{}, {name: ((1e2, 10 ** draw.uniform(3, 8)),) for name in CLASSES}]),
    )
    device = draw.choice(["cpu", "cuda"])
    price = StepSeconds.of(timeline(whole, passed, rates, device, microbatches)).total
    return time_bound(passed, rates, device, microbatches, mesh.pp), price


def check(points: int) -> None:
    draw, made = random.Random(26), dict[tuple[int, int], Plan]()
    for number in range(points):
        bound, price = drawn_step(draw, made)
        assert 0 < bound <= price * (1 + 1e-9), number


def test_the_bound_is_never_above_the_price_at_points_drawn_at_random() -> None:
    check(60)


@pytest.mark.soak
def test_the_bound_is_never_above_the_price_at_two_thousand_points() -> None:
    check(2000)


@pytest.mark.parametrize(("schedule", "idle"), [("1f1b", 0), ("gpipe", 3)])
def test_the_bound_is_the_work_of_the_heaviest_stage(schedule: str, idle: int) -> None:
    whole = plan(Mesh(pp=2), 0, 6, schedule)
    passed = {}
    for stage, (forward, backward) in enumerate([(3, 5), (1, 2)]):
        unit = whole.classes[f"pp {stage}"].units_of(stage)[-1].name
        passed[stage] = MeasuredPass(
            {(Kind.F, unit): one_pass(forward), (Kind.B, unit): one_pass(backward)}, 0
        )
    rates = hardware(flops_s=1.0)
    price = StepSeconds.of(timeline(whole, passed, rates, microbatches=6)).total
    assert time_bound(passed, rates, "cpu", 6, 2) == 6 * (3 + 5)
    assert price == pytest.approx(6 * (3 + 5) + idle)
