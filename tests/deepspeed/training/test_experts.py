"""DeepSpeed's layer of experts: its formulas in loops, its arguments, and training against plain torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.world import World
from shardwise.deepspeed.calls import groups
from shardwise.deepspeed.training.experts import (
    MoE,
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from tests.ranks import RankPool

WIDTH, EXPERTS = 5, 4


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))


def made(seed: int = 0, **options: Any) -> MoE:
    """fp64, with experts that differ."""
    torch.manual_seed(seed)
    options = {"num_experts": EXPERTS, "drop_tokens": False, "top2_2nd_expert_sampling": False, **options}
    layer = MoE(WIDTH, expert(), **options).double()
    for each in (layer.router.weight, *layer.experts.parameters()):
        nn.init.normal_(each)
    return layer


def batch(*shape: int, seed: int = 1) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=draws, dtype=torch.float64, requires_grad=True)


def in_loops(layer: MoE, x: Tensor, k: int, used: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, as DeepSpeed defines it."""
    rows, stacks = x.reshape(-1, WIDTH), dict(layer.experts.named_parameters())
    out, counts, shares = [], torch.zeros(EXPERTS), torch.zeros(EXPERTS, dtype=x.dtype)
    probabilities = torch.stack([(layer.router.weight @ row).softmax(0) for row in rows])
    for place, (row, p) in enumerate(zip(rows, probabilities, strict=True)):
        best = p.detach().argsort(descending=True)[:k].tolist()
        if used is not None and not used[place]:
            best = []
        y = torch.zeros(WIDTH, dtype=x.dtype)
        for e in best:
            one = {name: stack[e] for name, stack in stacks.items()}
            hidden = torch.tanh(one["0.weight"] @ row + one["0.bias"])
            weight = p[e] / sum(p[each] for each in best) if k > 1 else p[e]
            y = y + weight * (one["2.weight"] @ hidden + one["2.bias"])
            counts[e] += 1
        balanced = best if k > 2 else best[:1]
        for e in balanced:
            shares[e] += 1 / len(rows) / len(balanced)
        if layer.residual is not None and layer.mix is not None:
            c = layer.mix(row).softmax(0)
            y = y * c[0] + layer.residual(row) * c[1]
        out.append(y)
    l_aux = EXPERTS * (probabilities.mean(0) * shares).sum()
    return torch.stack(out).view(x.shape), l_aux, counts


@pytest.mark.parametrize("k", [1, 2, 3])
def test_outputs_l_aux_counts_and_gradients(k: int) -> None:
    """Weights are divided by their sum where there are several; l_aux of two counts first choices alone."""
    layer, x = made(k=k, use_residual=k == 1), batch(2, 6)
    used = torch.tensor([1, 0, 1] * 4) if k == 1 else None
    found, expected = layer(x, used), in_loops(layer, x, k, used)
    weights = [x, *layer.parameters()]
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        of_each = (
            torch.autograd.grad(each.square().sum(), weights, materialize_grads=True, retain_graph=True)
            for each in (one, other)
        )
        torch.testing.assert_close(*of_each, rtol=1e-12, atol=1e-12)
    assert found[2].tolist() == expected[2].tolist() and found[2].dtype == torch.int64


def test_any_shape_is_one_batch_of_tokens() -> None:
    layer, x = made(drop_tokens=True, capacity_factor=0.5, min_capacity=0), batch(12)
    flat, l_aux, counts = layer(x)
    stacked = layer(x.view(3, 4, WIDTH))
    assert torch.equal(stacked[0].view(12, WIDTH), flat) and torch.equal(stacked[1], l_aux)
    assert counts.sum() == 12
    dropped = (flat == 0).all(-1).sum()  # room for ceil(0.5 · 12 / 4) of each expert's
    assert dropped == (counts - 2).clamp_min(0).sum() > 0
    with pytest.raises(UsageError, match=r"\[2, 4\]; expected \[..., 5\]"):
        layer(torch.zeros(2, 4))


def test_room_in_evaluation_is_another() -> None:
    layer, x = (
        made(drop_tokens=True, capacity_factor=0.5, eval_capacity_factor=4.0, min_capacity=0),
        batch(12),
    )
    assert (layer(x)[0] == 0).all(-1).any()
    assert not (layer.eval()(x)[0] == 0).all(-1).any()
    assert (layer.train()(x)[0] == 0).all(-1).any()


