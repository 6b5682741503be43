"""Steps prepared ahead change no bit, at any depth and any speed of the threads; and nobody waits for ever."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shardwise.base.errors import DataError, UsageError
from shardwise.base.pytree import tensors_in
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.data import Loader
from shardwise.data.batched import BatchedDataset
from shardwise.engine.step.prefetch import keep_for
from shardwise.observe.lanes_picture import LANES, LaneRecorder
from shardwise.parallel.embedding.ahead import PreparedFeatures
from shardwise.plan.lists import keys_ahead
from tests.engine.tables_net import FEATURES, ROWS, batch, build, row_of

MIXED = {"large": "row", "grows": "row", "rare": "table", "wide": "column"}
COPIES = {"large": "data_parallel", "grows": "data_parallel", "rare": "data_parallel", "wide": "table"}
STEPS = 30
_PATIENCE_S = 10.0


class Clicks(BatchedDataset):
    """Samples of the net, made from their numbers; reading them takes a moment that nobody can foresee."""

    def __init__(self, samples: int, slow: bool = False):
        self._samples = samples
        self._random = random.Random(0) if slow else None

    def __len__(self) -> int:
        return self._samples

    def batch(self, samples: npt.NDArray[np.int64]) -> Any:
        if self._random is not None:
            time.sleep(self._random.uniform(0, 0.004))
        sparse = {}
        for place, name in enumerate(FEATURES):
            lists = [
                [int(n * (place + 3 + j) % ROWS if (n + j) % 3 else n % 7) for j in range(int(n + place) % 4)]
                for n in samples
            ]
            sparse[name] = Ragged.of_lists(lists)
        return {"sparse": sparse, "labels": torch.from_numpy((samples * 7 % 3 == 0).astype(np.float64))}

    def fingerprint(self) -> str:
        return f"clicks {self._samples}"


def loader_of(world: World, slow: bool, micro: int, **options: Any) -> Loader:
    return Loader(
        Clicks(240, slow),
        global_batch=12,
        micro_batch=micro,
        dp_index=world.rank,
        dp_size=world.size,
        workers=2,
        **options,
    )


def wait_for_threads() -> list[str]:
    """Names of the threads that prepare keys, once they had time to end."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        names = [thread.name for thread in threading.enumerate() if thread.name == "shardwise-keys"]
        if not names or time.monotonic() > end:
            return names
        time.sleep(0.02)


class AsksInOrder:
    """Looks at every step of ``engine``: its keys went ahead as its list says, and before it."""

    def __init__(self, engine: Any, depth: int):
        self._depth = depth
        self.departures: list[str] = []
        self._planned = engine.plan.own.actions
        engine.on_step.append(self._after)

    def _after(self, engine: Any, result: Any) -> None:
        trace, planned = engine.trace, self._planned
        self._planned = engine.plan.own.actions
        wanted = keys_ahead(planned) if self._depth else []
        if [done.action for done in trace.ahead] != wanted:
            self.departures.append(f"step {result.step}: {trace.ahead} instead of {wanted}")
        if any(done.stop_s > trace.starts_s[0] or done.stop_s < done.start_s for done in trace.ahead):
            self.departures.append(f"step {result.step}: keys came while it ran")
        sends = engine.world.size > 1 and result.weight > 0
        if self._depth and any((done.bytes > 0) != sends for done in trace.ahead):
            self.departures.append(f"step {result.step}: {trace.ahead} sent something else than keys")


