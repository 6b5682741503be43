"""The scorer returns the engine's logits: every built-in model, every pooling, several threads and processes."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import shardwise
from shardwise.base.errors import CheckpointError, DamagedError, DataError, MismatchError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.cli.main import app
from shardwise.comm.world import join
from shardwise.models.ctr.policy import CTR_POLICIES
from shardwise.models.vectors import StoredTable, write_vectors
from shardwise.serving.export import export_step, opened_step
from shardwise.serving.scorer import Scorer
from tests.serving.served import ASKED, CONFIG, Own, batch, built, own_batch, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NAMES = sorted(CTR_POLICIES)


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Every built-in model, trained and saved on two ranks, and the engine's logits."""
    folder = tmp_path_factory.mktemp("saved")
    logits: dict[str, list[float]] = {}
    for name in NAMES:  # a call for each, because a call has a time limit
        first, second = ranks(2).run(trained, str(folder), [name])
        assert first == second
        logits |= first
    return folder, logits


@pytest.fixture(scope="module")
def served(saved: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DLRM as a folder for serving."""
    out = tmp_path_factory.mktemp("served") / "dlrm"
    export_step(saved[0] / "dlrm/step_00000003", out)
    return out


def asked() -> dict[str, Any]:
    return batch(ASKED, keys=90)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_engine(
    name: str, saved: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    folder, logits = saved
    wanted = torch.tensor(logits[name])
    export_step(folder / name / "step_00000003", tmp_path / "out")
    scorer = shardwise.Scorer(tmp_path / "out")
    assert scorer.step == 3 and wanted.std() > 1e-3
    for _ in range(2):  # from files, then from hot rows
        found = scorer.score(asked())
        assert found.dtype == torch.float32 and (found - wanted).abs().max() <= 1e-6
    assert scorer.hit_rate >= 0.4 and 0 < scorer.cached_bytes <= 64 << 20
    without_labels = {key: value for key, value in asked().items() if key != "labels"}
    assert torch.equal(scorer.score(without_labels), scorer.score(asked()))
    from_checkpoint = shardwise.Scorer(folder / name, cache_bytes=0)
    assert (from_checkpoint.score(asked()) - wanted).abs().max() <= 1e-6
    assert from_checkpoint.cached_bytes == 0 and not from_checkpoint.refresh()


@pytest.mark.parametrize(("form", "most"), [("fp16", 2**-10), ("bf16", 2**-7), ("int8", 0.03)])
def test_vectors_of_fewer_bits(form: str, most: float, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Each number is within half a step of its form; the logits follow."""
    step = saved[0] / "dlrm/step_00000003"
    export_step(step, tmp_path / "whole")
    done = CliRunner().invoke(app, ["convert", str(step), str(tmp_path / "few"), "--vectors", form])
    assert done.exit_code == 0, done.output
    whole, few = shardwise.Vectors(tmp_path / "whole"), shardwise.Vectors(tmp_path / "few")
    keys = torch.arange(30)
    for table in ("tables.user", "tables.shop"):
        a, b = whole.lookup(table, keys), few.lookup(table, keys).float()
        bound = a.abs().amax(1, keepdim=True) / 127 / 2 if form == "int8" else a.abs() * most / 2
        assert a.abs().max() > 0 and ((a - b).abs() <= bound + 1e-7).all() and not torch.equal(a, b)
    sizes = [
        sum(each.stat().st_size for each in (tmp_path / name).glob("tables.*")) for name in ("whole", "few")
    ]
    assert sizes[1] < sizes[0]
    wanted = Scorer(tmp_path / "whole").score(asked())
    assert (Scorer(tmp_path / "few").score(asked()) - wanted).abs().max() <= most
    unknown = CliRunner().invoke(app, ["convert", str(step), str(tmp_path / "x"), "--vectors", "int4"])
    assert unknown.exit_code and isinstance(unknown.exception, UsageError)


def test_a_model_of_ones_own_is_built_by_its_function(tmp_path: Path) -> None:
    engine = shardwise.initialize(Own(), CONFIG, world=join(quiet=True))
    for step in range(3):
        engine.train_step([own_batch(step)])
    engine.save(tmp_path / "steps", asynchronous=False)
    engine.eval()
    (output,) = engine.predict([own_batch(9)])
    engine.close()
    export_step(tmp_path / "steps/step_00000003", tmp_path / "out")
    scorer = Scorer(tmp_path / "out", model=Own)
    assert (scorer.score(own_batch(9)) - output["logits"]).abs().max() <= 1e-6
    assert scorer.score({"sparse": own_batch(9)["sparse"]}).shape == (8,), "a tensor without labels"
    with pytest.raises(
        UsageError, match=r"a model of your own; give the function that builds it: .*model=build"
    ):
        Scorer(tmp_path / "out")
    with pytest.raises(MismatchError, match="has a table 'tables.user', which is not there"):
        Scorer(tmp_path / "out", model=lambda: built("dlrm"))
    with pytest.raises(MismatchError, match="has no EmbeddingCollection"):
        Scorer(tmp_path / "out", model=lambda: torch.nn.Linear(1, 1))

    def wider() -> Own:
        model = Own()
        model.out = torch.nn.Linear(14, 2)
        return model

    with pytest.raises(MismatchError, match=r"'out.bias' is \[2\] in the model and \[1\] in the folder"):
        Scorer(tmp_path / "out", model=wider)
    with pytest.raises(UsageError, match="was built on meta"):
        Scorer(tmp_path / "out", model=lambda: Own().to("meta"))


def test_bad_batches_are_refused_as_in_training(served: Path) -> None:
    scorer = Scorer(served)
    given = asked()
    del given["sparse"]["user"]
    with pytest.raises(DataError, match="feature 'user' of table 'user' is missing"):
        scorer.score(given)
    given = asked()
    given["sparse"]["shop"].values[3] = 77
    with pytest.raises(DataError, match="key 77 at 3 lies outside table 'shop', whose keys are 0 to 29"):
        scorer.score(given)
    scorer.score(asked())


# Threads, processes and steps --------------------------------------------------------------------------------------


def next_step(folder: Path, saved: Path, during: Callable[[], None] = lambda: None) -> None:
    """Write another step into a folder for serving: everything is the double, the number of the step as well."""
    found = opened_step(saved)

    def doubled(table: StoredTable, is_last: bool) -> StoredTable:
        def parts() -> Iterator[tuple[int, Tensor, Tensor]]:
            if is_last:
                during()
            for first, keys, vectors in table.parts():
                yield first, keys, 2 * vectors

        return table._replace(parts=parts)

    tables = [doubled(table, table is found.tables[-1]) for table in found.tables]
    doubles = {name: 2 * each for name, each in found.dense.tensors.items()}
    dense = found.dense._replace(tensors=doubles, about=found.dense.about | {"step": 2 * found.step})
    write_vectors(folder, tables, 2 * found.step, dense=dense.to_write())


def test_requests_in_threads_never_mix_steps(saved: tuple[Path, Any], tmp_path: Path) -> None:
    step = saved[0] / "dlrm/step_00000003"
    export_step(step, tmp_path / "out")
    scorer = Scorer(tmp_path / "out", cache_bytes=4000)
    batches = [batch(seed, 16, 90) for seed in range(6)]
    first = [scorer.score(each) for each in batches]
    failures: list[str] = []
    ends = threading.Event()
    results: list[tuple[int, Tensor]] = []

    def ask(number: int) -> None:
        done, left = 0, 3
        while not ends.is_set() or left:
            left -= ends.is_set()
            place = (number + done) % len(batches)
            try:
                results.append((place, scorer.score(batches[place])))
            except Exception as error:
                failures.append(repr(error))
                return
            done += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    next_step(tmp_path / "out", step)
    assert scorer.step == 3 and scorer.refresh() and not scorer.refresh()
    ends.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert scorer.step == 6
    second = [Scorer(tmp_path / "out", cache_bytes=0).score(each) for each in batches]
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(first, second, strict=True))
    kinds = {0, 1}
    for place, found in results:
        is_of = [torch.equal(found, each[place]) for each in (first, second)]
        assert any(is_of), "a request of two steps"
        kinds -= {is_of.index(True)}
    assert not kinds, "requests before and after"


