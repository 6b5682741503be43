"""Each phase of a job holds what was foreseen, and each byte at the peak has its origin."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.fit.models_in_phases import OTHERS
from torch import Tensor, nn

import shardwise
from shardwise.base.pytree import tensors_in
from shardwise.comm.world import World
from shardwise.engine.fit.beside_steps import ring_bytes, save_copy_bytes
from shardwise.engine.fit.foresee import foresee, read
from shardwise.models import Gpt, GptPolicy
from shardwise.models.generate import generate
from shardwise.simulate.storages import LiveBytes
from shardwise.simulate.timeline import StepMemory

CPU = torch.device("cpu")
TOKENS = torch.arange(4 * 64).view(4, 64)
BATCH = {"tokens": TOKENS, "targets": TOKENS}
ROWS = ("process", "rings", "holes", "table rows")
"""Rows that a dispatch mode does not see; another thread reads rows of tables for a save."""


def gpt(**given: Any) -> nn.Module:
    with torch.device("meta"):
        return Gpt(
            GptPolicy.model_validate(
                {"layers": 4, "width": 64, "heads": 4, "context": 64, "vocab": 256} | given
            )
        )


def foreseen(step: StepMemory, example: Any = BATCH) -> dict[str, int]:
    """Bytes of the storages of each phase; the batch is made before the engine."""
    batch = sum(each.nbytes for each in tensors_in(example))
    return {
        phase: sum(size for row, size in point.rows.items() if row not in ROWS)
        - batch * ("kept" in point.rows)
        for phase, point in step.points.items()
    }


def held(world: World, model: dict[str, Any] | str, given: dict[str, Any], folder: str) -> dict[str, int]:
    """Most bytes of storages in each phase of a real run on one rank, and the bytes of the rows beside."""
    make, batch = (lambda: gpt(**model), BATCH) if isinstance(model, dict) else made(model)
    live, found = LiveBytes(), {}
    given = given | {"batch": given.get("batch", {}) | {"duplicates": "allow"}, "check_first_step": "off"}

    def during(phase: str, do: Any) -> Any:
        live.most = live.held
        with live:
            result = do()
        found[phase] = live.most
        return result

    engine = during("build", lambda: shardwise.initialize(make(), given, world=world))
    batches = [batch] * engine.accumulation
    for phase in ("first step", "step"):
        during(phase, lambda: engine.train_step(batches) and None)
    during("evaluation", lambda: engine.evaluate([(batch, 1.0)]))
    during("save", lambda: engine.save(folder))
    engine.wait_for_save()
    rows = engine.held_bytes()
    during("load", lambda: engine.load(folder) and None)
    found["load"] -= rows["save"]
    engine.close()
    return found | {f"row {row}": rows.get(row, 0) for row in ("rings", "save", "tables")}


def made(name: str) -> tuple[Callable[[], nn.Module], Any]:
    """Maker and microbatch of a model that is not a GPT."""
    make, batch = OTHERS[name]
    return make, batch()


def check(
    ranks: Any, count: int, model: dict[str, Any], given: dict[str, Any], folder: Path, within: float = 0.01
) -> None:
    outlook = foresee(lambda: gpt(**model), given, count, example=BATCH)
    for step, real in zip(
        outlook.steps, ranks(count).run(held, model, given, str(folder)), strict=len(outlook.steps) > 1
    ):
        for phase, size in foreseen(step).items():
            assert size == pytest.approx(real[phase], rel=within), phase
        assert save_copy_bytes(outlook.plan, step.rank) == pytest.approx(real["row save"], abs=64)
        assert (
            ring_bytes(outlook.plan, step.rank) <= real["row rings"]
        )  # the ranks keep those of earlier engines


def test_each_phase_is_foreseen(ranks: Any, tmp_path: Path) -> None:
    check(ranks, 1, {}, {}, tmp_path)


LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"recompute": "full"}),
    (1, {}, {"precision": "bf16", "batch": {"accumulation": 2}}),
    (1, {}, {"tiles": {"logits": 32, "mlp": 64}}),
    (2, {}, {"zero": {"stage": 1}}),
    (2, {}, {"zero": {"stage": 3}}),
    (2, {}, {"mesh": {"tp": 2}}),
    (2, {}, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}),
    (2, {"family": "gpt2"}, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}),
]


def check_other(ranks: Any, count: int, name: str, given: dict[str, Any], folder: Path) -> None:
    """Compare the phases of a model that is not a GPT."""
    make, batch = made(name)
    outlook = foresee(make, given, count, example=batch)
    for step, real in zip(
        outlook.steps, ranks(count).run(held, name, given, str(folder)), strict=len(outlook.steps) > 1
    ):
        rows = step.points["step"].rows
        tables = rows.get("tables", 0)
        assert tables == real["row tables"]
        assert rows.get("buffers", 0) == sum(each.nbytes for each in make().buffers())
        assert step.points["save"].rows["save"] == pytest.approx(real["row save"], abs=64)
        for phase, size in foreseen(step, batch).items():
            assert size == pytest.approx(real[phase] + tables, rel=0.015), phase


@pytest.mark.parametrize("name", ["resnet", "dlrm"])
def test_each_phase_of_another_model_is_foreseen(ranks: Any, tmp_path: Path, name: str) -> None:
    check_other(ranks, 1, name, {}, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "count", "given"),
    [
        ("llama", 1, {}),
        ("gpt2", 1, {}),
        ("llama", 2, {"zero": {"stage": 3}}),
        ("gpt2", 1, {"recompute": "full", "precision": "bf16"}),
        ("resnet", 2, {"zero": {"stage": 2}}),
        ("resnet", 1, {"precision": "bf16", "batch": {"accumulation": 2}}),
        ("dlrm", 1, {"batch": {"accumulation": 2}}),
    ],
    ids=str,
)
def test_each_phase_of_further_models_is_foreseen(
    ranks: Any, tmp_path: Path, name: str, count: int, given: dict[str, Any]
) -> None:
    check_other(ranks, count, name, given, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("count", "model", "given"), LAYOUTS, ids=str)
def test_each_phase_of_each_layout_is_foreseen(
    ranks: Any, tmp_path: Path, count: int, model: dict[str, Any], given: dict[str, Any]
) -> None:
    check(ranks, count, model, given, tmp_path)


class Wasteful(nn.Module):
    """A model whose author keeps a large temporary value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        wide = x[:, None, :] * x[None, :, :]  # the wasteful line
        return wide.exp().mean()


