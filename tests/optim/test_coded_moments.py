"""Moments in 16 and 8 bits: the numbers of a reference that is written by hand, unbiased, and updates as if in fp32."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from shardwise.kernels.philox import key_of
from shardwise.optim.classes import from_torch, labels_of, make_state
from shardwise.optim.coded_moments import CodedMoments, CodedPart, refused
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.lion import Lion
from shardwise.optim.rounding import RoundedPart, StochasticRounding
from shardwise.plan.placement import ContiguousRun
from shardwise.plan.state_form import BLOCK, StateForm, stored_elements

CPU = torch.device("cpu")
TOTAL = 5 * 64 + 37
FORMS: list[StateForm] = ["bf16", "int8"]


def whole(elements: int, name: str = "w") -> StochasticRounding:
    """Of one parameter, uncut."""
    return StochasticRounding(
        [RoundedPart(0, elements, key_of(0, name), lambda a, b: [ContiguousRun(a, a, b - a)])]
    )


def moments(form: StateForm, elements: int, *labels: str) -> CodedMoments:
    return CodedMoments(form, labels, elements, CPU, whole(elements))


def spread(elements: int, label: str) -> Tensor:
    """Numbers over many magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(elements, generator=generator) * (4 * torch.randn(elements, generator=generator)).exp()
    x[::7] = 0
    return x.square() if label == "exp_avg_sq" else x


def by_hand(block: list[float], squares: bool) -> list[tuple[float, float]]:
    """Of each number of a block its two neighbours among those that the form has, of the definition."""
    power, levels, base = (4, 255, 16) if squares else (2, 127, 4)
    most = max(map(abs, block))
    e = next(e for e in range(-63, 64) if levels**power * float(base) ** e >= most)
    steps = [float(q**power) * float(base) ** e for q in range(levels + 1)]
    found = []
    for x in block:
        low = max(step for step in steps if step <= abs(x))
        high = min(step for step in steps if step >= abs(x))
        if squares and x > 0:
            low = max(low, steps[1])
        found.append((math.copysign(low, x), math.copysign(high, x)))
    return found


@pytest.mark.parametrize("label", ["exp_avg", "exp_avg_sq"])
def test_int8_is_one_of_two_neighbours(label: str) -> None:
    held, x = moments("int8", 20 * BLOCK, label), spread(20 * BLOCK, label)
    for step in range(3):
        held.write(label, 0, x, held.bits(0, len(x), step)[0])
        got = held.read(label, 0, len(x)).tolist()
        for first in range(0, len(x), BLOCK):
            block = [float(each) for each in x[first : first + BLOCK]]
            for near, mine in zip(by_hand(block, label != "exp_avg"), got[first:], strict=False):
                # 255^4 has more digits than fp32
                assert any(math.isclose(mine, each, rel_tol=2**-23) for each in near), (near, mine)


@pytest.mark.parametrize("label", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("form", FORMS)
def test_the_mean_is_what_was_written(form: StateForm, label: str) -> None:
    """Of the same blocks in many places, element by element, as closely as so many draws allow."""
    draws, block = 4000, 4 * BLOCK
    held, x = moments(form, draws * block, label), spread(block, label)
    bits = held.bits(0, draws * block, 5)[0]
    held.write(label, 0, x.repeat(draws), bits)
    many = held.read(label, 0, draws * block).double().view(draws, block)
    # What is below a second moment's lowest step is raised to it.
    above = many.min(0).values <= x if label == "exp_avg_sq" else torch.ones_like(x, dtype=torch.bool)
    step = x.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK) / 127**2
    off = (many.mean(0) - x).abs() / (
        many.std(0) / math.sqrt(draws) + (1e-4 * x.abs()).minimum(step) + 5 * step / draws
    )
    assert above.sum() > block / 2 and off[above].max() < 5
    assert label == "exp_avg" or bool(((many > 0) == (x > 0)).all())


