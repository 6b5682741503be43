"""Stages cut out of a model compute what the model does, and a model that cannot be cut is found at build."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.blocks import stages_of_modules
from shardwise.parallel.pipeline.check_cut import check_cut
from shardwise.parallel.pipeline.cut import cut
from tests.engine.nets import Language, seeded
from tests.parallel.pipeline.chain import error_of_cut, forward_backward, gradients_of
from tests.parallel.pipeline.cuttable import TOKENS, Images, Patches, gpt, loss, on_images


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, both: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        a, rest = both
        return torch.tanh(self.left(rest["b"])), {"b": torch.tanh(self.right(a)), "a": a}


class Pairs(nn.Module):
    """A tuple with a dictionary passes from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(*(Pair() for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        a, rest = self.blocks((x, {"b": x * 2, "a": x}))
        return (a * rest["b"] * rest["a"]).mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], list[tuple[str, ...]]]] = {
    "llama": (gpt, loss, [("blocks.1",), ("blocks.1", "blocks.2", "blocks.3")]),
    "gpt2": (lambda: gpt(family="gpt2"), loss, [("blocks.3",), ("blocks.1", "blocks.2", "blocks.3")]),
    "language": (lambda: seeded(Language), loss, [("blocks.1",), ("blocks.1", "blocks.2")]),
    "head alone": (lambda: seeded(Language), loss, [("blocks.2", "head")]),
    "images": (
        lambda: seeded(Images),
        on_images((2, 3, 9, 9)),
        [("layer2",), ("layer1", "layer2", "layer3")],
    ),
    "patches": (lambda: seeded(Patches), on_images((2, 3, 4, 4)), [("layers.1",), ("layers.1", "layers.2")]),
    "pairs": (
        lambda: seeded(Pairs),
        lambda m: m(TOKENS),
        [("blocks.1",), ("blocks.1", "blocks.2", "blocks.3")],
    ),
    "sequential": (
        lambda: seeded(
            lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        ),
        lambda m: m(TOKENS).square().mean(),
        [("1",), ("1", "3"), ("1", "2", "3")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_whole_model(case: str) -> None:
    make, call, cuts = CASES[case]
    for starts in cuts:
        model = make()
        check_cut(model, call, starts)
        assert error_of_cut(model, call, starts) <= 1e-12, starts


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_belongs_to_one_stage_under_its_own_name(case: str) -> None:
    make, _, cuts = CASES[case]
    for starts in cuts:
        model = make()
        before = {name: (p, p.clone()) for name, p in model.named_parameters(remove_duplicate=False)}
        stage_of = stages_of_modules(model, starts)
        found: dict[str, int] = {}
        for number, stage in cut(model, starts, range(len(starts) + 1)).items():
            for name, _ in stage.module.named_parameters(remove_duplicate=False):
                assert name not in found, f"{name} is on two stages"
                found[name] = number
        assert found == {name: stage_of[name.rpartition(".")[0]] for name in before}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            assert parameter is before[name][0] and torch.equal(parameter, before[name][1]), (
                "the model changed"
            )


def test_a_rank_holds_its_own_stages_alone() -> None:
    model = gpt(family="gpt2")
    (stage,) = cut(model, ("blocks.2",), [1]).values()
    alive = weakref.ref(model.blocks[0].mlp.up.weight), weakref.ref(model.blocks[3].mlp.up.weight)
    del model
    gc.collect()
    assert alive[0]() is None, "a weight of another stage is kept alive"
    assert alive[1]() is stage.module.get_parameter("blocks.3.mlp.up.weight")


def test_tied_weights_are_a_parameter_on_each_stage() -> None:
    model = gpt(family="gpt2")
    stage_of = stages_of_modules(model, ("blocks.1", "blocks.2"))
    assert (stage_of["embed"], stage_of["head"]) == (0, 2)
    stages = cut(model, ("blocks.1", "blocks.2"), range(3))
    assert not {"embed.weight", "head.weight"} & {name for name, _ in stages[1].module.named_parameters()}
    first, last = stages[0].module.embed.weight, stages[2].module.head.weight
    assert first is not last and torch.equal(first, last)
    (alone,) = cut(model, ("blocks.1", "blocks.2"), [2]).values()
    assert alone.module.head.weight is model.head.weight, "a copy that nobody needs"


def test_a_model_that_ties_its_weights_again_keeps_those_of_its_stage() -> None:
    for number, stage in cut(gpt(family="gpt2"), ("blocks.1", "blocks.2"), range(3)).items():
        names = dict(stage.module.named_parameters(remove_duplicate=False))
        stage.module.float()
        assert dict(stage.module.named_parameters(remove_duplicate=False)).keys() == names.keys(), number
        assert all(p.dtype == torch.float32 for p in stage.module.parameters())


def test_two_names_of_one_stage_stay_one_parameter() -> None:
    model = seeded(Language)
    model.blocks[2].up.weight = model.blocks[1].up.weight
    stages = cut(model, ("blocks.1",), [0, 1])
    assert stages[1].module.blocks[2].up.weight is stages[1].module.blocks[1].up.weight
    assert error_of_cut(model, loss, ("blocks.1",)) <= 1e-12


def test_inner_weights_tied_across_stages_are_copied_with_the_modules_around_them() -> None:
    model = seeded(Language)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    assert error_of_cut(model, loss, ("blocks.1",)) <= 1e-12
    assert model.blocks[2].up.weight is model.blocks[0].up.weight


def test_hooks_on_blocks_see_an_ordinary_pass() -> None:
    """Those on the root's output run where that output is, on the last stage (test_root_hooks.py)."""
    model = seeded(Language)
    stages = cut(model, ("blocks.2",), [0, 1])
    seen: list[tuple[str, bool]] = []
    root, last = stages[0].module, stages[0].module.blocks[1]
    for name, module in (("root", root), ("last", last)):
        module.register_forward_hook(lambda m, a, out, name=name: seen.append((name, out.requires_grad)))
    root.register_forward_pre_hook(lambda m, args: seen.append(("root's input", args[0].requires_grad)))
    last.register_full_backward_hook(lambda m, a, b: seen.append(("last, backward", True)))
    assert isinstance(stages[0].module, Language) and type(stages[0].module).__name__ == "Language"
    forward_backward(stages, loss)
    assert seen == [("root's input", False), ("last", True), ("last, backward", True)]
    assert not model._forward_hooks and not model.blocks[1]._forward_hooks, "hooks reached the whole model"


def test_nothing_of_a_pass_stays_alive() -> None:
    """The exception that ends a pass holds a traceback, which holds frames, which hold activations."""
    stages = cut(seeded(Language), ("blocks.1",), [0, 1])
    kept: list[Any] = []
    stages[0].module.embed.register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    gc.disable()
    try:
        with torch.no_grad():
            received = stages[0].run(loss)
            assert kept[0]() is None
            alive = weakref.ref(received)
            stages[1].run(loss, received)
            del received
            assert alive() is None
    finally:
        gc.enable()


def test_the_embedding_of_another_stage_is_nan_in_the_dtype_that_arrives() -> None:
    stages = cut(seeded(Language), ("blocks.1",), [1])
    embedded = stages[1].module.embed
    stages[1]._relay.load(torch.zeros(2, 7, 6, dtype=torch.bfloat16))
    filler = embedded(TOKENS)
    assert filler.dtype == torch.bfloat16 and filler.shape == (2, 7, 6) and bool(filler.isnan().all())
    filler += 1  # in memory of its own: models write into outputs in place


def test_a_users_loss_around_the_model_runs_on_the_last_stage_alone() -> None:
    calls = []

    def call(model: nn.Module) -> Tensor:
        try:
            result = model(TOKENS, TOKENS)
        except Exception:  # a model's or user's own handler must not catch the end of a stage
            return torch.zeros(())
        calls.append(model)
        return result * 2

    stages = cut(seeded(Language), ("blocks.1",), [0, 1])
    forward_backward(stages, call)
    assert calls == [stages[1].module]


def test_compiled_and_checkpointed_blocks() -> None:
    from torch.utils.checkpoint import checkpoint

    model = seeded(Language)
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    assert error_of_cut(model, loss, ("blocks.1", "blocks.2")) <= 1e-12


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        (("blocks.9",), "no module of Language is called 'blocks.9'.*did you mean 'blocks"),
        (("blocks.2", "blocks.1"), "'blocks.1' does not come after 'blocks.2'.*blocks.1, blocks.2"),
        (("blocks.0",), "no block is left for stage 0.*'blocks.1'"),
    ],
)
def test_wrong_names_are_told(starts: tuple[str, ...], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        cut(seeded(Language), starts, [0])


def test_gradients_of_two_microbatches_add_up() -> None:
    """Stages keep no state between passes."""
    model = seeded(Language)
    stages = cut(model, ("blocks.1", "blocks.2"), range(3))
    for _ in range(2):
        forward_backward(stages, loss)
    twice = gradients_of(stages, model)
    forward_backward(stages, loss)
    once = gradients_of(stages, model)
    assert all(torch.allclose(twice[name], 2 * once[name], rtol=1e-12) for name in once)
