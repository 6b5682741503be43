"""Where the bytes lie: from shapes alone, in files that plain safetensors reads."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardwise.checkpoint.layout import PAGE_BYTES, LayoutSizes, arrange, index_text
from shardwise.checkpoint.piece import TensorSpec
from shardwise.formats.safetensors import CODES

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.dictionaries(
    st.tuples(st.sampled_from(["weight", "master", "exp_avg"]), st.sampled_from("abcdef")),
    st.tuples(shapes, st.sampled_from(list(CODES))),
    max_size=8,
).map(lambda found: [TensorSpec(*key, *value) for key, value in sorted(found.items())])


@given(specs, st.integers(1, 300), st.integers(1, 40))
def test_every_element_has_one_place(specs: list[TensorSpec], file_bytes: int, piece_elements: int) -> None:
    layouts = arrange(specs, LayoutSizes(file_bytes, piece_elements, 64), {})
    pieces: dict[TensorSpec, list[tuple[int, int]]] = {spec: [] for spec in specs}
    for layout in layouts:
        assert len(layout.header) % PAGE_BYTES == 0
        position = len(layout.header)
        for slot in layout.slots:
            assert slot.offset == position and slot.offset % slot.spec.dtype.itemsize == 0
            position = slot.end
            pieces[slot.spec].append((slot.start, slot.stop))
        assert position == layout.bytes
        assert layout.bytes - len(layout.header) <= file_bytes or len(layout.slots) == 1
    for spec, found in pieces.items():
        found.sort()
        assert found[0][0] == 0 and found[-1][1] == spec.elements
        assert all(before[1] == after[0] for before, after in zip(found, found[1:], strict=False))
        row = spec.elements // spec.shape[0] if spec.shape and spec.shape[0] else 1
        assert spec.kind == "weight" or all(stop - start <= max(piece_elements, row) for start, stop in found)


@given(specs)
def test_layout_does_not_depend_on_the_order_given(specs: list[TensorSpec]) -> None:
    sizes = LayoutSizes(200, 30, 64)
    assert arrange(specs, sizes, {}) == arrange(
        sorted(specs, key=lambda spec: spec.name, reverse=True), sizes, {}
    )


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_headers_are_those_of_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = TensorSpec("weight", "block.ü", (3, 4), dtype)
    (layout,) = arrange([spec], LayoutSizes(), {"block.ü": ["tied"]})
    path = tmp_path / "x.safetensors"
    data = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) % 2
    path.write_bytes(layout.header + data.numpy().tobytes())
    found = load_file(path)
    assert list(found) == ["block.ü"] and found["block.ü"].dtype == dtype and found["block.ü"].shape == (3, 4)
    assert torch.equal(found["block.ü"].reshape(-1).view(torch.uint8), data)


def test_names_of_files() -> None:
    specs = [TensorSpec("weight", name, (10,), torch.float32) for name in "abc"]
    assert [layout.path for layout in arrange(specs, LayoutSizes(), {})] == ["model/model.safetensors"]
    assert index_text(arrange(specs, LayoutSizes(), {})) is None
    several = arrange(specs, LayoutSizes(file_bytes=80), {})
    assert [layout.path for layout in several] == [
        "model/model-00001-of-00002.safetensors",
        "model/model-00002-of-00002.safetensors",
    ]
    assert b'"c": "model-00002-of-00002.safetensors"' in (index_text(several) or b"")