def test_no_two_steps_round_alike() -> None:
    """With the bits of one step for all, an element would go up in each of 16 steps, or in none: 7 of 8 in none."""
    count = 16 * 256
    held = moments("bf16", count, "exp_avg")
    held.write("exp_avg", 0, torch.ones(count))
    for step in range(16):
        part = CodedPart(held, 0, step)
        (x,) = part.chunk(slice(0, count))
        part.keep(slice(0, count), [x + 2.0**-10])  # an eighth of the way to the next number
    stays = float((held.read("exp_avg", 0, count) == 1).float().mean())
    assert abs(stays - (7 / 8) ** 16) < 0.03


@pytest.mark.parametrize("label", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("form", FORMS)
def test_what_was_decoded_is_encoded_to_itself(form: StateForm, label: str) -> None:
    """Whole or in pieces that cut blocks, at random or to the nearest, where a block's largest has been rounded too."""
    elements = 100 * BLOCK + 5
    first, second, third = (moments(form, elements, label) for _ in range(3))
    first.write(label, 0, spread(elements, label), first.bits(0, elements, 1)[0])
    x = first.read(label, 0, elements)
    second.write(label, 0, x, second.bits(0, elements, 2)[0])
    for start in range(0, elements, 37):
        third.write(label, start, x[start : start + 37])
    assert torch.equal(second.read(label, 0, elements), x)
    assert torch.equal(third.read(label, 0, elements), x)
    assert torch.equal(third.read(label, 21, 55), x[21:55])
    assert first.tensors[label].numel() == stored_elements(form, elements)


@pytest.mark.parametrize("form", FORMS)
def test_no_overflow_is_hidden(form: StateForm) -> None:
    held = moments(form, 3 * BLOCK, "exp_avg")
    x = torch.ones(3 * BLOCK)
    x[BLOCK], x[BLOCK + 1] = math.inf, math.nan
    held.write("exp_avg", 0, x, held.bits(0, len(x), 0)[0])
    got = held.read("exp_avg", 0, len(x))
    assert not got[BLOCK].isfinite() and got[BLOCK + 1].isnan()
    assert torch.equal(got[:BLOCK], x[:BLOCK]) and torch.equal(got[2 * BLOCK :], x[2 * BLOCK :])


@pytest.mark.parametrize("form", FORMS)
def test_smallest_and_largest(form: StateForm) -> None:
    for label in ("exp_avg", "exp_avg_sq"):
        for each in (1e-44, 1.1754944e-38, 1e-30, 1.0, 3e38):
            held = moments(form, BLOCK, label)
            held.write(label, 0, torch.full((BLOCK,), each))
            (got,) = set(held.read(label, 0, BLOCK).tolist())
            assert math.isclose(got, each, rel_tol=0.02, abs_tol=5e-38), (label, each, got)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.3, fused=True),
    "adam": lambda ps: optim.Adam(ps, lr=0.1, weight_decay=0.3, foreach=False),
    "sgd": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "nadam": lambda ps: optim.NAdam(ps, lr=0.1),
    "rmsprop": lambda ps: optim.RMSprop(ps, lr=0.1, momentum=0.5),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.5),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=0.1),
    "adamax": lambda ps: optim.Adamax(ps, lr=0.1),
    "radam": lambda ps: optim.RAdam(ps, lr=0.1),
    "lion": lambda ps: Lion(ps, lr=0.1, weight_decay=0.3),
}
UNUSED: list[list[tuple[int, int]]] = [[], [(64, 211)], [(0, 3), (304, TOTAL)], []]


