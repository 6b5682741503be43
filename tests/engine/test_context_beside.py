"""Sequences that are cut over ranks, beside experts, and with a loss outside the model, equal one process."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import PlanError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.engine.parts.pass_context import PassContext
from shardwise.kernels import viewed_attention
from shardwise.models import Gpt
from shardwise.models.cache import KeyValueCache
from shardwise.parallel.context.region import ContextRegion
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.parallel.expert.surroundings import ExpertContext
from tests.engine.tables_net import row_of
from tests.engine.test_context import FOREIGN, SMALL, VOCABULARY, batch, begin, make

EXPERTS: dict[str, dict[str, Any]] = {
    "balance of each sequence, noise, room": {
        "noise": "gumbel",
        "capacity": 1.0,
        "min_capacity": 1,
        "balance": "loss",
        "balance_weight": 0.5,
        "z_weight": 0.1,
    },
    "balance of the batch, jitter": {
        "noise": "jitter",
        "balance": "loss",
        "balance_over": "batch",
        "balance_weight": 0.5,
    },
    "a bias": {"balance": "bias", "score": "sigmoid"},
}


def router_of(name: str) -> dict[str, Any]:
    return {"experts": {"count": 4, "hidden": 8, "router": EXPERTS[name]}}


def trained(world: World, name: str, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms, loads and weights of three steps."""
    engine, found = begin(world, config, **router_of(name)), []
    for step, length in enumerate((12, 13, 5)):
        each = batch(length, step)
        if step == 1:
            each["targets"][:, 3:] = -100  # a part without targets
        result = engine.train_step([each])
        found += [result.loss, float(result.grad_norm or 0)]
        for tally in engine.expert_tallies().values():
            found += [*tally.routed, *tally.kept, tally.tokens, tally.entropy]
    found.append(engine.evaluate([(each, None)]))
    state = engine.state_dict()
    engine.close()
    return found, state


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_equal_one_process(ranks: Any, name: str) -> None:
    wanted, state = trained(World(0, 1), name, {})
    for got, weights in ranks(2).run(trained, name, {"mesh": {"cp": 2, "ep": 2}, "recompute": "full"}):
        assert got == pytest.approx(wanted, rel=1e-11)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-12)


def factor_of_own_labels() -> Any:
    """Each rank balances its tokens by the factor of its own part of the loss."""
    return patch.object(ExpertContext, "scale_of", lambda self, tokens: self.scale)


def labels_of_own_tokens() -> Any:
    """Each rank weighs sequences by the labels of its own part."""
    return patch.object(ExpertContext, "labels_of", lambda self, labels, tokens: labels)


def loads_of_own_tokens() -> Any:
    """Each rank counts the pairs of its own tokens alone."""
    return patch.object(ExpertContext, "summed", lambda self, counts, tokens: counts)


MISTAKES = (factor_of_own_labels, labels_of_own_tokens, loads_of_own_tokens)


def planted(world: World) -> dict[str, str]:
    said = {}
    for mistake in MISTAKES:
        with mistake():
            experts = {"count": 4, "hidden": 8, "router": {"balance": "loss", "balance_weight": 0.5}}
            engine = begin(world, {"mesh": {"cp": 2}, "check_first_step": "auto"}, experts=experts)
            try:
                engine.train_step([batch(13)])
            except PlanError as error:
                said[mistake.__name__] = str(error)
                engine.discard()
            engine.close()
    return said


def test_the_check_of_the_first_step_sees_planted_mistakes(ranks: Any) -> None:
    for said in ranks(2).run(planted):
        assert said.keys() == {each.__name__ for each in MISTAKES}
        assert all("uncut" in each for each in said.values()), said


# A loss outside the model ------------------------------------------------------------------------------------------


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A penalty for each sequence, and cross entropy."""
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) + penalty(logits)


def penalty(logits: Tensor) -> Tensor:
    return 0.1 * logits.logsumexp(-1).sum(1).square().mean()


def outside(world: World, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, weights and norms of steps whose loss is computed from logits, log-probabilities or in a function."""
    engine, found = begin(world, config), []
    for step in range(4):
        each = batch(13, step)
        tokens, targets = each["tokens"], each["targets"]
        if step == 0:
            loss = nn.functional.cross_entropy(engine(tokens=tokens).flatten(0, 1), targets.flatten())
            engine.backward(loss)
        elif step == 1:
            logits = engine(tokens)
            engine.backward(
                nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + penalty(logits), 3.0
            )
        elif step == 2:
            advantage = torch.linspace(-1, 1, 13, dtype=torch.float64)
            loss = -(advantage * engine.log_probs({"tokens": tokens}, targets)).mean()
            engine.backward(loss)
        else:
            loss = penalty(engine.run(lambda x: engine.module(x), tokens))
            engine.backward(loss)
        result = engine.step()
        found += [result.loss, float(result.grad_norm or 0), result.weight]
    engine.eval()
    state: dict[str, Tensor] = {**engine.state_dict(), "logits": engine.predict([{"tokens": tokens}])[0]}
    with torch.no_grad():
        state["log_probs"] = engine.log_probs({"tokens": tokens}, targets)
        state["cached"] = engine(tokens, cache=KeyValueCache(32))
    engine.close()
    return found, state