def test_noise_draws_the_second_expert_and_never_the_first() -> None:
    layer, x = made(k=2, top2_2nd_expert_sampling=True), batch(1).expand(400, WIDTH)
    scores = (x[0] @ layer.router.weight.T).softmax(0)
    best = int(scores.argmax())
    counts = layer(x)[2]
    assert counts[best] == 400
    others = scores.detach().clone()
    others[best] = 0
    expected = others / others.sum()
    assert torch.allclose(counts.double().index_fill(0, torch.tensor(best), 0) / 400, expected, atol=0.1)
    torch.testing.assert_close(layer.eval()(x)[2].sort().values, torch.tensor([0, 0, 400, 400]))
    drawn = made(k=1, noisy_gate_policy="RSample")(x)[2]
    assert (drawn > 0).sum() > 1 and drawn.sum() == 400


def test_arguments_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts 3 does not divide by ep_size 2"):
        MoE(WIDTH, expert(), num_experts=3, ep_size=2)
    with pytest.raises(ConfigError, match="'Jitter' or 'RSample'"):
        MoE(WIDTH, expert(), noisy_gate_policy="jitter")
    with pytest.raises(ConfigError, match="top2_2nd_expert_sampling=False"):
        MoE(WIDTH, expert(), num_experts=2, k=2, noisy_gate_policy="Jitter")
    with pytest.raises(AttributeError, match="layer.experts.<name>"):
        made().deepspeed_moe  # noqa: B018


def test_groups_of_parameters() -> None:
    """A copy of a model has experts too; the shared branch has none."""
    model = copy.deepcopy(nn.Sequential(nn.Linear(WIDTH, WIDTH), made(use_residual=True, ep_size=2)))
    parameters = [*model.parameters()]
    dense, experts = split_params_into_shared_and_expert_params(parameters)
    stacks = [*model[1].experts.parameters()]
    assert [id(p) for p in experts] == [id(p) for p in stacks] and len(dense) == len(parameters) - 4
    assert all(is_moe_param(p) for p in stacks) and not is_moe_param(model[1].residual[0].weight)
    assert has_moe_layers(model) == (True, EXPERTS) and has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    found = configure_moe_param_groups(parameters)
    assert [(g["name"], len(g["params"]), is_moe_param_group(g)) for g in found] == [
        ("dense-params", len(dense), False),
        ("ep_size_2", 4, True),
    ]
    assert configure_moe_param_groups(found) is found
    two = split_params_into_different_moe_groups_for_optimizer(
        ({"params": parameters[:2], "lr": 1.0}, {"params": parameters[2:], "lr": 2.0})
    )
    assert [(g["lr"], len(g["params"])) for g in two] == [(1.0, 2), (2.0, len(parameters) - 6), (2.0, 4)]


# Training ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers of experts that share their dense branch."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, one = nn.Linear(3, WIDTH), expert()
        self.layers = nn.ModuleList(
            MoE(
                WIDTH, one, count, ep, k, use_residual=True, drop_tokens=False, top2_2nd_expert_sampling=False
            )
            for count, k in ((2, 1), (4, 2))
        )
        for layer in self.layers:
            for each in (layer.router.weight, *layer.experts.parameters()):
                nn.init.normal_(each)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, l_aux = self.first(x), torch.zeros(())
        for layer in self.layers:
            x, more, _ = layer(x)
            l_aux = l_aux + more
        return x, l_aux


PARTS, STEPS = 2, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": PARTS,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


def samples(rank: int) -> Tensor:
    return torch.randn(STEPS * PARTS, 4, 3, generator=torch.Generator().manual_seed(rank)).double()


def loss_of(made: tuple[Tensor, Tensor]) -> Tensor:
    return made[0].square().mean() + 0.5 * made[1]


def trained(world: World, ep: int, stage: int) -> tuple[list[float], list[Tensor], Any]:
    model = Net(ep)
    engine = deepspeed.initialize(
        model=model,
        model_parameters=configure_moe_param_groups([*model.parameters()]),
        config={**CONFIG, "zero_optimization": {"stage": stage}},
    )[0]
    norms = []
    for x in samples(world.rank):
        engine.backward(loss_of(engine(x)))
        engine.step()
        if engine.was_step_applied():
            norms.append(engine.get_global_grad_norm())
    assert engine.has_moe_layers and engine.num_experts == [2, 4]
    name = groups._get_max_expert_size_name()
    sizes = groups._get_expert_parallel_world_size(name), groups._get_expert_data_parallel_world_size(name)
    weights = [*engine.module_state_dict().values()]
    engine.destroy()
    return norms, weights, sizes


