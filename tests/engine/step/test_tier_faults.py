"""The disk below tables with tiers fails on one rank: one sentence on all ranks, no weight has moved, and a run that
goes on, or is resumed, has the numbers of tables that fit."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import DamagedStateError, ShardwiseError, TierError
from shardwise.comm.world import World
from shardwise.parallel.embedding.rows.rows_in_tiers import RowsInTiers
from shardwise.tiers.row_segments import RowSegments
from tests.engine.tiers_campaign import one_place
from tests.engine.tiers_net import batch, build, is_same, small_segments, state_of, train
from tests.tiers.segment_faults import FailingDisk
from tests.tiers.test_scratch_folder import another_run

STEPS = 6


def plain(world: World, placement: str, steps: int = STEPS) -> tuple[list[float], dict[str, Any]]:
    """Losses and state of tables that fit."""
    engine = build(world, placement, None)
    losses = [train(engine, step) for step in range(steps)]
    state = state_of(engine)
    engine.close()
    return losses, state


class Failing:
    """A disk of this rank that fails while ``is_on``; on other ranks nothing is changed."""

    def __init__(self, is_struck: bool, fault: str):
        # A page has more than the rows that are read, and a single bit might lie beside these.
        self.disk = FailingDisk(random.Random(5), 1.0, (fault,), flips_in=16)
        self.disk.is_on = False
        self._is_struck = is_struck

    def tried(self, call: Callable[[], Any]) -> tuple[str, str]:
        """Class and text of the error of a call while the disk fails."""
        self.disk.is_on = self._is_struck
        try:
            call()
            return "", ""
        except TierError as error:
            return type(error).__name__, str(error)
        finally:
            self.disk.is_on = False


def struck(world: World, placement: str, folder: str, fault: str, rank: int) -> dict[str, Any]:
    """A run in which the disk of one rank fails in a step, an evaluation and a save, and then works again."""
    failing, said, unmoved = Failing(world.rank == rank, fault), {}, []
    with small_segments(), failing.disk.patched():
        engine = build(world, placement, Path(folder), checkpoint={"tolerate_failures": 0})
        losses = [train(engine, step) for step in range(3)]
        calls = {
            "step": lambda: train(engine, 3),
            "evaluation": lambda: engine.evaluate([(batch(3, world.rank, world.size), 1.0)]),
            "save": lambda: engine.save(f"{folder}/saved", asynchronous=False),
        }
        for name, call in calls.items():
            before = state_of(engine)
            said[name] = failing.tried(call)
            unmoved.append(is_same(before, state_of(engine)))
        losses += [train(engine, step) for step in range(3, STEPS)]
        state = state_of(engine)
        engine.close()
    happened = sum(failing.disk.happened.values())
    return {"losses": losses, "state": state, "said": said, "unmoved": unmoved, "happened": happened}


@pytest.mark.parametrize(
    ("placement", "fault", "error"),
    [
        ("row", "short", TierError),
        ("data_parallel", "flipped", DamagedStateError),
        pytest.param("table", "failed", TierError, marks=pytest.mark.soak),
        pytest.param("column", "no space", TierError, marks=pytest.mark.soak),
    ],
)
def test_a_disk_that_fails_is_told_on_all_ranks(
    ranks: Any, tmp_path: Path, placement: str, fault: str, error: type[TierError]
) -> None:
    expected = ranks(2).run(plain, placement)
    found = ranks(2).run(struck, placement, str(tmp_path), fault, 1)
    assert found[1]["happened"] and not found[0]["happened"]
    for here, (losses, state) in zip(found, expected, strict=True):
        assert here["losses"] == losses and is_same(here["state"], state)
        assert all(here["unmoved"]), "no weight and no row has moved"
        assert here["said"] == found[0]["said"], "all ranks say the same"
    for name, (kind, text) in found[0]["said"].items():
        if fault == "no space" and name != "step":
            continue  # an evaluation writes only what it makes room for, and a save nothing
        where = (
            "saved: step 3 was not saved: " if name == "save" else ""
        )  # rows are read when they are written
        assert kind == error.__name__ or fault == "short", (name, kind)
        assert f"{where}rank 1: table" in text, (name, text)
        assert str(tmp_path) in text


def test_a_step_is_refused_for_the_compaction_before_it(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(compacted, str(tmp_path)) == [("TierError", "rank 0: no more compaction")] * 2


def compacted(world: World, folder: str) -> tuple[str, str]:
    """The error of the step behind one whose compaction failed on rank 0; the same step succeeds afterwards."""
    with small_segments():
        engine = build(world, "row", Path(folder))
        below = [part.store.tiers.below for part in engine.tables["tables"].placed.parts]

        def fails(most_bytes: int) -> int:
            raise TierError("no more compaction")

        for each in below if world.rank == 0 else ():
            each.compact = fails
        for step in range(8):
            before = state_of(engine)
            try:
                train(engine, step)
            except TierError as error:
                said = type(error).__name__, str(error)
                assert is_same(before, state_of(engine))
                break
        for each in below if world.rank == 0 else ():
            del each.compact
        train(engine, step)
        engine.close()
    return said


def loaded(world: World, folder: str, saved: str) -> tuple[tuple[str, str], bool]:
    """What a load says while the disk of rank 1 is full, and whether the next one gives the numbers."""
    failing = Failing(world.rank == 1, "no space")
    with small_segments(), failing.disk.patched():
        engine = build(world, "row", Path(folder))
        if world.size > 1 and not Path(saved).exists():
            world.barrier()
            for step in range(3):
                train(engine, step)
            engine.save(saved)
        said = failing.tried(lambda: engine.load(saved))
        engine.load(saved)
        again = build(world, "row", None)
        again.load(saved)
        same = train(engine, 3) == train(again, 3) and is_same(state_of(engine), state_of(again))
        engine.close()
        again.close()
    return said, same


def test_a_load_onto_a_full_disk_is_told_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    found = ranks(2).run(loaded, str(tmp_path), str(tmp_path / "saved"))
    assert [same for _, same in found] == [True, True]
    assert found[0][0] == found[1][0]
    kind, text = found[0][0]
    assert kind == "TierError" and text.startswith("rank 1: table") and "No space left" in text


def given_up(world: World, folder: str | None) -> dict[str, Any]:
    """Passes that an exception, a save or a load comes after, and then steps."""
    with small_segments():
        engine = build(world, "row", None if folder is None else Path(folder) / "disk")
        found: list[Any] = [train(engine, step) for step in range(3)]
        for step in range(3, STEPS):
            engine(**batch(100 + step, world.rank, world.size))
            if step == 3:
                engine.discard()
            elif step == 4:
                loss = engine(**batch(200, world.rank, world.size))
                with pytest.raises(RuntimeError):
                    engine.backward(_raising(loss))
                engine.discard()
            else:
                found.append(engine.evaluate([(batch(300, world.rank, world.size), 1.0)]))
                engine.discard()
            found.append(train(engine, step))
        state = state_of(engine)
        engine.close()
    return {"found": found, "state": state}


def _raising(loss: torch.Tensor) -> torch.Tensor:
    loss = loss * 1.0

    def fails(grad: torch.Tensor) -> None:
        raise RuntimeError("an exception between FETCH and STEP")

    loss.register_hook(fails)
    return loss


@pytest.mark.soak
def test_an_exception_between_fetch_and_step(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    tiered, fits = ranks(2).run(given_up, str(tmp_path)), ranks(2).run(given_up, None)
    for here, there in zip(tiered, fits, strict=True):
        assert here["found"] == there["found"] and is_same(here["state"], there["state"])


def vanished(world: World, folder: str) -> list[str]:
    """The folder goes while the run uses it: steps end with one sentence on all ranks once a segment is needed."""
    said = []
    with small_segments():
        engine = build(world, "row", Path(folder))
        train(engine, 0)
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
        world.barrier()
        for step in range(1, 20):
            before = state_of(engine, ("large",))
            try:
                train(engine, step)
            except TierError as error:
                said.append(str(error))
                assert is_same(before, state_of(engine, ("large",)))
                break
        engine.close()
    return said


def test_a_folder_that_vanishes_is_told_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    first, second = ranks(2).run(vanished, str(disk))
    assert first == second and len(first) == 1 and str(disk) in first[0] and "no row is lost" in first[0]


def refused(world: World, folders: list[str]) -> str:
    with pytest.raises(ShardwiseError) as error:
        build(world, "row", Path(folders[world.rank]))
    return str(error.value)


def test_a_folder_that_takes_no_files_is_told_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    """As a read-only one does: /proc takes none, not from root either."""
    first, second = ranks(2).run(refused, [str(tmp_path), "/proc"])
    assert (
        first == second and "rank 1" in first and "tables.defaults.tiers.disk: no files can be made" in first
    )
    assert not [each for each in tmp_path.iterdir() if each.name != "shardwise.lock"]


def test_a_folder_of_another_run_is_told_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    with another_run(tmp_path) as process:
        there = sorted(each.name for each in tmp_path.iterdir())
        first, second = ranks(2).run(refused, [str(tmp_path)] * 2)
        assert first == second and f"another run for its rank 0 (process {process} on " in first
        assert sorted(each.name for each in tmp_path.iterdir()) == there, "its files are left alone"


def too_small(world: World, folder: str) -> str:
    engine = build(world, "row", Path(folder), few=60)
    before = state_of(engine)
    with pytest.raises(Exception, match="do not fit") as error:
        train(engine, 0)
    assert is_same(before, state_of(engine))
    engine.close()
    return str(error.value)


def test_a_cache_smaller_than_a_step_is_named_with_the_number(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(too_small, str(tmp_path))
    assert first == second and "tiers.host_rows" in first


def test_the_disk_is_not_needed_by_step(ranks: Any, tmp_path: Path) -> None:
    """All rows of a step are in memory before NORM, also those that another microbatch has pushed out."""
    assert ranks(1).run(reads_of_steps, str(tmp_path)) == [0]


def reads_of_steps(world: World, folder: str) -> int:
    """Number of reads of the disk behind NORM in a few steps, with a cache that holds little more than a step."""
    reads, is_stepping = 0, False
    with small_segments():
        engine = build(world, "row", Path(folder), few=200)
        read, places = RowSegments.read, RowsInTiers.places_of_step

        def counted(self: RowSegments, *given: Any) -> None:
            nonlocal reads
            reads += is_stepping
            read(self, *given)

        def steps(self: RowsInTiers, rows: torch.Tensor) -> torch.Tensor:
            nonlocal is_stepping
            is_stepping = True
            try:
                return places(self, rows)
            finally:
                is_stepping = False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowSegments, "read", counted)
            patch.setattr(RowsInTiers, "places_of_step", steps)
            engine.set_accumulation(2)
            for step in range(STEPS):
                engine.train_step([batch(2 * step + i, 0, 2) for i in range(2)])
                engine.evaluate([(batch(500 + step, 0, 1), 1.0)])
        engine.close()
    return reads


PLACES = 340


@pytest.mark.soak
@pytest.mark.parametrize("tenth", range(10))
def test_no_life_that_is_struck_ends_with_other_numbers(tmp_path: Path, tenth: int) -> None:
    struck = [one_place(seed, tmp_path)["struck"] for seed in range(tenth, PLACES, 10)]
    assert sum(struck) > len(struck) // 2, "most places are met"