def by_function(world: World, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = shardwise.initialize(
        make(),
        {"optimizer": {"type": "sgd", "lr": 0.1}, "max_grad_norm": 1.0, **config},
        loss=loss_of,
        world=world,
    )
    found = []
    for step in range(3):
        given = [batch(length, 2 * step + i) for i, length in enumerate((13, 7))]
        result = engine.train_step(given, [2.0, 1.0] if step == 2 else None)
        found += [result.loss, float(result.grad_norm or 0)]
    found.append(engine.evaluate([(each, None) for each in given]))
    predicted = engine.predict([{"tokens": given[0]["tokens"]}])[0]
    state = {**engine.state_dict(), "logits": predicted}
    engine.close()
    return found, state


OUTSIDE: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "logits": (outside, 2, {"mesh": {"cp": 2}, "zero": {"stage": 3}}),
    "logits over slices": (
        outside,
        4,
        {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence_parallel": False}, "check_first_step": "auto"},
    ),
    "a function": (by_function, 2, {"mesh": {"cp": 2}, "batch": {"accumulation": 2}}),
    "a function in a pipeline": (
        by_function,
        4,
        {"mesh": {"cp": 2, "pp": 2}, "batch": {"accumulation": 2}, "check_first_step": "auto"},
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_loss_outside_the_model_equals_one_process(ranks: Any, name: str) -> None:
    run, size, config = OUTSIDE[name]
    wanted, state = run(World(0, 1), {key: value for key, value in config.items() if key != "mesh"})
    for got, weights in ranks(size).run(run, config):
        assert got == pytest.approx(wanted, rel=1e-11)
        for key, value in state.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-12)


def of_transformers(world: World, config: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of a loss of logits and hidden states, and predictions with and without padding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SMALL))
    engine = shardwise.initialize(model.double(), config, world=world)
    tokens = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
    output = engine(input_ids=tokens, output_hidden_states=True)
    engine.backward(output.logits.square().mean() + output.hidden_states[1].sum(1).square().mean())
    found = dict(engine.gradients())
    engine.discard()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad():
        found["tuple"] = engine(input_ids=tokens, return_dict=False)[0]
        found["hidden"] = engine(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
    found["padded"] = engine.predict([{"input_ids": tokens, "attention_mask": mask}])[0].logits[:, 3:]
    found["generated"] = engine.run("generate", tokens, max_new_tokens=3, do_sample=False)
    engine.close()
    return found


def test_outputs_of_transformers_equal_one_process(ranks: Any) -> None:
    wanted = of_transformers(World(0, 1), {})
    for found in ranks(2).run(of_transformers, {"mesh": {"cp": 2}, "zero": {"stage": 3}}):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-9)


ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("llama", {"attention_dropout": 0.1}),
    "softcap": ("gemma2", {"attn_logit_softcapping": 5.0}),
}


def attention_refused(world: World) -> dict[str, str]:
    transformers = pytest.importorskip("transformers")
    said = {}
    for name, (kind, more) in ATTENTION.items():
        config = transformers.AutoConfig.for_model(kind, **SMALL, **more)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        given = {"mesh": {"cp": 2}, "optimizer": {"type": "sgd", "lr": 0.1}}
        engine = shardwise.initialize(model, given, world=world)
        before = {key: tensor.clone() for key, tensor in engine.state_dict().items()}
        tokens = torch.ones(2, 8, dtype=torch.long)
        try:
            engine.train_step([{"input_ids": tokens, "labels": tokens}])
        except UsageError as error:
            said[name] = str(error)
            engine.discard()
        assert all(torch.equal(tensor, before[key]) for key, tensor in engine.state_dict().items())
        engine.close()
    return said


def test_dropout_and_soft_caps_inside_attention_are_refused_by_name(ranks: Any) -> None:
    for said in ranks(2).run(attention_refused):
        assert said.keys() == ATTENTION.keys()
        assert all(f"is asked for {name}, which no exchange" in text for name, text in said.items())


def a_window_is_longer_by_one() -> Any:
    right = ContextRegion.site

    def wrong(self: ContextRegion, name: str, window: int | None = None) -> Any:
        return right(self, name, None if window is None else window + 1)

    return patch.object(ContextRegion, "site", wrong)


