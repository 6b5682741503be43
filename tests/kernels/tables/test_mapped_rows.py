"""Keys of several tables are found, and their rows copied, as numpy finds and copies them table by table."""

import numpy as np
import pytest

from shardwise.kernels.tables import mapped_rows
from shardwise.kernels.tables.mapped_rows import KeySearch, TableColumn, TableKeys

SIZES = (0, 1, 2, 37, 1000)


def tables_of(seed: int) -> list[np.ndarray]:
    draws = np.random.default_rng(seed)
    keys = [draws.permutation(np.unique(draws.integers(-700, 700, size))) for size in SIZES]
    keys[3][[0, -1]] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return keys


def asked(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed + 1)
    keys = draws.integers(-800, 800, count)
    keys[: count // 20] = np.iinfo(np.int64).max
    return keys, draws.integers(0, len(SIZES), count)


def search_of(held: list[np.ndarray]) -> KeySearch:
    return KeySearch([TableKeys(each) for each in held])


def one_by_one(held: list[np.ndarray], keys: np.ndarray, tables: np.ndarray) -> list[int]:
    known = [{key: row for row, key in enumerate(each.tolist())} for each in held]
    return [known[table].get(key, -1) for key, table in zip(keys.tolist(), tables.tolist(), strict=True)]


@pytest.fixture(params=["compiled", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(mapped_rows, "is_installed", lambda: False)
    return str(request.param)


def test_rows_of_keys(form: str) -> None:
    for seed in range(20):
        held = tables_of(seed)
        keys, tables = asked(seed, 400)
        found = search_of(held).rows_of(keys, tables)
        assert found.tolist() == one_by_one(held, keys, tables)
        assert (found >= 0).sum() > 20 and (found < 0).sum() > 20
    nothing = np.empty(0, np.int64)
    assert search_of(held).rows_of(nothing, nothing).size == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int8, np.bool_])
@pytest.mark.parametrize("width", [None, 1, 3, 16])
def test_copies_of_rows(form: str, dtype: type, width: int | None) -> None:
    draws = np.random.default_rng(width or 0)
    shape = () if width is None else (width,)
    columns = [draws.integers(0, 100, (size, *shape)).astype(dtype) for size in SIZES]
    tables = draws.integers(1, len(SIZES), 300)
    rows = draws.integers(-1, np.array(SIZES)[tables])
    found = TableColumn(columns).read(rows, tables)
    zeros = np.zeros(shape, dtype)
    wanted = [columns[t][r] if r >= 0 else zeros for r, t in zip(rows, tables, strict=True)]
    assert found.dtype == dtype and np.array_equal(found, np.array(wanted))


def test_arrays_that_do_not_begin_at_a_multiple_of_their_numbers() -> None:
    memory = np.arange(1 + 8 * 5 * 3, dtype=np.uint8)
    column = np.frombuffer(memory, np.float64, 15, offset=1).reshape(5, 3)
    found = TableColumn([column]).read(np.array([4, 0]), np.zeros(2, np.int64))
    assert np.array_equal(found.view(np.int64), column[[4, 0]].view(np.int64))


def test_what_is_refused() -> None:
    held = tables_of(0)
    keys = np.array([1, 2])
    for tables in (np.array([0, 5]), np.array([-1, 0]), np.array([0]), np.array([0, 1], np.int32)):
        with pytest.raises(ValueError, match="tables of keys"):
            search_of(held).rows_of(keys, tables)
        with pytest.raises(ValueError, match="tables of keys"):
            TableColumn(held).read(keys, tables)
    with pytest.raises(ValueError, match="a row .*is out of range"):
        TableColumn(held).read(np.array([1]), np.array([1]))
    with pytest.raises(ValueError, match="different dtypes or widths"):
        TableColumn([np.zeros((2, 3)), np.zeros((2, 4))])


def test_keys_that_occur_twice_or_leave_one_out_are_told() -> None:
    for keys, are_distinct, are_all in (
        ([], True, True),
        ([0], True, True),
        ([1], True, False),
        ([2, 0, 1], True, True),
        ([2, 0, 3], True, False),
        ([2, 0, 0], False, False),
        ([-1, 0, 1], True, False),
    ):
        table = TableKeys(np.array(keys, np.int64))
        assert (table.are_distinct, table.are_all) == (are_distinct, are_all), keys
