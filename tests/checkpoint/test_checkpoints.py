"""Saving on some ranks and loading on others: to the bit, behind training, with every failure told."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import Checkpoints, FlatSlice, TensorPieces, verify
from shardwise.checkpoint.checkpoints import HostBuffer
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.policy import CheckpointPolicy
from shardwise.comm.world import World
from tests.checkpoint.saved import QUICK, save_with

from .crew import (
    SHAPES,
    TINY,
    Died,
    ThreadPeers,
    assemble,
    assert_same,
    blank_items,
    crew,
    items_of,
    make_state,
    succeed,
)


def load_with(root: Path, ranks: int, seed: int) -> tuple[int, dict]:
    def work(peers: ThreadPeers) -> tuple:
        items = blank_items(peers.rank, ranks, seed)
        loaded = Checkpoints(root, peers, QUICK).load(items)
        return loaded, items

    results = succeed(crew(ranks, work))
    assert len({loaded.step for loaded, _ in results}) == 1
    assert all(loaded.trainer == {"step": loaded.step} for loaded, _ in results)
    return results[0][0].step, assemble([items for _, items in results])


@pytest.mark.parametrize("seed", range(3))
def test_one_two_four_one_ranks_keep_every_bit(tmp_path: Path, seed: int) -> None:
    """State goes 1 -> 2 -> 4 -> 1 ranks, each time cut elsewhere, and arrives unchanged."""
    expected = make_state(1)
    save_with(tmp_path / "a", 1, 1, seed)
    for hop, (ranks, source, target) in enumerate([(2, "a", "b"), (4, "b", "c"), (1, "c", "d")]):
        step, found = load_with(tmp_path / source, ranks, seed + hop)
        assert_same(found, expected)

        def save(peers: ThreadPeers, found: dict = found, ranks: int = ranks, target: str = target) -> None:
            items = items_of(found, peers.rank, ranks, seed + 77)
            Checkpoints(tmp_path / target, peers, QUICK, sizes=TINY).save(
                1, items, {"step": 1}, asynchronous=False
            )

        succeed(crew(ranks, save))
    assert_same(load_with(tmp_path / "d", 1, 0)[1], expected)


def test_bytes_on_disk_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        save_with(tmp_path / str(ranks), ranks, 5, seed=ranks)
    folders = [tmp_path / str(ranks) / "step_00000005" for ranks in (1, 2, 3)]
    names = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*.safetensors"))
    assert len(names) > 4
    for name in names:
        contents = {(folder / name).read_bytes() for folder in folders}
        assert len(contents) == 1, name
    assert all(verify(folder) == [] for folder in folders)


def test_weights_open_with_plain_safetensors(tmp_path: Path) -> None:
    save_with(tmp_path, 2, 3, seed=0)
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "step_00000003" / "model").glob("*.safetensors"):
        found |= load_file(path)
    expected = {name: t for (kind, name), t in make_state(3).items() if kind in ("weight", "buffer")}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        shape = next(shape for (_, n), (shape, _) in SHAPES.items() if n == name)
        assert torch.equal(found[name], tensor.reshape(shape)), name


def test_tied_tensors_keep_their_names(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    items = [TensorPieces("weight", "embed", (2, 3), torch.float32, [FlatSlice(0, 6, tensor)])]
    ties = {"embed": ["head"]}
    for both in (False, True):
        checkpoints = Checkpoints(tmp_path / str(both), policy=CheckpointPolicy(asynchronous=False))
        checkpoints.save(1, items, {}, aliases=ties, write_aliases=both)
        stored = load_file(tmp_path / str(both) / "step_00000001" / "model" / "model.safetensors")
        assert set(stored) == ({"embed", "head"} if both else {"embed"})
        assert all(torch.equal(found, tensor.view(2, 3)) for found in stored.values())
        for name in ("embed", "head"):  # either name loads, and neither is missed when the other is asked for
            target = torch.zeros(6)
            wish = TensorPieces("weight", name, (2, 3), torch.float32, [FlatSlice(0, 6, target)])
            loaded = checkpoints.load([wish])
            assert loaded is not None and loaded.manifest.aliases == ties
            assert torch.equal(target, tensor)


def test_items_may_follow_from_the_manifest(tmp_path: Path) -> None:
    """A run in fp32 stores no master; a run in bf16 then fills its masters from the weights."""
    Checkpoints(tmp_path, policy=CheckpointPolicy(asynchronous=False)).save(
        1, [TensorPieces("weight", "w", (4,), torch.float32, [FlatSlice(0, 4, torch.arange(4.0))])], {}
    )
    master = torch.zeros(4)
    Checkpoints(tmp_path).load(
        lambda manifest: [
            TensorPieces(
                "master" if "master" in manifest.kinds else "weight",
                "w",
                (4,),
                torch.float32,
                [FlatSlice(0, 4, master)],
            )
        ]
    )
    assert torch.equal(master, torch.arange(4.0))


def test_parameters_that_require_grad_are_written_and_filled(tmp_path: Path) -> None:
    source = torch.arange(5.0).requires_grad_()
    target = torch.zeros(5, requires_grad=True)
    for behind in (False, True):
        checkpoints = Checkpoints(tmp_path / str(behind))
        checkpoints.save(
            1,
            [TensorPieces("weight", "w", (5,), torch.float32, [FlatSlice(0, 5, source)])],
            {},
            asynchronous=behind,
        )
        checkpoints.load([TensorPieces("weight", "w", (5,), torch.float32, [FlatSlice(0, 5, target)])])
        assert torch.equal(source, target)


def test_ranks_that_know_only_their_own_tensors(tmp_path: Path) -> None:
    """Stages of a pipeline: each rank lists what it has, the step holds the union."""
    state = make_state(9)
    keys = sorted(state)

    def work(peers: ThreadPeers) -> None:
        mine = [item for item in items_of(state) if keys.index((item.kind, item.name)) % 2 == peers.rank]
        Checkpoints(tmp_path, peers, QUICK, sizes=TINY).save(1, mine, {"step": 1}, asynchronous=False)

    succeed(crew(2, work))
    assert_same(load_with(tmp_path, 1, 0)[1], state)
    assert verify(tmp_path / "step_00000001") == []


def test_no_step_is_none_and_no_error(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").load([]) is None
    assert succeed(crew(2, lambda peers: Checkpoints(tmp_path, peers, QUICK).load([]))) == [None, None]


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "trainer", [{"loss": float("nan")}, {"seen": {1, 2}}, {1: "a", "1": "b"}], ids=["nan", "set", "key"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_state_that_is_not_json_is_refused_on_all_ranks(
    tmp_path: Path, trainer: dict, ranks: int
) -> None:
    def work(peers: ThreadPeers) -> None:
        Checkpoints(tmp_path, peers, QUICK).save(
            1, items_of(make_state(1), peers.rank, ranks), trainer, asynchronous=False
        )

    for result in crew(ranks, work):
        with pytest.raises(CheckpointError, match=r"trainer\.json: cannot be written as JSON"):
            raise result


def test_ranks_that_disagree_on_a_tensor_are_told(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> None:
        item = TensorPieces("master", "m", (8 - peers.rank,), torch.float32, [])
        Checkpoints(tmp_path, peers, QUICK).save(1, [item], {}, asynchronous=False)

    for result in crew(2, work):
        with pytest.raises(
            CheckpointError, match=r"master 'm' is \(7,\) F32 on rank 1, \(8,\) F32 on a rank before"
        ):
            raise result


def test_ranks_that_disagree_on_the_step_are_told(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> None:
        Checkpoints(tmp_path, peers, QUICK).save(peers.rank, [], {}, asynchronous=False)

    for result in crew(2, work):
        with pytest.raises(CheckpointError, match=r"rank 1 saves step 1 .*, rank 0 step 0"):
            raise result


@pytest.mark.parametrize("behind", [True, False])
def test_a_bad_piece_on_one_rank_stops_all(tmp_path: Path, behind: bool) -> None:
    """Rank 1's copy to host memory fails before its first word; rank 0 must not wait for its time to run out."""

    def work(peers: ThreadPeers) -> None:
        tensor = torch.zeros(8)[:: 1 + peers.rank]
        item = TensorPieces(
            "master", "m", (16,), torch.float32, [FlatSlice(8 * peers.rank, 8 * peers.rank + 8, tensor)]
        )
        checkpoints = Checkpoints(tmp_path, peers, QUICK)
        checkpoints.save(1, [item], {}, asynchronous=behind)
        checkpoints.wait()

    for result in crew(2, work):
        with pytest.raises(
            CheckpointError, match=r"rank 1: master 'm', piece 8\.\.16: expected a contiguous"
        ):
            raise result


