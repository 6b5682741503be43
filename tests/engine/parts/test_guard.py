"""Copies that differ between ranks, and state that changes between steps, stop all ranks in one step, by name."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.base.errors import ConfigError, DivergedError, NonFiniteError
from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.engine.parts.guard import GuardFollower, StateTensor
from shardwise.models import Gpt, GptPolicy
from tests.engine import tables_net

TOKENS = torch.arange(16).view(2, 8)


def make(tied: bool = False, experts: int = 0) -> Gpt:
    torch.manual_seed(0)
    given: dict[str, Any] = {"experts": {"count": experts}} if experts else {}
    return Gpt(GptPolicy(layers=2, width=16, heads=2, context=8, vocab=32, tied_head=tied, **given))


def begin(world: World, config: dict[str, Any], guard: dict[str, Any] | None, **model: Any) -> Engine:
    batch = {"duplicates": "allow", **config.get("batch", {})}
    given = {**config, "batch": batch, "check_first_step": "off"}
    if guard is not None:
        given["guard"] = guard
    return shardwise.initialize(make(**model), given, world=world)


def step(engine: Engine, seed: int = 0) -> float:
    count = engine.config.batch.accumulation or 1
    batches = [(TOKENS + seed * count + place) % 32 for place in range(count)]
    return engine.train_step([{"tokens": each, "targets": each} for each in batches]).loss


def guard_of(engine: Engine) -> GuardFollower:
    (found,) = (each for each in engine._parts.followers if isinstance(each, GuardFollower))
    return found


def states(engine: Engine, kind: str) -> list[StateTensor]:
    return [each for each in guard_of(engine)._state.tensors() if each.kind == kind]


def flip(flat: Tensor, bit: int) -> None:
    """Flip a bit as a fault of memory does: torch does not hear of it."""
    flat.view(torch.uint8).numpy()[bit // 8] ^= 1 << bit % 8


def used_spans(state: StateTensor) -> list[tuple[int, int]]:
    """The elements that belong to parameters, and not to the padding behind them."""
    last = state.first + state.flat.numel()
    spans = [
        (max(slot.offset, state.first) - state.first, min(slot.offset + slot.elements, last) - state.first)
        for slot in state.bucket.layout.slots
    ]
    return [span for span in spans if span[0] < span[1]]


def used_bit(state: StateTensor, draw: random.Random) -> int:
    """A bit of an element that belongs to a parameter."""
    start, stop = draw.choice(used_spans(state))
    return draw.randrange(start * 8 * state.flat.itemsize, stop * 8 * state.flat.itemsize)


class Fault(NamedTuple):
    """A layout, the kind of state in which one rank flips a bit, and the words that the error has."""

    ranks: int
    config: dict[str, Any]
    kind: str
    said: str
    model: dict[str, Any] = {}
    victim: int = 1


HSDP = {"mesh": {"dp": {"replicate": 2, "shard": 2}}, "zero": {"stage": 3}}
BF16 = {"precision": "bf16"}
FAULTS = {
    "weights of stage 0": Fault(2, {"zero": {"stage": 0}}, "weight", "do not agree"),
    "masters of stage 0": Fault(2, {"zero": {"stage": 0}, **BF16}, "master", "master of"),
    "moments of stage 0": Fault(2, {"zero": {"stage": 0}}, "exp_avg_sq", "exp_avg_sq of"),
    "moments in 8 bits": Fault(
        2, {"zero": {"stage": 0}, "offload": {"state": "int8"}}, "exp_avg", "exp_avg of", {"experts": 2}
    ),
    "whole weights of stage 2": Fault(2, {"zero": {"stage": 2}, **BF16}, "weight", "weight of"),
    "four ranks": Fault(4, {"zero": {"stage": 1}}, "weight", "rank 2 differs", victim=2),
    "HSDP": Fault(4, HSDP, "weight", "weight of", victim=3),
    "shards at rest": Fault(2, {"zero": {"stage": 3}}, "weight", "state of rank 1 changed"),
    "masters at rest": Fault(2, {"zero": {"stage": 2}, **BF16}, "master", "state of rank 1 changed"),
    "moments at rest": Fault(2, {"zero": {"stage": 3}}, "exp_avg", "state of rank 1 changed"),
    "masters in host memory at rest": Fault(
        2, {"zero": {"stage": 2}, **BF16, "offload": {"optimizer": "host"}}, "master", "rank 1 changed"
    ),
    "moments in host memory at rest": Fault(
        2,
        {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host"}},
        "exp_avg_sq",
        "rank 1",
    ),
    "weights in host memory at rest": Fault(
        2, {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host"}}, "weight", "rank 1"
    ),
    "moments in host memory under HSDP": Fault(
        4, {**HSDP, "offload": {"optimizer": "host", "state": "int8"}}, "exp_avg", "exp_avg of", victim=3
    ),
    "moments on tp at rest": Fault(2, {"mesh": {"tp": 2}}, "exp_avg", "rank 1 changed"),
    "experts": Fault(
        2, {"mesh": {"ep": 2}, "zero": {"stage": 0}}, "exp_avg", "rank 1 changed", {"experts": 2}
    ),
}


def faulty(world: World, fault: Fault, seed: int) -> str:
    """The error of the step after the flip; afterwards the bit is turned back and the run goes on as before."""
    engine = begin(world, fault.config, {"every": 1}, **fault.model)
    step(engine)
    step(engine, 1)
    draw = random.Random(seed)
    chosen = draw.choice(states(engine, fault.kind))
    bit = used_bit(chosen, draw)
    if world.rank == fault.victim:
        flip(chosen.flat, bit)
    said = ""
    try:
        step(engine, 2)
    except DivergedError as error:
        said = str(error)
        assert error.last_good_step == 1
    if world.rank == fault.victim:
        flip(chosen.flat, bit)
    assert engine.step_count == 2
    step(engine, 2)
    engine.close()
    return said


@pytest.mark.parametrize("name", FAULTS)
def test_a_flipped_bit_stops_all_ranks(ranks: Any, name: str) -> None:
    fault = FAULTS[name]
    said = ranks(fault.ranks).run(faulty, fault, 1)
    assert len({*said}) == 1, "all ranks say the same"
    assert fault.said in said[0] and "step 3" in said[0] and "all copies were equal after step 1" in said[0]


def one_of(world: World, config: dict[str, Any], model: dict[str, Any], name: str, victim: int) -> str:
    """The error after a flip in one named weight."""
    engine = begin(world, config, {"every": 1, "at_rest": False}, **model)
    step(engine)
    for state in states(engine, "weight"):
        for slot in state.bucket.layout.slots:
            if slot.name == name and world.rank == victim:
                flip(state.flat, 32 * (slot.offset - state.first))
    try:
        step(engine)
    except DivergedError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(
    ("config", "model", "name"),
    [
        ({"mesh": {"tp": 2}}, {}, "norm.weight"),
        ({"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, {"tied": True}, "embed.weight"),
    ],
    ids=["a norm on tp", "tied weights of two stages"],
)
def test_copies_on_the_ranks_of_a_model(
    ranks: Any, config: dict[str, Any], model: dict[str, Any], name: str
) -> None:
    said = ranks(2).run(one_of, {**config, "precision": "fp32"}, model, name, 1)
    assert said[0] == said[1] and f"weight of {name}" in said[0] and "ranks 0, 1, do not agree" in said[0]


def clean(world: World, config: dict[str, Any], model: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses without and with a guard."""
    losses = []
    for guard in (None, {"every": 2}):
        engine = begin(world, config, guard, **model)
        losses.append([step(engine, seed) for seed in range(6)])
        engine.close()
    return losses[0], losses[1]


