"""Hot rows return what the files hold, in bounded memory."""

import threading

import numpy as np
import pytest

from shardwise.base.errors import UsageError
from shardwise.serving import hot_rows
from shardwise.serving.hot_rows import HotRows, Keys

WIDTH = 3
ONE = 4 * WIDTH + 13


def vector_of(table: str, keys: Keys) -> np.ndarray:
    return np.stack([keys % 1009, np.full(keys.size, len(table)), keys // 1009], 1).astype(np.float32)


def lookup_of(names: tuple[str, ...], keys: Keys, tables: Keys) -> np.ndarray:
    found = np.empty((keys.size, WIDTH), np.float32)
    for place, name in enumerate(names):
        found[tables == place] = vector_of(name, keys[tables == place])
    return found


@pytest.fixture(params=["compiled", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(hot_rows, "is_installed", lambda: False)


def zipf(seed: int, count: int) -> tuple[Keys, Keys]:
    draws = np.random.default_rng(seed)
    return draws.zipf(1.3, count) % 100_000 - 50, draws.integers(0, 2, count)


def wanted(keys: Keys, tables: Keys) -> np.ndarray:
    found = vector_of("a", keys)
    found[tables == 1] = vector_of("bb", keys[tables == 1])
    return found


@pytest.mark.parametrize("most_bytes", [0, ONE, 2 * ONE, 100 * ONE, 5000 * ONE])
def test_vectors_are_those_of_the_files_in_bounded_memory(form: None, most_bytes: int) -> None:
    asked: list[int] = []

    def lookup(names: tuple[str, ...], keys: Keys, tables: Keys) -> np.ndarray:
        asked.append(keys.size)
        return lookup_of(names, keys, tables)

    hot = HotRows(["a", "bb"], WIDTH, np.float32, lookup, most_bytes)
    for seed in range(30):
        keys, tables = zipf(seed, 400)
        assert np.array_equal(hot.read(keys, tables), wanted(keys, tables))
    assert most_bytes // 2 - ONE < hot.nbytes <= most_bytes and bool(hot.nbytes) == (most_bytes >= 2 * ONE)
    if hot.nbytes:
        assert hot.hits + hot.misses == 30 * 400 and hot.misses == sum(asked)
    if most_bytes == 5000 * ONE:
        assert hot.hits > 0.7 * 30 * 400
    assert hot.read(np.empty(0, np.int64), np.empty(0, np.int64)).shape == (0, WIDTH)


def test_a_vector_that_is_asked_for_once_does_not_displace_one_that_is_asked_for_often(form: None) -> None:
    hot = HotRows(["a"], WIDTH, np.float32, lookup_of, 2 * ONE)
    often, table = np.array([7]), np.zeros(1, np.int64)
    hot.read(often, table)
    for once in range(100, 140):
        hits = hot.hits
        hot.read(often, table)
        hot.read(often, table)
        assert hot.hits >= hits + 1
        hot.read(np.array([once]), table)
        hits = hot.hits
        hot.read(often, table)
        assert hot.hits == hits + 1, once


def test_threads_read_whole_vectors(form: None) -> None:
    hot = HotRows(["a", "bb"], WIDTH, np.float32, lookup_of, 50 * ONE)
    wrong: list[int] = []

    def ask(number: int) -> None:
        for seed in range(60):
            keys, tables = zipf(1000 * number + seed, 100)
            if not np.array_equal(hot.read(keys, tables), wanted(keys, tables)):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and hot.hits


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(UsageError, match="-1 bytes of memory"):
        HotRows(["a"], WIDTH, np.float32, lookup_of, -1)
