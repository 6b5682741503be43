"""A scorer follows a running job: rows, hot rows and the dense part of a step change together, or not at all."""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.base.errors import CheckpointError, DamagedError, MismatchError, UsageError
from shardwise.comm.world import join
from shardwise.engine.state.stored_rows import changes_between
from shardwise.models import vectors as vectors_module
from shardwise.models.dense_part import DensePart
from shardwise.models.increments import Increment, read_increment, write_increment
from shardwise.models.vectors import INCREMENTS, Vectors
from shardwise.serving.export import export_changes, export_step
from shardwise.serving.scorer import Scorer
from tests.serving.served import CONFIG, Own, batch, built, own_batch

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

BATCHES = [batch(1000 + seed, samples=4, keys=90) for seed in range(6)]
"""Requests, some of whose keys have no row."""


def saved(steps: Path, step: int) -> Path:
    return steps / f"step_{step:08d}"


def answers(scorer: Scorer) -> Tensor:
    return torch.stack([scorer.score(each) for each in BATCHES])


def job(every: int = 1, full_every: int = 100) -> Any:
    config = {**CONFIG, "export": {"every": every, "full_every": full_every}}
    config["checkpoint"] = {"keep_last": None, "asynchronous": False}
    return shardwise.initialize(built("dlrm"), config, world=join(quiet=True))


def advance(engine: Any, folder: Path, steps: Path) -> bool:
    """Train a step, export and save it."""
    engine.train_step([batch(engine.step_count)])
    is_full = bool(engine.export(folder))
    engine.save(steps)
    return is_full


def truth(steps: Path, step: int, out: Path) -> Tensor:
    """The answers of a step's full export."""
    if not out.exists():
        export_step(saved(steps, step), out)
    return answers(Scorer(out, cache_bytes=0))


# A job and its checkpoints -------------------------------------------------------------------------------------------


class Exports(NamedTuple):
    """What a job wrote: full vectors at step 1, increments up to step 4, and a checkpoint of every step."""

    folder: Path
    steps: Path

    @property
    def increments(self) -> list[Path]:
        (run,) = (self.folder / INCREMENTS).iterdir()
        return sorted(run.iterdir())


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    made = Exports(tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("steps"))
    engine = job()
    assert [advance(engine, *made) for _ in range(4)] == [True, False, False, False]
    engine.close()
    return made


def opened_at_the_first(exports: Exports, tmp_path: Path) -> Scorer:
    """A scorer at step 1, whose hot rows were read."""
    export_step(saved(exports.steps, 1), tmp_path / "full_1")
    scorer = Scorer(tmp_path / "full_1")
    for _ in range(2):
        answers(scorer)
    return scorer


def since(exports: Exports, start: int, end: int, out: Path) -> Path:
    export_changes(saved(exports.steps, start), saved(exports.steps, end), out)
    return out


def without_changes(self: Vectors, table: str, keys: Any, rows: Any) -> None:
    """In the place of ``Vectors.write_changes``: hot rows stay those of the step before."""


def with_dense_of(exports: Exports) -> Callable[[Path], Increment]:
    """In the place of ``read_increment``: the dense part stays that of the first step."""
    first = Vectors(exports.folder)._opened().dense
    return lambda path: read_increment(path)._replace(dense=first)


