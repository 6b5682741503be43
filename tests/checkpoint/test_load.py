"""A step is loaded: each element once, in the model's dtype, and another model is named."""

from pathlib import Path

import pytest
import torch

from shardwise.base.errors import CheckpointError, MismatchError
from shardwise.checkpoint import Checkpoints, FlatSlice, TensorPieces
from tests.checkpoint.saved import QUICK, save_with

from .crew import (
    ThreadPeers,
    blank_items,
    crew,
    make_state,
    succeed,
)


def test_dtype_is_cast_on_load(tmp_path: Path) -> None:
    save_with(tmp_path, 2, 3, seed=0)
    items = blank_items(dtype=torch.float64)
    Checkpoints(tmp_path).load(items)
    expected = make_state(3)
    assert any(item.dtype == torch.float64 and item.kind == "master" for item in items)
    for item in items:
        for piece in item.pieces:
            whole = expected[item.kind, item.name].to(item.dtype)
            assert torch.equal(piece.tensor, whole[piece.start : piece.stop])


@pytest.mark.parametrize(
    ("change", "story"),
    [
        (lambda a, b: (a, b - 1), r"master 'm' of shape \(8,\): no rank wrote elements 7\.\.8"),
        (lambda a, b: (a - 1, b), r"master 'm' of shape \(8,\): several ranks wrote elements 3\.\.4"),
        (lambda a, b: (a, a), r"master 'm' of shape \(8,\): no rank wrote elements 4\.\.8"),
    ],
)
def test_each_element_exactly_once(tmp_path: Path, change, story: str) -> None:
    def work(peers: ThreadPeers) -> None:
        start, stop = (0, 4) if peers.rank == 0 else change(4, 8)
        piece = FlatSlice(start, stop, torch.zeros(stop - start))
        item = TensorPieces("master", "m", (8,), torch.float32, [piece])
        Checkpoints(tmp_path, peers, QUICK).save(1, [item], {}, asynchronous=False)

    for result in crew(2, work):
        with pytest.raises(CheckpointError, match=story):
            raise result
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_named(tmp_path: Path) -> None:
    save_with(tmp_path, 1, 1, seed=0)

    def work(peers: ThreadPeers) -> list[TensorPieces]:
        items = blank_items(peers.rank, 2)
        number = next(i for i, item in enumerate(items) if item.name == "blocks.1.up")
        items[number] = items[number]._replace(shape=(24, 18))
        del items[next(i for i, item in enumerate(items) if item.name == "blocks.0.norm")]
        items.append(TensorPieces("weight", "blocks.2.up", (12, 36), torch.bfloat16, []))
        items.append(TensorPieces("buffer", "mask2", (3,), torch.bool, []))
        try:
            Checkpoints(tmp_path, peers, QUICK).load(items)
        except MismatchError as error:
            assert all(
                bool((piece.tensor == -1).all()) for i in items for piece in i.pieces if i.dtype != torch.bool
            )
            return [str(error)]
        return []

    for told in succeed(crew(2, work)):
        assert "'blocks.1.up' is (12, 36) in the checkpoint and (24, 18) in this model" in told[0]
        assert "'blocks.2.up' (12, 36) is not in the checkpoint" in told[0]
        assert "'blocks.0.norm' (12,) is not in this model" in told[0]


def test_a_mismatch_names_five_and_counts_the_rest(tmp_path: Path) -> None:
    save_with(tmp_path, 1, 1, seed=0)
    items = [TensorPieces("weight", f"other.{i}", (1,), torch.float32, []) for i in range(9)]
    with pytest.raises(MismatchError, match=r"'other\.4'.*; and 4 more"):
        Checkpoints(tmp_path).load(items)


def test_part_of_a_kind_loads_when_asked(tmp_path: Path) -> None:
    save_with(tmp_path, 1, 1, seed=0)
    item = next(item for item in blank_items() if item.name == "blocks.0.up")
    with pytest.raises(MismatchError, match="is not in this model"):
        Checkpoints(tmp_path).load([item])
    Checkpoints(tmp_path).load([item], partial=True)
    assert torch.equal(item.pieces[0].tensor, make_state(1)["weight", "blocks.0.up"])
