"""From the keys of ``data:`` and from files of any kind to clicks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.data.clicks.criteo_text import lines, write
from tests.ranks import RankPool

from shardwise.base.errors import DataError
from shardwise.comm.world import World
from shardwise.data.clicks import (
    CRITEO,
    ClickPolicy,
    ClickRows,
    ClickSchema,
    FeatureKeys,
    PackedClicks,
    SparseFeature,
    SyntheticPolicy,
    build_clicks,
    convert_clicks,
)
from shardwise.data.clicks.packed import write_packed
from shardwise.data.loader import Loader


def first_numbers(rows: ClickRows) -> list[float]:
    return np.nan_to_num(rows.dense[:, 0], nan=-99).tolist()  # type: ignore[no-any-return]


def expected_numbers(content: list[str]) -> list[float]:
    return [float(part) if (part := line.split("\t")[1]) else -99.0 for line in content]


def test_files_lie_one_behind_the_other(tmp_path: Path) -> None:
    days = [lines(40, seed=day) for day in range(3)]
    (tmp_path / "days").mkdir()
    for day, content in enumerate(days):
        write(tmp_path / "days" / f"day_{day}.tsv", content)
    seen: list[tuple[int, int]] = []
    clicks = convert_clicks(
        str(tmp_path / "days"), tmp_path / "x.clicks", progress=lambda done, total: seen.append((done, total))
    )
    assert first_numbers(clicks.rows(np.arange(120))) == expected_numbers([x for day in days for x in day])
    assert clicks.schema == CRITEO
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in (tmp_path / "days").iterdir())
    both = [str(tmp_path / "x.clicks"), str(tmp_path / "days" / "day_0.tsv")]
    joined = convert_clicks(both, tmp_path / "y.clicks")
    assert first_numbers(joined.rows(np.arange(120, 160))) == expected_numbers(days[0])
    assert len(joined) == 160


def test_skipped_rows_are_counted_over_all_files_and_kept(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.tsv", [*lines(5), "broken"])
    sources = [str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")]
    with pytest.raises(DataError, match=r"b\.tsv:6: 1 columns"):
        convert_clicks(sources, tmp_path / "x.clicks", malformed_limit=1)
    assert not (tmp_path / "x.clicks").exists()
    assert convert_clicks(sources, tmp_path / "x.clicks", malformed_limit=2).skipped == 2
    policy = ClickPolicy(source=str(tmp_path / "x.clicks"), validation=0.2)
    corpus = build_clicks(policy, tmp_path / "cache")
    assert (corpus.skipped, len(corpus.train), len(corpus.validation)) == (2, 8, 2)
    assert not (tmp_path / "cache").exists(), "packed clicks are mapped as they are"


def test_columns_must_agree(tmp_path: Path) -> None:
    schema = ClickSchema(("x",), (SparseFeature("k"),))
    rows = ClickRows(
        np.zeros(3, np.float32), np.zeros((3, 1), np.float32), [FeatureKeys.of_ones(np.arange(3))]
    )
    write_packed(tmp_path / "small.clicks", schema, [rows])
    text = write(tmp_path / "log.tsv", lines(5))
    with pytest.raises(DataError, match=r"13 numbers and 26 features instead of 1 numbers and 1 features"):
        convert_clicks([str(tmp_path / "small.clicks"), str(text)], tmp_path / "x.clicks")
    policy = ClickPolicy(source=str(text), validation=str(tmp_path / "small.clicks"))
    with pytest.raises(DataError, match="other columns than data.source"):
        build_clicks(policy, tmp_path / "cache")


def test_nothing_is_overwritten_by_mistake(tmp_path: Path) -> None:
    text = write(tmp_path / "log.tsv", lines(5))
    with pytest.raises(DataError, match="is not overwritten"):
        convert_clicks(str(text), text)
    with pytest.raises(DataError, match="is a folder"):
        convert_clicks(str(text), tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        convert_clicks(str(tmp_path / "nothing"), tmp_path / "x.clicks")
    assert text.read_bytes().startswith(lines(1)[0].encode())


def test_text_is_converted_once_and_again_when_it_changed(tmp_path: Path) -> None:
    text = write(tmp_path / "log.tsv", lines(50))
    cache = tmp_path / "cache"
    policy = ClickPolicy(source=str(text), validation=0.2, missing_key=0, dense_transform="none")
    first = build_clicks(policy, cache)
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    again = build_clicks(policy, cache)
    assert made.stat().st_mtime_ns == before and again.fingerprint() == first.fingerprint()
    assert first.train.batch(np.arange(3))["dense"].abs().max() > 10
    assert all(r.values.numel() == 40 for r in first.train.batch(np.arange(40))["sparse"].values())
    cut = made.read_bytes()[:-5]
    made.unlink()  # the first corpus still has it mapped
    made.write_bytes(cut)
    assert build_clicks(policy, cache).fingerprint() == first.fingerprint(), "a cut file is made again"
    write(text, lines(60, seed=1))
    changed = build_clicks(policy, cache)
    assert len(changed.train) == 48 and len(list(cache.iterdir())) == 2
    assert changed.fingerprint() != first.fingerprint()
    assert changed.best is None


@pytest.mark.parametrize("letter", ["a", "\u00e4", "\U0001f40d"])
def test_a_source_with_the_longest_name_is_cached(tmp_path: Path, letter: str) -> None:
    long = letter * ((255 - len(".tsv")) // len(letter.encode()))
    source = write(tmp_path / f"{long}.tsv", lines(5))
    corpus = build_clicks(ClickPolicy(source=str(source), validation=0.2), tmp_path / "cache")
    assert len(corpus.train) == 4


def test_validation_files_of_their_own(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "a.tsv", lines(30)), write(tmp_path / "b.tsv", lines(7, seed=1))
    corpus = build_clicks(ClickPolicy(source=str(train), validation=[str(held_out)]), tmp_path / "cache")
    assert (len(corpus.train), len(corpus.validation)) == (30, 7)


def test_the_synthetic_log(tmp_path: Path) -> None:
    synthetic = SyntheticPolicy(samples=1000, validation_samples=200, tables=3, rows=50, dense=2)
    corpus = build_clicks(ClickPolicy(synthetic=synthetic), tmp_path)
    assert (len(corpus.train), len(corpus.validation)) == (1000, 200)
    assert [feature.name for feature in corpus.schema.features] == ["C1", "C2", "C3"]
    source = corpus.train.source
    assert corpus.validation.source is source and corpus.skipped == 0
    bar = corpus.best_on_validation()
    assert bar is not None and bar.samples == 200 and corpus.best is not None
    assert abs(bar.auc - corpus.best.auc) < 0.15
    few = corpus.best_on_validation(50)
    assert few is not None and few.samples == 50, "of the rows that an evaluation of 50 takes"
    labels = corpus.validation.batch(np.arange(200))["labels"]
    assert bar.click_rate == pytest.approx(float(labels.mean()))
    listed = SyntheticPolicy(rows=[5, 7])
    assert listed.table_rows == (5, 7)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dense": ["a"]}, "give both lists, or neither"),
        ({"synthetic": {"rows": [1, 2], "tables": 3}}, "rows lists 2 tables, but tables is 3"),
        ({"synthetic": {"fresh": 0.1}}, "set keys: hashed"),
        ({"source": []}, "at least 1"),
        ({"validation": 0.0}, "greater than 0"),
        ({"malformed": 3}, "malformed_limit"),
    ],
)
def test_what_the_policy_refuses(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=words):
        ClickPolicy(**given)


def read_on_rank(world: World, folder: str) -> tuple[str, list[float], list[str]]:
    """Every rank opens the same text; one converts it."""
    policy = ClickPolicy(source=f"{folder}/log.tsv", validation=0.1)
    corpus = build_clicks(policy, Path(folder) / "cache")
    loader = Loader(
        corpus.train,
        global_batch=20,
        micro_batch=5,
        dp_index=world.rank,
        dp_size=world.size,
        shuffle=policy.shuffle,
        epochs=1,
        workers=2,
    )
    numbers: list[float] = []
    for _ in range(3):
        for batch in loader.step_batches():
            numbers += batch["labels"].tolist()
    loader.close()
    return corpus.fingerprint(), numbers, [path.name for path in (Path(folder) / "cache").iterdir()]


def test_ranks_read_disjoint_rows_of_one_file(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    content = lines(50)
    write(tmp_path / "log.tsv", content)
    results = ranks(2).run(read_on_rank, str(tmp_path))
    assert len({fingerprint for fingerprint, _, _ in results}) == 1
    assert len(results[0][2]) == 1, "one file, no leftovers"
    labels = np.array([float(line[0]) for line in content[:45]])
    blocks = [labels[start : start + 5] for start in range(0, 45, 5)]
    # 45 rows in blocks of 5, dealt to two ranks step by step; the ninth is the last
    assert results[0][1] == np.concatenate(blocks[0::2]).tolist()
    assert results[1][1] == np.concatenate(blocks[1::2]).tolist()


def test_packed_clicks_open_where_they_lie(tmp_path: Path) -> None:
    convert_clicks(str(write(tmp_path / "log.tsv", lines(9))), tmp_path / "x.clicks")
    assert len(PackedClicks(tmp_path / "x.clicks")) == 9
