"""The keys of a step in one exchange: the bits of an exchange for each microbatch, and a way back for each refusal."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from shardwise.base.errors import DataError
from shardwise.base.ragged import Ragged
from shardwise.comm.exchange import RowParcel
from shardwise.comm.world import World
from shardwise.parallel.embedding import placed, step_keys
from shardwise.parallel.embedding.batch import KeysAtHand, PreparedKeys
from tests.engine import tables_net

ROUTED = {"large": "row", "grows": "row", "rare": "table", "wide": "column"}
COPIES = {"large": "data_parallel", "grows": "data_parallel", "rare": "data_parallel", "wide": "table"}
POOLED = {"large": "row", "grows": "column", "rare": "row", "wide": "table"}
STEPS, MICROBATCHES = 5, 2


class PooledNet(tables_net.Net):
    """The net with static tables that exchange pooled vectors."""

    def __init__(self, placements: Mapping[str, str], seed: int = 3) -> None:
        super().__init__(placements, seed)
        self.tables.tables = tuple(
            table if table.rows is None else table.model_copy(update={"exchange": "pooled"})
            for table in self.tables.tables
        )


def halves(world: World, step: int) -> list[dict[str, Any]]:
    """The microbatches of this rank."""
    share = tables_net.SAMPLES // world.size
    first = share * world.rank
    cuts = (first, first + share // 2, first + share)
    return [tables_net.batch(step, *span) for span in zip(cuts, cuts[1:], strict=False)]


class Counted:
    """Counts the exchanges of keys of this process: whole steps, second messages, and microbatches."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.steps = self.seconds = self.microbatches = 0
        exchanged, carry, prepare = (
            step_keys.StepKeys._exchanged,
            step_keys.carry,
            placed.PlacedTables.prepare,
        )

        def of_step(*args: Any) -> Any:
            self.steps += 1
            return exchanged(*args)

        def second(*args: Any) -> Any:
            self.seconds += 1
            return carry(*args)

        def of_microbatch(*args: Any, **options: Any) -> Any:
            self.microbatches += 1
            return prepare(*args, **options)

        patch.setattr(step_keys.StepKeys, "_exchanged", of_step)
        patch.setattr(step_keys, "carry", second)
        patch.setattr(placed.PlacedTables, "prepare", of_microbatch)

    @property
    def all(self) -> tuple[int, int, int]:
        """Exchanges of (steps, second messages, microbatches)."""
        return self.steps, self.seconds, self.microbatches


def trained(
    world: World,
    placements: dict[str, str],
    together: bool,
    change: Callable[[Any, Any], None] | None = None,
    weighted: bool = False,
) -> Any:
    """(losses, norms and rows), (counts of exchanges)."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        if placements == POOLED:
            patch.setattr(tables_net, "Net", PooledNet)
        engine = tables_net.build(
            world, placements, batch={"accumulation": MICROBATCHES}, tables={"prefetch_steps": int(together)}
        )
        if change is not None:
            change(engine, patch)
        found = []
        is_pooled = any(part.way.parcels == 2 for part in engine.tables["tables"].placed.parts)
        assert is_pooled == (placements == POOLED)
        for step in range(STEPS):
            batches = halves(world, step)
            if weighted:
                for batch in batches:
                    batch["sparse"] = {
                        name: each._replace(
                            weights=torch.linspace(1, 2, len(each.values), dtype=torch.float64)
                        )
                        for name, each in batch["sparse"].items()
                    }
            result = engine.train_step(batches)
            found.append((result.loss, result.grad_norm))
        rows = tables_net.row_of(engine)
        assert not engine.trace.divergences and engine.trace.actions == [*engine.plan.own.actions]
        engine.close()
    return (found, rows), counted.all


def both(world: World, placements: dict[str, str], weighted: bool) -> Any:
    return [trained(world, placements, together, weighted=weighted) for together in (True, False)]


@pytest.mark.parametrize("placements", [ROUTED, COPIES, POOLED], ids=["routed", "copies", "pooled"])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_exchange_has_the_bits_of_one_for_each_microbatch(
    ranks: Any, placements: dict[str, str], weighted: bool
) -> None:
    for (one, counts), (each, before) in ranks(2).run(both, placements, weighted):
        assert one == each, "a number differs"
        assert before == (0, 0, STEPS * MICROBATCHES)
        steps, seconds, microbatches = counts
        assert (steps, microbatches) == (STEPS, 0) and 1 <= seconds < STEPS, counts


def without_room(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """Slots of one key are too small in every step."""
    patch.setattr(step_keys, "_slot_for", lambda need: 1)


def small_slots(world: World) -> Any:
    return trained(world, ROUTED, True, without_room), trained(world, ROUTED, False)


def test_keys_that_do_not_fit_travel_in_a_second_message(ranks: Any) -> None:
    for (one, counts), (each, _) in ranks(2).run(small_slots):
        assert one == each and counts == (STEPS, STEPS, 0)


def builds_new_features(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The model asks for copies of its features."""
    tables, forward = engine.tables["tables"], type(engine.tables["tables"]).forward

    def copied(features: Any) -> Any:
        return forward(
            tables, {name: Ragged(each.values.clone(), each.offsets) for name, each in features.items()}
        )

    patch.setattr(tables, "forward", copied)


