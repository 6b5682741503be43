"""A search finds what a look at every point finds, and what it writes trains."""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.base.hardware import even_hardware
from shardwise.comm.world import World
from shardwise.config.run import load
from shardwise.engine.fit import search as searching
from shardwise.engine.fit.fits import seconds_of
from shardwise.engine.fit.jobs import JobShelf
from shardwise.engine.fit.knobs import KnobScope, assignments, overrides_of
from shardwise.engine.fit.search import SearchReport, batch_of, scope_of, search
from shardwise.models import Gpt, GptPolicy
from shardwise.simulate.bound import pipeline_bound, stage_seconds

CPU = torch.device("cpu")
RATES = even_hardware(
    "test",
    1e10,
    host_bytes_s=1e10,
    device_bytes_s=1e10,
    link_bytes_s=1e10,
    disk_bytes_s=1e9,
    exchange_bytes_s=2.5e9,
)
GIVEN: dict[str, Any] = {"batch": {"global_size": 4, "micro_size": 2}, "optimizer": {"type": "adamw"}}
KNOBS = ("batch.micro_size", "recompute", "zero.stage")


def gpt(layers: int = 1) -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy(layers=layers, width=16, heads=2, context=8, vocab=32))


def tokens(rows: int) -> dict[str, Tensor]:
    ids = torch.empty(rows, 8, dtype=torch.int64, device="meta")
    return {"tokens": ids, "targets": ids}


class PricedPoint(NamedTuple):
    """One point, looked at by itself."""

    said: tuple[str, ...]
    bound_s: float
    step_s: float
    peak_bytes: int


def shelf(layers: int = 1) -> JobShelf:
    made = JobShelf(lambda: gpt(layers), CPU, tokens)
    made._process_bytes = {False: 0, True: 0}
    return made


def every_point(made: JobShelf, scope: KnobScope, keys: Any) -> list[PricedPoint]:
    """Every point of the knobs, each priced."""
    found = []
    for shape in assignments(scope, "shape", {}, keys):
        for chosen in assignments(scope, "state", shape, keys):
            said = overrides_of(scope, chosen)
            try:
                job = made.job(load(scope.given, said), scope.ranks)
                outlook = job.outlook(job.settings.offload)
            except (ConfigError, PlanError):
                continue
            price = seconds_of(job, outlook, job.settings.offload, RATES)
            stages = stage_seconds(job.passed, RATES, "cpu")
            bound_s = pipeline_bound(stages, job.mesh.pp, job.policies.microbatches)
            found.append(PricedPoint(said, bound_s, price.total, outlook.bytes_by_tier["device"]))
    return found


@pytest.fixture(scope="module")
def shared() -> JobShelf:
    """The passes of all tests here, which are measured once."""
    return shelf()


@pytest.fixture(scope="module")
def points(shared: JobShelf) -> list[PricedPoint]:
    return every_point(shared, scope_of(shared, load(GIVEN), 2, {"device": 1}, (4, 2), 8), frozenset(KNOBS))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, shared: JobShelf) -> None:
    """Searches by jobs whose processes take nothing by themselves."""
    monkeypatch.setattr(searching, "JobShelf", lambda *_: shared)


def found_in(memory: int, **given: Any) -> SearchReport:
    with_these: dict[str, Any] = {"ranks": 2, "hardware": RATES, "knobs": KNOBS} | given
    return search(gpt, GIVEN, {"device": memory}, tokens, **with_these)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_nothing_that_fits_beats_what_a_search_finds(points: list[PricedPoint], share: float) -> None:
    sizes = sorted({point.peak_bytes for point in points})
    memory = sizes[int(share * (len(sizes) - 1))]
    fitting = {point.said: point for point in points if point.peak_bytes <= memory}
    found = found_in(memory)
    assert found.best[0].step_s == min(point.step_s for point in fitting.values())
    told = {(point.step_s, point.peak_bytes) for point in found.best}
    assert told <= {(point.step_s, point.peak_bytes) for point in fitting.values()}
    for point in fitting.values():
        if point.step_s < (found.best[-1].step_s or 0) and (point.step_s, point.peak_bytes) not in told:
            less = tuple(said for said in point.said if not said.startswith("recompute"))
            assert less != point.said and less in fitting, "it computes again what could have been kept"
    for point in Random(0).sample(points, 30):
        assert point.said not in fitting or point.step_s >= (found.best[0].step_s or 0)