def test_processes_share_one_folder(served: Path, saved: tuple[Path, dict[str, list[float]]]) -> None:
    """Each opens the folder itself, with keys of its own."""
    wanted = {seed: Scorer(served, cache_bytes=0).score(batch(seed, 16, 90)) for seed in range(3)}
    children = []
    for seed in range(3):
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                scorer = Scorer(served)
                is_right = all(torch.equal(scorer.score(batch(seed, 16, 90)), wanted[seed]) for _ in range(5))
            finally:
                os._exit(0 if is_right else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


def test_a_reader_beside_a_killed_writer(saved: tuple[Path, Any], tmp_path: Path) -> None:
    step = saved[0] / "dlrm/step_00000003"
    export_step(step, tmp_path / "out")
    before = Scorer(tmp_path / "out")
    wanted = before.score(asked())
    child = os.fork()
    if child == 0:
        try:
            next_step(tmp_path / "out", step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert not before.refresh() and torch.equal(before.score(asked()), wanted)
    again = Scorer(tmp_path / "out")
    assert again.step == 3 and torch.equal(again.score(asked()), wanted)
    next_step(tmp_path / "out", step)
    assert again.refresh() and again.step == 6 and torch.equal(before.score(asked()), wanted)
    assert len(list((tmp_path / "out").iterdir())) == 1 + 1 + 5, "the index, the dense part and the tables"


# Folders that are refused ------------------------------------------------------------------------------------------


def cut_short(folder: Path, pattern: str) -> None:
    (file,) = folder.glob(pattern)
    os.truncate(file, file.stat().st_size - 4)


def flipped(folder: Path, pattern: str) -> None:
    (file,) = folder.glob(pattern)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def without(folder: Path, pattern: str) -> None:
    (file,) = folder.glob(pattern)
    file.unlink()


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / "tables.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def as_model(value: Any) -> Callable[[Any], None]:
    return lambda index: index["dense"]["about"].update(click_model=value)


@pytest.mark.parametrize(
    ("hurt", "error", "match"),
    [
        (lambda f: cut_short(f, "tables.user.*"), DamagedError, "cut short or damaged"),
        (lambda f: cut_short(f, "dense.*"), DamagedError, "do not match their SHA-256"),
        (lambda f: flipped(f, "dense.*"), DamagedError, "do not match their SHA-256"),
        (lambda f: without(f, "tables.shop.*"), DamagedError, "names .*tables.shop.*, which is not there"),
        (lambda f: without(f, "dense.*"), DamagedError, "names .*dense.*, which is not there"),
        (lambda f: without(f, "tables.json"), CheckpointError, "holds neither tables.json"),
        (lambda f: (f / "tables.json").write_text("{"), DamagedError, "tables.json"),
        (lambda f: changed(f, lambda i: i.pop("dense")), UsageError, "without the dense part of a model"),
        (lambda f: changed(f, lambda i: i["dense"].update(file="../x")), DamagedError, "outside the folder"),
        (lambda f: changed(f, lambda i: i["dense"].pop("about")), DamagedError, "about"),
        (
            lambda f: changed(f, as_model({"model": {"name": "bert"}})),
            DamagedError,
            "does not fit this version",
        ),
        (
            lambda f: changed(f, as_model({"model": {"name": "dlrm"}})),
            DamagedError,
            "does not fit this version",
        ),
        (
            lambda f: changed(f, lambda i: i.update(step=4)),
            UsageError,
            "of step 4, and its dense part is of step 3",
        ),
        (lambda f: changed(f, as_model([1])), DamagedError, "does not fit this version"),
        (lambda f: shutil.rmtree(f), CheckpointError, "is no folder; expected one with tables.json"),
    ],
)
def test_folders_that_are_refused(
    served: Path, tmp_path: Path, hurt: Callable[[Path], None], error: type[Exception], match: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(served, folder)
    hurt(folder)
    with pytest.raises(error, match=match):
        Scorer(folder)


def test_a_damaged_checkpoint_is_refused(saved: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "dlrm", tmp_path / "steps")
    flipped(tmp_path / "steps/step_00000003/model", "*.safetensors")
    with pytest.raises(DamagedError, match="nothing was exported"):
        Scorer(tmp_path / "steps")


def test_a_step_without_tables_is_refused(tmp_path: Path) -> None:
    engine = shardwise.initialize(torch.nn.Linear(2, 1), CONFIG, world=join(quiet=True))
    engine.save(tmp_path, asynchronous=False)
    engine.close()
    with pytest.raises(UsageError, match="holds no embedding tables"):
        Scorer(tmp_path)


def test_features_alone_are_a_batch_of_a_model_without_numbers(tmp_path: Path) -> None:
    from shardwise.data.clicks.rows import ClickSchema, SparseFeature
    from shardwise.models.ctr.build import build_ctr
    from shardwise.models.ctr.policy import DeepFmPolicy

    model = build_ctr(DeepFmPolicy(width=2, hidden=(4,)), ClickSchema((), (SparseFeature("user"),)))
    engine = shardwise.initialize(model, CONFIG, world=join(quiet=True))
    users = {"user": Ragged.of_ones(torch.arange(5))}
    given = {"dense": torch.zeros(5, 0), "sparse": users, "labels": torch.ones(5)}
    engine.train_step([given])
    engine.save(tmp_path, asynchronous=False)
    engine.eval()
    (output,) = engine.predict([given])
    engine.close()
    assert (Scorer(tmp_path).score(users) - output["logits"]).abs().max() <= 1e-6
