"""Packed documents, windows and sinks equal each document by itself, in one process with plain attention.

The truth computes every document as a sequence of its own, and the loss is the mean over all targets. The last token of
a document has no target. The soak has the whole matrix.
"""

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import shardwise
from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.comm.world import World
from shardwise.kernels.attention import plain_attention
from shardwise.models import Gpt, GptPolicy
from shardwise.models.cache import KeyValueCache
from shardwise.models.huggingface import config_of as config_of_export
from tests.engine.conformance import Conformance, evaluation_departures
from tests.engine.plain import Truth, once, train, worst
from tests.everyday import chosen

VOCABULARY, CLIP, SEQUENCES = 19, 0.5, 3
OPTIMIZER = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}


class Case(NamedTuple):
    """A model, its batches, and how they lie on ranks."""

    documents: bool = True
    window: int | None = None
    sinks: bool = False
    pattern: int | None = None
    family: str = "llama"
    heads: int = 4
    kv_heads: int = 4
    length: int = 13
    cp: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    stage: int = 0
    microbatches: int = 1
    sequence: bool = True
    recompute: str = "none"
    tile: int = 0
    compiled: bool = False
    method: str = "auto"

    @property
    def size(self) -> int:
        return self.cp * self.tp * self.pp * self.dp

    def __str__(self) -> str:
        default = Case()._asdict()
        said = [f"{key}-{value}" for key, value in self._asdict().items() if value != default[key]]
        return "-".join(said) or "one"


def model_of(case: Case, **more: Any) -> Gpt:
    policy = GptPolicy(
        family=case.family,  # type: ignore[arg-type]
        layers=2,
        width=4 * case.heads,
        heads=case.heads,
        kv_heads=case.kv_heads if case.family == "llama" else None,
        context=case.length,
        vocab=VOCABULARY,
        hidden=24,
        sliding_window=case.window,
        sliding_window_pattern=case.pattern,
        sinks=case.sinks,
        **more,
    )
    return Gpt(policy, attention=plain_attention).double()


def begun(case: Case, **more: Any) -> Gpt:
    """The model with attention that can be cut, and sinks that are not all alike."""
    model = Gpt(model_of(case, **more).policy).double()
    start_sinks(model)
    return model


def start_sinks(model: Gpt) -> None:
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            if block.attention.sinks is not None:
                block.attention.sinks.copy_(torch.linspace(-1 - i, 1, len(block.attention.sinks)))


