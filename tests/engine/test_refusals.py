"""What cannot be cut so is refused on every rank before anything runs: the rule, the number given, what would work."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, PlanError, ShardwiseError
from shardwise.comm.world import join
from shardwise.models import Gpt, GptPolicy
from shardwise.parallel.pipeline.layers import Layers
from tests.engine.nets import Language, seeded

SMALL = dict(layers=4, width=24, heads=4, context=12, vocab=19, hidden=24)


def gpt(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: Gpt(GptPolicy(**SMALL | changes))  # type: ignore[arg-type]


class Flat(nn.Module):
    """No list of blocks anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


class Case(NamedTuple):
    """``says``: parts of the error's text."""

    make: Callable[[], nn.Module]
    config: dict[str, Any]
    says: tuple[str, ...]
    batch: Any = None
    """Given to ``train_step`` where ``initialize`` cannot know."""


TOKENS = torch.arange(14).view(2, 7) % 19
TP2 = {"mesh": {"tp": 2}}
PP2 = {"mesh": {"pp": 2}}

CASES = {
    "heads": Case(gpt(heads=3, width=24), TP2, ("3 heads", "tp=2", "nearest", "1")),
    "hidden": Case(gpt(hidden=25), TP2, ("25", "tp=2", "24", "26")),
    "layers": Case(gpt(layers=1), PP2, ("has no blocks", "at least two children")),
    "stages": Case(
        gpt(layers=3),
        PP2 | {"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}},
        ("3 blocks cannot make 4 stages", "nearest that work"),
    ),
    "no blocks": Case(Flat, PP2, ("Flat has no blocks", "pipeline.partition", "Layers")),
    "no table": Case(Flat, TP2, ("nobody knows how to cut a Flat", "tensor.table", "'column'")),
    "unknown block": Case(
        gpt(), PP2 | {"pipeline": {"partition": ["blocks.7"]}}, ("blocks.7", "did you mean")
    ),
    "empty stage": Case(
        lambda: Layers(
            [nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), torch.tanh], loss=nn.functional.mse_loss
        ),
        PP2 | {"pipeline": {"partition": ["2"]}},
        ("stage 1", "no parameters", "neighbour"),
    ),
    "microbatches": Case(
        gpt(),
        PP2 | {"batch": {"global_size": 10, "micro_size": 4}},
        ("global_size 10", "micro_size 4", "nearest that does is 8"),
    ),
    "mesh": Case(gpt(), {"mesh": {"pp": 3}}, ("pp=3", "3", "2")),
    "virtual_stages without stages": Case(
        gpt(),
        {"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}},
        ("mesh.pp is 1", "mesh.pp: 2"),
    ),
    "schedule": Case(gpt(), PP2 | {"pipeline": {"schedule": "1fb1"}}, ("1fb1", "1f1b")),
    "reshard": Case(
        gpt(), {"zero": {"stage": 3, "reshard_after_forward": False}}, ("mesh.pp is 1", "stage: 2")
    ),
    "batch norm": Case(gpt(), PP2 | {"batch_norm": "synchronized"}, ("batch_norm", "per_rank")),
}


def refused(world: Any, names: list[str]) -> list[str]:
    """The texts of the errors."""
    found = []
    for name in names:
        make, config, _, batch = CASES[name]
        with pytest.raises(ShardwiseError) as caught:
            engine = shardwise.initialize(make(), config, world=world)
            assert batch is not None, f"{name} was not refused"
            engine.train_step([batch])
        found.append(str(caught.value))
    return found


@pytest.fixture(scope="module")
def texts(ranks: Any) -> dict[str, list[str]]:
    by_rank = ranks(2).run(refused, list(CASES))
    return dict(zip(CASES, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_error_says_what_to_do(texts: dict[str, list[str]], name: str) -> None:
    for text in texts[name]:
        for part in CASES[name].says:
            assert part in text, text


def calls(world: Any) -> list[str]:
    engine = shardwise.initialize(Gpt(GptPolicy(**SMALL)), PP2, world=world)  # type: ignore[arg-type]
    found = []
    for call in (
        lambda: engine((TOKENS, TOKENS)),
        lambda: engine.run("forward", TOKENS),
        lambda: engine.train_step([(TOKENS, TOKENS)] * 2),
    ):
        with pytest.raises(ShardwiseError) as caught:
            call()
        found.append(str(caught.value))
    assert engine.train_step([(TOKENS, TOKENS)]).step == 1, "none of them has changed anything"
    engine.close()
    return found


def test_calls_that_a_pipeline_cannot_serve(ranks: Any) -> None:
    for one_batch, method, too_many in ranks(2).run(calls):
        assert "mesh.pp above 1" in one_batch
        assert "engine.train_step" in one_batch
        assert "engine.predict" in method
        assert "given 2 microbatches" in too_many


def odd(world: Any) -> float:
    model = Gpt(GptPolicy(**SMALL | {"vocab": 17}))  # type: ignore[arg-type]
    engine = shardwise.initialize(model, {"mesh": {"tp": world.size}}, world=world)
    tokens = TOKENS[:, :6] % 17
    loss = engine.train_step([(tokens, tokens)]).loss
    assert {name: tuple(tensor.shape) for name, tensor in engine.state_dict().items()}["head.weight"] == (
        17,
        24,
    )
    engine.close()
    return loss


def test_a_vocabulary_that_does_not_divide_is_padded_exactly(ranks: Any) -> None:
    alone = odd(join(quiet=True))
    assert ranks(2).run(odd) == [pytest.approx(alone, rel=1e-6)] * 2


def test_one_rank_needs_no_table_and_no_blocks() -> None:
    solo = join(quiet=True)
    engine = shardwise.initialize(seeded(Flat), {}, world=solo)
    assert engine.train_step([torch.ones(2, 4, dtype=torch.float64)]).step == 1
    engine = shardwise.initialize(seeded(Language), {"mesh": {"pp": 1, "tp": 1}}, world=solo)
    with pytest.raises(ConfigError, match="virtual_stages"):
        shardwise.initialize(
            Flat(), {"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}, world=solo
        )


def given_another_model(world: Any) -> str:
    width = 6 + 2 * world.rank
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    with pytest.raises(PlanError) as caught:
        shardwise.initialize(model, {"zero": {"stage": 2}, "comm": {"timeout_s": 10}}, world=world)
    return str(caught.value)


def test_ranks_with_different_models_are_told_before_any_work(ranks: Any) -> None:
    for said in ranks(2).run(given_another_model):
        assert "the ranks were given different models" in said


class EitherEnd(nn.Module):
    """A layer that the batch has in front of the blocks or behind them: on the first stage or the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, front: Tensor | None = None, behind: Tensor | None = None) -> Tensor:
        x = behind if front is None else self.side(front)
        for block in self.blocks:
            x = block(x)
        return (self.side(x) if front is None else x).square().mean()


def given_another_example(world: Any, of_rank: tuple[str, str]) -> str:
    config = {"mesh": {"pp": 2}, "comm": {"timeout_s": 10}, "check_first_step": "off"}
    example = {of_rank[world.rank]: torch.zeros(2, 4)}
    try:
        engine = shardwise.initialize(EitherEnd(), config, world=world, example=example)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    engine.close()
    return ""


def test_ranks_with_examples_of_different_kinds_are_told_before_any_work(ranks: Any) -> None:
    for said in ranks(2).run(given_another_example, ("front", "behind")):
        assert said.startswith(
            "PlanError: model: the ranks were given different models, or use their parts in"
        )
    assert ranks(2).run(given_another_example, ("behind", "behind")) == ["", ""]
