"""Any stage on any number of ranks saves; any other loads, to the bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import MismatchError
from shardwise.checkpoint import verify
from shardwise.comm.world import World, join
from shardwise.models.gpt import Gpt, GptPolicy

SMALL = GptPolicy(layers=2, width=16, heads=2, context=8, vocab=19, hidden=24)


def build(
    world: World, stage: int, precision: str = "fp32", optimizer: str = "adamw", policy: GptPolicy = SMALL
) -> Any:
    with torch.device("meta"):
        model = Gpt(policy)
    sgd: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    config = {
        "zero": {"stage": stage},
        "precision": precision,
        "optimizer": {"type": optimizer, "lr": 1e-2, **sgd},
        "batch": {"global_size": 4, "micro_size": 4 // world.size},
        "max_grad_norm": 1.0,
    }
    return shardwise.initialize(model, config, world=world)


def train(engine: Any, steps: int) -> list[float]:
    """The same global batches on any number of ranks."""
    world, losses = engine.world, []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.step_count)
        tokens = (torch.randint(0, 19, (4, 1), generator=generator) + torch.arange(9)) % 19
        mine = tokens.chunk(world.size)[world.rank]
        losses.append(engine.train_step([(mine[:, :-1], mine[:, 1:])]).loss)
    return losses


def fingerprint(engine: Any) -> dict[str, list[float]]:
    """Weights, masters and moments, whole, as plain numbers by name."""
    found = {name: tensor.double().flatten().tolist() for name, tensor in engine.state_dict().items()}
    for bucket, optimizer in engine._parts.trained:
        flats = {label: torch.zeros_like(bucket.weight.master) for label in ("exp_avg", "exp_avg_sq")}
        for label, start, stop, tensor in optimizer.state.moments():
            flats.setdefault(label, torch.zeros_like(bucket.weight.master))[start:stop] = tensor
        flats["master"] = bucket.weight.master
        for label, flat in flats.items():
            full = bucket.weight.gathered_copy(flat)
            for slot in bucket.layout.slots:
                values = full[slot.offset : slot.offset + slot.elements]
                found[f"{label}/{slot.name}"] = values.double().tolist()
    return found


def save_after_training(world: World, folder: str, stage: int, precision: str, steps: int) -> Any:
    engine = build(world, stage, precision)
    losses = train(engine, steps)
    engine.save(folder, {"note": "kept"})
    engine.wait_for_save()
    state = fingerprint(engine)
    engine.close()
    return losses, state


def load_and_save(world: World, source: str, target: str, stage: int, precision: str) -> Any:
    engine = build(world, stage, precision)
    assert engine.load(source) == {"note": "kept"}
    state = fingerprint(engine)
    engine.save(target, {"note": "kept"}, asynchronous=False)
    step = engine.step_count
    engine.close()
    return step, state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_goes_round_layouts_without_changing_a_bit(
    ranks: Any, tmp_path: Path, precision: str
) -> None:
    """1 -> 2 -> 4 -> 1 ranks and stages 3 -> 0 -> 3 -> 1 -> 2."""
    solo = join(quiet=True)
    _, first = save_after_training(solo, str(tmp_path / "0"), 3, precision, 3)
    route = [(2, 3), (4, 0), (2, 3), (1, 1), (4, 2), (2, 1)]
    for number, (size, stage) in enumerate(route):
        args = (str(tmp_path / str(number)), str(tmp_path / str(number + 1)), stage, precision)
        results = [load_and_save(solo, *args)] if size == 1 else ranks(size).run(load_and_save, *args)
        for step, state in results:
            assert step == 3
            assert state == first, f"changed on the way to {size} ranks, stage {stage}"
    assert not verify(tmp_path / str(len(route)) / "step_00000003")


def resumed_curve(world: World, folder: str, stage: int) -> Any:
    """Six steps in one go, and three, a save, a new engine and three more."""
    whole = build(world, stage)
    undisturbed = train(whole, 6)
    first = build(world, stage)
    curve = train(first, 3)
    first.save(folder)
    first.wait_for_save()
    second = build(world, stage)
    assert second.load(folder) == {}
    curve += train(second, 3)
    return undisturbed, curve, fingerprint(whole) == fingerprint(second)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resuming_on_the_same_ranks_changes_no_bit(ranks: Any, tmp_path: Path, stage: int) -> None:
    for undisturbed, curve, same in ranks(2).run(resumed_curve, str(tmp_path), stage):
        assert curve == undisturbed
        assert same


def hundred_more(world: World, folder: str, stage: int) -> Any:
    engine = build(world, stage)
    engine.load(folder)
    losses = train(engine, 100)
    engine.close()
    return losses


def test_resuming_on_other_ranks_keeps_the_curve(ranks: Any, tmp_path: Path) -> None:
    """The order of a sum is all that may differ: losses stay within 1e-5 over 100 steps."""
    solo = join(quiet=True)
    engine = build(solo, 0)
    train(engine, 20)
    engine.save(tmp_path, asynchronous=False)
    undisturbed = train(engine, 100)
    assert undisturbed[-1] < undisturbed[0] - 0.1, "a curve that does not move shows nothing"
    for size, stage in ((2, 3), (4, 1)):
        for losses in ranks(size).run(hundred_more, str(tmp_path), stage):
            worst = max(abs(a - b) for a, b in zip(losses, undisturbed, strict=True))
            assert worst < 1e-5, f"{size} ranks, stage {stage}: {worst}"


def test_weights_load_in_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    engine = build(join(quiet=True), 0, "bf16")
    train(engine, 1)
    engine.save(tmp_path, asynchronous=False)
    weights = load_file(tmp_path / "step_00000001" / "model" / "model.safetensors")
    assert weights.keys() == engine.state_dict().keys()
    for name, tensor in engine.state_dict().items():
        assert torch.equal(weights[name], tensor)


def test_precision_may_change_on_the_way(tmp_path: Path) -> None:
    """A bf16 run's fp32 masters become the weights of an fp32 run, and the other way round."""
    solo = join(quiet=True)
    half = build(solo, 0, "bf16")
    train(half, 2)
    half.save(tmp_path / "half", asynchronous=False)
    whole = build(solo, 0, "fp32")
    whole.load(tmp_path / "half")
    masters = {name: values for name, values in fingerprint(half).items() if name.startswith("master/")}
    assert masters == {
        name: values for name, values in fingerprint(whole).items() if name.startswith("master/")
    }
    whole.save(tmp_path / "whole", asynchronous=False)
    again = build(solo, 0, "bf16")
    again.load(tmp_path / "whole")
    assert fingerprint(again) == fingerprint(half)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    solo = join(quiet=True)
    engine = build(solo, 0)
    train(engine, 1)
    engine.save(tmp_path, asynchronous=False)
    other = build(solo, 0, policy=SMALL.model_copy(update={"width": 32}))
    with pytest.raises(MismatchError, match="norm.weight.*16.*32"):
        other.load(tmp_path)


