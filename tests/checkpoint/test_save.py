"""A save on a disk that fails: an error that says so, the older steps intact, the next save as if nothing had been."""

import errno
import json
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, verify
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.steps import open_step

from .crew import TINY, ThreadPeers, assemble, assert_same, blank_items, crew, items_of, make_state, succeed
from .faults import CountingFiles, FailingFiles

POLICY = CheckpointPolicy(asynchronous=False, timeout_s=20)


def save(
    root: Path, step: int, files: FileSystem | None = None, ranks: int = 1
) -> list[BaseException | None]:
    def work(peers: ThreadPeers) -> None:
        checkpoints = Checkpoints(root, peers, POLICY, sizes=TINY, files=files, warn=lambda line: None)
        checkpoints.save(step, items_of(make_state(step), peers.rank, ranks), {"step": step})

    return crew(ranks, work)


def newest(root: Path) -> int:
    items = blank_items()
    loaded = Checkpoints(root).load(items)
    assert loaded is not None
    assert_same(assemble([items]), make_state(loaded.step))
    assert verify(loaded.path) == []
    return loaded.step


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".writing")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_any_call_may_fail(tmp_path: Path, code: int) -> None:
    """Each call of a save fails in turn (a sample: every ninth)."""
    succeed(save(tmp_path, 1))
    counting = CountingFiles()
    succeed(save(tmp_path / "other", 2, counting))
    failed = 0
    for number in range(code % 9, len(counting.calls), 9):
        files = FailingFiles(lambda n, operation, path, number=number: n == number, code)
        error = save(tmp_path, 2, files)[0]
        assert files.fired == 1
        if error is None:  # the commit was behind it: what fails in the tidying is told, no more
            assert newest(tmp_path) == 2
            continue
        failed += 1
        with pytest.raises(
            CheckpointError, match=r"step 2 was not saved: .*(No space left|Input/output error)"
        ):
            raise error
        assert newest(tmp_path) in (1, 2)
        assert not [name for name in names(tmp_path) if ".tmp-" in name], "a full disk needs its space back"
    assert failed > 3
    succeed(save(tmp_path, 3))
    assert newest(tmp_path) == 3


def test_a_full_disk_on_one_rank_stops_all(tmp_path: Path) -> None:
    succeed(save(tmp_path, 1, ranks=2))

    def work(peers: ThreadPeers) -> None:
        when = lambda n, operation, path: operation == "write" and path.parent.name == "state"  # noqa: E731
        files = FailingFiles(when, errno.ENOSPC) if peers.rank == 1 else FileSystem()
        Checkpoints(tmp_path, peers, POLICY, sizes=TINY, files=files).save(
            2, items_of(make_state(2), peers.rank, 2), {"step": 2}
        )

    for error in crew(2, work):
        with pytest.raises(CheckpointError, match=r"rank 1: .*state/.*No space left on device"):
            raise error
    assert newest(tmp_path) == 1 and names(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_the_file_system_loses_is_found_before_the_commit(tmp_path: Path, rank: int) -> None:
    """The call reports success, the bytes never arrive: some network file systems, two writers of one page."""
    succeed(save(tmp_path, 1, ranks=2))

    class Forgetful(FileSystem):
        def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
            return len(data) if offset >= 4096 and any(data) else super().pwrite(descriptor, data, offset)

    def work(peers: ThreadPeers) -> None:
        files = Forgetful() if peers.rank == rank else FileSystem()
        Checkpoints(tmp_path, peers, POLICY, sizes=TINY, files=files).save(
            2, items_of(make_state(2), peers.rank, 2), {"step": 2}
        )

    for error in crew(2, work):
        with pytest.raises(CheckpointError, match="read back other bytes than were written"):
            raise error
    assert newest(tmp_path) == 1


def test_ranks_without_a_shared_folder_are_told(tmp_path: Path) -> None:
    def work(peers: ThreadPeers) -> None:
        root = tmp_path / f"host{peers.rank}"
        Checkpoints(root, peers, POLICY, sizes=TINY).save(2, items_of(make_state(2), peers.rank, 2), {})

    for error in crew(2, work):
        with pytest.raises(CheckpointError, match="must lie on a file system that all ranks share"):
            raise error


def test_every_file_is_synced_before_the_commit_and_the_folder_after(tmp_path: Path) -> None:
    files = CountingFiles()
    succeed(save(tmp_path, 1, files))
    operations = [(operation, path.name) for operation, path in files.calls]
    commit = next(
        i for i, (op, name) in enumerate(operations) if op == "rename" and ".tmp-" in name and "step" in name
    )
    synced = {name for op, name in operations[:commit] if op == "sync"}
    written = {name for op, name in operations[:commit] if op == "write"}
    assert written == synced and len(written) > 8
    assert {name for op, name in operations[:commit] if op == "sync_directory"} >= {"model", "state"}
    assert operations[commit + 1] == ("sync_directory", tmp_path.name)


def test_small_files_go_along(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, policy=POLICY, sizes=TINY)
    checkpoints.save(
        1, items_of(make_state(1)), {}, texts={"model/config.json": "{}\n", "run.yaml": "ü: 1\n"}
    )
    step = tmp_path / "step_00000001"
    assert (step / "model" / "config.json").read_text() == "{}\n"
    assert (step / "run.yaml").read_text(encoding="utf-8") == "ü: 1\n"
    assert verify(step) == []
    for taken in (
        "../x",
        "manifest.json",
        "trainer.json",
        "/x",
        "model/model-00001-of-00003.safetensors",
        "a/b",
    ):
        with pytest.raises(CheckpointError, match="cannot be the name of a file of a step"):
            checkpoints.save(2, items_of(make_state(1)), {}, texts={taken: "x"})


def test_the_index_names_the_file_of_every_weight(tmp_path: Path) -> None:
    succeed(save(tmp_path, 1))
    index = json.loads((tmp_path / "step_00000001" / "model" / "model.safetensors.index.json").read_text())
    manifest = open_step(tmp_path / "step_00000001", FileSystem())
    weights = [tensor for tensor in manifest.tensors if tensor.kind in ("weight", "buffer")]
    assert index["weight_map"] == {t.name: t.pieces[0].file.removeprefix("model/") for t in weights}
    assert index["metadata"]["total_size"] == sum(tensor.bytes for tensor in weights)
