"""Moments in 16 and 8 bits (``offload.state``): alike on every layout and tier, and through checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.base.errors import ConfigError, PlanError
from shardwise.comm.world import World
from tests.engine.test_offload import Case, batches, gpt, state_of

FORMS = ["bf16", "int8"]


def config_of(case: Case, form: str, disk: str | None = None) -> dict[str, Any]:
    config = case.config(disk)
    config["offload"] = config.get("offload", {}) | {"state": form}
    config["max_grad_norm"] = None
    config["batch"]["duplicates"] = "allow"
    return config


class Ended:
    """A run, on this rank."""

    def __init__(self, engine: Any, losses: list[str]):
        self.losses = losses
        self.state = state_of(engine)
        rows = engine._parts.site.ledger.bytes_by_row()
        predicted = engine.plan.own.bytes_of_units(engine.plan.mesh)
        self.rows = rows
        self.as_planned = {row: rows.get(row, 0) for row in predicted} == predicted
        engine.close()

    def unlike(self, other: "Ended") -> list[str]:
        assert self.state.keys() == other.state.keys()
        found = [name for name, held in self.state.items() if not torch.equal(held, other.state[name])]
        return found + (["losses"] if self.losses != other.losses else [])


def train(world: World, config: dict[str, Any], steps: int = 3) -> Ended:
    """All ranks get the same batch, so that sums over 1, 2 and 4 of them are the same but for a power of 2."""
    engine = shardwise.initialize(gpt(), config, world=world)
    losses = [engine.train_step(batches(0, step, 1)).loss.hex() for step in range(steps)]
    return Ended(engine, losses)


def on_layouts(world: World, cases: list[tuple[Case, bool]], disk: str) -> list[list[Ended]]:
    """By case, and whether its state lies on a disk; in each form."""
    return [
        [train(world, config_of(case, form, disk if on_disk else None), 2) for form in FORMS]
        for case, on_disk in cases
    ]


LAYOUTS = {
    1: [(Case(parameters="disk"), True)],
    2: [(Case(0, fraction=0.5), True), (Case(2), False), (Case(3), True)],
    4: [(Case(3, replicate=2), False)],
}


def test_every_number_of_ranks_stage_and_tier_has_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    alone = shardwise.comm.world.join()
    plain, *alike = (train(alone, config_of(Case(), form), 2) for form in ("fp32", *FORMS))
    assert plain.as_planned and all(one.as_planned and len(one.unlike(plain)) > 20 for one in alike)
    elements = plain.rows["moments"] // 4
    blocks = alike[1].rows["moments"] - elements
    assert alike[0].rows["moments"] == 2 * elements and 0 <= 16 * blocks - elements < 16 * 100
    for size, cases in LAYOUTS.items():
        given = (cases, str(tmp_path))
        for found in [on_layouts(alone, *given)] if size == 1 else ranks(size).run(on_layouts, *given):
            for (case, on_disk), runs in zip(cases, found, strict=True):
                for one, again in zip(alike, runs, strict=True):
                    assert not again.unlike(one), (case, again.unlike(one))
                    assert again.as_planned and ("disk" in again.rows) == on_disk, case


def test_slices_are_rounded_as_the_whole(ranks: Any) -> None:
    """tp 2, where sums differ in their last bits: draws alike but for the few that those turn."""
    one = train(shardwise.comm.world.join(), config_of(Case(), "bf16"), 1)
    again, *_ = ranks(2).run(train, config_of(Case(tp=2), "bf16"), 1)
    for label in ("exp_avg", "exp_avg_sq"):
        pairs = [
            (held, again.state[name]) for name, held in one.state.items() if name.startswith(f"{label} ")
        ]
        near = [torch.isclose(held, other, rtol=1e-3, atol=0).flatten() for held, other in pairs]
        assert torch.cat(near).double().mean() > 0.98, label


def resumed(
    world: World, folder: str, forms: tuple[str, str], stages: tuple[int, int]
) -> tuple[Ended, Ended]:
    """(in one go, saved and loaded in the middle)."""
    first, second = (config_of(Case(stage), form) for stage, form in zip(stages, forms, strict=True))
    whole = train(world, first, 4)
    engine = shardwise.initialize(gpt(), first | {"checkpoint": {"asynchronous": True}}, world=world)
    for step in range(2):
        engine.train_step(batches(0, step, 1))
    engine.save(folder)
    engine.train_step(batches(0, 9, 1))  # beside the save
    engine.close()
    engine = shardwise.initialize(gpt(), second, world=world)
    engine.train_step(batches(0, 7, 1))  # what a load forgets
    engine.load(folder)
    losses = [engine.train_step(batches(0, step, 1)).loss.hex() for step in range(2, 4)]
    whole.losses = whole.losses[2:]
    return whole, Ended(engine, losses)


def resumed_all(world: World, folder: str) -> list[tuple[Ended, Ended]]:
    ways = [
        (("bf16", "bf16"), (3, 1)),
        (("int8", "int8"), (3, 0)),
        (("fp32", "int8"), (2, 2)),
    ]
    return [resumed(world, f"{folder}/{i}", *way) for i, way in enumerate(ways)]


def test_a_run_goes_on_to_the_bit_and_any_form_loads_any_other(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(resumed_all, str(tmp_path)):
        for whole, again in found[:2]:
            assert not whole.unlike(again)
        for whole, again in found[2:]:
            losses = [[float.fromhex(each) for each in run.losses] for run in (whole, again)]
            assert losses[0] == pytest.approx(losses[1], rel=0.01) and whole.unlike(again)


def test_edits_and_absence_between_steps(tmp_path: Path) -> None:
    """A moment that is written reads back rounded; state that leaves comes back to the bit."""
    name = "blocks.1.attention.qkv.weight"
    (tmp_path / "away").mkdir()
    for form, rtol in (("bf16", 2**-8), ("int8", 1.1)):
        plain = train(shardwise.comm.world.join(), config_of(Case(), form))
        for disk in (None, str(tmp_path)):
            engine = shardwise.initialize(gpt(), config_of(Case(), form, disk))
            losses = []
            for step in range(3):
                losses.append(engine.train_step(batches(0, step, 1)).loss.hex())
                engine.set_full_tensor(name, engine.full_tensor(name, "exp_avg"), "exp_avg")
                engine.offload_states("disk", tmp_path / "away")
                engine.reload_states()
            mine = engine.local_tensor(name, "exp_avg_sq")
            engine.set_local_tensor(name, mine * 1.3, "exp_avg_sq")
            assert torch.allclose(engine.local_tensor(name, "exp_avg_sq"), mine * 1.3, rtol=rtol, atol=0)
            engine.set_local_tensor(name, mine, "exp_avg_sq")
            assert f"exp_avg:{form}=" in str(engine.plan)
            ended = Ended(engine, losses)
            assert not ended.unlike(plain), (form, disk)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ({"type": "lamb"}, "looks at whole tensors"),
        ({"type": "muon"}, "looks at whole tensors"),
        ({"type": "sgd", "momentum": 0.9, "dampening": 0.5}, "makes state in its first step"),
        ({"type": "adam", "amsgrad": True}, "amsgrad"),
        ({"type": "rprop"}, "nobody has said"),
    ],
)
def test_what_cannot_be_rounded_is_refused(optimizer: dict[str, Any], why: str) -> None:
    config = config_of(Case(), "int8") | {"optimizer": {"lr": 0.1, **optimizer}}
    with pytest.raises(ConfigError, match=f"offload.state: int8.*{why}"):
        shardwise.initialize(gpt(), config)


def test_masters_in_fp64_are_refused() -> None:
    config = config_of(Case(), "bf16") | {"precision": {"compute": "fp64"}}
    with pytest.raises(PlanError, match="offload.state: bf16.*float64"):
        shardwise.initialize(gpt(), config)


def last_loss(form: str) -> float:
    """Mean of four batches that were seen six times."""
    engine = shardwise.initialize(
        gpt(), config_of(Case(), form) | {"optimizer": {"type": "adamw", "lr": 0.02}}
    )
    losses = [engine.train_step(batches(0, step % 4, 1)).loss for step in range(28)]
    engine.close()
    return sum(losses[-4:]) / 4


def test_it_learns_as_fast() -> None:
    """Within 5 % of what fp32 has learned."""
    plain = last_loss("fp32")
    learned = 2.6 - plain
    assert learned > 0.8
    for form in FORMS:
        assert last_loss(form) == pytest.approx(plain, abs=0.05 * learned), form