def test_another_optimizer_is_refused_and_weights_alone_are_not(tmp_path: Path) -> None:
    solo = join(quiet=True)
    engine = build(solo, 0)
    train(engine, 1)
    engine.save(tmp_path, asynchronous=False)
    other = build(solo, 0, optimizer="sgd")
    with pytest.raises(MismatchError, match="exp_avg.*momentum_buffer.*weights_only"):
        other.load(tmp_path)
    other.load(tmp_path, weights_only=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(other.state_dict().values(), engine.state_dict().values(), strict=True)
    )


class Switched(nn.Module):
    """Its second layer trains from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return (self.second(y) if next(self.calls) >= 2 else y).square().mean()


def test_step_counts_of_late_parameters_survive(tmp_path: Path) -> None:
    """Adam's bias correction of a parameter that was unused for two steps lags by two, also after a reload."""

    def fresh() -> Any:
        torch.manual_seed(0)
        return shardwise.initialize(
            Switched(), {"optimizer": {"type": "adam", "lr": 0.1}}, world=join(quiet=True)
        )

    x = torch.arange(8.0).view(2, 4) / 8
    whole, first = fresh(), fresh()
    for engine in (whole, first):
        for _ in range(4):
            engine.train_step([x])
    first.save(tmp_path, asynchronous=False)
    second = fresh()
    second.load(tmp_path)
    second.module.calls = itertools.count(4)
    for engine in (whole, second):
        engine.train_step([x])
    for a, b in zip(whole.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "offload", [None, {"optimizer": "host"}, {"optimizer": "host", "state": "int8"}], ids=str
)
def test_a_bucket_that_never_stepped_begins_at_its_first_gradient(tmp_path: Path, offload: Any) -> None:
    """An optimizer group of its own, none of whose weights had a gradient yet, was loaded with the step counts of the
    others and without moments: the first step that used it was a KeyError."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.late, self.is_late = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.body(x)
            return (self.late(found) if self.is_late else found).square().mean()

    groups = [{"match": "late.*", "weight_decay": 0.0}]
    config = {"optimizer": {"type": "adamw", "lr": 0.1, "groups": groups}} | (
        {"offload": offload} if offload else {}
    )

    def step(engine: Any, is_late: bool) -> str:
        engine.module.is_late = is_late
        return str(engine.train_step([torch.ones(2, 4)]).loss.hex())

    engines = [shardwise.initialize(Late(), config, world=join(quiet=True)) for _ in range(2)]
    for _ in range(2):
        step(engines[0], False)
    engines[0].save(tmp_path, asynchronous=False)
    engines[1].load(tmp_path)
    expected, found = ([step(engine, True) for _ in range(3)] for engine in engines)
    assert found == expected


def load_over_other_moments(world: World, folder: str) -> bool:
    """Whether the moments are those that were saved, after a load over large ones."""
    config = {
        "precision": "fp32",
        "mesh": {"tp": 2},
        "offload": {"state": "int8"},
        "batch": {"duplicates": "allow"},
    }
    torch.manual_seed(0)
    model = Gpt(GptPolicy(layers=1, width=16, heads=2, context=8, vocab=32))
    engine = shardwise.initialize(model, config, world=world)
    tokens = torch.arange(16).view(2, 8)
    engine.train_step([{"tokens": tokens, "targets": tokens}])
    engine.save(folder, asynchronous=False)
    states = [optimizer.state for _, optimizer in engine._parts.trained]
    saved = [state.read(label) for state in states for label in state.labels]
    for state in states:
        assert state.coded is not None
        for tensor in state.coded.tensors.values():
            tensor.fill_(100)
    engine.load(folder)
    loaded = [state.read(label) for state in states for label in state.labels]
    engine.close()
    return all(torch.equal(a, b) for a, b in zip(loaded, saved, strict=True))


def test_what_an_engine_held_does_not_round_what_it_loads(ranks: Any, tmp_path: Path) -> None:
    """A cut matrix is loaded by rows that are shorter than a block of moments, whose scale an old value set."""
    assert ranks(2).run(load_over_other_moments, str(tmp_path)) == [True, True]


def test_an_empty_folder_loads_nothing(tmp_path: Path) -> None:
    assert build(join(quiet=True), 0).load(tmp_path) is None