def losses_and_rows(
    world: World, placements: dict[str, str], depth: int, accumulation: int, slow: str, config: dict[str, Any]
) -> Any:
    """Every number that a run of 30 steps makes, evaluations ahead of it and between its steps included."""
    micro = 12 // world.size // accumulation
    engine = build(world, placements, batch={"global_size": 12, "micro_size": micro}, **config)
    asks, waits = AsksInOrder(engine, depth), random.Random(world.rank + 1)
    loader = loader_of(world, slow == "reader", micro)
    found: list[Any] = []
    with engine.prefetch(loader, depth) as steps:
        for batches in steps:
            if slow == "compute":
                time.sleep(waits.uniform(0, 0.006))
            result = engine.train_step(batches)
            found.append((result.loss, result.grad_norm))
            assert loader.state()["samples"] == 12 * result.step
            if result.step % 20 == 5:
                before = engine.table_tallies()
                held_out = ([(batch(1000 + k + world.rank), 1.0)] for k in range(3))
                pairs = (pair for (pair,) in engine.prefetch(held_out, depth))
                found.append(engine.evaluate(pairs))
                found.append(engine.evaluate([(batch(2000 + world.rank), 1.0)]))  # prepared by nobody
                assert engine.table_tallies() == before, "an evaluation inserts no key"
            if result.step == STEPS:
                break
    assert not asks.departures, asks.departures
    tallies = engine.table_tallies()
    assert tallies["tables.grows"].evicted > 0 and tallies["tables.rare"].rows > 0
    dense = {name: value.tolist() for name, value in engine.state_dict().items()}
    keys = engine.traffic.total("keys").bytes
    left, rows = wait_for_threads(), row_of(engine)
    engine.close()
    return {"found": found, "rows": rows, "dense": dense}, keys, left


CASES = [
    # placements, ranks, depths, accumulation, slow, configuration
    (MIXED, 2, (1, 3), 1, "", {}),
    (MIXED, 2, (1, 3), 2, "reader", {}),
    (MIXED, 2, (2,), 1, "compute", {}),
    (COPIES, 2, (1,), 2, "compute", {"comm": {"timeout_s": 60, "transport": "torch"}}),
    (MIXED, 2, (1,), 1, "", {"precision": {"compute": "bf16"}, "zero": {"stage": 3}}),
    ({}, 1, (1, 3), 2, "reader", {}),
    ({}, 1, (2,), 1, "compute", {"precision": "fp32"}),
]


@pytest.mark.parametrize(("placements", "size", "depths", "accumulation", "slow", "config"), CASES)
def test_no_bit_changes(
    ranks: Any,
    placements: dict[str, str],
    size: int,
    depths: tuple[int, ...],
    accumulation: int,
    slow: str,
    config: dict[str, Any],
) -> None:
    off = ranks(size).run(losses_and_rows, placements, 0, accumulation, "", config)
    for depth in depths:
        on = ranks(size).run(losses_and_rows, placements, depth, accumulation, slow, config)
        for (here, keys_on, left), (there, keys_off, _) in zip(on, off, strict=True):
            assert here == there
            assert left == [], "the thread ends with its work"
            if size > 1:
                assert keys_on < 0.1 * keys_off, "keys go their own way, but for those that nobody prepared"


def test_the_position_is_that_of_the_step_handed_out(ranks: Any) -> None:
    for straight, resumed in ranks(2).run(stop_and_go_on):
        assert resumed == straight


def stop_and_go_on(world: World) -> Any:
    """Losses of 12 steps, and of 5 and 7 with a new loader between them."""
    found = []
    for stop in (12, 5):
        engine = build(world, MIXED, batch={"global_size": 12, "micro_size": 3})
        loader, losses = loader_of(world, False, 3, epochs=1), []
        for batches in engine.prefetch(loader, 3):
            losses.append(engine.train_step(batches).loss)
            if len(losses) == stop:
                break
        state = loader.state()
        loader = loader_of(world, False, 3, epochs=1)
        loader.load_state(state)
        steps = engine.prefetch(loader, 2)
        while len(losses) < 12:
            losses.append(engine.train_step(next(steps)).loss)
        steps.close()
        losses.append(engine.train_step(loader.step_batches()).loss)  # what was read ahead is read again
        found.append(losses)
        engine.close()
    return found


@pytest.mark.parametrize("how", ["loop", "step"])
def test_after_a_break_every_step_comes_once(ranks: Any, how: str) -> None:
    for seen, expected, state, callbacks, left in ranks(2).run(leave_and_go_on, how):
        assert seen == expected
        assert state == (20, 240) and callbacks == 0 and left == []