def batch_of(case: Case, step: int) -> dict[str, Tensor]:
    """The global batch: tokens, targets, and documents, of which the sequences have unlike ones."""
    draw = torch.Generator().manual_seed(step)
    shape = (SEQUENCES, case.length)
    tokens, targets = (torch.randint(VOCABULARY, shape, generator=draw) for _ in range(2))
    if step == 1:
        targets[0, case.length // 2 :] = -100
    if not case.documents:
        return {"tokens": tokens, "targets": targets}
    documents = torch.zeros(shape, dtype=torch.long)
    for row, cuts in enumerate(((), (1, 5, 6), (7,))):
        for cut in cuts[: step + 1]:
            documents[row, cut + step :] += 1 + row
    ends = documents.diff(dim=1, append=documents[:, -1:]) > 0
    return {"tokens": tokens, "targets": targets.masked_fill(ends, -100), "documents": documents}


def each_document(batch: dict[str, Tensor]) -> list[tuple[tuple[Tensor, Tensor], float]]:
    """Tokens and targets of each document, with the number of its targets."""
    found = []
    documents = batch.get("documents", torch.zeros_like(batch["tokens"]))
    for row, numbers in enumerate(documents):
        for number in numbers.unique():
            here = numbers == number
            targets = batch["targets"][row : row + 1, here]
            count = float((targets != -100).sum())
            if count:
                found.append(((batch["tokens"][row : row + 1, here], targets), count))
    return found


@once
def truth(*words: Any) -> list[Truth]:
    case = Case()._replace(**dict(zip(OF_TRUTH, words, strict=True)))
    model = model_of(case)
    start_sinks(model)
    steps = [each_document(batch_of(case, step)) for step in range(3)]
    options = {key: value for key, value in OPTIMIZER.items() if key != "type"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    return train(model, optimizer, steps, lambda model, batch: model(*batch), CLIP)


OF_TRUTH = ("documents", "window", "sinks", "pattern", "family", "heads", "kv_heads", "length")


def config_of(case: Case) -> dict[str, Any]:
    return {
        "mesh": {"pp": case.pp, "dp": case.dp, "cp": case.cp, "tp": case.tp},
        "zero": {"stage": case.stage},
        "tensor": {"sequence_parallel": case.sequence},
        "context": {"method": case.method},
        "recompute": case.recompute,
        "tiles": {"logits": case.tile or "off", "mlp": case.tile or "off"},
        "compile": {"scope": "blocks", "backend": "aot_eager"} if case.compiled else {},
        "batch": {"accumulation": case.microbatches},
        "check_first_step": "auto",
        "optimizer": OPTIMIZER,
        "max_grad_norm": CLIP,
    }


def pieces(case: Case, index: int, step: int) -> list[dict[str, Tensor]]:
    """The microbatches of one data-parallel rank, of unlike numbers of sequences."""
    whole, count = batch_of(case, step), case.dp * case.microbatches
    own = range(index * case.microbatches, (index + 1) * case.microbatches)
    chunks = {name: tensor.tensor_split(count) for name, tensor in whole.items()}
    return [{name: chunks[name][i] for name in chunks} for i in own]


def measure(world: Any, case: Case) -> tuple[float, list[str]]:
    """The worst error of gradients, norms, losses and weights of three steps, and departures from the Plan."""
    with warnings.catch_warnings():
        if case.compiled:  # dynamo looks at every input
            warnings.filterwarnings("ignore", "The .grad attribute|.*should not be instantiated")
        return trained(world, case)


def trained(world: Any, case: Case) -> tuple[float, list[str]]:
    engine = shardwise.initialize(begun(case), config_of(case), world=world)
    found: dict[str, Tensor] = {}
    engine_step = engine._training.step

    def with_gradients() -> Any:
        if engine._parts.accumulation.is_complete:
            found.update(engine.gradients())
        return engine_step()

    engine._training.step = with_gradients  # type: ignore[method-assign]
    conformance, errors = Conformance(engine), [0.0]
    wanted_steps = truth(*(getattr(case, name) for name in OF_TRUTH))
    for step, wanted in enumerate(wanted_steps):
        found.clear()
        batches = pieces(case, engine.dp_index, step)
        result = engine.train_step(batches)
        errors += [abs(result.grad_norm / wanted.norm - 1), abs(result.loss / wanted.loss - 1)]
        errors.append(worst(found, wanted.gradients, wanted.addends))
    state = engine.state_dict()
    errors.append(worst({name: state[name] for name in wanted.weights}, wanted.weights))
    departures = conformance.departures + evaluation_departures(engine, batches)
    engine.close()
    return max(errors), departures


def measure_all(world: Any, cases: list[Case]) -> list[tuple[float, list[str]]]:
    return [measure(world, case) for case in cases]


ALL: dict[str, Any] = {"window": 4, "sinks": True, "pattern": 2}
CASES = [
    Case(**ALL),
    Case(**ALL, heads=6, kv_heads=1),
    Case(**ALL, tile=5, recompute="selective"),
    Case(documents=False, window=1, sinks=True),
    *(Case(**ALL, tp=2, kv_heads=2, sequence=sequence) for sequence in (True, False)),
    Case(pp=2, microbatches=2, family="gpt2", sinks=True, recompute="full"),
    Case(cp=2, method="planned"),
    Case(cp=2, **ALL, family="gpt2", stage=3, method="ring"),
    Case(cp=2, length=2, microbatches=3),
    Case(cp=2, tp=2, **ALL, kv_heads=2, sequence=False, stage=1),
    Case(cp=2, pp=2, microbatches=3, window=3, stage=2, tile=4),
    Case(cp=4, **ALL, heads=6, kv_heads=2, stage=3, recompute="selective"),
]
SEES: list[dict[str, Any]] = [{}, {"documents": False, "window": 3}, {"documents": False, "sinks": True}, ALL]
EVERY = [
    Case(family="gpt2", recompute="full", microbatches=2),
    Case(dp=2, stage=3, microbatches=1, sinks=True),
    Case(cp=2, **ALL, method="planned"),
    Case(cp=2, documents=False, **ALL, kv_heads=2, length=5),
    Case(cp=3, **ALL, heads=6, kv_heads=1, microbatches=3),
    Case(cp=2, tp=2, **ALL, kv_heads=2, stage=1),
    *(
        case
        for sees in SEES
        for cp in (1, 2, 3, 4)
        for case in (
            *(Case(cp=cp, **sees, length=length, microbatches=3) for length in (2, 7, 13)),
            Case(cp=cp, **sees, heads=6, kv_heads=1),
            Case(cp=cp, **sees, heads=6, kv_heads=3, recompute="full", stage=3),
            Case(cp=cp, **sees, tile=5, recompute="selective"),
            Case(cp=cp, **sees, compiled=True, recompute="full" if cp == 2 else "none"),
            *(
                Case(cp=cp, **sees, **more, kv_heads=2)
                for more in (
                    {"tp": 2},
                    {"tp": 2, "sequence": False},
                    {"pp": 2, "microbatches": 3},
                    {"dp": 2, "stage": 3},
                )
                if cp <= 2
            ),
        )
        if case not in CASES
    ),
]


@pytest.fixture(scope="module")
def measured(ranks: Any, request: pytest.FixtureRequest) -> dict[Case, list[tuple[float, list[str]]]]:
    """Figures of the cases of this run by rank; one call for each number of ranks."""
    found = {}
    cases = [case for (case,) in chosen(request, "test_equals_each_document_by_itself", "case")]
    for size in sorted({case.size for case in cases}):
        table = [case for case in cases if case.size == size]
        by_rank = ranks(size).run(measure_all, table, timeout_s=250.0)
        found.update(dict(zip(table, zip(*by_rank, strict=True), strict=True)))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_each_document_by_itself(measured: Any, case: Case) -> None:
    for error, departures in measured[case]:
        assert error <= 1e-10 and not departures, (error, departures)


@pytest.mark.soak
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_case_equals_each_document_by_itself(ranks: Any, case: Case) -> None:
    for error, departures in ranks(case.size).run(measure, case):
        assert error <= 1e-10 and not departures, (error, departures)


# Beside the gradients ----------------------------------------------------------------------------------------------


def numbers(world: Any, cp: int, weights: list[float] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms and an evaluation with dropout, whose masks belong to places in the sequence."""
    case = Case(cp=cp, **ALL, family="gpt2" if weights else "llama")
    engine = shardwise.initialize(begun(case, dropout=0.3), config_of(case), world=world)
    found = []
    for step in range(2):
        result = engine.train_step([batch_of(case, step)], weights)
        found += [result.loss, float(result.grad_norm or 0), result.weight]
    found.append(engine.evaluate([(batch_of(case, 2), None)]))
    state = engine.state_dict()
    engine.close()
    return found, state


@pytest.mark.parametrize("weights", [None, [5.0]], ids=["counted", "given"])
def test_dropout_weights_and_evaluation_equal_one_process(ranks: Any, weights: list[float] | None) -> None:
    wanted, state = numbers(World(0, 1), 1, weights)
    for got, found in ranks(2).run(numbers, 2, weights):
        assert got == pytest.approx(wanted, rel=1e-11)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every input
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_compiled_block_is_not_compiled_again_for_other_documents() -> None:
    case, counter = Case(**ALL), CompileCounter()
    model = begun(case).double()
    for block in model.blocks:
        block.compile(backend=counter)
    found, frames = [], []
    for step in range(3):
        found.append(model(**batch_of(case, step)))
        frames.append(counter.frame_count)
    assert frames[0] == frames[2] > 0
    plain = begun(case)
    torch.testing.assert_close(
        found, [plain(**batch_of(case, step)) for step in range(3)], rtol=1e-12, atol=0
    )
    torch._dynamo.reset()


# Refused -----------------------------------------------------------------------------------------------------------


def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain_attention(q, k, v)


def test_an_attention_function_without_a_view_is_refused() -> None:
    shape: dict[str, Any] = {"layers": 1, "width": 8, "heads": 2, "context": 8, "vocab": VOCABULARY}
    for more in ({"sliding_window": 3}, {"sinks": True}):
        with pytest.raises(PlanError, match="an argument 'view'.*which three does not"):
            Gpt(GptPolicy(**shape, **more), attention=three)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UsageError, match="documents are for an attention function.*three"):
        Gpt(GptPolicy(**shape), attention=three)(tokens, documents=tokens)
    model = Gpt(GptPolicy(**shape))
    with pytest.raises(UsageError, match="a cache holds the tokens of one document"):
        model(tokens, cache=KeyValueCache(8), documents=tokens)
    with pytest.raises(ConfigError, match="export: the model has sliding_window 3"):
        config_of_export(GptPolicy(**shape, sliding_window=3), "float32")


def test_a_pattern_without_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no sliding_window"):
        GptPolicy(sliding_window_pattern=2)
    pattern = GptPolicy(layers=4, sliding_window=3, sliding_window_pattern=2)
    assert [pattern.window_of(block) for block in range(4)] == [3, None, 3, None]


def refused(world: Any, cp: int) -> list[str]:
    case, said = Case(cp=cp), []
    engine = shardwise.initialize(begun(case), config_of(case), world=world)
    before = engine.state_dict()
    batch = batch_of(case, 0)
    documents = batch["documents"]
    for wrong in (documents.flip(1), documents[:, 1:], documents.double()):
        try:
            engine.train_step([{**batch, "documents": wrong}])
        except UsageError as error:
            said.append(str(error).partition(";")[0])
            engine.discard()
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.close()
    return said


@pytest.mark.parametrize("cp", [1, 2])
def test_documents_that_fall_or_of_another_shape_are_refused(ranks: Any, cp: int) -> None:
    for falling, short, floats in ranks(cp).run(refused, cp):
        assert "numbers of sequence 1 fall from 2 to 0" in falling
        assert "tokens of the shape [3, 13] and documents of the shape [3, 12]" in short
        assert "float64" in floats


# Models of transformers --------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
LAYERS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FOREIGN: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt_oss": {**SMALL, **LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def packed(step: int) -> dict[str, Tensor]:
    """One sequence of documents of 4, 1 and 8 tokens, as transformers' collator makes it."""
    tokens = torch.randint(VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(step))
    positions = torch.cat([torch.arange(length) for length in (4, 1, 8)])[None]
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


def foreign_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **FOREIGN[kind])
    )
    return model if kind == "gpt_oss" else model.double()


def foreign_numbers(world: Any, kind: str, cp: int) -> tuple[list[float], dict[str, Tensor]]:
    given = {
        "mesh": {"cp": cp},
        "optimizer": {"type": "sgd", "lr": 0.1},
        "max_grad_norm": 1.0,
        "check_first_step": "auto",  # passes over: the uncut model of transformers sees the documents before
    }
    engine, found = shardwise.initialize(foreign_model(kind), given, world=world), []
    for step in range(2):
        result = engine.train_step([packed(step)])
        found += [result.loss, float(result.grad_norm or 0)]
    state = {name: tensor.double() for name, tensor in engine.state_dict().items()}
    engine.close()
    return found, state


def each_by_itself(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model, found = foreign_model(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, total = packed(step)["input_ids"], 0.0
        for part in tokens.split([4, 1, 8], 1):
            if part.shape[1] > 1:
                loss = model(input_ids=part, labels=part).loss * (part.shape[1] - 1) / 10
                loss.backward()
                total += loss.item()
        found += [total, float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: tensor.double() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", FOREIGN)
def test_positions_that_begin_anew_keep_documents_of_transformers_apart(ranks: Any, kind: str) -> None:
    """On one process a gpt-oss of transformers sees the documents before; cut over ranks it does not."""
    wanted, state = each_by_itself(kind)
    exact = {"rtol": 1e-4, "atol": 2e-6} if kind == "gpt_oss" else {"rtol": 1e-6, "atol": 1e-7}
    for got, found in ranks(2).run(foreign_numbers, kind, 2):
        assert got == pytest.approx(wanted, rel=2e-6)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, **exact)


def refused_positions(world: Any) -> list[str]:
    engine = shardwise.initialize(foreign_model("llama"), {"mesh": {"cp": 2}}, world=world)
    batch, said = packed(0), []
    positions = batch["position_ids"]
    jump, late = positions.clone(), positions + 1
    jump[0, 7] = 9
    mask = torch.ones_like(positions)
    for wrong in (
        {"position_ids": jump},
        {"position_ids": late},
        {"position_ids": positions[:, 1:]},
        {"attention_mask": mask},
    ):
        try:
            engine.train_step([{**batch, **wrong}])
        except UsageError as error:
            said.append(str(error))
            engine.discard()
    engine.close()
    return said


def test_positions_that_jump_are_refused(ranks: Any) -> None:
    for jump, late, short, mask in ranks(2).run(refused_positions):
        assert "are 9 at token 7, behind 1" in jump
        assert "are 1 at token 0, behind nothing" in late
        assert "position_ids of the shape [1, 12]" in short
        assert "leave the attention_mask out" in mask
