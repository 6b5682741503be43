"""What people do around a training loop by habit: right, or refused where it is called, with what to do instead.

Never a number that is silently wrong, and never a file of NaN.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import MismatchError, UsageError
from shardwise.comm.world import World, join
from shardwise.models import Gpt, GptPolicy
from tests.engine.nets import Language, seeded
from tests.engine.plain import against_plain, worst

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def piece(step: int, i: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + i))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def world() -> World:
    return join(quiet=True)


def start(world: Any, model: nn.Module | None = None, **config: Any) -> Any:
    model = seeded(Language) if model is None else model
    return shardwise.initialize(model, {"comm": {"timeout_s": 10.0}, **config}, world=world)


def raised(call: Callable[[], Any], kind: type[Exception] = UsageError) -> str:
    """The text of the expected error; anything else passes through."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


# p.grad between backward and step ----------------------------------------------------------------------------------


def gradient_habits(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """What training scripts do with ``p.grad``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = parameters[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return {
        "clip by norm": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "clip by norm, one by one": lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
        "clip by value": lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        "scale": lambda: first.grad.mul_(0.5),
        "log": lambda: first.grad.norm().item(),
        "print": lambda: repr(first.grad),
        "noise": lambda: first.grad.add_(torch.randn_like(first)),
        "look at one": lambda: first.grad[0],
        "another loss": lambda: (first * 2).sum().backward(),
        "unscale": lambda: scaler.unscale_(optimizer),
        "scaler's step": lambda: scaler.step(optimizer),
        "step of one's own": lambda: optimizer.step(),
        "AdamW": lambda: torch.optim.AdamW(parameters).step(),
        "zero in place": lambda: optimizer.zero_grad(set_to_none=False),
    }


def refused_at_once(world: Any, stage: int) -> None:
    """p.grad was None between the two calls, so that clip_grad_norm_ returned 0.0 and clipped nothing."""
    engine = start(world, zero={"stage": stage})
    for name, habit in gradient_habits(engine.module).items():
        engine.backward(engine(*piece(0, world.rank)))
        text = raised(habit)
        if stage == 3 and name == "another loss":  # it reads a released weight first
            assert "engine.full_parameters()" in text, text
        else:
            assert ".grad: between engine.backward" in text and "max_grad_norm: 1.0" in text, name
            assert "engine.gradients()" in text, name
        engine.step()
        assert all(p.grad is None for p in engine.module.parameters()), name
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_reading_gradients_by_habit_is_refused_where_it_is_called(ranks: Any, stage: int) -> None:
    ranks(2).run(refused_at_once, stage)


def test_zero_grad_in_the_right_places_does_nothing(world: World) -> None:
    """Before the forward pass, after the step, and in the middle of accumulation, as Accelerate has it."""

    def run(habit: Callable[[nn.Module], None]) -> dict[str, Tensor]:
        engine = start(world, batch={"accumulation": 2})
        for step in range(2):
            for i in range(2):
                habit(engine.module)
                loss = engine(*piece(step, i))
                habit(engine.module)
                engine.backward(loss)
                engine.step()
        state: dict[str, Tensor] = engine.state_dict()
        return state

    wanted = run(lambda model: None)
    assert worst(run(lambda model: model.zero_grad()), wanted) == 0


def test_gradients_that_were_dropped_or_given_are_not_ignored(world: World) -> None:
    engine = start(world)
    before = engine.state_dict()
    engine.backward(engine(*piece(0, 0)))
    engine.module.zero_grad()
    assert "engine.discard()" in raised(engine.step)
    engine.backward(engine(*piece(0, 0)))
    engine.module.norm.weight.grad = torch.ones(6, dtype=torch.float64)
    assert "norm.weight.grad was set after engine.backward" in raised(engine.step)
    engine.backward(engine(*piece(0, 0)))
    engine.discard()
    assert worst(engine.state_dict(), before) == 0
    assert all(p.grad is None for p in engine.module.parameters())
    engine.backward(engine(*piece(0, 0)))
    assert engine.step().step == 1


def exact_beside_marks(world: Any, stage: int) -> float:
    return against_plain(
        world,
        lambda: seeded(Language),
        piece,
        {"zero": {"stage": stage}, "batch": {"accumulation": 2}},
        loss_of=lambda model, batch: model(*batch),
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_marks_change_no_number(ranks: Any, stage: int) -> None:
    assert max(ranks(2).run(exact_beside_marks, stage)) <= 1e-12


# Saving, loading and copying the model itself ----------------------------------------------------------------------


def saves_whole_or_not_at_all(world: Any, stage: int, precision: str, folder: str) -> None:
    """At stage 3 a finished run was saved as 21 tensors of NaN, with exit code 0."""
    model = seeded(Language, dtype=torch.float32)
    engine = start(world, model, zero={"stage": stage}, precision=precision)
    engine.train_step([piece(0, world.rank)])
    whole = engine.state_dict()
    cut = stage == 3
    file = f"{folder}/{world.rank}.pt"

    def save() -> None:
        torch.save(model.state_dict(), file)

    if cut:
        assert "engine.state_dict()" in raised(save)
        assert "engine.state_dict()" in raised(model.blocks[1].state_dict)
    for inside in [True] if cut else [False, True]:
        if inside:
            with engine.full_parameters():
                save()
        else:
            save()
        assert worst(torch.load(file, weights_only=True), whole) == 0
    # The next step does not know that anything was saved.
    assert engine.train_step([piece(1, world.rank)]).step == 2
    engine.close()


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp32"), (3, "bf16")])
def test_a_saved_model_is_whole_or_refused(ranks: Any, tmp_path: Any, stage: int, precision: str) -> None:
    ranks(2).run(saves_whole_or_not_at_all, stage, precision, str(tmp_path))


def loads_into_masters(world: Any, stage: int, precision: str) -> None:
    """At stage 3 torch spoke of memory locations; with masters of their own the step after spoke up, or nobody."""
    model = seeded(Language, dtype=torch.float32)
    engine = start(world, model, zero={"stage": stage}, precision=precision)
    other = seeded(Language, seed=1, dtype=torch.float32).state_dict()
    engine.train_step([piece(0, world.rank)])
    if stage == 3 or precision == "bf16":
        assert "engine.load_state_dict(state)" in raised(lambda: model.load_state_dict(other))
    else:
        model.load_state_dict(other)
        assert worst(engine.state_dict(), other) == 0
    with engine.full_parameters(write=True):
        model.load_state_dict(other)
    exact = {name: tensor.to(torch.bfloat16).float() for name, tensor in other.items()}
    assert worst(engine.state_dict(), exact if precision == "bf16" else other) == 0
    engine.load_state_dict(other)
    masters = [bucket.weight.master for bucket, _ in engine._parts.trained]
    assert precision == "fp32" or any(  # not rounded on their way
        not torch.equal(m, m.bfloat16().float()) for m in masters
    )
    loss = engine.train_step([piece(1, world.rank)]).loss
    fresh = seeded(Language, seed=1, dtype=torch.float32)
    again = start(world, fresh, zero={"stage": stage}, precision=precision)
    assert loss == again.train_step([piece(1, world.rank)]).loss
    text = raised(lambda: engine.load_state_dict({"head.wait": torch.ones(2)}), MismatchError)
    assert "head.wait" in text and "embed.weight" in text
    engine.load_state_dict({"norm.weight": torch.full((6,), 3.0)}, strict=False)
    assert float(engine.state_dict()["norm.weight"].sum()) == 18.0
    engine.close()
    again.close()


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (3, "fp32"), (3, "bf16")]
)
def test_a_loaded_state_reaches_the_masters(ranks: Any, stage: int, precision: str) -> None:
    ranks(2).run(loads_into_masters, stage, precision)


def parts_are_refused(world: Any, mesh: dict[str, int]) -> None:
    """Rank 0's half was saved as if it were the model."""
    model = Gpt(GptPolicy(layers=2, width=16, heads=4, context=12, vocab=20, hidden=24))
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = start(world, model, mesh=mesh)
    assert "engine.state_dict()" in raised(model.state_dict)
    assert "engine.load_state_dict(state)" in raised(lambda: model.load_state_dict(wanted))
    assert "Build a new model" in raised(lambda: copy.deepcopy(model))
    here = {id(each) for stage in engine._parts.stages for each in stage.module.parameters()}
    for each in model.parameters():
        if id(each) not in here:  # what lives on another stage stays on the CPU beside an accelerator
            with torch._C.DisableTorchFunctionSubclass():  # no user could: it is refused
                each.data = torch.empty(each.shape, dtype=torch.float64)
    assert model.to(torch.float32) is model
    other = {name: tensor + 0.5 for name, tensor in wanted.items()}
    assert worst(engine.state_dict(), wanted) == 0
    engine.load_state_dict(other)
    assert worst(engine.state_dict(), other) == 0
    engine.close()


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_part_of_a_model_is_not_saved_as_the_model(ranks: Any, mesh: dict[str, int]) -> None:
    ranks(2).run(parts_are_refused, mesh)


def copies(world: Any, stage: int) -> None:
    """An average of the weights (EMA), made before and after: 'cannot pickle mmap', and NaN at stage 3."""
    model = seeded(Language)
    early = torch.optim.swa_utils.AveragedModel(model)
    start_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = start(world, model, zero={"stage": stage})
    if stage == 3:
        assert "engine.full_parameters()" in raised(lambda: copy.deepcopy(model))
    with engine.full_parameters():
        late = torch.optim.swa_utils.AveragedModel(model)
    engine.train_step([piece(0, world.rank)])
    moved = engine.state_dict()
    if stage == 3:
        assert "engine.full_parameters()" in raised(lambda: early.update_parameters(model))
    with engine.full_parameters():
        early.update_parameters(model)  # the first is a copy
        twin = copy.deepcopy(model)
    # A copy is a plain model: it has the weights of its moment, and trains by itself.
    assert worst(late.module.state_dict(), start_weights) == 0
    assert worst(early.module.state_dict(), moved) == 0
    assert worst(twin.state_dict(), moved) == 0
    loss = twin(*piece(1, 0))
    loss.backward()
    assert twin.blocks[0].up.weight.grad is not None and model.blocks[0].up.weight.grad is None
    assert copy.deepcopy(twin).half().blocks[0].up.weight.dtype == torch.float16
    with torch.no_grad():
        assert float(engine(*piece(1, 0))) == float(loss.detach())
    # A file of the model would be code.
    with engine.full_parameters():
        assert "engine.state_dict()" in raised(lambda: torch.save(model, io.BytesIO()))
    engine.close()
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("stage", [0, 3])
def test_copies_of_the_model_are_plain_models(ranks: Any, stage: int) -> None:
    ranks(2).run(copies, stage)


def test_a_copy_that_would_call_the_original_is_refused(world: World) -> None:
    engine = start(world, recompute="full")
    assert "forward of module blocks.0 was replaced" in raised(lambda: copy.deepcopy(engine.module))
    engine.close()
    twin = copy.deepcopy(engine.module)  # nothing of the engine is left
    assert "forward" not in vars(twin.blocks[0])


class CopiesItself(Language):
    def __deepcopy__(self, memo: Any) -> "CopiesItself":
        twin = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin


def test_a_model_that_copies_itself_is_refused_by_name(world: World) -> None:
    """It was a KeyError."""
    engine = start(world, seeded(CopiesItself))
    assert "CopiesItself copies itself" in raised(lambda: copy.deepcopy(engine.module))
    engine.close()


def converted(world: Any, config: dict[str, Any]) -> None:
    """What a conversion made did not train, which the next step said, or nobody where it was a buffer."""
    model = seeded(Language)
    model.register_buffer("scale", torch.ones(3, dtype=torch.float64))
    engine = start(world, model, **config)
    roots = {model, *(stage.module for stage in engine._parts.stages)}
    for root in roots:
        for call in (root.half, root.float, lambda root=root: root.to("meta"), root.share_memory):
            assert "before initialize()" in raised(call)
        assert "engine.state_dict()" in raised(lambda root=root: nn.Sequential(root).bfloat16())
        # What changes nothing is a habit that may stay.
        assert root.to("cpu") is root and root.double() is root and root.cpu().to(torch.float64) is root
    engine.close()
    if config["mesh"] == {}:
        assert model.half().scale.dtype == torch.float16


@pytest.mark.parametrize("config", [{"mesh": {}, "zero": {"stage": 3}}, {"mesh": {"pp": 2}}], ids=str)
def test_conversions_are_refused_where_they_are_called(ranks: Any, config: dict[str, Any]) -> None:
    ranks(2).run(converted, config)


class Dropping(Language):
    """Drops half of what the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.5))


def closed_and_opened(world: Any, stage: int) -> None:
    """After close() the model was hollow at stage 3: no second engine, no file, no plain use."""
    model = seeded(Dropping, dtype=torch.float32)
    config = {"zero": {"stage": stage}, "recompute": "full", "precision": "bf16"}
    engine = start(world, model, **config)
    first = engine.train_step([piece(0, world.rank)]).loss
    whole = engine.state_dict()
    engine.close()
    assert worst({name: each.bfloat16() for name, each in model.state_dict().items()}, whole) == 0
    model(*piece(0, 0)).backward()
    assert model.norm[0].weight.grad is not None
    model.zero_grad()
    assert not model._forward_pre_hooks and "forward" not in vars(model.blocks[0])
    # A second engine begins with the weights of the first, and nothing of its casts and wrappers is left.
    whole = {name: each.clone() for name, each in model.state_dict().items()}
    again = start(world, model, zero={"stage": stage})
    assert worst(again.state_dict(), whole) == 0
    loss = again.train_step([piece(0, world.rank)]).loss
    assert loss != first and loss == loss
    again.close()
    again.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_close_gives_the_model_back_whole(ranks: Any, stage: int) -> None:
    ranks(2).run(closed_and_opened, stage)


def a_cell_run_again(world: Any, stage: int) -> None:
    """Without close(): the engine before gives the model back, and refuses to go on with it."""
    model = seeded(Language)
    first = start(world, model, zero={"stage": stage})
    first.train_step([piece(0, world.rank)])
    whole = first.state_dict()
    first.backward(first(*piece(1, world.rank)))  # in the middle of a step
    second = start(world, model, zero={"stage": stage})
    assert first.is_closed and worst(second.state_dict(), whole) == 0
    assert "this engine is closed" in raised(lambda: first.backward(second(*piece(0, world.rank))))
    fresh = seeded(Language)
    fresh.load_state_dict(whole)
    plain = start(world, fresh, zero={"stage": stage})
    for step in (2, 3):
        loss = second.train_step([piece(step, world.rank)]).loss
        assert loss == plain.train_step([piece(step, world.rank)]).loss
    assert worst(second.state_dict(), plain.state_dict()) == 0
    second.close()
    plain.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_engine_on_one_module_takes_it_over(ranks: Any, stage: int) -> None:
    ranks(2).run(a_cell_run_again, stage)


class Logits(Language):
    """Returns logits: a teacher, or a student."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def distilled(student: Any, teacher: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Divergence from a teacher without gradients, beside the labels' own loss."""
    with torch.no_grad():
        wanted = teacher(batch[0]).log_softmax(-1)
    logits = student(batch[0])
    own = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    return own + nn.functional.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")


def distillation(world: Any, stage: int, teaches: str) -> float:
    def make(blocks: int) -> nn.Module:
        return seeded(Logits, blocks, seed=blocks)

    plain, teacher = make(2), make(3).requires_grad_(False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    held = start(world, make(3), zero={"stage": stage}) if teaches == "engine" else make(3)
    engine = start(world, make(2), zero={"stage": stage}, optimizer={"type": "sgd", "lr": 0.5})
    for step in range(3):
        pieces = [piece(step, i) for i in range(world.size)]
        optimizer.zero_grad()
        sum(distilled(plain, teacher, each) / world.size for each in pieces).backward()
        optimizer.step()
        engine.backward(distilled(engine, held, pieces[world.rank]))
        engine.step()
    wrong = worst(engine.state_dict(), plain.state_dict())
    engine.close()
    if teaches == "engine":
        assert worst(held.state_dict(), teacher.state_dict()) == 0
        held.close()
    return wrong


@pytest.mark.parametrize("teaches", ["module", "engine"])
@pytest.mark.parametrize("stage", [0, 3])
def test_distillation_is_that_of_one_process(ranks: Any, stage: int, teaches: str) -> None:
    assert max(ranks(2).run(distillation, stage, teaches)) <= 1e-12


def fails_alone(world: Any) -> None:
    """One rank fails and closes on its way out; the others are elsewhere."""
    engine = start(world, zero={"stage": 3})
    engine.train_step([piece(0, world.rank)])
    if world.rank == 0:
        with pytest.raises(ValueError, match="alone"):
            try:
                raise ValueError("alone")
            finally:
                engine.close()
    else:
        engine.close(whole=False)


def test_close_waits_for_nobody_after_an_error(ranks: Any) -> None:
    ranks(2).run(fails_alone)


class Adapted(Language):
    """A frozen base with one adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Linear(6, 6, bias=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits = self.head(self.norm(x + self.adapter(x)) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adapters(world: Any) -> None:
    engine = start(world, seeded(Adapted), zero={"stage": 3})
    engine.train_step([piece(0, world.rank)])
    state = engine.state_dict(trained_only=True)
    assert list(state) == ["adapter.weight"] and torch.equal(
        state["adapter.weight"], engine.state_dict()["adapter.weight"]
    )
    engine.load_state_dict({"adapter.weight": torch.zeros(6, 6)}, strict=False)
    assert not engine.state_dict()["adapter.weight"].any()
    engine.close()


def test_adapters_are_saved_alone(ranks: Any) -> None:
    ranks(2).run(adapters)


def folders(world: Any, layout: dict[str, Any], folder: str) -> None:
    """save_pretrained of the model itself wrote a file of NaN at stage 3, and rank 0's half under tp."""
    from transformers import LlamaForCausalLM

    model = seeded(llama)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = start(world, model, **layout)
    assert "engine.save_pretrained(folder)" in raised(lambda: model.save_pretrained(folder + "/nowhere"))
    engine.save_pretrained(folder)
    read = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert worst(read.state_dict(), wanted) == 0
    engine.close(whole=False)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    made: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes)
    )
    return made


@pytest.mark.parametrize(
    "layout", [{"zero": {"stage": 3}}, {"mesh": {"tp": 2}}, {"mesh": {"pp": 2}}], ids=str
)
def test_a_folder_for_transformers_from_any_layout(ranks: Any, tmp_path: Any, layout: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    ranks(2).run(folders, layout, str(tmp_path))
    with pytest.raises(UsageError, match="has none of its own"):
        start(join(quiet=True)).save_pretrained(tmp_path)