def new_features(world: World) -> Any:
    return trained(world, ROUTED, True, builds_new_features), trained(world, ROUTED, False)


def test_a_model_that_builds_new_features_is_prepared_in_its_forward_pass(ranks: Any) -> None:
    for (one, counts), (each, _) in ranks(2).run(new_features):
        assert one == each
        assert counts == (2, 1, STEPS * MICROBATCHES), "the second step says that the first was of no use"


def refused(world: World) -> Any:
    """One rank's second microbatch has a key that no row has; then goes on."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        engine = tables_net.build(world, ROUTED, batch={"accumulation": MICROBATCHES})
        engine.train_step(halves(world, 0))
        wrong = halves(world, 1)
        if world.rank == 1:
            wrong[1]["sparse"]["d"] = Ragged.of_ones(torch.full((3,), tables_net.ROWS + 5))
        with pytest.raises(DataError) as heard:
            engine.train_step(wrong)
        engine.train_step(halves(world, 1))
        left = [len(each.placed.at_hand) for each in engine.tables.values()]
        engine.close()
    return str(heard.value), counted.steps, left


def test_a_refused_batch_is_reported_by_the_forward_pass_on_all_ranks(ranks: Any) -> None:
    first, second = ranks(2).run(refused)
    assert "rank 1 could not take a part" in first[0] and "'d'" in second[0]
    assert first[1:] == second[1:] == (3, [0])


def by_hand(world: World) -> tuple[int, int, int]:
    """A script that calls forward and backward itself."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        engine = tables_net.build(world, ROUTED, batch={"accumulation": MICROBATCHES})
        for batch in halves(world, 0):
            engine.backward(engine(batch))
            engine.step()
        engine.close()
    return counted.all


def test_a_script_of_its_own_exchanges_each_microbatch(ranks: Any) -> None:
    assert ranks(2).run(by_hand) == [(0, 0, MICROBATCHES)] * 2


# Without ranks ------------------------------------------------------------------------------------------------------


def test_keys_are_those_of_the_same_unchanged_tensors() -> None:
    features = {"a": Ragged.of_lists([[1], [2, 3]]), "b": Ragged.of_lists([[4], []])}
    at_hand = KeysAtHand({"a": features["a"]}, PreparedKeys(2, {}, []))
    assert at_hand.is_of(features) and at_hand.is_of({"a": features["a"]})
    assert not at_hand.is_of({"b": features["b"]})
    assert not at_hand.is_of({"a": features["a"]._replace(values=features["a"].values.clone())})
    assert not at_hand.is_of({"a": features["a"]._replace(weights=torch.ones(3))})
    features["a"].values.add_(1)
    assert not at_hand.is_of(features), "somebody wrote into the keys"


def test_keys_are_used_in_one_training_pass() -> None:
    features = {"a": Ragged.of_lists([[1]])}
    at_hand = KeysAtHand(features, PreparedKeys(1, {}, [], is_learning=True))
    assert not at_hand.is_of(features)


@pytest.mark.parametrize(
    ("need", "slot"),
    [
        ([[40, 40], [40, 40]], 64),
        ([[100, 90], [80, 100]], 128),
        ([[400, 0], [0, 0]], 0),
        ([[0, 0], [0, 0]], 0),
    ],
)
def test_slots_have_room_and_little_padding(need: list[list[int]], slot: int) -> None:
    assert step_keys._slot_for(torch.tensor(need)) == slot


def test_slots_are_unpacked_by_parcel_and_rank() -> None:
    """Rank 1 of 2: one parcel is for all, of the other each rank gets its part."""
    gathered = RowParcel(torch.tensor([5]), [[2], [1]])
    sent = RowParcel(torch.tensor([7, 8, 9]), [[1, 2], [1, 2]])
    slots = torch.tensor([[1, 2, 3, 4, 0, 0], [5, 8, 9, 0, 0, 0]])
    assert [each.tolist() for each in step_keys._unpacked(slots, [gathered, sent], 1)] == [
        [1, 2, 5],
        [3, 4, 8, 9],
    ]
    assert step_keys._needed([gathered, sent], 2).tolist() == [[3, 4], [2, 3]]
