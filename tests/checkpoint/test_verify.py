"""Damage: every flipped bit is found and named, nothing damaged is ever loaded, the step before is used."""

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import DamagedError
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, FlatSlice, TensorPieces, verify
from shardwise.checkpoint.files import FileSystem
from shardwise.checkpoint.layout import PAGE_BYTES
from shardwise.checkpoint.steps import open_step

from .crew import (
    TINY,
    ThreadPeers,
    assemble,
    assert_same,
    blank_items,
    crew,
    items_of,
    make_state,
    succeed,
)

OLD, NEW = "step_00000001", "step_00000002"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 and 2, equal in all but their numbers' contents."""
    checkpoints = Checkpoints(tmp_path, policy=CheckpointPolicy(asynchronous=False), sizes=TINY)
    for step in (1, 2):
        checkpoints.save(step, items_of(make_state(step)), {"step": step})
    return tmp_path


def falls_back(folder: Path, names: str) -> None:
    """Loading takes step 1, after one line that names what is wrong with step 2."""
    lines: list[str] = []
    items = blank_items()
    loaded = Checkpoints(folder, warn=lines.append).load(items)
    assert loaded is not None and loaded.step == 1
    assert_same(assemble([items]), make_state(1))
    assert len(lines) == 1 and NEW in lines[0] and names in lines[0], lines


def files_of(step: Path) -> list[str]:
    return sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())


def flip_and_look(folder: Path, name: str, position: int, bit: int) -> None:
    """One bit of step 2 is the other way round: found, named, step 1 loaded; then mended."""
    step = folder / NEW
    tensors = [] if name == "manifest.json" else open_step(step, FileSystem()).tensors
    hit = [
        f"{tensor.kind} {tensor.name!r}"
        for tensor in tensors
        for piece in tensor.pieces
        if piece.file == name
        and piece.offset <= position < piece.offset + (piece.stop - piece.start) * tensor.torch_dtype.itemsize
    ]
    contents = bytearray((step / name).read_bytes())
    contents[position] ^= 1 << bit
    (step / name).write_bytes(contents)
    found = verify(step)
    assert [damage.file for damage in found] == [name], (name, position, bit, found)
    assert list(found[0].tensors) == hit, (name, position, bit, found)
    falls_back(folder, names=hit[0] if hit else name)
    contents[position] ^= 1 << bit
    (step / name).write_bytes(contents)


def flips(folder: Path, count: int, seed: int) -> int:
    """First one in every file, then in any; half of them anywhere, half behind the headers."""
    draws = random.Random(seed)
    step = folder / NEW
    names = files_of(step)
    chosen = (names + draws.choices(names, k=count))[:count]
    for number, name in enumerate(chosen):
        size = (step / name).stat().st_size
        first = PAGE_BYTES if number % 2 and size > PAGE_BYTES else 0
        flip_and_look(folder, name, draws.randrange(first, size), draws.randrange(8))
    assert verify(step) == []
    return len(chosen)


def test_a_sample_of_flipped_bits(folder: Path) -> None:
    assert flips(folder, 40, seed=0) == 40


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_flipped_bits(folder: Path) -> None:
    found = flips(folder, 200, seed=1)
    print(f"{found} of 200 flipped bits found and named, the older step loaded each time")
    assert found == 200


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_byte_of_the_manifest(folder: Path) -> None:
    for position in range((folder / NEW / "manifest.json").stat().st_size):
        flip_and_look(folder, "manifest.json", position, position % 8)


def stale(step: Path) -> str:
    """The same file of the step before: same size, same header, other numbers."""
    name = "state/master-00001-of-00004.safetensors"
    assert (step.parent / OLD / name).stat().st_size == (step / name).stat().st_size
    shutil.copy(step.parent / OLD / name, step / name)
    return name


def missing(step: Path) -> str:
    (step / "state/exp_avg-00001-of-00002.safetensors").unlink()
    return "state/exp_avg-00001-of-00002.safetensors: (holds exp_avg 'blocks.0.norm'"


def short(step: Path) -> str:
    path = step / "state/exp_avg-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return "state/exp_avg-00001-of-00002.safetensors"