# ---------------------------------------------------------------------------------------- behind training


class SlowFiles(FileSystem):
    """Holds every write until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def before(self, operation: str, path: Path) -> None:
        if operation == "write":
            assert self.go.wait(20)


def test_saving_returns_before_the_disk_is_done(tmp_path: Path) -> None:
    files = SlowFiles()
    checkpoints = Checkpoints(tmp_path, sizes=TINY, files=files)
    checkpoints.save(4, items_of(make_state(4)), {"step": 4})
    assert checkpoints.saving and not (tmp_path / "step_00000004").exists()
    files.go.set()
    checkpoints.wait()
    assert not checkpoints.saving
    assert_same(load_with(tmp_path, 1, 0)[1], make_state(4))


def test_host_memory_is_used_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    places = set()
    for step in (1, 2, 3):
        checkpoints.save(step, items_of(make_state(step)), {})
        places.add(tuple(page.data_ptr() for page in checkpoints._buffer._pages))
    checkpoints.wait()
    assert len(places) == 1


def test_a_copy_lies_in_pages_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBuffer, "_PAGE_BYTES", 128)
    state, items = make_state(1), items_of(make_state(1))
    checkpoints = Checkpoints(tmp_path, sizes=TINY)
    checkpoints.save(1, items, {})
    checkpoints.wait()
    pages = [page.nbytes for page in checkpoints._buffer._pages]
    assert len(pages) > 2
    assert set(pages[:-1]) == {128}
    for item in items:
        for piece in item.pieces:
            piece.tensor.zero_()
    checkpoints.load(items)
    for item in items:
        for start, stop, tensor in item.pieces:
            assert torch.equal(tensor, state[item.kind, item.name][start:stop])


@pytest.mark.gpu
@pytest.mark.parametrize("behind", [True, False])
def test_state_on_a_device(tmp_path: Path, behind: bool) -> None:
    device = torch.accelerator.current_accelerator()
    items = [
        item._replace(pieces=[piece._replace(tensor=piece.tensor.to(device)) for piece in item.pieces])
        for item in items_of(make_state(3))
    ]
    checkpoints = Checkpoints(tmp_path, sizes=TINY)
    checkpoints.save(3, items, {"step": 3}, asynchronous=behind)
    for item in items if behind else []:
        for piece in item.pieces:
            piece.tensor.zero_()
    checkpoints.wait()
    for item in items:
        for piece in item.pieces:
            piece.tensor.zero_()
    checkpoints.load(items)
    expected = make_state(3)
    for item in items:
        for start, stop, tensor in item.pieces:
            assert torch.equal(tensor.cpu(), expected[item.kind, item.name][start:stop])


class FailingFiles(FileSystem):
    def before(self, operation: str, path: Path) -> None:
        if operation == "sync":
            raise OSError(5, "Input/output error", str(path))


def test_what_fails_behind_training_is_told_and_raised_by_wait(tmp_path: Path) -> None:
    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, files=FailingFiles(), warn=lines.append)
    checkpoints.save(1, items_of(make_state(1)), {})
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: .*Input/output error"):
        checkpoints.wait()
    assert len(lines) == 1 and "Input/output error" in lines[0]
    checkpoints.wait()  # told once


class FailingTimes(FileSystem):
    """The disk is full for so many saves."""

    def __init__(self, times: int) -> None:
        self.times = times

    def free_bytes(self, path: Path) -> int:
        self.times -= 1
        return 0 if self.times >= 0 else super().free_bytes(path)


def test_a_save_that_failed_does_not_end_the_run(tmp_path: Path) -> None:
    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, files=FailingTimes(2), warn=lines.append, sizes=TINY)
    for step in (1, 2, 3):
        checkpoints.save(step, items_of(make_state(step)), {})
    checkpoints.wait()
    assert [found.step for found in checkpoints.steps()] == [3] and checkpoints.failed_saves == 2
    assert "are free" in lines[0] and "1 failed in a row" in lines[0] and "2 failed in a row" in lines[1]


def test_too_many_failures_in_a_row_are_raised(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tolerate_failures=1)
    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, policy=policy, files=FailingTimes(2), warn=lines.append, sizes=TINY)
    checkpoints.save(1, items_of(make_state(1)), {})
    checkpoints.save(2, items_of(make_state(2)), {})
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        checkpoints.save(3, items_of(make_state(3)), {})
    assert "the next save ends the run: 2 failed in a row" in lines[1]
    checkpoints.save(4, items_of(make_state(4)), {})  # whoever goes on all the same may
    checkpoints.wait()
    assert [found.step for found in checkpoints.steps()] == [4]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_leaves_the_older_step_and_the_others_are_told(tmp_path: Path, dead: int) -> None:
    save_with(tmp_path, 2, 1, seed=0)

    class Mortal(FileSystem):
        def before(self, operation: str, path: Path) -> None:
            if operation == "write" and path.suffix == ".safetensors":
                raise Died

    def work(peers: ThreadPeers) -> None:
        files = Mortal() if peers.rank == dead else FileSystem()
        policy = CheckpointPolicy(timeout_s=1.5)
        Checkpoints(tmp_path, peers, policy, sizes=TINY, files=files).save(
            2, items_of(make_state(2), peers.rank, 2), {"step": 2}, asynchronous=False
        )

    results = crew(2, work)
    assert isinstance(results[dead], Died)
    with pytest.raises(
        CheckpointError, match=rf"which died, hang or are slow: no word from ranks \[{dead}\]"
    ):
        raise results[1 - dead]
    step, found = load_with(tmp_path, 2, 1)
    assert step == 1
    assert_same(found, make_state(1))
    save_with(tmp_path, 2, 3, seed=1)  # and the next writer cleans up
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_texts_do_not_pile_up_in_the_store(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> int:
        checkpoints = Checkpoints(tmp_path, peers, QUICK, sizes=TINY)
        for step in range(4):
            checkpoints.save(step, items_of(make_state(step), peers.rank, 2), {})
        checkpoints.wait()
        return sum(map(len, peers._store.texts.values()))

    assert succeed(crew(2, work))[0] < 200


def test_two_writers_in_turn_share_one_store(tmp_path: Path) -> None:
    """Two engines of one process: keys must not meet, or one reads the other's words."""

    def work(peers: ThreadPeers) -> None:
        for folder in ("a", "b", "a"):
            checkpoints = Checkpoints(tmp_path / folder, peers, QUICK)
            checkpoints.save(random.Random(folder).randint(1, 9), items_of(make_state(1), peers.rank, 2), {})
            checkpoints.wait()
            assert checkpoints.load(blank_items(peers.rank, 2)) is not None

    succeed(crew(2, work))