def a_sink_counts_in_each_part() -> Any:
    right = viewed_attention.with_sink

    def wrong(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
        return right(out, right(out, lse, sink), sink)

    return patch.object(viewed_attention, "with_sink", wrong)


def planted_in_transformers(world: World) -> dict[str, str]:
    transformers = pytest.importorskip("transformers")
    said = {}
    for kind, mistake in (("mistral", a_window_is_longer_by_one), ("gpt_oss", a_sink_counts_in_each_part)):
        config = transformers.AutoConfig.for_model(kind, **FOREIGN[kind])
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        given = {"mesh": {"cp": 2}, "optimizer": {"type": "sgd", "lr": 0.1}, "check_first_step": "auto"}
        with mistake():
            engine = shardwise.initialize(model if kind == "gpt_oss" else model.double(), given, world=world)
            tokens = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
            try:
                engine.train_step([{"input_ids": tokens, "labels": tokens}])
            except PlanError as error:
                said[kind] = str(error)
                engine.discard()
            engine.close()
    return said


def test_wrong_windows_and_sinks_of_transformers_are_seen(ranks: Any) -> None:
    for said in ranks(2).run(planted_in_transformers):
        assert said.keys() == {"mistral", "gpt_oss"}
        assert all("cut by mesh.cp: 2 does not compute" in text for text in said.values()), said


class Pooled(Gpt):
    """A GPT that returns one row for each sequence."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens, positions=positions).mean(1)


class Both(Gpt):
    """A GPT that returns its loss and its logits."""

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = super().forward(tokens, positions=positions)
        assert targets is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def outputs_refused(world: World) -> list[str]:
    said, policy = [], make().policy
    for kind in (Pooled, Both):
        engine = shardwise.initialize(kind(policy), {"mesh": {"cp": 2}}, world=world)
        given = batch(8)
        if kind is Pooled:
            del given["targets"]
        try:
            engine(**given)[1].sum()
        except UsageError as error:
            said.append(str(error))
            engine.discard()
        engine.close()
    return said


def test_outputs_without_a_row_for_each_token_are_refused(ranks: Any) -> None:
    for pooled, both in ranks(2).run(outputs_refused):
        assert "has the shape [2, 19]" in pooled and "cannot be joined" in pooled
        assert both.startswith("[1]: in a pass with targets")


def test_a_loss_that_counts_for_each_rank_is_seen(ranks: Any) -> None:
    """Without the share each rank counts the whole loss: gradients are those of one process, weights are not."""
    wanted, _ = outside(World(0, 1), {})
    for got, _ in ranks(2).run(counted_twice):
        assert got != pytest.approx(wanted, rel=1e-3)


def counted_twice(world: World) -> tuple[list[float], dict[str, Tensor]]:
    with patch.object(PassContext, "share_of_loss", lambda self: 1.0):
        return outside(world, {"mesh": {"cp": 2}})


# Embedding tables --------------------------------------------------------------------------------------------------


class WithTables(Gpt):
    """A GPT that adds a vector for each token, and one for the reader of each sequence."""

    def __init__(self) -> None:
        super().__init__(make().policy)
        shape = {"width": self.policy.width, "rows": 64}
        adam = RowOptimizerPolicy(type="adam", lr=0.05, exact=True)
        hashed = TablePolicy(name="hashed", optimizer=adam, **shape)
        self.tables = EmbeddingCollection([hashed], dtype=torch.float64)
        momentum = RowOptimizerPolicy(type="momentum", lr=0.05)
        self.readers = EmbeddingCollection(
            [TablePolicy(name="reader", **shape)], momentum, dtype=torch.float64
        )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        readers: dict[str, Ragged] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        places = torch.arange(tokens.shape[1]) if positions is None else positions
        at = self._angles(places)
        hashed = (tokens * 31 + places) % 64
        of_tokens = self.tables({"hashed": Ragged.of_ones(hashed.flatten())})["hashed"]
        assert readers is not None
        x = self.embed(tokens) + of_tokens.view(*tokens.shape, -1) + self.readers(readers)["reader"][:, None]
        for block in self.blocks:
            x = block(x, at, None, None)
        return self.head(self.norm(x), targets)


def of_tables(
    world: World, config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, dict[int, list[float]]]]:
    """Weights and losses of three steps, and this rank's rows by key."""
    torch.manual_seed(0)
    given = {"optimizer": {"type": "sgd", "lr": 0.1}, "max_grad_norm": 1.0, **config}
    engine = shardwise.initialize(WithTables().double(), given, world=world)
    losses = []
    for step, length in enumerate((12, 13, 5)):
        each: dict[str, Any] = batch(length, step)
        each["readers"] = {"reader": Ragged.of_lists([[step, 7], [3]])}
        result = engine.train_step([each])
        losses += [result.loss, float(result.grad_norm or 0)]
    found = {**engine.state_dict(), "losses": torch.tensor(losses, dtype=torch.float64)}
    rows = row_of(engine)
    engine.close()
    return found, rows


def test_rows_of_tables_equal_one_process(ranks: Any) -> None:
    wanted, rows = of_tables(World(0, 1), {})
    parts = ranks(2).run(of_tables, {"mesh": {"cp": 2}, "zero": {"stage": 3}})
    for name, of_table in rows.items():
        there: dict[int, list[float]] = {}
        for found, here in parts:
            there |= here[name]
            for key, value in wanted.items():
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
        assert there.keys() == of_table.keys()
        for row, values in of_table.items():
            assert there[row] == pytest.approx(values, rel=1e-9, abs=1e-12), (name, row)