def test_a_wasteful_line_comes_first() -> None:
    known = read(Wasteful, {}, 1, CPU, torch.zeros(64, 32))
    outlook = known.outlook(known.settings.offload)
    assert outlook.step is not None
    found = [each for each in known.reasons(outlook.plan, outlook.step) if each.row != "process"]
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# the wasteful line"))
    assert found[0].line == f"{__file__}:{line}" and found[0].bytes % (64 * 64 * 32 * 4) == 0
    assert found[0].plain()["line"] == found[0].line and found[0].plain()["class"] == "all"


@pytest.mark.parametrize(
    "given",
    [{}, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}, {"zero": {"stage": 3}, "recompute": "full"}],
    ids=str,
)
def test_the_reasons_add_up_to_each_row(given: dict[str, Any]) -> None:
    known = read(gpt, given, 2, CPU, BATCH)
    outlook = known.outlook(known.settings.offload)
    for step in outlook.steps:
        for point in step.points.values():
            rows: Counter[str] = Counter()
            for each in known.reasons(outlook.plan, step, point):
                rows[each.row] += each.bytes
                assert each.bytes > 0
            assert rows == Counter(point.rows)


def test_blocks_in_flight_are_copies_with_an_end() -> None:
    """Of four blocks on two stages under 1F1B, the first stage keeps two microbatches and the second one."""
    known = read(gpt, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}, 2, CPU, BATCH)
    outlook = known.outlook(known.settings.offload)
    for step, in_flight in zip(outlook.steps, (2, 1), strict=True):
        found = known.reasons(outlook.plan, step, step.points["step"])
        scores = next(each for each in found if each.row == "kept" and each.what == "_softmax")
        assert scores.copies == 2 * in_flight and scores.bytes == scores.copies * 4 * 4 * 64 * 64 * 4
        assert scores.until is not None and scores.until.kind.name == "B"


def test_stages_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    from shardwise.engine.fit import foresee as foreseeing

    plain = foreseeing.measure
    monkeypatch.setattr(
        foreseeing, "measure", lambda module, *rest: measured.append("") or plain(module, *rest)
    )
    given = {"mesh": {"pp": 5}, "batch": {"accumulation": 5}}
    outlook = foresee(lambda: gpt(layers=5), given, 5, example=BATCH)
    assert len(outlook.steps) == 5 and len(measured) == 3
    kept = [step.points["step"].rows["kept"] for step in outlook.steps]
    assert all(more > less for more, less in zip(kept, kept[1:], strict=False)), "1F1B keeps fewer behind"


def sampled(world: World, given: dict[str, Any]) -> int:
    """Most bytes of storages while a real engine generates text as ``shardwise train`` does, with its own state."""
    live = LiveBytes()
    with live:
        engine = shardwise.initialize(gpt(), given, world=world)
        engine.train_step([BATCH])
        live.most = live.held
        context = nullcontext() if given["zero"]["stage"] < 3 else engine.gathered()
        with context:
            prompt = TOKENS[:1, :16]

            def call(tokens: Tensor, **beside: Any) -> Tensor:
                (logits,) = engine.predict([{"tokens": tokens, **beside}])
                return logits

            engine.eval()
            generate(call, prompt, 3, 0.8, 50, context=64)
    engine.close()
    return live.most


@pytest.mark.parametrize(
    ("count", "stage"), [(1, 0), pytest.param(2, 3, marks=pytest.mark.soak)], ids=["1", "zero 3"]
)
def test_the_sample_at_the_end_of_a_run_is_foreseen(ranks: Any, count: int, stage: int) -> None:
    given = {"zero": {"stage": stage}, "check_first_step": "off", "batch": {"duplicates": "allow"}}
    model = {"name": "gpt", "layers": 4, "width": 64, "heads": 4, "context": 64, "vocab": 256}
    step = foresee(gpt, given | {"model": model, "train": {"sample_tokens": 3}}, count, example=BATCH).step
    assert step is not None and "sample" not in foresee(gpt, given, count, example=BATCH).steps[0].points
    rows = step.points["sample"].rows
    size = sum(size for row, size in rows.items() if row not in ROWS)
    real = ranks(count).run(sampled, given)
    assert size == pytest.approx(real[0], rel=0.01), (dict(rows), real)


class Heavy(nn.Module):
    """A model with many parameters and few activations; an update works on pieces of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@pytest.mark.parametrize("given", [{}, {"optimizer": {"type": "lamb"}, "max_grad_norm": 1.0}], ids=str)
def test_an_update_holds_no_more_than_its_step(given: dict[str, Any]) -> None:
    x, live = torch.ones(2, 512), LiveBytes()
    step = foresee(Heavy, given, 1, example=x).steps[0]
    with live:
        engine = shardwise.initialize(Heavy(), given | {"batch": {"duplicates": "allow"}})
        engine.train_step([x])
        live.most = live.held
        engine.train_step([x])
    engine.close()
    assert foreseen(step, x)["step"] == pytest.approx(live.most, rel=0.01)