def leave_and_go_on(world: World, how: str) -> Any:
    """Labels and keys of an epoch that was left twice, and of one read straight through; neither loop was closed."""

    def named(batches: Any) -> Any:
        return [(each["labels"].tolist(), each["sparse"]["d"].values.tolist()) for each in batches]

    straight = loader_of(world, False, 6, epochs=1)
    expected = [named(straight.step_batches()) for _ in range(20)]
    engine = build(world, MIXED, batch={"global_size": 12, "micro_size": 6})
    loader, seen, lanes = loader_of(world, False, 6, epochs=1), [], LaneRecorder(12)
    for stop in (4, 9):
        steps = engine.prefetch(loader, 3, lanes)
        for batches in steps:
            engine.train_step(batches)
            seen.append(named(batches))
            if len(seen) == stop:
                break
        assert loader.state()["step"] == stop
        if how == "step":
            seen.append(named(loader.step_batches()))
            with pytest.raises(UsageError, match="somebody else has asked the loader"):
                next(steps)
    for batches in engine.prefetch(loader, 2, lanes):
        engine.train_step(batches)
        seen.append(named(batches))
    left = wait_for_threads()
    engine.close()
    return seen, expected, (loader.state()["step"], loader.state()["samples"]), len(engine.on_step), left


def test_an_epoch_ends_on_all_ranks_alike(ranks: Any) -> None:
    assert ranks(2).run(one_epoch) == [[20, []]] * 2


def one_epoch(world: World) -> Any:
    engine = build(world, MIXED, batch={"global_size": 12, "micro_size": 6})
    loader = loader_of(world, False, 6, epochs=1)
    count = sum(1 for batches in engine.prefetch(loader, 3) if engine.train_step(batches))
    assert list(engine.prefetch(loader, 3)) == []
    left = wait_for_threads()
    engine.close()
    return [count, left]


def two_in_turns(world: World) -> Any:
    """Losses of two engines with their keys ahead at the same time, and of each alone."""

    def stepping(engine: Any, depth: int) -> Iterator[float]:
        for batches in engine.prefetch(loader_of(world, False, 6, epochs=1), depth):
            # Not the same time on both ranks: one has asked for the other engine's keys while this one's are under way.
            time.sleep(0.004 * ((engine.step_count + world.rank) % 2))
            yield engine.train_step(batches).loss

    together: list[list[float]] = [[], []]
    engines = [build(world, MIXED, batch={"global_size": 12, "micro_size": 6}) for _ in together]
    for losses in zip(*(stepping(engine, 2) for engine in engines), strict=True):
        for found, loss in zip(together, losses, strict=True):
            found.append(loss)
    left = wait_for_threads()
    alone = build(world, MIXED, batch={"global_size": 12, "micro_size": 6})
    expected = list(stepping(alone, 0))
    for engine in (*engines, alone):
        engine.close()
    return together == [expected, expected], len(expected), left


def test_two_engines_in_turns(ranks: Any) -> None:
    assert ranks(2).run(two_in_turns) == [(True, 20, [])] * 2


# Ranks that fail --------------------------------------------------------------------------------------------------


def failing(world: World, how: str) -> Any:
    """What each rank hears where the second one fails at step 4; then both go on with the same engine."""
    engine = build(world, MIXED, comm={"timeout_s": 10})

    def steps() -> Iterator[Any]:
        for step in range(8):
            mine = batch(step, 6 * world.rank, 6 * world.rank + 6)
            if step == 4 and world.rank == 1:
                if how == "reader":
                    raise RuntimeError("a file is gone")
                if how == "end":
                    return
                if how == "feature":
                    del mine["sparse"]["d"]
                    yield [mine]
                if how == "mapping":
                    yield [{"labels": mine["labels"]}]
                mine["sparse"]["d"] = mine["sparse"]["d"]._replace(values=mine["sparse"]["d"].values + ROWS)
            yield [mine]

    done = 0
    heard = ""
    try:
        for batches in engine.prefetch(steps(), 2):
            engine.train_step(batches)
            done += 1
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    for batches in engine.prefetch(([batch(step)] for step in range(10, 13)), 1):
        engine.train_step(batches)
    steps_done, left = engine.step_count, wait_for_threads()
    engine.close()
    return done, heard, steps_done, left


