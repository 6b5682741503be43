"""A model as a list: built where it lives, tied where it says so, the same weights under every cut."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import PlanError, UsageError
from shardwise.parallel.pipeline.blocks import find_blocks, stages_of_modules
from shardwise.parallel.pipeline.check_cut import check_cut
from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.layers import Layers, LayerSpec, TiedSpec
from tests.engine.nets import Block
from tests.parallel.pipeline.chain import forward_backward, gradients_of

TOKENS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))
CUTS = [("1",), ("3",), ("1", "2", "4"), ("2", "5"), ("1", "2", "3", "4", "5")]


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def logits(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.T


def language() -> Layers:
    return Layers(
        [
            TiedSpec("embedding", nn.Embedding, 11, 6),
            LayerSpec(Block, 6),
            torch.tanh,
            LayerSpec(Block, width=6),
            nn.LayerNorm(6),
            TiedSpec("embedding", nn.Embedding, 11, 6, forward=logits),
        ],
        loss=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    )


def call(model: nn.Module) -> Tensor:
    return model(TOKENS, TOKENS)


def truth() -> tuple[Tensor, dict[str, Tensor]]:
    """The same by hand, with the weights of the list's own layers."""
    model = cut(language(), (), [0])[0].module
    made = dict(model.named_children())
    x = made["0"](TOKENS)
    x = made["3"](torch.tanh(made["1"](x)))
    loss = F.cross_entropy((made["4"](x) @ made["0"].weight.T).flatten(0, 1), TOKENS.flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("starts", CUTS, ids="-".join)
def test_every_cut_gives_the_same_loss_and_gradients(starts: tuple[str, ...]) -> None:
    wanted_loss, wanted = truth()
    model = language()
    check_cut(model, call, starts)
    stages = cut(model, starts, range(len(starts) + 1))
    loss = forward_backward(stages, call)
    got = gradients_of(stages, model)
    assert float((loss - wanted_loss).abs()) <= 1e-14
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert float((got[name] - wanted[name]).norm()) <= 1e-12 * float(wanted[name].norm()), name


def test_a_layer_is_built_where_it_lives_alone() -> None:
    model = language()
    specified = {name for name, _ in model.named_parameters() if not name.startswith("4.")}
    assert all(p.is_meta == (name in specified) for name, p in model.named_parameters())
    (stage,) = cut(model, ("3",), [1]).values()
    assert {name.split(".")[0] for name, _ in stage.module.named_parameters()} == {"3", "4", "5"}
    assert not any(p.is_meta for p in stage.module.parameters())
    assert model.get_parameter("3.up.weight").is_meta, "the list itself stays as it was"


def test_start_weights_do_not_depend_on_the_cut_nor_touch_torchs_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = dict(cut(language(), (), [0])[0].module.named_parameters(remove_duplicate=False))
    assert torch.equal(torch.get_rng_state(), before)
    for starts in CUTS:
        for stage in cut(language(), starts, range(len(starts) + 1)).values():
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                assert torch.equal(parameter, whole[name]), name
    assert not torch.equal(whole["1.up.weight"], whole["3.up.weight"]), "two layers drew the same numbers"


def test_tied_layers_are_told() -> None:
    model = language()
    stage_of = stages_of_modules(model, ("3",))
    assert (stage_of["0"], stage_of["5"]) == (0, 1)
    one = cut(model, (), [0])[0].module
    assert one.get_parameter("0.weight") is one.get_parameter("5.weight")
    assert find_blocks(model) == tuple("012345")


def test_a_hook_on_a_tied_layer_runs_at_its_own_place() -> None:
    model, seen = cut(language(), (), [0])[0].module, []
    for name in ("0", "5"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: seen.append((name, out.shape[-1]))
        )
    call(model)
    assert seen == [("0", 6), ("5", 11)]


def test_without_targets_or_loss_the_result_comes_out() -> None:
    model = cut(language(), (), [0])[0].module
    assert model(TOKENS).shape == (2, 7, 11)


def test_any_pytree_passes_from_layer_to_layer() -> None:
    def split(x: Tensor) -> Any:
        return {"a": x, "b": (x * 2, None)}

    def join(value: Any) -> Tensor:
        return value["a"] * value["b"][0]

    model = Layers([LayerSpec(nn.Embedding, 11, 4), split, join, LayerSpec(nn.Linear, 4, 2)], loss=F.mse_loss)
    run = lambda m: m(TOKENS, torch.zeros(2, 7, 2))  # noqa: E731
    check_cut(model, run, ("2",))
    stages = cut(model, ("2",), [0, 1])
    assert torch.equal(forward_backward(stages, run), run(cut(model, (), [0])[0].module).detach())


def test_mistakes_are_told() -> None:
    with pytest.raises(PlanError, match="the list is empty"):
        Layers([])
    with pytest.raises(UsageError, match="expected a module class"):
        LayerSpec(nn.Linear(2, 2).weight)
    with pytest.raises(UsageError, match="made a str, expected a module"):
        Layers([LayerSpec(str)])
