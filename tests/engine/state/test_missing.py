"""A checkpoint that lacks some of a model, or holds more: what is named starts fresh, all else is restored exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import MismatchError, UsageError
from shardwise.comm.world import World, join
from shardwise.models.gpt import Gpt, GptPolicy

ADAM = {"type": "adam", "lr": 0.02, "betas": [0.8, 0.9]}
X = torch.arange(24.0, dtype=torch.float64).view(4, 6).sin()


class Net(nn.Module):
    """A body with a buffer, and a head."""

    def __init__(self, head: str, outputs: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(6, 5)
        self.register_buffer("shift", torch.full((5,), float(seed)))
        setattr(self, head, nn.Linear(5, outputs))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        head = list(self.children())[-1]
        return (head(self.body(x).tanh() + self.shift) - 1).square().mean()


def engine_of(model: nn.Module, stage: int = 0) -> Any:
    config = {"precision": "fp64", "optimizer": ADAM, "zero": {"stage": stage}}
    return shardwise.initialize(model, config, world=join(quiet=True))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two steps of the net with its old head."""
    engine = engine_of(Net("old", 3, 1))
    for _ in range(2):
        engine.train_step([X])
    engine.save(tmp_path, asynchronous=False)
    engine.close()
    return tmp_path


@pytest.mark.parametrize(
    ("head", "unexpected", "said"),
    [
        ("head", ["old.*"], "head.weight ((2, 5) is not in the checkpoint)"),
        ("old", [], "old.weight (is (3, 5) in the checkpoint and (2, 5) in this model)"),
    ],
)
def test_a_new_head_starts_fresh_and_the_body_goes_on_as_in_plain_torch(
    saved: Path, caplog: pytest.LogCaptureFixture, head: str, unexpected: list[str], said: str
) -> None:
    """Step counts too: Adam's correction of the head's moments begins at one, the body's goes on at three."""
    old, new = Net("old", 3, 1), Net(head, 2, 7)
    first = torch.optim.Adam(old.parameters(), lr=0.02, betas=(0.8, 0.9))
    for _ in range(2):
        first.zero_grad()
        old(X).backward()
        first.step()
    second = torch.optim.Adam(new.parameters(), lr=0.02, betas=(0.8, 0.9))
    with torch.no_grad():
        new.shift.copy_(old.shift)
        for ours, theirs in zip(new.body.parameters(), old.body.parameters(), strict=True):
            ours.copy_(theirs)
            second.state[ours] = first.state[theirs]
    engine = engine_of(Net(head, 2, 7))
    engine.load(saved, missing=[f"{head}.*"], unexpected=unexpected)
    assert engine.not_loaded == [f"{head}.weight", f"{head}.bias"] and engine.step_count == 2
    assert said in caplog.text
    assert ("passed over, not in this model: old.bias, old.weight" in caplog.text) == bool(unexpected)
    for _ in range(3):
        engine.train_step([X])
        second.zero_grad()
        new(X).backward()
        second.step()
    for name, tensor in new.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], tensor, rtol=0, atol=1e-12)


def test_another_shape_counts_as_missing_and_a_buffer_too(saved: Path) -> None:
    engine = engine_of(Net("old", 2, 7))
    with pytest.raises(
        MismatchError, match=r"'old.weight' is \(3, 5\) in the checkpoint and \(2, 5\) in this model"
    ):
        engine.load(saved)
    engine.load(saved, missing=["old.*", "shift", "body.bias"])
    assert engine.not_loaded == ["old.weight", "old.bias"], "what is there and fits is loaded"
    assert engine.module.shift.eq(1).all()