@pytest.mark.parametrize(
    ("how", "there", "here"),
    [
        ("reader", "RuntimeError: a file is gone", r"DataError: .*rank 1 could not read"),
        (
            "key",
            "DataError: feature 'd': key .* outside table",
            r"DataError: .*rank 1 could not take",
        ),
        (
            "end",
            r"DataError: .*no further step on rank 1",
            r"DataError: .*no further step on rank 1",
        ),
        (
            "feature",
            "DataError: .* on rank 1 0 of 1 times .* 'd' is missing",
            "DataError: .* on rank 1 0 of 1 times .* 'd' is missing",
        ),
        (
            "mapping",
            "DataError: .* on rank 1 0 of 1 times a collection finds all its features. Every",
            "DataError: .* on rank 1 0 of 1 times a collection finds all its features. Every",
        ),
    ],
)
def test_what_fails_on_one_rank_ends_the_step_on_all(ranks: Any, how: str, there: str, here: str) -> None:
    import re

    for rank, (done, heard, steps_done, left) in enumerate(ranks(2).run(failing, how)):
        assert done == 4, "the steps before are computed"
        assert re.match((here, there)[rank], heard), heard
        assert steps_done == 7 and left == []


def refused_on_the_spot(world: World) -> str:
    """A batch that nobody prepared and one rank refuses."""
    engine = build(world, MIXED)
    mine = batch(0, 6 * world.rank, 6 * world.rank + 6)
    if world.rank == 1:
        mine["sparse"]["d"] = Ragged.of_ones(torch.arange(4))
    try:
        engine.train_step([mine])
    except DataError as error:
        heard = str(error)
    engine.train_step([batch(1, 6 * world.rank, 6 * world.rank + 6)])
    engine.close()
    return heard


def test_a_batch_refused_in_the_forward_pass_ends_on_all(ranks: Any) -> None:
    first, second = ranks(2).run(refused_on_the_spot)
    assert "rank 1 could not take a part" in first and "samples" in second


def test_an_exception_in_the_loop_leaves_nothing_behind() -> None:
    engine = build(World(0, 1))
    with pytest.raises(KeyboardInterrupt), engine.prefetch(([batch(step)] for step in range(9)), 3) as steps:
        engine.train_step(next(steps))
        raise KeyboardInterrupt
    assert list(steps) == [] and wait_for_threads() == []
    engine.close()


# What a batch carries ---------------------------------------------------------------------------------------------


def prepared_batch(engine: Any) -> Any:
    ((found,),) = list(engine.prefetch([[batch(0)]], 1))
    return found


def test_the_features_stay_readable_and_are_prepared_once() -> None:
    engine = build(World(0, 1))
    given, found = batch(0), prepared_batch(engine)
    sparse = found["sparse"]
    assert isinstance(sparse, PreparedFeatures) and not isinstance(sparse, dict)
    assert list(sparse) == list(FEATURES) and len(sparse) == len(FEATURES)
    assert all(torch.equal(sparse[name].values, each.values) for name, each in given["sparse"].items())
    tables = engine.tables["tables"]
    assert len(tables.rows_here("grows").keys) == 0, "keys get their rows in the forward pass"
    prepared = sparse.of(tables)
    assert prepared is not None
    carried = {id(tensor) for tensor in tensors_in([found])}
    assert {id(each.keys) for each in prepared.asked} < carried, "a walk finds the keys too"
    assert {id(each.values) for each in sparse.values()} < carried
    vectors = tables(sparse)
    assert prepared.is_learning and sparse.of(tables) is None
    again = tables(sparse)  # prepares on the spot
    assert all(torch.equal(vectors[name], again[name]) for name in FEATURES)
    engine.close()


