"""A search finds what a look at every point finds, and what it writes trains."""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.base.hardware import Hardware, even_hardware
from shardwise.base.hardware_files import find_hardware
from shardwise.comm.world import World
from shardwise.config.run import load
from shardwise.engine.fit import knobs
from shardwise.engine.fit import search as searching
from shardwise.engine.fit.bound import state_key
from shardwise.engine.fit.fits import is_within, seconds_of
from shardwise.engine.fit.foresee import JobFacts
from shardwise.engine.fit.jobs import JobShelf
from shardwise.engine.fit.knobs import TIER_KNOBS, KnobScope, assignments, overrides_of
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
            bound_s = pipeline_bound(stages, job.mesh.places, job.policies.microbatches)
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


@pytest.mark.usefixtures("alone")
def test_a_limit_ends_a_search_between_two_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second at each look."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(searching.time, "monotonic", lambda: float(next(ticks)))
    whole = found_in(1 << 30, limit_s=1000.0)
    looks = next(ticks) - 1
    assert "limit" not in whole.causes and whole.tried + 2 < looks
    found = found_in(1 << 30, limit_s=looks - 2.0)
    assert 0 < found.tried < whole.tried and found.causes["limit"] > 0
    assert found.tried + found.pruned == whole.tried + whole.pruned


@pytest.mark.usefixtures("alone")
def test_a_search_without_time_prices_the_given_configuration() -> None:
    found = found_in(1 << 30, limit_s=0.0)
    assert found.tried == 1 and set(found.causes) <= {"limit", "rules"}
    (best,) = found.best
    assert best.set == () and best.step_s and best.peak_bytes
    assert not found_in(1000, limit_s=0.0).best


class BoundedPoint(NamedTuple):
    """One point that a search has priced, with the bounds that it had."""

    said: tuple[str, ...]
    bounds: tuple[float, ...]
    step_s: float
    held_bytes: int
    peak_bytes: int


def bounded(monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[BoundedPoint]:
    """Every point of a search that leaves nothing out, with its bounds."""
    found: list[BoundedPoint] = []
    plain, without_tiers = searching._Search._price, searching.JobBounds.point

    def price(self: Any, shape: Any, said: tuple[str, ...], job: JobFacts, outlook: Any) -> int | None:
        needs = plain(self, shape, said, job, outlook)
        outlook = outlook or job.outlook(job.settings.offload, only_counted=True)
        step_s = seconds_of(job, outlook, job.settings.offload, self._hardware).total
        own = without_tiers(
            self._bounds, job, shape.bound, state_key(job.settings, job.mesh.world_size, job.mesh)
        )
        bounds = (self._scaled_bound(shape), shape.bound.step_s, own.step_s)
        if job.mesh.pp > 1:
            config = load(self._given, self._overrides(shape.scope, shape.chosen))
            passed = self._shelf.whole_pass(config, shape.scope.ranks)
            bounds += (self._bounds.whole(passed, job).step_s,)
        found.append(BoundedPoint(said, bounds, step_s, own.held_bytes, outlook.bytes_by_tier["device"]))
        return needs

    with monkeypatch.context() as patched:
        patched.setattr(searching, "_BEST", 1 << 30)
        patched.setattr(searching._Search, "_price", price)
        search(**{"memory": {"device": 1 << 40}, **given})
    return found


def check_bounds(points: list[BoundedPoint]) -> None:
    for point in points:
        assert max(point.bounds) <= point.step_s, point
        assert point.held_bytes <= point.peak_bytes, point


def test_no_bound_of_a_point_is_above_its_price_or_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "JobShelf", lambda *_: shelf(2))
    knobs = ("mesh.pp", "zero.stage", "zero.exchange")
    given = {"make": lambda: gpt(2), "config": GIVEN, "example": tokens, "ranks": 2, "hardware": RATES}
    points = bounded(monkeypatch, **given, knobs=knobs)
    check_bounds(points)
    assert len(points) > 10
    assert any(1.1 * max(point.bounds) > point.step_s for point in points), "a bound is close to the price"
    assert any(point.bounds[2] > 1.05 * point.bounds[1] for point in points), "a point's own bound is higher"


def test_bounds_hold_where_a_device_sums_the_replicas_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound once counted these sums behind Python, beside which they run, and was up to 3 % above the price."""
    points = bounded(
        monkeypatch,
        make=gpt,
        config=GIVEN | {"mesh": {"tp": 2, "dp": {"replicate": 2, "shard": 2}}},
        example=tokens,
        ranks=8,
        device=torch.device("cuda"),
        hardware=find_hardware("h100"),
        knobs=("zero.stage",),
        per_host=4,
    )
    check_bounds(points)
    assert len(points) >= 3


def test_ranks_that_share_sequences_are_searched_if_they_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their methods are tried too, and no bound of theirs is above its price."""
    monkeypatch.setattr(searching, "JobShelf", lambda *_: shelf(2))
    given = {"make": lambda: gpt(2), "config": GIVEN, "example": tokens, "ranks": 2, "hardware": RATES}
    points = bounded(monkeypatch, **given, knobs=("mesh.cp", "context.method"), free=("mesh.cp", "context"))
    check_bounds(points)
    said = {" ".join(point.said) for point in points}
    assert len(said) == 5, said  # one rank, and four methods of two
    assert any("mesh.cp=2" in each and "context.method=ring" in each for each in said)