def test_the_bound_is_never_above_the_price(points: list[PricedPoint]) -> None:
    assert len(points) == 40
    for point in points:
        assert 0.3 * point.step_s < point.bound_s <= point.step_s, point
    assert any(1.5 * point.bound_s > point.step_s for point in points), "the bound is close to the price"


@pytest.mark.usefixtures("alone")
def test_a_search_repeats_itself_and_keeps_the_numbers_of_the_run() -> None:
    found, again = (found_in(1 << 30, knobs=("zero.stage",)) for _ in range(2))
    assert found == again and 1 < len(found.best) == 3
    for point in (*found.best, *found.front, *found.rejected):
        assert all(said.startswith("zero.stage") for said in point.set)
    for place in range(3):
        assert found.config(place).batch.derived(2).global_size == 4
    freed = found_in(1 << 30, knobs=(), free=("offload.state",))
    assert {said for point in freed.best for said in point.set} <= {
        "offload.state=bf16",
        "offload.state=int8",
    }
    assert freed.tried == 3


def test_keys_that_are_no_knobs_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'zero.stag' is no knob of a search; did you mean 'zero.stage'"):
        found_in(1 << 30, knobs=("zero.stag",))
    with pytest.raises(ConfigError, match="free: 'mesh.tp' changes no numbers of a run"):
        found_in(1 << 30, free=("mesh.tp",))
    with pytest.raises(ConfigError, match=r"knobs: offload.state changes the numbers of the run"):
        found_in(1 << 30, knobs=("offload.state",))
    with pytest.raises(UsageError, match="the samples of a step are not known"):
        batch_of(load({}), [2], None)


@pytest.mark.usefixtures("alone")
def test_a_job_that_fits_nowhere_has_no_best(points: list[PricedPoint]) -> None:
    stages = [point for point in points if all("stage" in said for said in point.said)]
    memory = min(point.peak_bytes for point in stages) - 1
    found = found_in(memory, knobs=("zero.stage",))
    assert not found.best and found.causes == {"memory": 4}
    assert "nothing fits" in str(found) and found.rejected[0].reason.startswith("more than ")
    found = found_in(1000, knobs=("zero.stage",))
    assert found.causes == {"memory": 4} and "keeps more activations" in found.rejected[0].reason
    with pytest.raises(UsageError, match="0 configurations fit"):
        found.config()


def train(world: World, path: str) -> float:
    engine = shardwise.initialize(
        Gpt(GptPolicy(layers=1, width=16, heads=2, context=8, vocab=32)), path, world=world
    )
    ids = torch.arange(8).repeat(engine.config.batch.micro_size or 1, 1) + world.rank
    loss = engine.train_step([{"tokens": ids, "targets": ids}] * engine.accumulation).loss
    engine.close()
    return float(loss)


@pytest.mark.usefixtures("alone")
def test_what_a_search_writes_trains(ranks: Any, tmp_path: Path) -> None:
    found = found_in(1 << 30, knobs=("zero.stage",))
    found.write(tmp_path / "best.yaml")
    losses = ranks(2).run(train, str(tmp_path / "best.yaml"))
    assert losses[0] == losses[1] > 0 and "stage: " in (tmp_path / "best.yaml").read_text()


@pytest.mark.soak
def test_nothing_of_all_knobs_beats_what_a_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = shelf(4)
    monkeypatch.setattr(searching, "JobShelf", lambda *_: made)
    keys = {
        "mesh.pp",
        "mesh.tp",
        "batch.micro_size",
        "pipeline.schedule",
        "pipeline.virtual_stages",
        "recompute",
    }
    keys |= {"tiles.mlp", "zero.stage", "mesh.dp", "zero.exchange", "zero.reduce"}
    given = GIVEN | {"batch": {"global_size": 8, "micro_size": 2}}
    scope = scope_of(made, load(given), 4, {"device": 1}, (8, 2), 8)
    points = every_point(made, scope, frozenset(keys))
    assert all(point.bound_s <= point.step_s for point in points)
    sizes = sorted({point.peak_bytes for point in points})
    for share in (0.05, 0.3, 1.0):
        memory = sizes[int(share * (len(sizes) - 1))]
        found = search(lambda: gpt(4), given, {"device": memory}, tokens, ranks=4, hardware=RATES, knobs=keys)
        fitting = [each for each in points if each.peak_bytes <= memory]
        assert found.best[0].step_s == min(each.step_s for each in fitting)
