"""Packed clicks give back what was written, in any order, and never damaged bytes."""

from pathlib import Path

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.data.clicks import (
    BatchForm,
    ClickRows,
    ClickSchema,
    FeatureKeys,
    PackedClicks,
    PackedWriter,
    SparseFeature,
)
from shardwise.data.clicks import packed as module
from shardwise.data.clicks.packed import write_packed

SCHEMA = ClickSchema(
    ("age", "price"),
    (
        SparseFeature("item"),
        SparseFeature("seen", many=True),
        *(SparseFeature(f"f{i}") for i in range(9)),
        SparseFeature("tags", many=True),
    ),
)


def made(n: int, seed: int = 0, schema: ClickSchema = SCHEMA) -> ClickRows:
    draw = np.random.default_rng(seed)
    keys = []
    for feature in schema.features:
        lengths = draw.integers(0, 6 if feature.many else 2, n)
        offsets = np.r_[0, np.cumsum(lengths)]
        keys.append(FeatureKeys(draw.integers(-(1 << 62), 1 << 62, offsets[-1]), offsets))
    dense = draw.standard_normal((n, len(schema.dense))).astype(np.float32)
    dense[draw.random(dense.shape) < 0.3] = np.nan
    return ClickRows(draw.integers(0, 2, n).astype(np.float32), dense, keys)


def row(rows: ClickRows, i: int) -> tuple[object, ...]:
    keys = [k.values[k.offsets[i] : k.offsets[i + 1]].tolist() for k in rows.keys]
    return (float(rows.labels[i]), rows.dense[i].tobytes(), keys)


def test_any_rows_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 512)
    rows = made(500)

    clicks = write_packed(tmp_path / "x.clicks", SCHEMA, [rows])
    assert len(clicks) == 500 and clicks.schema == SCHEMA
    for order in (np.arange(500), np.random.default_rng(1).integers(0, 500, 300), np.array([499, 0, 0])):
        found = clicks.rows(order)
        assert [row(found, i) for i in range(order.size)] == [row(rows, int(i)) for i in order]
    none = clicks.rows(np.empty(0, np.int64))
    assert none.labels.shape == (0,) and none.dense.shape == (0, 2)
    assert [k.offsets.tolist() for k in none.keys] == [[0]] * 12
    with pytest.raises(IndexError):
        clicks.rows(np.array([500]))
    with pytest.raises(IndexError):
        clicks.rows(np.array([-1]))


def test_appended_in_parts_is_the_same_file(tmp_path: Path) -> None:
    whole = made(300)
    write_packed(tmp_path / "a.clicks", SCHEMA, [whole])
    parts = []
    for start in range(0, 300, 70):
        stop = min(start + 70, 300)
        keys = [
            FeatureKeys(
                k.values[k.offsets[start] : k.offsets[stop]], k.offsets[start : stop + 1] - k.offsets[start]
            )
            for k in whole.keys
        ]
        parts.append(ClickRows(whole.labels[start:stop], whole.dense[start:stop], keys))
    write_packed(tmp_path / "b.clicks", SCHEMA, parts)
    assert (tmp_path / "a.clicks").read_bytes() == (tmp_path / "b.clicks").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.clicks", "b.clicks"], (
        "nothing left behind"
    )
    assert (
        PackedClicks(tmp_path / "a.clicks").fingerprint() == PackedClicks(tmp_path / "b.clicks").fingerprint()
    )
    write_packed(tmp_path / "c.clicks", SCHEMA, [made(300, seed=1)])
    assert (
        PackedClicks(tmp_path / "a.clicks").fingerprint() != PackedClicks(tmp_path / "c.clicks").fingerprint()
    )


@pytest.mark.parametrize(
    "schema",
    [
        ClickSchema((), (SparseFeature("a"),)),
        ClickSchema((), (SparseFeature("a"), SparseFeature("b"))),
        ClickSchema(("x",), ()),
        ClickSchema((), (SparseFeature("a", True),)),
    ],
)
def test_small_schemas(tmp_path: Path, schema: ClickSchema) -> None:
    rows = made(20, schema=schema)
    found = write_packed(tmp_path / "x.clicks", schema, [rows]).rows(np.arange(20))
    assert [row(found, i) for i in range(20)] == [row(rows, i) for i in range(20)]
    batch = BatchForm().batch(found, schema)  # torch takes no strides that are no multiple of an element
    assert batch["dense"].shape == (20, len(schema.dense)) and batch["labels"].shape == (20,)


def test_a_wide_schema_has_room_in_its_header(tmp_path: Path) -> None:
    schema = ClickSchema(tuple(f"a number with a long name {i}" for i in range(300)), (SparseFeature("k"),))
    found = write_packed(tmp_path / "x.clicks", schema, [made(3, schema=schema)])
    assert found.schema == schema