def long(step: Path) -> str:
    with (step / "trainer.json").open("ab") as file:
        file.write(b" ")
    return "trainer.json"


def zeros(step: Path) -> str:
    path = step / "model/model-00001-of-00003.safetensors"
    size = path.stat().st_size
    path.write_bytes(bytes(size))
    return "model/model-00001"


def link(step: Path) -> str:
    path = step / "state/exp_avg-00001-of-00002.safetensors"
    path.rename(step.parent / "elsewhere")
    path.symlink_to(step.parent / "elsewhere")
    return "state/exp_avg-00001-of-00002.safetensors"


def linked_directory(step: Path) -> str:
    (step / "state").rename(step.parent / "elsewhere")
    (step / "state").symlink_to(step.parent / "elsewhere")
    return "a link where a directory was written"


def linked_manifest(step: Path) -> str:
    path = step / "manifest.json"
    path.rename(step.parent / "elsewhere")
    path.symlink_to(step.parent / "elsewhere")
    return "manifest.json"


def fifo(step: Path) -> str:
    path = step / "manifest.json"
    path.unlink()
    os.mkfifo(path)
    return "not a regular file"


def pickled(step: Path) -> str:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path(step.parent / "executed").touch, ())

    (step / "manifest.json").write_bytes(pickle.dumps(Evil()))
    return "manifest.json"


def no_manifest(step: Path) -> str:
    (step / "manifest.json").unlink()
    return "manifest.json"