@pytest.mark.parametrize("planted", ["", "hot rows", "dense part"])
def test_rows_hot_rows_and_the_dense_part_go_on_together(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Each step's answers are those of its full export, to the bit, from hot rows alone. Mistakes are seen."""
    wanted = {step: truth(exports.steps, step, tmp_path / str(step)) for step in (1, 3, 4)}
    assert all((wanted[a] - wanted[b]).abs().max() > 1e-4 for a, b in ((1, 3), (3, 4)))
    scorer = opened_at_the_first(exports, tmp_path)
    assert torch.equal(answers(scorer), wanted[1])
    if planted == "hot rows":
        monkeypatch.setattr(Vectors, "write_changes", without_changes)
    if planted == "dense part":
        monkeypatch.setattr(vectors_module, "read_increment", with_dense_of(exports))
    kept = []
    for start, end in ((1, 3), (3, 4)):
        if planted == "dense part":
            with pytest.raises(
                UsageError, match=f"vectors are of step {end}, and its dense part is of step 1"
            ):
                scorer.apply(since(exports, start, end, tmp_path / f"to_{end}"))
            assert scorer.step == 1 and torch.equal(answers(scorer), wanted[1])
            return
        misses = sum(hot.misses for each in scorer._served.collections for hot in each.hot)
        scorer.apply(since(exports, start, end, tmp_path / f"to_{end}"))
        assert scorer.step == end
        kept.append(torch.equal(answers(scorer), wanted[end]))
        assert misses == sum(hot.misses for each in scorer._served.collections for hot in each.hot)
    assert kept == [planted == ""] * 2


def test_a_scorer_opened_late_or_early_reads_the_newest_step(tmp_path: Path) -> None:
    """Increments are applied in turn; full vectors that replace them are opened; another load of the job too."""
    folder, steps = tmp_path / "served", tmp_path / "steps"
    engine = job(full_every=2)
    assert advance(engine, folder, steps)
    early = Scorer(folder)
    assert early.step == 1 and not early.refresh()
    assert not advance(engine, folder, steps) and not advance(engine, folder, steps)
    assert early.refresh() and early.step == 3 and not early.refresh()
    late = Scorer(folder)
    wanted = truth(steps, 3, tmp_path / "3")
    assert late.step == 3 and torch.equal(answers(late), wanted) and torch.equal(answers(early), wanted)
    assert advance(engine, folder, steps), "full again after two increments"
    assert early.refresh() and early.step == 4
    assert torch.equal(answers(early), truth(steps, 4, tmp_path / "4"))
    engine.load(saved(steps, 2))
    engine.train_step([batch(77)])
    assert engine.export(folder)
    assert early.refresh() and early.step == 3 and not torch.equal(answers(early), wanted)
    engine.close()


# Refusals ------------------------------------------------------------------------------------------------------------


def changed_dense(exports: Exports, out: Path, change: Callable[[DensePart], DensePart]) -> Path:
    """An increment from step 1 to step 3 with another dense part."""
    start, end, tables = changes_between(saved(exports.steps, 1), saved(exports.steps, 3))
    dense = read_increment(exports.increments[1]).dense
    assert dense is not None
    return write_increment(out, tables, start, end, dense=change(dense).to_write())


def wider(dense: DensePart) -> DensePart:
    return dense._replace(tensors={name: torch.cat([each, each]) for name, each in dense.tensors.items()})


def flipped(place: Path, pattern: str) -> Path:
    (file,) = place.glob(pattern)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return place


def refusals(exports: Exports, place: Path) -> Iterator[tuple[Path, type[Exception], str]]:
    """Increments that do not follow step 1 of the checkpoints, and what is said of them."""
    yield since(exports, 3, 4, place / "late"), MismatchError, "an increment between them is missing"
    yield (
        exports.increments[0],
        MismatchError,
        "Apply increments to vectors of the run that they were made from",
    )
    yield (
        changed_dense(exports, place / "wide", wider),
        MismatchError,
        r"its dense part is of another model: 'bottom.0.bias' is \[16\] .* and \[8\] .* and \d+ more",
    )
    yield (
        changed_dense(
            exports, place / "half", lambda d: DensePart({k: v.half() for k, v in d.tensors.items()}, d.about)
        ),
        MismatchError,
        r"in torch.float16 in the increment and .* in torch.float32 in the reader",
    )
    yield (
        changed_dense(
            exports, place / "fewer", lambda d: DensePart(dict(list(d.tensors.items())[1:]), d.about)
        ),
        MismatchError,
        "is only in the reader",
    )
    yield (
        changed_dense(
            exports, place / "other", lambda d: d._replace(about={**d.about, "click_model": {"a": 1}})
        ),
        MismatchError,
        "the descriptions of the model differ",
    )
    yield flipped(since(exports, 1, 3, place / "d"), "dense.*"), DamagedError, "do not match their SHA-256"
    yield (
        flipped(since(exports, 1, 3, place / "r"), "tables.user.*"),
        DamagedError,
        "do not match their SHA-256",
    )
    gone = since(exports, 1, 3, place / "gone")
    (gone / "dense.safetensors").unlink()
    yield gone, DamagedError, "dense.safetensors: cannot be read"
    yield place / "nowhere", CheckpointError, "no increment.json"
    start, end, tables = changes_between(saved(exports.steps, 1), saved(exports.steps, 3))
    yield write_increment(place / "rows", tables, start, end), UsageError, "without the dense part of a model"


def test_what_does_not_follow_is_refused_and_the_scorer_goes_on(exports: Exports, tmp_path: Path) -> None:
    scorer = opened_at_the_first(exports, tmp_path)
    wanted = answers(scorer)
    for path, error, match in refusals(exports, tmp_path):
        with pytest.raises(error, match=match):
            scorer.apply(path)
        assert scorer.step == 1 and torch.equal(answers(scorer), wanted), path
    follows = since(exports, 1, 3, tmp_path / "follows")
    scorer.apply(follows)
    after = answers(scorer)
    with pytest.raises(MismatchError, match=r"the reader is at step 3\. It is applied already"):
        scorer.apply(follows)
    assert scorer.step == 3 and torch.equal(answers(scorer), after)


def test_a_damaged_increment_in_the_folder_leaves_the_scorer_at_its_step(tmp_path: Path) -> None:
    folder, steps = tmp_path / "served", tmp_path / "steps"
    engine = job()
    advance(engine, folder, steps)
    scorer = Scorer(folder)
    wanted = answers(scorer)
    advance(engine, folder, steps)
    advance(engine, folder, steps)
    (run,) = (folder / INCREMENTS).iterdir()
    flipped(sorted(run.iterdir())[1], "dense.*")
    with pytest.raises(DamagedError, match=r"step_00000002_to_00000003/dense.safetensors: its bytes"):
        scorer.refresh()
    assert scorer.step == 1 and torch.equal(answers(scorer), wanted)
    engine.load(saved(steps, 3))
    advance(engine, folder, steps)  # full vectors, because the engine has loaded
    assert scorer.refresh() and scorer.step == 4
    assert torch.equal(answers(scorer), truth(steps, 4, tmp_path / "4"))
    engine.close()


def test_a_model_of_ones_own_is_built_anew_for_each_step(tmp_path: Path) -> None:
    """Buffers go on too; a function that returns one module again is refused."""
    config = {**CONFIG, "checkpoint": {"keep_last": None, "asynchronous": False}}
    engine = shardwise.initialize(Own(), config, world=join(quiet=True))
    wanted = {}
    for step in (1, 2):
        engine.train_step([own_batch(step)])
        engine.save(tmp_path / "steps")
        engine.eval()
        wanted[step] = engine.predict([own_batch(9)])[0]["logits"]
        engine.train()
    engine.close()
    export_step(saved(tmp_path / "steps", 1), tmp_path / "out")
    export_changes(saved(tmp_path / "steps", 1), saved(tmp_path / "steps", 2), tmp_path / "delta")
    scorer = Scorer(tmp_path / "out", model=Own)
    assert (scorer.score(own_batch(9)) - wanted[1]).abs().max() <= 1e-6 < (wanted[2] - wanted[1]).abs().max()
    scorer.apply(tmp_path / "delta")
    assert (scorer.score(own_batch(9)) - wanted[2]).abs().max() <= 1e-6
    one = Own()
    again = Scorer(tmp_path / "out", model=lambda: one)
    with pytest.raises(UsageError, match="returned modules that it returned before"):
        again.apply(tmp_path / "delta")


# A scorer in another process -----------------------------------------------------------------------------------------


def serve(folder: Path, found: Path, requests: int, last: int) -> None:
    """Follow a job up to step ``last`` with two threads of requests and one that refreshes; write all answers."""
    while not (folder / "tables.json").exists():
        time.sleep(0.01)
    scorer, faults = Scorer(folder, cache_bytes=6000), list[str]()
    found.with_suffix(".ready").touch()
    logits: list[Tensor] = []

    def ask(first: int) -> None:
        number, step = first, 0
        while not faults and (number < requests or step < last or number < first + 20):
            place, step = number % len(BATCHES), scorer.step  # the answer is of this step or of a later one
            try:
                answer = scorer.score(BATCHES[place])
            except Exception as error:
                faults.append(f"request {number}: {error!r}")
                return
            logits.append(torch.cat([torch.tensor([float(place)]), answer]))
            number += 2

    def follow() -> None:
        while not faults and scorer.step < last:
            try:
                scorer.refresh()
            except Exception as error:
                faults.append(f"refresh at step {scorer.step}: {error!r}")
            time.sleep(0.005)

    threads = [threading.Thread(target=ask, args=(first,)) for first in (0, 1)]
    threads.append(threading.Thread(target=follow))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.save({"answers": torch.stack(logits), "faults": faults}, found.with_suffix(".part"))
    found.with_suffix(".part").rename(found)


@pytest.mark.parametrize(
    ("requests", "steps"),
    [(400, 7), pytest.param(100_000, 40, marks=pytest.mark.soak)],
    ids=["a few", "many"],
)
def test_a_scorer_in_another_process_beside_a_job(tmp_path: Path, requests: int, steps: int) -> None:
    """No request fails, and each answer is that of one step's full export, while the job exports step after step."""
    folder, places = tmp_path / "served", tmp_path / "steps"
    # Threads of a fork would meet torch's pool of threads, which stays with the parent.
    child = multiprocessing.get_context("spawn").Process(
        target=serve, args=(folder, tmp_path / "found.pt", requests, steps), daemon=True
    )
    child.start()
    engine = job(full_every=5)
    fulls = []
    for _ in range(steps):
        fulls.append(advance(engine, folder, places))
        while child.is_alive() and not (tmp_path / "found.ready").exists():
            time.sleep(0.01)
        time.sleep(0.05 if steps < 10 else 1.0)  # for requests between two exports
    engine.close()
    assert fulls == [step % 6 == 0 for step in range(steps)]
    child.join()
    assert child.exitcode == 0
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert not found["faults"], found["faults"][0]
    asked, given = found["answers"][:, 0].long(), found["answers"][:, 1:]
    assert len(asked) >= requests
    wanted = torch.stack([truth(places, step, tmp_path / str(step)) for step in range(1, steps + 1)])
    near = torch.stack([(given - wanted[step][asked]).abs().amax(1) <= 1e-6 for step in range(steps)])
    assert bool(near.any(0).all()), "a request mixed steps"
    seen = near.any(1).nonzero()[:, 0].tolist()
    assert steps - 1 in seen and len(seen) >= 3, "requests of several steps"
    distinct = (wanted[1:] - wanted[:-1]).abs().amax((1, 2))
    assert bool((distinct > 1e-4).all()), "steps whose answers tell them apart"
