"""Edits of a model between steps: in place, by way of ``p.data``, and of its tree of modules."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import shardwise
from shardwise.base.errors import UsageError
from shardwise.comm.world import World, join
from shardwise.memory.watched import WatchedParameter
from tests.engine.nets import Language, seeded
from tests.engine.plain import worst


def piece(number: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


def start(world: World, model: nn.Module | None = None, **config: Any) -> Any:
    model = seeded(Language, dtype=torch.float32) if model is None else model
    config = {"comm": {"timeout_s": 10.0}, "optimizer": {"type": "adamw", "lr": 1e-3}, **config}
    return shardwise.initialize(model, config, world=world)


# Numbers -----------------------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "p.data.clamp_": lambda model: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()],
    "p.data.copy_": lambda model: model.norm.weight.data.copy_(torch.linspace(0, 1, 6)),
    "nn.init": lambda model: nn.init.constant_(model.blocks[0].up.weight.data, 0.25),
    "p.clamp_": lambda model: [p.detach().clamp_(-0.05, 0.05) for p in model.parameters()],
    "a slice": lambda model: model.norm.weight.data.view(-1)[:2].fill_(0.125),
}


def edited(world: World, config: dict[str, Any], edit: str, in_context: bool) -> dict[str, Tensor]:
    """Return the state after a step, an edit and two more steps."""
    engine = start(world, **config)
    for number in range(3):
        engine.train_step([piece(number)])
        if number == 0 and in_context:
            with engine.full_parameters(write=True):
                EDITS[edit](engine.module)
        elif number == 0:
            EDITS[edit](engine.module)
    found = engine.state_dict() | {
        f"{name} master": engine.full_tensor(name) for name in ("norm.weight", "blocks.0.up.weight")
    }
    engine.close()
    assert not any(isinstance(p, WatchedParameter) for p in engine.module.parameters())
    return found


def taken_up(world: World, config: dict[str, Any], edit: str) -> float:
    """Return the largest difference from the same edit inside ``engine.full_parameters(write=True)``."""
    return worst(edited(world, config, edit, False), edited(world, config, edit, True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every input
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("setting", ["bf16", "host", "disk", "compiled"])
def test_an_edit_beside_a_master_becomes_the_master(tmp_path: Path, setting: str, edit: str) -> None:
    """The next update rounded the old master over it."""
    config: dict[str, Any] = {
        "bf16": {"precision": "bf16"},
        "host": {"offload": {"optimizer": "host"}},
        "disk": {"offload": {"optimizer": "disk", "disk_path": str(tmp_path)}},
        "compiled": {"precision": "bf16", "compile": {"scope": "blocks", "backend": "eager"}},
    }[setting]
    assert taken_up(join(quiet=True), config, edit) == 0.0


@pytest.mark.parametrize("stage", [0, 2])
def test_an_edit_on_all_ranks_becomes_the_master_of_each_range(ranks: Any, stage: int) -> None:
    config = {"precision": "bf16", "zero": {"stage": stage}, "batch": {"duplicates": "allow"}}
    assert ranks(2).run(taken_up, config, "p.data.clamp_") == [0.0, 0.0]


def test_an_edit_after_the_last_step_is_saved_and_given_back(tmp_path: Path) -> None:
    world = join(quiet=True)
    engine = start(world, precision="bf16")
    engine.train_step([piece(0)])
    engine.module.norm.weight.data.fill_(0.125)
    engine.save(tmp_path, asynchronous=False)
    engine.module.norm.weight.data.fill_(0.25)
    engine.close()
    assert (engine.module.norm.weight == 0.25).all()
    other = start(world, precision="bf16")
    other.load(tmp_path)
    assert (other.full_tensor("norm.weight") == 0.125).all()
    other.close()


def test_reading_data_changes_no_number() -> None:
    world = join(quiet=True)

    def run(reads: bool) -> dict[str, Tensor]:
        engine = start(world, precision="bf16")
        for number in range(3):
            engine.train_step([piece(number)])
            if reads:
                assert all(p.data.isfinite().all() for p in engine.module.parameters())
        found: dict[str, Tensor] = {"master": engine.full_tensor("norm.weight"), **engine.state_dict()}
        engine.close()
        return found

    assert worst(run(True), run(False)) == 0.0


def test_a_copy_of_the_model_is_not_watched() -> None:
    engine = start(join(quiet=True), precision="bf16")
    assert all(isinstance(p, WatchedParameter) for p in engine.module.parameters())
    copied = copy.deepcopy(engine.module)
    assert {type(p) for p in copied.parameters()} == {nn.Parameter}
    engine.close()


def test_a_model_whose_backward_passes_are_adopted_is_copied() -> None:
    """The hook of the adopted passes took the engine along, whose shared memory torch could not pickle."""
    engine = start(join(quiet=True))
    engine.adopt_backward()
    engine(*piece(0)).backward()
    engine.step()
    copied = copy.deepcopy(engine.module)
    assert worst(copied.state_dict(), engine.state_dict()) == 0.0
    copied(*piece(1)).backward()
    engine.close()


def test_an_edit_under_a_late_update_is_refused() -> None:
    """The update under way was made of the numbers before the edit."""
    engine = start(join(quiet=True), precision="bf16", offload={"optimizer": "host", "step": "delayed"})
    engine.train_step([piece(0)])
    engine.module.norm.weight.data.clamp_(-0.5, 0.5)
    with pytest.raises(UsageError, match="norm.weight was changed in place, which its torch.float32 master"):
        engine.train_step([piece(1)])
    engine.close(whole=False)


def released(world: World) -> list[str]:
    engine = start(world, zero={"stage": 3})
    weight, said = engine.module.norm.weight, []
    average = torch.zeros_like(weight)
    for edit in (
        lambda: weight.data.clamp_(-1, 1),
        lambda: weight.data.copy_(torch.zeros(6)),
        lambda: weight.data.mul_(0.9).add_(average),
        lambda: weight.detach().zero_(),
        lambda: nn.init.normal_(weight.data),
        lambda: average.data.copy_(weight.data),
    ):
        with pytest.raises(UsageError) as error:
            edit()
        said.append(str(error.value))
    engine.close()
    return said


def test_an_edit_of_a_released_weight_by_way_of_data_names_what_to_do(ranks: Any) -> None:
    """torch said that elements of the written-to tensor refer to a single memory location."""
    for said in ranks(2).run(released):
        for text in said:
            assert "parameter 'norm.weight' of Unit" in text and "engine.full_parameters()" in text
            assert "test_edits.py:" in text
        assert all("edited in place" in text for text in said[:5])


# The tree of modules -----------------------------------------------------------------------------------------------


def _replace_head(model: Any) -> None:
    model.norm = nn.LayerNorm(6)


def _replace_parameter(model: Any) -> None:
    model.norm.weight = nn.Parameter(torch.ones(6))


def _append(model: Any) -> None:
    model.blocks.append(copy.deepcopy(seeded(Language, dtype=torch.float32).blocks[0]))


def _delete(model: Any) -> None:
    del model.blocks[1]


def _add(model: Any) -> None:
    model.blocks[0].extra = nn.Linear(2, 2)


def _tie(model: Any) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def _swap(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def _prune(model: Any) -> None:
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)


CHANGES = {
    "parameters replaced since initialize.* norm.weight, norm.bias": _replace_head,
    "parameters replaced since initialize.* norm.weight": _replace_parameter,
    "new parameters .* blocks.3": _append,
    "parameters that left the model .* blocks.1.norm.weight": _delete,
    "new parameters .* blocks.0.extra.weight": _add,
    "parameters that left the model .* blocks.1.up.weight": _tie,
    "parameters have other names .* blocks.0.norm.weight is blocks.1.norm.weight now": _swap,
    "parameters have other names .* blocks.0.up.weight is blocks.0.up.weight_orig now": _prune,
}


@pytest.mark.parametrize("said", CHANGES)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_is_another_than_at_initialize_is_refused(tmp_path: Path, stage: int, said: str) -> None:
    """The new module computed and never trained, and a saved model held the old one."""
    engine = start(join(quiet=True), zero={"stage": stage})
    engine.train_step([piece(0)])
    CHANGES[said](engine.module)
    for name, call in {
        "save": lambda: engine.save(tmp_path),
        "state_dict": engine.state_dict,
        "train_step": lambda: engine.train_step([piece(1)]),
    }.items():
        with pytest.raises(UsageError, match=f"^{name}: .*{said}"):
            call()
    assert not any(tmp_path.iterdir())
    engine.close(whole=False)


def test_a_change_in_a_users_own_loop_is_refused_at_the_step() -> None:
    engine = start(join(quiet=True))
    _replace_head(engine.module)
    engine.backward(engine(*piece(0)))
    with pytest.raises(
        UsageError, match=r"^step: parameters replaced since initialize.* norm.weight, norm.bias"
    ):
        engine.step()
    engine.close(whole=False)


def set_on_stages(world: World) -> str:
    config = {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}
    engine = start(world, seeded(Language), **config)
    engine.module.forward = lambda *given: 2 * type(engine.module).forward(engine.module, *given)
    with pytest.raises(UsageError) as error:
        engine.train_step([piece(0), piece(1)])
    del engine.module.forward
    engine.train_step([piece(0), piece(1)])
    engine.close()
    return str(error.value)


def test_a_forward_that_is_set_on_a_pipelined_model_is_refused(ranks: Any) -> None:
    """The stages run copies of the root, which did not call it."""
    for said in ranks(2).run(set_on_stages):
        assert said.startswith("train_step: forward of the model was set after initialize()")


class Scaled(Language):
    """A model whose forward reads an attribute and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))
        self.act = nn.Identity()

    def forward(self, *given: Any) -> Any:
        return self.act(self.alpha * super().forward(*given) + self.shift)