def cut_manifest(step: Path) -> str:
    path = step / "manifest.json"
    os.truncate(path, path.stat().st_size // 2)
    return "cut short or changed"


def huge_manifest(step: Path) -> str:
    os.truncate(step / "manifest.json", 10 * 2**30)
    return "manifest.json"


def older_manifest(step: Path) -> str:
    shutil.copy(step.parent / OLD / "manifest.json", step / "manifest.json")
    return "its manifest is that of step 1"


@pytest.mark.parametrize(
    "harm",
    [
        stale, missing, short, long, zeros, link, linked_directory, linked_manifest, fifo, pickled, no_manifest,
        cut_manifest, huge_manifest, older_manifest,
    ],
)  # fmt: skip
def test_harm_is_found_and_the_older_step_is_loaded(folder: Path, harm: Callable[[Path], str]) -> None:
    names = harm(folder / NEW)
    falls_back(folder, names)
    assert verify(folder / NEW) != []
    assert not (folder / "executed").exists()


def test_two_files_that_changed_places(tmp_path: Path) -> None:
    """Both are whole files of this step, and of one size."""
    checkpoints = Checkpoints(tmp_path, policy=CheckpointPolicy(asynchronous=False))
    kinds = ("exp_avg", "exp_avg_sq")
    items = [TensorPieces(kind, "w", (9,), torch.float32, [FlatSlice(0, 9, torch.rand(9))]) for kind in kinds]
    checkpoints.save(1, items, {})
    one, other = (tmp_path / OLD / "state" / f"{kind}.safetensors" for kind in kinds)
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    assert [damage.file for damage in verify(tmp_path / OLD)] == [
        f"state/{kind}.safetensors" for kind in kinds
    ]
    with pytest.raises(DamagedError, match=r"state/exp_avg\.safetensors \(tensor exp_avg 'w'\)"):
        checkpoints.load(items)


def test_an_extra_file_is_told_and_does_no_harm(folder: Path) -> None:
    (folder / NEW / "model" / "more.safetensors").write_bytes(b"x")
    (folder / NEW / "link").symlink_to("/etc/hostname")
    assert [str(damage) for damage in verify(folder / NEW)] == [
        "link: is not in the manifest",
        "model/more.safetensors: is not in the manifest",
    ]
    loaded = Checkpoints(folder).load(blank_items())
    assert loaded is not None and loaded.step == 2


def test_a_whole_step_under_another_number_is_passed_over(folder: Path) -> None:
    shutil.copytree(folder / OLD, folder / "step_00000007")
    lines: list[str] = []
    loaded = Checkpoints(folder, warn=lines.append).load(blank_items())
    assert loaded is not None and loaded.step == 2
    assert "step_00000007" in lines[0] and "is that of step 1" in lines[0]


def test_the_hint_is_never_trusted(folder: Path) -> None:
    for text in ("step_00000001\n", "/etc\n", "step_00000099\n"):
        (folder / "latest").write_text(text)
        loaded = Checkpoints(folder).load(blank_items())
        assert loaded is not None and loaded.step == 2


def test_nothing_whole_is_an_error_that_names_all(folder: Path) -> None:
    for step in (OLD, NEW):
        os.truncate(folder / step / "trainer.json", 1)
    with pytest.raises(DamagedError, match=rf"no step there can be loaded.*{NEW}.*{OLD}"):
        Checkpoints(folder, warn=lambda line: None).load(blank_items())


def test_damage_seen_by_one_rank_turns_all_ranks(folder: Path) -> None:
    """A rank whose own share is whole must not load what another found damaged, and touches nothing before."""
    path = folder / NEW / "state" / "master-00004-of-00004.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    seen: list[bool] = []

    def work(peers: ThreadPeers) -> tuple:
        items = blank_items(peers.rank, 4)

        def choose(manifest):  # called once a step, before anything is read
            seen.append(
                all(bool((p.tensor == -1).all()) for i in items for p in i.pieces if i.dtype != torch.bool)
            )
            return items

        lines: list[str] = []
        loaded = Checkpoints(folder, peers, CheckpointPolicy(timeout_s=20), warn=lines.append).load(choose)
        return loaded, items, lines

    results = succeed(crew(4, work))
    assert [loaded.step for loaded, _, _ in results] == [1] * 4
    assert len(seen) == 8 and all(seen)
    assert_same(assemble([items for _, items, _ in results]), make_state(1))
    assert [len(lines) for _, _, lines in results] == [1, 0, 0, 0]


class RottingFiles(FileSystem):
    """Every byte is right the first time it is read, and one is wrong the second time."""

    def __init__(self, name: str) -> None:
        self._name, self._open, self.reads = name, -1, 0

    def open_for_reading(self, path: Path) -> int:
        descriptor = super().open_for_reading(path)
        if path.as_posix().endswith(self._name):
            self._open = descriptor
            self.reads += 1
        elif self._open == descriptor:
            self._open = -1
        return descriptor

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> None:
        super().read_at(descriptor, buffer, offset)
        if descriptor == self._open and self.reads > 1:
            buffer[-1] ^= 1


def test_bytes_that_turn_bad_between_check_and_read_are_not_taken(folder: Path) -> None:
    files = RottingFiles(f"{NEW}/state/exp_avg-00001-of-00002.safetensors")
    items = blank_items()
    lines: list[str] = []
    loaded = Checkpoints(folder, files=files, warn=lines.append).load(items)
    assert files.reads > 1 and len(lines) == 1 and "exp_avg" in lines[0]
    assert loaded is not None and loaded.step == 1
    assert_same(assemble([items]), make_state(1))


class BadSector(FileSystem):
    def __init__(self) -> None:
        self.reads = 0

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> None:
        self.reads += 1
        if "step_00000002/state" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        super().read_at(descriptor, buffer, offset)


def test_a_bad_sector_is_damage(folder: Path) -> None:
    lines: list[str] = []
    loaded = Checkpoints(folder, files=BadSector(), warn=lines.append).load(blank_items())
    assert loaded is not None and loaded.step == 1
    assert "cannot be read" in lines[0] and "state/" in lines[0]


def test_one_step_asked_for_by_path(folder: Path) -> None:
    items = blank_items()
    loaded = Checkpoints(folder).load(items, path=folder / OLD)
    assert loaded is not None and loaded.step == 1
    (folder / NEW).rename(folder / "best")
    loaded = Checkpoints(folder).load(items, path=folder / "best")
    assert loaded is not None and loaded.step == 2
    os.truncate(folder / "best" / "trainer.json", 3)
    with pytest.raises(DamagedError, match=r"trainer\.json"):
        Checkpoints(folder).load(items, path=folder / "best")