@pytest.mark.parametrize(("ep", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_training_is_that_of_one_process(ranks: Callable[[int], RankPool], ep: int, stage: int) -> None:
    """The script's own l_aux counts once, however often its layers run and wherever experts lie."""
    (norms, weights, sizes), _ = ranks(2).run(trained, ep, stage)
    assert sizes == (ep, 2 // ep)
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            for x in samples(rank)[step * PARTS : (step + 1) * PARTS]:
                (loss_of(model(x)) / PARTS / 2).backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    torch.testing.assert_close(norms, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(weights, [*model.state_dict().values()], rtol=1e-10, atol=1e-12)


def saved_and_loaded(world: World, folder: str) -> tuple[list[float], list[Tensor], list[Tensor]]:
    x, losses, found = samples(world.rank)[0], [], []
    for ep, stage in ((2, 2), (1, 3)):
        model = Net(ep)
        config = {**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": stage}}
        engine = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)[0]
        if ep == 2:
            engine.backward(loss_of(engine(x)))
            engine.step()
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        losses.append(loss_of(engine(x)).item())
        found.append([*engine.module_state_dict().values()])
        engine.destroy()
    served = deepspeed.init_inference(Net(2), dtype=torch.float64, moe={"ep_size": 2}, checkpoint=folder)
    losses.append(loss_of(served(x)).item())
    served.destroy()
    return losses, *found


def test_saved_over_two_ranks_and_loaded_where_experts_are_whole(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for losses, before, after in ranks(2).run(saved_and_loaded, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert losses == pytest.approx(losses[:1] * 3, rel=1e-12)


class Carrying(nn.Module):
    """A layer of a pipeline, with what the ones before say of balance beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, expert(), EXPERTS, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, l_aux = given if isinstance(given, tuple) else (given, torch.zeros(()).double())
        y, more, _ = self.moe(x)
        return x + y, l_aux + more


def pipeline(stages: int) -> Any:
    def judged(made: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return (made[0] - targets).square().mean() + 0.5 * made[1]

    torch.manual_seed(4)
    layers = [deepspeed.pipe.LayerSpec(Carrying), Carrying(), deepspeed.pipe.LayerSpec(Carrying)]
    return deepspeed.pipe.PipelineModule(layers, num_stages=stages, loss_fn=judged).double()


def pairs(step: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(step)
    return [
        (torch.randn(4, WIDTH, generator=draws).double(), torch.randn(4, WIDTH, generator=draws).double())
        for _ in range(PARTS)
    ]


def piped(world: World) -> tuple[list[float], dict[str, Tensor]]:
    model = pipeline(2)
    engine = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=CONFIG)[0]
    losses = [engine.train_batch(iter(pairs(step))).item() for step in range(STEPS)]
    weights = engine.module_state_dict()
    engine.destroy()
    return losses, weights


def test_layers_of_a_pipeline(ranks: Callable[[int], RankPool]) -> None:
    """In DeepSpeed's own way of cutting: stages hold no part of the others' experts."""
    model = pipeline(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model.loss_fn(model(x), y) for x, y in pairs(step)]
        (sum(losses) / PARTS).backward()
        expected.append(sum(losses).item() / PARTS)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    wanted = model.state_dict()
    for found, weights in ranks(2).run(piped):
        assert found == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(weights, {name: wanted[name] for name in weights}, rtol=1e-10, atol=1e-12)


class Drawing(nn.Module):
    """Dropout and a drawn second expert, in a piece that the model itself checkpoints, or not."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.moe = made(k=2, top2_2nd_expert_sampling=True)  # which seeds
        self.first, self.dropped, self.call = nn.Linear(3, WIDTH).double(), nn.Dropout(0.5), call

    def piece(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux, _ = self.moe(self.dropped(x.tanh()))
        return y, l_aux

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.call(self.piece, self.first(x))


def test_a_checkpoint_of_the_scripts_own_draws_the_same_again() -> None:
    norms = []
    for call in (lambda function, x: function(x), deepspeed.checkpointing.checkpoint):
        engine = deepspeed.initialize(
            model=Drawing(call), config={**CONFIG, "gradient_accumulation_steps": 1}
        )[0]
        for x in samples(0)[:2]:
            engine.backward(loss_of(engine(x)))
            engine.step()
            norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[:2] == norms[2:]


def test_layers_over_other_ranks_are_refused_before_any_work() -> None:
    model = nn.Sequential(made(ep_size=1), made(ep_size=2))
    config = {"train_batch_size": 2}
    with pytest.raises(UsageError, match="ep_size 1 and 2"):
        deepspeed.initialize(model=model, config=config)
    with pytest.raises(UsageError, match="tensor parallelism"):
        deepspeed.initialize(model=made(), config={**config, "tensor_parallel": {"autotp_size": 2}})
    experts = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    with pytest.raises(UsageError, match="ep_size 2 and 4"):
        deepspeed.initialize(model=made(ep_size=4), config={**config, **experts})
    with pytest.raises(ConfigError, match='moe .*expected {"ep_size": N}'):
        deepspeed.init_inference(made(), moe={"size": 2})
    with pytest.raises(UsageError, match="no engine lives"):
        groups._get_expert_parallel_world_size()