def whole_tensors(
    make: Any, form: StateForm, master: Tensor, grads: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same on tensors as a whole: torch's step in fp32, and one write of each moment behind it."""
    leaf = master.clone()
    optimizer = make([leaf])
    make_state(optimizer)
    labels = labels_of(optimizer.state[leaf])
    held = moments(form, TOTAL, *labels)
    for label in labels:
        held.write(label, 0, optimizer.state[leaf][label])
    for step, grad in enumerate(grads):
        spans, start = [], 0
        for first, last in [*UNUSED[step], (TOTAL, TOTAL)]:
            spans, start = [*spans, (start, first)], last
        before = leaf.clone()
        for label in labels:
            optimizer.state[leaf][label].copy_(held.read(label, 0, TOTAL))
        leaf.grad = grad / 3
        optimizer.step()
        bits = held.bits(0, TOTAL, step)
        stays = torch.ones(TOTAL, dtype=torch.bool)
        for start, stop in spans:
            stays[start:stop] = False
            for label, own in zip(labels, bits, strict=True):
                held.write(label, start, optimizer.state[leaf][label][start:stop], own[start:stop])
        leaf[stays] = before[stays]
    return leaf, {label: held.read(label, 0, TOTAL) for label in labels}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_fp32(name: str, form: StateForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """By chunks, with parts that are not used, whose counts stand still: compared where counts agree."""
    monkeypatch.setattr("shardwise.optim.flat.CHUNK", 64)
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(TOTAL, generator=generator)
    grads = [torch.randn(TOTAL, generator=generator) for _ in UNUSED]
    make = OPTIMIZERS[name]
    flat = FlatOptimizer(master.clone(), from_torch(make([torch.zeros(1)])), 0, form, whole(TOTAL))
    rounded = torch.zeros(TOTAL, dtype=torch.bfloat16)
    for step, grad in enumerate(grads):
        assert flat.step(grad.clone(), 3.0, [{}], UNUSED[step], rounded, step)
    expected, theirs = whole_tensors(make, form, master, grads)
    counted = torch.ones(TOTAL, dtype=torch.bool)
    for part in UNUSED:
        for start, stop in part:
            counted[start:stop] = False
    assert flat.state.labels == sorted(theirs)
    assert torch.allclose(flat.state.master[counted], expected[counted], rtol=1e-5, atol=1e-6)
    assert torch.equal(rounded, flat.state.master.bfloat16())
    for label, moment in theirs.items():
        near = torch.isclose(flat.state.read(label), moment, rtol=1e-4, atol=1e-7)
        # torch's kernels differ in the last bit of fp32, which may turn the draw of an element.
        assert (near | ~counted).double().mean() > 0.98, label
    whole_count = {row.scalars.get("step") for row in flat.state.scalars() if row.start == 3}
    assert whole_count in ({4.0}, {None})


def test_state_goes_through_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``saving`` does: read, written, restored with the counts."""
    monkeypatch.setattr("shardwise.optim.flat.CHUNK", 64)
    make = from_torch(optim.AdamW([torch.zeros(1)], lr=0.1))
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(TOTAL, generator=generator) for _ in range(4)]

    def made() -> FlatOptimizer:
        return FlatOptimizer(torch.ones(TOTAL), make, 0, "int8", whole(TOTAL))

    one, other = made(), made()
    for step in range(2):
        one.step(grads[step].clone(), 1.0, [{}], [(64, 128)], steps=step)
    other.state.master.copy_(one.state.master)
    for label in one.state.labels:
        other.state.write(label, 0, one.state.read(label))
    counts = [(row.stop, row.scalars if row.has_state else None) for row in one.state.scalars()]
    other.state.restore({}, counts)
    for step in range(2, 4):
        for each in (one, other):
            each.step(grads[step].clone(), 1.0, [{}], steps=step)
    assert torch.equal(one.state.master, other.state.master) and one.state.scalars() == other.state.scalars()
    assert all(torch.equal(one.state.read(label), other.state.read(label)) for label in one.state.labels)
    assert one.state.count_bytes() == 2 * (TOTAL + -(-TOTAL // BLOCK))


def test_what_cannot_be_rounded_is_refused() -> None:
    for labels, why in [
        (("exp_avg", "max_exp_avg_sq"), "amsgrad"),
        (("square_avg", "grad_avg"), "centered"),
        (("prev", "step_size"), "nobody has said"),
    ]:
        assert all(why in refused(form, labels) for form in FORMS)
        assert not refused("fp32", labels)
