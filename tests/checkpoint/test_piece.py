"""Pieces of tensors in a checkpoint: their keys, and names that stand for two."""

import pytest
import torch
from hypothesis import strategies as st

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.layout import LayoutSizes, arrange
from shardwise.checkpoint.piece import TensorSpec
from shardwise.formats.safetensors import CODES

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


specs = st.dictionaries(
    st.tuples(st.sampled_from(["weight", "master", "exp_avg"]), st.sampled_from("abcdef")),
    st.tuples(shapes, st.sampled_from(list(CODES))),
    max_size=8,
).map(lambda found: [TensorSpec(*key, *value) for key, value in sorted(found.items())])


def test_keys_of_state_say_kind_name_and_rows() -> None:
    (layout,) = arrange(
        [TensorSpec("exp_avg", "w", (10, 4), torch.float32)], LayoutSizes(piece_elements=13), {}
    )
    assert [slot.key for slot in layout.slots] == [
        "exp_avg/w/0-3",
        "exp_avg/w/3-6",
        "exp_avg/w/6-9",
        "exp_avg/w/9-10",
    ]


def test_one_name_for_a_weight_and_a_buffer_is_refused() -> None:
    specs = [TensorSpec("weight", "a", (1,), torch.float64), TensorSpec("buffer", "a", (1,), torch.int8)]
    with pytest.raises(CheckpointError, match="'a' is the name of both a weight and a buffer"):
        arrange(specs, LayoutSizes(), {})