def with_attributes(world: World, pp: int) -> tuple[list[float], str]:
    """Return losses before and after attributes of the model are set, and what a replaced child is told."""
    engine = start(world, seeded(Scaled), mesh={"pp": pp}, batch={"accumulation": 2, "duplicates": "allow"})
    model = engine.module
    batches = [piece(0), piece(1)]
    found = [engine.train_step(batches).loss]
    model.alpha = 2.0
    found += [engine.train_step(batches).loss, engine.evaluate([(piece(2), None)])]
    model.shift = torch.ones((), dtype=torch.float64)
    found.append(engine.train_step(batches).loss)
    del model.alpha
    type(model).alpha = 0.5
    found.append(engine.evaluate([(piece(2), None)]))
    del type(model).alpha
    model.alpha, said = 1.0, ""
    model.act = nn.Tanh()
    try:
        engine.train_step(batches)
    except UsageError as error:
        said = str(error)
    engine.close(whole=False)
    return found, said


def test_attributes_set_on_a_pipelined_model_are_those_of_its_stages(ranks: Any) -> None:
    """The stages run copies of the root, which kept the values before."""
    (truth, free), *_ = ranks(2).run(with_attributes, 1)
    for found, said in ranks(2).run(with_attributes, 2):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
        assert said.startswith("train_step: module act was replaced after initialize()")
    assert not free


