"""Experts and the engine around them: what balance adds to gradients, what routers chose, and what moves a bias.

The truth is the layer itself on one process, without an engine, on the whole batch at once. Layouts cut the batch into
data-parallel ranks and microbatches of unlike size, and the model into stages; experts stay whole here. In the second
step sequences have unlike numbers of labels.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import MixtureOfExperts, RouterPolicy
from shardwise.base.errors import CommError, NonFiniteError, PlanError, UsageError
from shardwise.comm.world import join
from shardwise.engine.step.pipeline import _PipelineTraining
from shardwise.models import Gpt, GptPolicy
from shardwise.observe.metrics import StepRecord, read
from shardwise.observe.progress import words
from shardwise.parallel.expert import balance
from shardwise.parallel.expert.loads import ExpertLoads, ExpertTally, summary_of
from shardwise.passes.replay import DrawReplay
from tests.engine.plain import worst

WIDTH, EXPERTS, VOCABULARY, SEQUENCES, LENGTH, RATE, LR = 8, 4, 11, 6, 6, 0.25, 0.05
BALANCED = RouterPolicy(top_k=2, balance="loss", balance_weight=0.5, z_weight=0.1)
BIASED = RouterPolicy(top_k=2, balance="bias", bias_rate=RATE)
OVER_BATCH = RouterPolicy(top_k=2, balance="loss", balance_over="batch", balance_weight=0.5)
POLICIES = (BALANCED, BIASED, RouterPolicy(top_k=2, capacity=0.75, balance="bias", z_weight=0.2), OVER_BATCH)


class Net(Gpt):
    """A small LLaMA whose feed-forward layers are mixtures of experts."""

    def __init__(self, policies: tuple[RouterPolicy, ...]) -> None:
        shape = {"layers": len(policies), "width": WIDTH, "heads": 2, "context": LENGTH, "vocab": VOCABULARY}
        super().__init__(GptPolicy(**shape, hidden=8))
        for block, policy in zip(self.blocks, policies, strict=True):
            block.mlp = MixtureOfExperts(WIDTH, 4, EXPERTS, router=policy)

    def tensor_table(self) -> dict[str, str]:
        return {name: words for name, words in super().tensor_table().items() if ".mlp." not in name}


def net_of(policies: tuple[RouterPolicy, ...] = POLICIES) -> Net:
    torch.manual_seed(3)
    return Net(policies).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, VOCABULARY, (2, SEQUENCES, LENGTH), generator=generator)
    for sequence, labels in {0: 2, 3: 4, 5: 1}.items() if step == 1 else ():
        targets[sequence, labels:] = -100
    return tokens, targets


class Layout(NamedTuple):
    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    microbatches: int = 1
    virtual_stages: int = 1
    stage: int = 0
    recompute: str = "none"

    def config(self) -> dict[str, Any]:
        schedule = "interleaved_1f1b" if self.virtual_stages > 1 else "1f1b"
        return {
            "mesh": {"pp": self.pp, "dp": self.dp, "tp": self.tp, "ep": self.ep},
            "zero": {"stage": self.stage},
            "pipeline": {
                "schedule": schedule,
                "virtual_stages": self.virtual_stages,
                "partition": "uniform",
            },
            "recompute": self.recompute,
            "batch": {"accumulation": self.microbatches},
            "optimizer": {"type": "sgd", "lr": LR},
        }


class Step(NamedTuple):
    """What is known after one."""

    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    tallies: dict[str, ExpertTally]


@cache
def truth() -> list[Step]:
    """Two steps on one process with torch alone."""
    net = net_of()
    layers = {f"blocks.{i}.mlp": block.mlp for i, block in enumerate(net.blocks)}
    loads = ExpertLoads(dict.fromkeys(layers, EXPERTS), DrawReplay())
    for name, layer in layers.items():
        layer.surroundings.name, layer.surroundings.loads = name, loads
        loads.routers[name] = layer.router
    optimizer, steps = torch.optim.SGD(net.parameters(), LR), []
    for step in range(2):
        optimizer.zero_grad()
        net(*data(step)).backward()
        gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        loads.count(0, 1.0)
        loads.settle(loads.numbers(torch.device("cpu")).tolist())
        loads.balance()
        loads.forget()
        state = {name: each.detach().clone() for name, each in net.state_dict().items()}
        steps.append(Step(gradients, state, dict(loads.last)))
    return steps


def pieces(layout: Layout, dp_index: int, step: int) -> list[tuple[Tensor, Tensor]]:
    parts = layout.microbatches * layout.dp
    tokens, targets = (each.tensor_split(parts) for each in data(step))
    return [(tokens[i], targets[i]) for i in range(dp_index, parts, layout.dp)]


def look(engine: Any, batch: Any) -> None:
    """What must leave no trace in a step: an evaluation, and predictions."""
    engine.evaluate([(batch, 1.0)])
    engine.predict([batch], lambda model, batch: model(*batch))


def made(world: Any, config: dict[str, Any], net: nn.Module | None = None) -> Any:
    return shardwise.initialize(net or net_of(), config, loss=lambda m, b: m(*b), world=world)


def trained(world: Any, layout: Layout, last: int = 2) -> list[Step]:
    engine, steps = made(world, layout.config()), []
    for step in range(last):
        batches, before = pieces(layout, engine.dp_index, step), engine.state_dict()
        if layout.pp > 1:
            engine.train_step(batches)
        for i, batch in enumerate(batches if layout.pp == 1 else ()):
            engine.backward(engine(batch))
            look(engine, batch)
            assert (engine.step() is None) == (i + 1 < len(batches))
        look(engine, batches[0])
        state = engine.state_dict()
        gradients = {name: (before[name] - state[name]) / LR for name in state}
        steps.append(Step(gradients, state, engine.expert_tallies()))
    return steps


def departures(found: list[Step]) -> list[str]:
    """What differs from the truth."""
    said = []
    for got, wanted in zip(found, truth(), strict=False):
        gradients = {name: got.gradients[name] for name in wanted.gradients}
        biases = [name for name in wanted.state if name.endswith(("router.bias", "router.loads"))]
        said += ["gradients"] * (worst(gradients, wanted.gradients) > 1e-10)
        said += ["weights"] * (worst(got.state, wanted.state) > 1e-10)
        said += ["biases"] * any(not torch.equal(got.state[name], wanted.state[name]) for name in biases)
        for name, tally in wanted.tallies.items():
            mine = got.tallies[name]
            said += ["tallies"] * (mine._replace(entropy=0, rows_sent=0) != tally._replace(entropy=0))
            said += ["entropy"] * (abs(mine.entropy - tally.entropy) > 1e-12)
            said += ["accounting"] * (sum(mine.kept) + mine.dropped != 2 * SEQUENCES * LENGTH)
    return said


LAYOUTS = [
    Layout(microbatches=4, recompute="full"),
    Layout(dp=2, ep=2, microbatches=2, stage=3, recompute="full"),
    Layout(dp=2, stage=1, recompute="selective"),
    Layout(pp=2, microbatches=4),
    Layout(pp=2, microbatches=4, virtual_stages=2, recompute="full"),
    Layout(tp=2, ep=2, microbatches=2, recompute="selective"),
    Layout(tp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_one_process(ranks: Any, layout: Layout) -> None:
    """Gradients with balance and z, weights, biases, and what went where."""
    assert any(tally.dropped for tally in truth()[0].tallies.values())
    assert any(bool(each.any()) for name, each in truth()[1].state.items() if "router.bias" in name)
    size = layout.pp * layout.dp * layout.tp
    for found in ranks(2).run(trained, layout) if size == 2 else [trained(join(), layout)]:
        assert not departures(found)
        sent = [tally.rows_sent > 0 for step in found for tally in step.tallies.values()]
        assert sent == [layout.ep > 1] * 8


# Planted bugs --------------------------------------------------------------------------------------------------------


def planted(world: Any, layout: Layout) -> None:
    """Stages before the last do not hear what a microbatch was multiplied by; ranks of "tp" multiply once more each.
    The check of the first step sees both."""
    inner = _PipelineTraining.backward
    with patch.object(_PipelineTraining, "backward", lambda self, *args: inner(self, *args) and None):
        engine = made(world, layout.config())
        replay = engine._parts.passes.replay
        scaled = replay.scaled
        replay.scaled = lambda scale: scaled(scale * layout.tp)
        with pytest.raises(PlanError, match=r"blocks\.0\.\S+_norm\.weight by"):
            engine.train_step(pieces(Layout(microbatches=layout.microbatches), 0, 0))


@pytest.mark.parametrize("layout", [Layout(pp=2, microbatches=4), Layout(tp=2)])
def test_a_wrong_scale_on_several_ranks_is_seen(ranks: Any, layout: Layout) -> None:
    ranks(2).run(planted, layout)


def without_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawReplay, "scaled", lambda self, scale: DrawReplay().at(None))


def moved_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = ExpertLoads.balance
    monkeypatch.setattr(ExpertLoads, "balance", lambda self: (inner(self), inner(self)))


def labels_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = balance._of_each_token
    monkeypatch.setattr(balance, "_of_each_token", lambda tokens, labels: inner(tokens, None))


PLANTS = [(without_scale, 1, "gradients"), (moved_twice, 1, "biases"), (labels_unread, 2, "gradients")]


@pytest.mark.parametrize(("plant", "last", "seen"), PLANTS)
def test_planted_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, plant: Any, last: int, seen: str) -> None:
    truth()
    plant(monkeypatch)
    assert seen in departures(trained(join(), Layout(microbatches=2, recompute="full"), last))


def with_uneven_labels(world: Any, layout: Layout) -> tuple[list[str], list[str]]:
    """What departs from the truth as it is, and where sequences weigh by their tokens."""
    truth()
    plain = departures(trained(world, layout))
    with pytest.MonkeyPatch.context() as patched:
        labels_unread(patched)
        return plain, departures(trained(world, layout))


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, microbatches=2)], ids=str)
def test_labels_that_are_not_read_are_seen_on_several_ranks(ranks: Any, layout: Layout) -> None:
    """The step with whole sequences passes, the one with uneven labels does not."""
    for plain, planted in ranks(2).run(with_uneven_labels, layout):
        assert not plain and planted == ["gradients", "weights"]


class Skips(nn.Module):
    """Two mixtures, of which a batch may leave out the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureOfExperts(WIDTH, 4, EXPERTS) for _ in range(2))

    def forward(self, x: Tensor, skips: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number or not skips:
                x = x + layer(x)
        return x.square().mean()


def skipping(world: Any, transport: str) -> str:
    """What a rank is told where the data of rank 1 leave out a layer."""
    torch.manual_seed(world.rank)
    config = {
        "mesh": {"dp": 2, "ep": 2},
        "precision": "fp64",
        "comm": {"transport": transport, "timeout_s": 20},
        "check_first_step": "off",
    }
    engine = made(world.among((0, 1)), config, Skips())
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    engine.train_step([(x, torch.tensor(False))])
    with pytest.raises(CommError) as caught:
        engine.train_step([(x, torch.tensor(world.rank == 1))])
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shared_memory", "torch"])
def test_a_rank_whose_data_leave_out_a_layer_is_named_at_once(ranks: Any, transport: str) -> None:
    """Over torch's backends rows of two layers would pass for one another until the last of them."""
    said = ranks(2).run(skipping, transport)
    for rank, each in enumerate(said):
        assert f"layers.{rank}.experts" in each and f"rank {1 - rank}" in each, said


# The scale of a microbatch -------------------------------------------------------------------------------------------


def expected(parts: list[tuple[Any, float]], policies: tuple[RouterPolicy, ...]) -> dict[str, Tensor]:
    """Σ w ∇(loss + balance) / Σ w, a microbatch at a time."""
    net, total = net_of(policies), sum(weight for _, weight in parts)
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for batch, weight in parts:
        net.zero_grad()
        net(*batch).backward()
        for name, parameter in net.named_parameters():
            sums[name] += (0 if parameter.grad is None else parameter.grad) * (weight / total)
    return sums


def test_balance_weighs_as_the_loss_does_and_a_weight_of_0_counts_nowhere() -> None:
    engine = made(join(), Layout(microbatches=3).config(), net_of((BALANCED, BIASED)))
    batches = [tuple(each[i : i + 2] for each in data(0)) for i in (0, 2, 4)]
    for i, (batch, weight) in enumerate(zip(batches, (3.0, 0.0, 1.0), strict=True)):
        engine.backward(engine(batch), weight=weight)
        if i < 2:
            engine.step()
    parts = [(batches[0], 3.0), (batches[2], 1.0)]
    assert worst(engine.gradients(), expected(parts, (BALANCED, BIASED))) < 1e-10
    engine.step()
    assert {tally.tokens for tally in engine.expert_tallies().values()} == {4 * LENGTH}


def test_each_backward_pass_adds_it_and_tokens_count_once() -> None:
    engine = made(join(), Layout().config(), net_of((BALANCED, BALANCED)))
    loss = engine(data(0))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    twice = {name: 2 * g for name, g in expected([(data(0), 1.0)], (BALANCED, BALANCED)).items()}
    assert worst(engine.gradients(), twice) < 1e-10
    engine.step()
    assert {tally.tokens for tally in engine.expert_tallies().values()} == {SEQUENCES * LENGTH}


def test_a_plain_backward_pass_adds_it_too() -> None:
    engine = made(join(), Layout(microbatches=2).config(), net_of((BALANCED, BALANCED)))
    engine.adopt_backward()
    for part in (0, 1):
        engine(tuple(each[3 * part :][:3] for each in data(0))).backward()
        if not part:
            engine.step()
    assert worst(engine.gradients(), expected([(data(0), 1.0)], (BALANCED, BALANCED))) < 1e-10


def test_with_a_loss_scale() -> None:
    """Balance alone reaches these routers' weights: one expert is nothing to choose."""
    strong = RouterPolicy(top_k=EXPERTS, normalize=False, balance="loss", balance_weight=0.0, z_weight=4.0)
    wanted = expected([(data(0), 1.0)], (strong, strong))
    config = Layout().config() | {"precision": {"compute": "fp16", "loss_scale": 2.0**10}}
    engine = made(join(), config, net_of((strong, strong)).float())
    engine.backward(engine(data(0)))
    names = [name for name in wanted if "router" in name]
    got = {name: each for name, each in engine.gradients().items() if name in names}
    assert worst(got, {name: wanted[name] for name in names}) < 1e-2


# What the Plan expects -----------------------------------------------------------------------------------------------


class Even(nn.Module):
    """Three mixtures: two of them choose by noise alone, so evenly; the third sends every token to all experts."""

    def __init__(self, experts: int = 8, width: int = 4) -> None:
        super().__init__()
        even = RouterPolicy(top_k=3, noise="gumbel")
        policies = (even, even, RouterPolicy(top_k=experts))
        self.layers = nn.ModuleList(MixtureOfExperts(width, 4, experts, router=each) for each in policies)
        for layer in self.layers:
            nn.init.zeros_(layer.router.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def expected_and_sent(
    world: Any, tokens: int, precision: str
) -> tuple[str, list[tuple[float, int]], int, int]:
    """The Plan as printed; by layer the rows that it expects and those that were sent; bytes of this rank: by its
    price for what all sent, and counted."""
    torch.manual_seed(0)
    size = world.size
    config = {
        "mesh": {"dp": size, "ep": size},
        "precision": precision,
        "model": {"target": "a:b", "context": tokens},
        "batch": {"global_size": size},
    }
    with patch.object(world, "hosts", tuple(rank // 2 for rank in range(size))):
        engine = shardwise.initialize(Even(), config, world=world)
    engine._parts.traffic.clear()
    engine.train_step([torch.randn(size, 1, tokens, 4)[world.rank]])
    counts = engine._parts.traffic.counts.items()
    counted = sum(count.bytes for (operation, *_), count in counts if operation == "all_to_all")
    tallies, plan = engine.expert_tallies(), engine.plan
    rows = [(size * tokens * each.rows, tallies[each.layer].rows_sent) for each in plan.exchanges]
    rows += [
        (size * tokens * each.crossing, tallies[each.layer].rows_crossed)
        for each in plan.exchanges
        if size > 2
    ]
    priced = sum(tallies[each.layer].rows_sent * each.row_bytes for each in plan.exchanges)
    engine.close()
    return str(plan), rows, priced, counted


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_the_plan_expects_the_rows_that_are_sent(ranks: Any, precision: str) -> None:
    (text, rows, priced, mine), (*_, other) = ranks(2).run(expected_and_sent, 400, precision)
    *even, (expected, every) = rows
    assert every == expected == 2 * 400  # each token once to the other rank
    assert all(sent == pytest.approx(wanted, rel=0.05) for wanted, sent in even)
    assert mine + other == priced
    size = {"fp64": 80 + 2 * 32 + 64, "bf16": 32 + 2 * 8 + 32}[precision]  # filled up to 16 bytes
    share = 1 - 4 / 56  # of 56 choices of 3 among 8, those without one of the other rank's 4
    assert (
        f"experts of layers.0 .. layers.1, each: 3 of 8 over ep=2; chosen evenly, {share:.3g} rows a token leave their "
        f"rank, {share * size:.0f} B of all-to-all; of 800 tokens a step {800 * share:.0f} rows, "
        f"{800 * share * size / 1024:.1f} KiB"
    ) in text


def test_the_plan_expects_the_rows_of_two_levels(ranks: Any) -> None:
    """Those that leave their rank, and among them those that leave their host, of which there are two."""
    found = ranks(4).run(expected_and_sent, 400, "fp64")
    text, rows, priced, _ = found[0]
    assert [rows[2], rows[5]] == [(4 * 400 * 3, 4 * 400 * 3), (4 * 400, 4 * 400)]
    assert all(sent == pytest.approx(wanted, rel=0.05) for wanted, sent in rows)
    assert sum(counted for *_, counted in found) == priced
    assert "over ep=4; chosen evenly, 2.21 rows a token leave their rank, 0.929 their host, " in text


# A bias --------------------------------------------------------------------------------------------------------------


def biases(engine: Any) -> list[Tensor]:
    return [each.clone() for name, each in engine.module.named_buffers()]


def test_a_skipped_step_moves_no_bias() -> None:
    config = Layout().config() | {"precision": {"nonfinite": "skip"}}
    engine = made(join(), config)
    engine.train_step([data(0)])
    before = biases(engine)
    engine.backward(engine(data(1)) * float("nan"))
    assert engine.step().skipped
    assert all(torch.equal(a, b) for a, b in zip(before, biases(engine), strict=True))
    engine.train_step([data(2)])
    assert not all(torch.equal(a, b) for a, b in zip(before, biases(engine), strict=True))


def test_it_is_saved_in_fp32_and_alike_on_all_ranks(tmp_path: Path) -> None:
    config = Layout().config() | {"precision": {"compute": "bf16", "buffers": "bf16"}}
    engines = [made(join(), config, net_of().float()) for _ in range(2)]
    engines[0].train_step([data(0)])
    engines[0].save(tmp_path)
    engines[0].wait_for_save()
    engines[1].load(tmp_path)
    found = [biases(engine) for engine in engines]
    assert all(each.dtype == torch.float32 and each.abs().max() > 0 for each in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    info = engines[0].plan.registry.get("buffer", "blocks.1.mlp.router.bias")
    assert not info.placement


def test_a_nan_in_a_router_is_named_at_the_end_of_the_step() -> None:
    """Whatever it meets on its way; an engine with other ranks must not end a pass on one of them alone."""
    engine = made(join(), Layout(microbatches=2, recompute="full").config())
    before = biases(engine)
    with torch.no_grad():
        engine.module.get_parameter("blocks.2.mlp.router.weight")[1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"first module with a non-finite output is 'blocks\.2\.mlp"):
        engine.train_step(pieces(Layout(microbatches=2), 0, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, biases(engine), strict=True))


def between_ranks(world: Any) -> list[str]:
    """What each rank is told where ranks that use one another's experts bring unlike things."""
    said = []
    engine = made(world, Layout(dp=2, ep=2, stage=2, recompute="full").config())
    batches = pieces(Layout(microbatches=3), 0, 0)[: 2 + world.rank]
    for call in (
        lambda: engine.predict(batches, lambda model, batch: model(*batch)),
        lambda: engine.evaluate((batch, 1.0) for batch in batches),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        said.append(str(caught.value))
    look(engine, batches[0])  # with nothing left in between
    if world.rank:
        with torch.no_grad():
            engine.module.get_parameter("blocks.2.mlp.router.weight")[1] = torch.nan
    with pytest.raises(NonFiniteError) as nan:
        engine.train_step([batches[-1]])
    return [*said, str(nan.value)]


def test_ranks_that_use_one_anothers_experts_are_told_alike(ranks: Any) -> None:
    """None waits for the other."""
    predict, evaluate, nan = (set(said) for said in zip(*ranks(2).run(between_ranks), strict=True))
    assert {*predict, *evaluate} == {
        f"{call}: the ranks were given unlike numbers of batches; with mesh.ep: 2 each pass uses experts of other "
        "ranks, so all bring as many: a rank that has run out of data repeats any batch (engine.evaluate: with weight "
        "0)"
        for call in ("predict", "evaluate")
    }
    assert len(nan) == 1 and "on rank 1, in microbatch 0, the first module" in nan.pop()


def test_noise_is_drawn_where_the_tokens_stand(ranks: Any) -> None:
    """Alike on any ranks and microbatches, and where a block runs again."""
    (one,) = (noisy(join(), Layout(recompute="full")),)
    assert all(each == one for each in ranks(2).run(noisy, Layout(dp=2, stage=2)))
    assert one != noisy(join(), Layout(), seed=1)


def noisy(world: Any, layout: Layout, seed: int = 0) -> dict[str, tuple[int, ...]]:
    policy = RouterPolicy(top_k=1, noise="gumbel")
    config = layout.config() | {"train": {"seed": seed}}
    engine = made(world, config, net_of((policy, policy)))
    engine.train_step(pieces(layout, engine.dp_index, 0))
    return {name: tally.routed for name, tally in engine.expert_tallies().items()}


def test_what_a_step_did_stands_in_its_record(tmp_path: Path) -> None:
    monitor = {"print_every": None, "csv": True}
    engine = made(join(), Layout().config() | {"output_dir": str(tmp_path), "monitor": monitor})
    engine.train_step([data(0)])
    (record,) = read(tmp_path / "metrics.csv")
    engine.close()
    assert isinstance(record, StepRecord)
    summary = summary_of(engine.expert_tallies().values())
    assert (record.expert_load, record.expert_drops, record.router_entropy) == summary
    assert summary is not None and summary.expert_load > 1 and 0 < summary.expert_drops < 1
    said = words(record, None)
    assert said["expert_load"] == f"expert load {summary.expert_load:.2f}"
    assert {"expert_drops", "router_entropy"} <= said.keys()


def test_a_closed_engine_leaves_the_layer_alone() -> None:
    net = net_of()
    own = net.blocks[0].mlp.surroundings
    engine = made(join(), Layout().config(), net)
    assert net.blocks[0].mlp.surroundings.name == "blocks.0.mlp"
    engine.close()
    assert net.blocks[0].mlp.surroundings is own


def test_what_runs_again_or_weighs_nothing_adds_nothing() -> None:
    replay, numbers = DrawReplay(), torch.tensor([3, 1, 3, 1, 2, 0, 0, 0.5], dtype=torch.float64)
    loads = ExpertLoads({"moe": 2}, replay)
    for microbatch, weight in enumerate((2.0, 0.0, 1.0)):
        loads.microbatch = microbatch
        loads.add("moe", numbers.clone())
        loads.sent("moe", 7, 3)
        with replay.again():
            loads.add("moe", numbers.clone())
            loads.sent("moe", 7, 3)
        loads.count(microbatch, weight)
    assert loads.numbers(torch.device("cpu")).tolist() == [6, 2, 6, 2, 4, 14, 6, 1]
    loads.settle(loads.numbers(torch.device("cpu")).tolist())
    assert loads.last == {"moe": ExpertTally((6, 2), (6, 2), 4, 14, 6, 0.25)}
    loads.forget()
    assert not loads.numbers(torch.device("cpu")).any()


def test_a_tally_in_numbers() -> None:
    tallies = [ExpertTally((6, 2), (5, 2), 4, 3, 0, 0.5), ExpertTally((4, 4), (4, 4), 4, 0, 0, 0.25)]
    assert (tallies[0].load, tallies[0].dropped) == (1.5, 1)
    assert summary_of(tallies) == (1.5, 1 / 16, 0.375)
    assert summary_of([]) is None


def test_a_copy_of_the_model_runs_alone() -> None:
    """An average of weights, say: what the layer knows of the engine stays with the engine's model."""
    torch.manual_seed(0)
    model = nn.Sequential(MixtureOfExperts(8, 8, 4)).double()
    engine = shardwise.initialize(model, {"precision": "fp64"})
    copied = copy.deepcopy(model).eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(copied(x), engine(x))
    engine.close()