def faulty_rows(world: World, placement: str, config: dict[str, Any]) -> tuple[bool, str]:
    """Whether clean steps passed, and the error of the step after a flip in a table's rows on the last rank."""
    placements = dict.fromkeys(("large", "wide"), placement)
    engine = tables_net.build(world, placements, guard={"every": 1}, check_first_step="off", **config)
    tables_net.train(engine, 4)
    (found,) = (each for each in guard_of(engine)._state.shared() if each.name == "tables.large")
    if world.rank == world.size - 1:
        flip(found.flat, 77)
    try:
        tables_net.train(engine, 1)
    except DivergedError as error:
        return engine.step_count == 4, str(error)
    finally:
        engine.close()
    return False, ""


def test_copied_rows_of_tables_are_compared(ranks: Any) -> None:
    for went_on, said in ranks(2).run(faulty_rows, "data_parallel", {}):
        assert went_on and "rows of tables.large" in said and "after step 3" in said


CLEAN: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"zero": {"stage": 1}, **BF16}, {}),
    (2, {"mesh": {"tp": 2}}, {}),
    (4, HSDP, {}),
    (4, {"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "zero": {"stage": 2}}, {"tied": True}),
    (4, {"mesh": {"ep": 2}, "zero": {"stage": 1}}, {"experts": 4}),
    (4, {"mesh": {"tp": 2}, "zero": {"stage": 0}, "offload": {"state": "int8"}}, {"tied": True}),
    (2, {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host"}}, {}),
    (2, {"zero": {"stage": 2}, **BF16, "offload": {"optimizer": "host", "step": "delayed"}}, {}),
]


@pytest.mark.parametrize(("size", "config", "model"), CLEAN, ids=lambda each: str(each))
def test_a_clean_run_has_the_same_bits_and_no_alarm(
    ranks: Any, size: int, config: dict[str, Any], model: dict[str, Any]
) -> None:
    for without, guarded in ranks(size).run(clean, config, model):
        assert without == guarded


@pytest.mark.parametrize("offload", [{}, {"optimizer": "host"}], ids=["device", "host"])
def test_changes_by_calls_are_no_alarm(offload: dict[str, Any]) -> None:
    """Edits of weights, loads of weights, averages and state that moves are what a program may do between steps."""
    config = {"zero": {"stage": 0}, "ema": {"decay": 0.9}, "offload": offload}
    engine = begin(World(0, 1), config, {"every": 1})
    step(engine)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.mul_(0.5)
    step(engine)
    with engine.evaluated_weights():
        engine.evaluate([({"tokens": TOKENS, "targets": TOKENS}, None)])
    step(engine)
    engine.load_state_dict(engine.state_dict())
    step(engine)
    engine.close()


def test_one_process_is_compared_with_itself() -> None:
    engine = begin(World(0, 1), {}, {"every": 3})
    for _ in range(3):
        step(engine)
    (chosen, *_) = states(engine, "exp_avg")
    flip(chosen.flat, 5)
    with pytest.raises(DivergedError, match=r"step 4: state of rank 0 changed .* exp_avg of .*after step 2"):
        step(engine)
    engine.close()


def test_restore_loads_the_newest_step_that_was_good(tmp_path: Any) -> None:
    engine = begin(World(0, 1), {}, {"every": 2, "on_alarm": "restore"})
    losses = []
    for seed in range(4):
        losses.append(step(engine, seed))
        engine.save(tmp_path, {"seed": seed + 1})
    (chosen, *_) = states(engine, "exp_avg")
    flip(chosen.flat, 5)
    with pytest.raises(DivergedError, match=r"The engine has loaded .*step_00000003") as caught:
        step(engine, 4)
    error = caught.value
    assert (error.last_good_step, error.restored_step) == (3, 3)
    assert error.trainer == {"seed": 3} and engine.step_count == 3
    assert step(engine, 3) == losses[3]
    engine.close()


def test_restore_without_a_saved_step_says_so() -> None:
    engine = begin(World(0, 1), {}, {"every": 1, "on_alarm": "restore"})
    step(engine)
    step(engine)
    flip(states(engine, "exp_avg")[0].flat, 5)
    with pytest.raises(DivergedError, match="Nothing was restored: nothing was saved or loaded yet"):
        step(engine)
    engine.close()


def test_a_guard_that_compares_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"guard.at_rest: false on one process"):
        begin(World(0, 1), {}, {"at_rest": False})


# The campaign ------------------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero": {"stage": 0}}, {}),
    ({"zero": {"stage": 2}, **BF16}, {}),
    (HSDP, {}),
    ({"mesh": {"tp": 2}, "zero": {"stage": 3}}, {}),
    ({"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "zero": {"stage": 1}}, {"tied": True}),
    ({"mesh": {"ep": 2}, "zero": {"stage": 1}}, {"experts": 4}),
    ({"mesh": {"tp": 2}, "zero": {"stage": 0}, "offload": {"state": "int8"}}, {}),
    ({**HSDP, "offload": {"optimizer": "host", "state": "bf16"}}, {}),
]


def campaign(world: World, layout: int, flips: int, every: int, folder: str) -> list[str]:
    """Flip ``flips`` bits one after the other, and return those that nobody saw and that stayed."""
    config, model = LAYOUTS[layout]
    engine = begin(world, config, {"every": every}, **model)
    step(engine)
    engine.save(folder)
    engine.wait_for_save()
    unseen = []
    for number in range(flips):
        draw = random.Random(1000 * layout + number)
        victim = draw.randrange(world.size)
        state = guard_of(engine)._state
        # On the due step's eve all state is at rest; on other days only what others hold too is compared.
        open_to = [(each.kind, each.flat, 0, each.flat.numel()) for each in state.shared()]
        if engine.step_count % every == 0:
            resting = [each for each in state.tensors() if not each.is_reachable]
            open_to += [(each.kind, each.flat, *span) for each in resting for span in used_spans(each)]
        what = "nothing"
        # Off the eve, a rank of stage 3 may hold nothing that others hold.
        if world.rank == victim and open_to:
            kind, flat, start, stop = draw.choice(open_to)
            size = 8 * flat.itemsize
            bit = draw.randrange(start * size, stop * size)
            flip(flat, bit)
            what = f"bit {bit} of {kind}"
        is_seen = False
        try:
            for seed in range(every):
                step(engine, number + seed)
        except DivergedError:
            is_seen = True
        except NonFiniteError:
            is_seen = True  # a flipped exponent: an error of its own, and nothing was updated
        if not is_seen and not agrees(engine):
            unseen.append(f"{what}, flipped on rank {victim}")
        if is_seen or every > 1:
            engine.load(folder)
            step(engine, number)  # behind a load nothing is at rest before the next update
        elif not is_seen:
            unseen.append(f"{what}, flipped on rank {victim}, equal again within one step")
    engine.close()
    return unseen


def agrees(engine: Engine) -> bool:
    """True if all copies are equal now."""
    totals = guard_of(engine)._copies()
    group = engine._parts.groups["world"]
    group.all_reduce(totals, "the copies", purpose="control").wait()
    return not bool(totals.any())


@pytest.mark.soak
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_every_flipped_bit_is_seen_or_gone(ranks: Any, tmp_path: Any, layout: int, every: int) -> None:
    flips = 170 if every == 1 else 40
    for unseen in ranks(4).run(campaign, layout, flips, every, str(tmp_path), timeout_s=900):
        assert unseen == []


def long_run(world: World, config: dict[str, Any], model: dict[str, Any], steps: int) -> int:
    engine = begin(world, config, {"every": 1}, **model)
    for seed in range(steps):
        step(engine, seed)
    done = engine.step_count
    engine.close()
    return done


@pytest.mark.soak
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_ten_thousand_clean_steps_have_no_alarm(ranks: Any, layout: int) -> None:
    assert set(ranks(4).run(long_run, *LAYOUTS[layout], 1700, timeout_s=900)) == {1700}