# --------------------------------------------------------------------------------------- real processes


def save_and_load_on(world: World, root: str, seed: int) -> tuple[int, list[tuple[str, bool]]]:
    """Two saves behind each other, then a load with other cuts; which tensors came back equal."""
    checkpoints = Checkpoints(root, world, QUICK, sizes=TINY)
    for step in (1, 2):
        checkpoints.save(step, items_of(make_state(step), world.rank, world.size, seed), {"step": step})
    items = blank_items(world.rank, world.size, seed + 1)
    loaded = checkpoints.load(items)
    assert loaded is not None
    expected = make_state(loaded.step)
    return loaded.step, [
        (item.name, torch.equal(piece.tensor, expected[item.kind, item.name][piece.start : piece.stop]))
        for item in items
        for piece in item.pieces
    ]


def test_processes_meet_over_the_store_of_the_world(tmp_path: Path, ranks: Callable) -> None:
    for turn in range(2):  # the second time on the same store, as a second engine would
        results = ranks(2).run(save_and_load_on, str(tmp_path / str(turn)), turn)
        assert [step for step, _ in results] == [2, 2]
        assert all(equal for _, found in results for _, equal in found)
    assert_same(load_with(tmp_path / "0", 1, 0)[1], make_state(2))


def test_a_thread_that_somebody_waits_for_has_his_priority(tmp_path: Path) -> None:
    """On a busy machine the caller would wait for a thread that hardly runs."""
    writes, go = threading.Event(), threading.Event()

    class Waits(FileSystem):
        def before(self, operation: str, path: Path) -> None:
            if operation == "write":
                writes.set()
                assert go.wait(20)

    checkpoints = Checkpoints(tmp_path, policy=QUICK, sizes=TINY, files=Waits())
    checkpoints.save(1, items_of(make_state(1), 0, 1, 0), {}, asynchronous=True)
    assert writes.wait(20)
    thread = next(each for each in threading.enumerate() if each.name == "shardwise-save")
    ours = os.getpriority(os.PRIO_PROCESS, 0)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)

    assert niceness() == 10 or ours > 10
    waiter = threading.Thread(target=checkpoints.join)
    waiter.start()
    deadline = time.monotonic() + 20
    while niceness() != ours and os.geteuid() == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert niceness() == ours or os.geteuid() != 0
    go.set()
    waiter.join()
    checkpoints.wait()