def test_strict_without_the_arguments_and_it_says_what_to_write(saved: Path) -> None:
    engine = engine_of(Net("head", 2, 7))
    before = engine.state_dict()
    with pytest.raises(MismatchError) as refused:
        engine.load(saved)
    said = str(refused.value)
    assert "missing=['head.weight', 'head.bias'], unexpected=['old.bias', 'old.weight']" in said
    assert "weight 'head.weight' (2, 5) is not in the checkpoint" in said
    for name, tensor in engine.state_dict().items():
        assert tensor.equal(before[name]), "nothing was touched"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"missing": ["haed.*"]}, MismatchError, r"missing: pattern 'haed.\*' matches no name of the model"),
        (
            {"unexpected": ["odl"]},
            MismatchError,
            "unexpected: pattern 'odl' matches no name in step 2; known here: body.bias",
        ),
        ({"missing": "head.*"}, UsageError, r"missing: expected a list of patterns.*missing=\['head"),
        ({"missing": ["head.*"]}, MismatchError, "weight 'old.bias' .* is not in this model"),
    ],
)
def test_patterns_that_do_not_fit(saved: Path, given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        engine_of(Net("head", 2, 7)).load(saved, **given)


# Layouts -------------------------------------------------------------------------------------------------------------

LAYOUTS = [{"zero": {"stage": 1}}, {"zero": {"stage": 3}}, {"mesh": {"pp": 2}}, {"mesh": {"tp": 2}}]


def gpt_engine(world: World, vocab: int, layout: dict[str, Any]) -> Any:
    policy = GptPolicy(layers=2, width=8, heads=2, context=6, vocab=vocab, hidden=12, tied_head=False)
    with torch.device("meta"):
        model = Gpt(policy)
    ranks = 1 if "mesh" in layout else world.size
    batch = {"global_size": 4, "micro_size": 2 // ranks}
    return shardwise.initialize(
        model, {"precision": "fp64", "optimizer": ADAM, "batch": batch, **layout}, world=world
    )


def steps(engine: Any, count: int) -> None:
    """The same global batches on any layout."""
    dp, size = (0, 1) if "pp 2" in str(engine.plan.mesh) else (engine.world.rank, engine.world.size)
    if engine.dp_size == 1:
        dp, size = 0, 1
    for _ in range(count):
        tokens = (torch.arange(28).view(4, 7) * 5 + engine.step_count) % 11
        mine = tokens[dp::size]
        engine.train_step([(each[:, :-1], each[:, 1:]) for each in mine.chunk(2)])


def over_layouts(world: World, folder: str) -> list[dict[str, Tensor]]:
    found = []
    for number, layout in enumerate(LAYOUTS):
        engine = gpt_engine(world, 13, layout)
        engine.load(folder, missing=["embed.*", "head.*"])
        assert sorted(engine.not_loaded) == ["embed.weight", "head.weight"]
        steps(engine, 2)
        engine.save(f"{folder}/{number}", asynchronous=False)
        found.append(engine.state_dict())
        engine.close(whole=False)
    return found


def test_every_layout_leaves_the_same_and_restores_the_rest(ranks: Any, tmp_path: Path) -> None:
    """A GPT whose vocabulary grew, saved by one rank; what two ranks save then loads on one, strictly."""
    solo = join(quiet=True)
    old = gpt_engine(solo, 11, {})
    steps(old, 2)
    old.save(tmp_path, asynchronous=False)
    whole = gpt_engine(solo, 13, {})
    whole.load(tmp_path, missing=["embed.*", "head.*"])
    steps(whole, 2)
    expected = whole.state_dict()
    steps(whole, 1)
    for found in ranks(2).run(over_layouts, str(tmp_path)):
        for layout, weights in zip(LAYOUTS, found, strict=True):
            for name, tensor in expected.items():
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10, msg=f"{layout}: {name}")
    for number in (1, 3):
        again = gpt_engine(solo, 13, {})
        again.load(tmp_path / str(number))
        steps(again, 1)
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=1e-10)


# init_from -----------------------------------------------------------------------------------------------------------


def test_init_from_a_checkpoint_takes_weights_alone(saved: Path) -> None:
    start = {"path": str(saved), "missing": ["head.*"], "unexpected": ["old.*"]}
    engine = shardwise.initialize(Net("head", 2, 7), {"precision": "fp64", "init_from": start})
    theirs = engine_of(Net("old", 3, 5))
    theirs.load(saved)
    assert engine.step_count == 0 and engine.not_loaded == ["head.weight", "head.bias"]
    assert engine.state_dict()["body.weight"].equal(theirs.state_dict()["body.weight"])
    assert engine.state_dict()["head.weight"].equal(Net("head", 2, 7).head.weight)
    assert not any(
        row.has_state for _, optimizer in engine._parts.trained for row in optimizer.state.scalars()
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_refused_start_gives_the_model_back(saved: Path, stage: int) -> None:
    """The hooks and views of an engine that nobody has stayed on it."""
    model, hooks = Net("head", 2, 7), Net("head", 2, 7)._forward_pre_hooks
    config = {"precision": "fp64", "zero": {"stage": stage}, "init_from": {"path": str(saved)}}
    with pytest.raises(MismatchError, match="head.weight"):
        shardwise.initialize(model, config)
    assert model._forward_pre_hooks == hooks
    wanted = Net("head", 2, 7).state_dict()
    assert all(tensor.equal(wanted[name]) for name, tensor in model.state_dict().items())


def test_init_from_a_file_may_lack_a_head(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And brings the buffers that it has."""
    file = str(saved / "step_00000002" / "model")
    with pytest.raises(MismatchError, match="2 of the model's 5 tensors are missing: head.weight"):
        shardwise.initialize(Net("head", 2, 7), {"init_from": file})
    start = {"path": file, "missing": ["head.*"]}
    engine = shardwise.initialize(Net("head", 2, 7), {"precision": "fp64", "init_from": start})
    assert engine.state_dict()["head.weight"].equal(Net("head", 2, 7).head.weight)
    assert not engine.state_dict()["body.weight"].equal(Net("head", 2, 7).body.weight)
    assert engine.module.shift.eq(1).all()
    assert "init_from: not loaded, stays as it starts" in caplog.text
    with pytest.raises(MismatchError, match="pattern 'haed' matches no name of the model"):
        shardwise.initialize(Net("head", 2, 7), {"init_from": {"path": file, "missing": ["head.*", "haed"]}})


def test_a_buffer_of_another_shape_in_a_file_is_no_small_matter(saved: Path) -> None:
    """It was passed over without a word, and the model began with its own."""
    file, other = str(saved / "step_00000002" / "model"), Net("old", 3, 7)
    other.shift = torch.full((1,), 7.0, dtype=torch.float64)
    with pytest.raises(
        MismatchError, match=r"1 tensors have another shape: shift is \[5\], the model's is \[1\]"
    ):
        shardwise.initialize(other, {"precision": "fp64", "init_from": file})
    start = {"path": file, "missing": ["shift"]}
    engine = shardwise.initialize(other, {"precision": "fp64", "init_from": start})
    assert engine.module.shift.eq(7).all()