def test_a_block_that_is_compiled_later_keeps_its_names() -> None:
    engine = start(join(quiet=True))
    engine.module.blocks[0] = torch.compile(engine.module.blocks[0], backend="eager")
    assert "blocks.0.up.weight" in engine.state_dict()
    engine.close()


def test_what_has_nothing_to_train_comes_and_goes() -> None:
    engine = start(join(quiet=True))
    model = engine.module
    model.metric = nn.Softmax(dim=-1)
    model.teacher = nn.Linear(2, 2).requires_grad_(False)
    engine.train_step([piece(0)])
    del model.metric
    norm = model.norm
    model.norm = nn.Identity()
    engine.evaluate([(piece(1), None)])
    model.norm = norm
    engine.train_step([piece(1)])
    assert "teacher.weight" not in engine.state_dict()
    engine.close()


# Gradients ---------------------------------------------------------------------------------------------------------


def halved(world: World, stage: int, late: bool) -> dict[str, Tensor]:
    """Return the state after two steps with the gradient of one parameter halved by a user's hook."""
    model = seeded(Language)

    def register() -> None:
        def halve(parameter: Tensor) -> None:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

        model.blocks[0].up.weight.register_post_accumulate_grad_hook(halve)

    if not late:
        register()
    engine = start(world, model, zero={"stage": stage}, batch={"accumulation": 2})
    if late:
        register()
    for number in range(2):
        engine.train_step([piece(number + 10 * world.rank), piece(number + 7 + 10 * world.rank)])
    found: dict[str, Tensor] = engine.state_dict()
    engine.close()
    return found


def late_hook(world: World, stage: int) -> float:
    return worst(halved(world, stage, True), halved(world, stage, False))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hook_on_a_gradient_acts_whenever_it_was_registered(ranks: Any, stage: int) -> None:
    """One registered after initialize found p.grad taken over already, and did nothing."""
    assert ranks(2).run(late_hook, stage) == [0.0, 0.0]