def test_the_thread_walks_the_asks_of_the_plan() -> None:
    engine = build(World(0, 1), batch={"accumulation": 2})
    tables, units, ran = engine.tables["tables"], engine._parts.program.tables, []
    send = units.input_dist
    units.input_dist = lambda action: (ran.append(str(action)), send(action))
    wanted = [str(action) for action in keys_ahead(engine.plan.own.actions)]
    (step,) = list(engine.prefetch([[batch(0), batch(1)]], 1))
    assert ran == wanted and len(ran) == 2
    (three,) = list(
        engine.prefetch([[batch(0), batch(1), batch(2)]], 1)
    )  # an evaluation has as many as it likes
    assert ran[2:] == [*wanted, wanted[-1].replace(",1)", ",2)")]
    assert all(each["sparse"].of(tables) is not None for each in (*step, *three))
    engine._parts.program.asks = lambda: lambda microbatches: []
    (step,) = list(engine.prefetch([[batch(0), batch(1)]], 1))
    assert [each["sparse"].of(tables) for each in step] == [None, None]
    engine.close()


def test_weights_of_another_dtype_are_prepared_again() -> None:
    engine = build(World(0, 1))
    tables = engine.tables["tables"]
    mine = batch(0)
    mine["sparse"] = {
        name: each._replace(weights=torch.rand(len(each.values), dtype=torch.float64))
        for name, each in mine["sparse"].items()
    }
    ((found,),) = list(engine.prefetch([[mine]], 1))
    assert found["sparse"].of(tables) is not None
    rounded = found["sparse"].changed(lambda each: each._replace(weights=each.weights.half()))
    assert rounded.of(tables) is None and rounded["d"].weights.dtype == torch.float16
    engine.close()


def test_mappings_that_no_collection_reads_stay_as_they_are() -> None:
    engine = build(World(0, 1))
    some = {"a": Ragged.of_ones(torch.arange(3))}
    given = [some, (some, torch.ones(2)), {"empty": {}}, "text"]
    (found,) = list(engine.prefetch([given], 1))
    assert [type(each) for each in found] == [dict, tuple, dict, str] and found[0].keys() == some.keys()
    engine.close()


def test_a_users_data_is_read_by_the_callers_thread() -> None:
    engine = build(World(0, 1))
    read_by = []

    def steps() -> Iterator[Any]:
        for step in range(3):
            read_by.append(threading.current_thread())
            yield [batch(step)]

    assert len(list(engine.prefetch(steps(), 2))) == 3
    assert set(read_by) == {threading.main_thread()}
    with pytest.raises(UsageError, match="depth is -1"):
        engine.prefetch([], -1)
    engine.close()


# The lanes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
def test_lanes_of_a_real_run(depth: int) -> None:
    lanes = LaneRecorder(global_batch=12)
    engine = build(World(0, 1), batch={"global_size": 12, "micro_size": 6})
    loader = loader_of(World(0, 1), False, 6, epochs=1, watch=lanes.watch)
    for batches in engine.prefetch(loader, depth, lanes):
        engine.train_step(batches)
    spans = lanes.spans
    assert lanes.depth == depth
    compute = [span for span in spans if span.lane == "compute"]
    assert [span.step for span in compute] == list(range(1, 21))
    for lane in LANES:
        for span in (span for span in spans if span.lane == lane):
            assert span.start_s <= span.stop_s
            (computed,) = [each for each in compute if each.step == span.step] or [None]
            assert lane == "compute" or computed is None or span.stop_s <= computed.stop_s
    if depth:
        order = [span.step for span in spans if span.lane == "keys"]
        assert order == sorted(order) and order[-1] == 20
    assert engine.on_step == []
    engine.close()


def test_only_tensors_on_the_device_are_kept_for_a_stream() -> None:
    """Keys of dynamic tables lie on the host, where a tensor belongs to no stream and refuses to be told of one."""
    kept = []

    class OnDevice(torch.Tensor):
        device = torch.device("meta")

        def record_stream(self, stream: object) -> None:
            kept.append((self, stream))

    there = torch.zeros(2).as_subclass(OnDevice)
    keep_for("the stream", [torch.arange(3), there, torch.zeros(1)])  # type: ignore[arg-type]
    assert len(kept) == 1 and kept[0][0] is there and kept[0][1] == "the stream"