def test_zb_greedy_is_tried_with_the_schedules_in_a_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is made from the foreseen seconds of the passes, and its bound holds."""
    given = GIVEN | {"batch": {"global_size": 8, "micro_size": 2}}
    points = bounded(
        monkeypatch,
        make=lambda: gpt(4),
        config=given,
        example=tokens,
        ranks=2,
        hardware=RATES,
        knobs=("mesh.pp", "pipeline.schedule", "pipeline.virtual_stages"),
    )
    check_bounds(points)
    steps_s = {
        name: point.step_s
        for point in points
        for name in ("zb_v", "dualpipe_v", "zb_greedy")
        if f"pipeline.schedule={name}" in point.said
    }
    assert len(steps_s) == 3
    assert steps_s["zb_greedy"] <= 1.02 * min(steps_s.values()), (
        "messages are no part of what makes the order"
    )


def test_long_sequences_are_shared_if_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = shelf()
    monkeypatch.setattr(searching, "JobShelf", lambda *_: made)
    monkeypatch.setattr(knobs, "LONG_TOKENS", 8)
    monkeypatch.setattr(searching, "LONG_TOKENS", 8)
    given: dict[str, Any] = {"ranks": 2, "hardware": RATES, "knobs": ("mesh.cp", "batch.micro_size")}
    config = GIVEN | {"zero": {"stage": 3}}

    def found(memory: int) -> SearchReport:
        return search(gpt, config, {"device": memory}, tokens, **given)

    plenty = found(1 << 30)
    assert plenty.best and not any("mesh.cp" in said for point in plenty.best for said in point.set)
    least = min(point.peak_bytes or 0 for point in plenty.front)
    tight = found(least - 1)
    assert tight.best and all("mesh.cp=2" in point.set for point in tight.best)
    assert "batch.micro_size=1" in tight.best[0].set
    freed = search(gpt, config, {"device": 1 << 30}, tokens, free=("mesh.cp",), **given)
    assert freed.tried > plenty.tried, "what is freed is tried beside the rest"
    monkeypatch.setattr(searching, "LONG_TOKENS", 9)
    assert not found(least - 1).best


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_bounds_hold_at_thousands_of_points(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Each device has more than 1,300 points."""
    hardware: Hardware = RATES if device == "cpu" else find_hardware(device)
    knobs = ("mesh.pp", "mesh.tp", "batch.micro_size", "pipeline.schedule", "pipeline.virtual_stages")
    knobs += ("recompute", "zero.stage", "mesh.dp", "zero.exchange", "zero.reduce", "tiles.mlp")
    points = bounded(
        monkeypatch,
        make=lambda: gpt(4),
        config={"batch": {"global_size": 32, "micro_size": 2}, "optimizer": {"type": "adamw"}},
        example=tokens,
        ranks=8,
        device=torch.device("cpu" if device == "cpu" else "cuda"),
        hardware=hardware,
        knobs=knobs,
        per_host=4,
    )
    check_bounds(points)
    print(device, len(points), "points")
    assert len(points) >= 1300


@pytest.mark.soak
def test_nothing_drawn_at_random_beats_what_a_search_finds() -> None:
    """Points of 64 ranks on 8 hosts, with tiles and recomputation, of any shape and any state."""
    hardware, device = find_hardware("h100"), torch.device("cuda")

    def model() -> nn.Module:
        with torch.device("meta"):
            return Gpt(GptPolicy(layers=8, width=1024, heads=8, context=512, vocab=32000))

    def ids(rows: int) -> dict[str, Tensor]:
        each = torch.empty(rows, 512, dtype=torch.int64, device="meta")
        return {"tokens": each, "targets": each}

    given = load({"batch": {"global_size": 128, "micro_size": 1}, "precision": "bf16"})
    memory: dict[Any, Any] = {"device": "4 GiB"}
    found = search(model, given, memory, ids, ranks=64, device=device, hardware=hardware, per_host=8)
    assert "limit" not in found.causes and found.best
    made = JobShelf(model, device, ids, None, 8)
    have = searching.budget(memory)
    scope = scope_of(made, given, 64, have, (128, 1), 8)
    keys = searching._searched((), None)
    shapes = [each for each in assignments(scope, "shape", {}, keys) if searching._divides(scope, each)]
    draws, looked, fitting = Random(7), 0, 0
    while looked < 150:
        states = list(assignments(scope, "state", draws.choice(shapes), keys - set(TIER_KNOBS)))
        said = overrides_of(scope, draws.choice(states))
        try:
            job = made.job(load(given, said), 64)
            outlook = job.outlook(job.settings.offload, only_counted=True)
        except (ConfigError, PlanError):
            continue
        looked += 1
        if is_within(outlook, have):
            fitting += 1
            price = seconds_of(job, outlook, job.settings.offload, hardware).total
            assert price >= (found.best[0].step_s or 0), said
    print(looked, "drawn", fitting, "fit", found.tried, "priced", found.pruned, "excluded")
    assert fitting >= 50


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