def test_every_damaged_byte_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 256)
    path = tmp_path / "x.clicks"
    good = write_packed(path, SCHEMA, [made(50)])
    good.check()
    content = path.read_bytes()
    start = module._PAGE_BYTES  # behind a small header
    padding = range(
        start + good._record_part.content.size, start + -(-good._record_part.content.size // 8) * 8
    )
    for at in [0, 9, 13, 17, 40, *range(start, len(content), 97), len(content) - 1]:
        if at in padding:
            continue
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(DataError, match=r"damaged|no packed clicks|version"):
            PackedClicks(path).rows(np.arange(50))
        with pytest.raises(DataError):
            PackedClicks(path).check()
    at = start + 300  # in the second block: rows of the first are read, and it is named
    path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    PackedClicks(path).rows(np.array([0]))
    with pytest.raises(DataError, match=r"bytes 256 to 511 of the records differs; make it again"):
        PackedClicks(path).rows(np.array([4]))
    for wrong, words in ((content[:-1], "cut short"), (content + b"0", "longer"), (b"", "no packed clicks")):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=words):
            PackedClicks(path)


def test_a_file_that_is_cut_while_it_is_in_use_is_named(tmp_path: Path) -> None:
    """Reading the map beyond the end would end the process with a signal."""
    path = tmp_path / "x.clicks"
    clicks = write_packed(path, SCHEMA, [made(5000)])
    with path.open("r+b") as file:
        file.truncate(8192)
    with pytest.raises(DataError, match="were cut to 8192 bytes while they are in use"):
        clicks.rows(np.array([4000]))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "x.clicks"
    one = ClickSchema((), (SparseFeature("k"),))
    none = np.empty((2, 0), np.float32)
    labels = np.zeros(2, np.float32)
    cases: list[tuple[ClickRows, str, str]] = [
        (
            ClickRows(np.array([0, np.nan], np.float32), none, [FeatureKeys.of_ones(np.arange(2))]),
            "i64",
            "row 1 has no label",
        ),
        (
            ClickRows(labels, none, [FeatureKeys.of_ones(np.array([5, -1]))]),
            "u32",
            "from -1 to 5, which 32 bits do not hold",
        ),
        (
            ClickRows(labels, none, [FeatureKeys(np.arange(3), np.array([0, 2, 3]))]),
            "i64",
            "'k' has 2 keys in one row",
        ),
        (
            ClickRows(labels, none, [FeatureKeys(np.arange(3), np.array([0, 1, 2]))]),
            "i64",
            "do not fit its 3 keys",
        ),
    ]
    for rows, key_type, words in cases:
        with pytest.raises(DataError, match=words):
            write_packed(path, one, [rows], key_type)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="holds no rows"):
        write_packed(path, one, [])
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        write_packed(tmp_path / "file" / "x", one, [])


def test_missing_and_zero_are_different(tmp_path: Path) -> None:
    rows = ClickRows(
        np.zeros(3, np.float32),
        np.empty((3, 0), np.float32),
        [FeatureKeys.of_ones(np.array([0, 0, 7]), np.array([False, True, False]))],
    )
    with PackedWriter(tmp_path / "x.clicks", ClickSchema((), (SparseFeature("k"),)), "u32") as writer:
        writer.append(rows)
        writer.skipped = 4
    found = PackedClicks(tmp_path / "x.clicks")
    assert found.skipped == 4
    assert found.rows(np.arange(3)).keys[0].values.tolist() == [0, 7]
    assert found.rows(np.arange(3)).keys[0].offsets.tolist() == [0, 1, 1, 2]


def test_a_row_read_alone_is_checked_to_its_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and their keys lie across blocks: the block that holds only the end is checked too."""
    monkeypatch.setattr(module, "_BLOCK_BYTES", 256)
    path = tmp_path / "x.clicks"
    good = write_packed(path, SCHEMA, [made(30)])
    content = path.read_bytes()
    size = good._records.itemsize
    records, keys = good._record_part, good._heap_part
    heap = len(content) - 4 * (records.checksums.size + keys.checksums.size) - keys.content.size
    for i in range(30):
        first = int(good._records["start"][i, 0])
        count = int(good._records["lengths"][i].sum())
        places = [module._PAGE_BYTES + i * size, module._PAGE_BYTES + (i + 1) * size - 1]
        if count:
            places += [heap + 8 * first, heap + 8 * (first + count) - 1]
        for at in places:
            other = tmp_path / "y.clicks"
            other.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(DataError, match="damaged"):
                PackedClicks(other).rows(np.array([i]))
            other.unlink()
