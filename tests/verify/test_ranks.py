"""Whole tensors are put together from the pieces of ranks, and a wrong copy does not hide behind right ones."""

from typing import Any

import torch
from torch import Tensor

from shardwise.plan.placement import Partial, PerRank, Placement, Replicate, Shard, ShardBlock
from shardwise.plan.registry import TensorInfo
from shardwise.verify.ranks import RankRecords

WHOLE = torch.arange(12.0, dtype=torch.float64).view(2, 6)
KEY = "m step 1 piece 0"


def records(
    pieces: list[Tensor], of: str = "outputs", stages: list[int] | None = None, **more: Any
) -> RankRecords:
    """Records of ranks along "tp", or of one rank on each stage."""
    kinds = dict.fromkeys(("outputs", "inputs", "gradients"), {})
    ranks = [
        {**kinds, of: {KEY: piece}, "place": {"tp": 0 if stages else i, "pp": stages[i] if stages else 0}}
        for i, piece in enumerate(pieces)
    ]
    shapes = more.pop("shapes", {})
    for rank, held in zip(ranks, more.pop("held", [{}] * len(ranks)), strict=True):
        rank["held"] = held
    return RankRecords(ranks, 1 if stages else len(pieces), shapes, **more)


def placed(where: Placement, *shape: int) -> TensorInfo:
    """An activation that lies so on the ranks along "tp"."""
    return TensorInfo("m", shape or (2, 6), torch.float64, "activation", {"tp": where}, label="output")


def test_tokens_of_which_each_rank_holds_a_part_of_each_sequence() -> None:
    """Tokens [B, T] that are cut along T are [B · T] afterwards, cut in B blocks."""
    whole = WHOLE.view(12, 1)
    pieces = [WHOLE[:, :3].reshape(6, 1), WHOLE[:, 3:].reshape(6, 1)]
    where = placed(Shard(0, (ShardBlock(6, 6),) * 2), 12, 1)
    found = records(pieces, "inputs", placements={("m", "input"): where}).whole("inputs", KEY, whole, "m")
    assert found.tensor is not None and torch.equal(found.tensor, whole)


def test_parts_in_order_and_padded_parts() -> None:
    found = records([WHOLE[:, :4], WHOLE[:, 4:]]).whole("outputs", KEY, WHOLE, "m")
    assert found.tensor is not None and torch.equal(found.tensor, WHOLE) and found.ranks == (0, 1)
    padded = torch.cat([WHOLE[:, 3:5], torch.zeros(2, 1)], 1)
    found = records([WHOLE[:, :3], padded]).whole("outputs", KEY, WHOLE[:, :5], "m")
    assert found.tensor is not None and torch.equal(found.tensor, WHOLE[:, :5])


def test_features_are_cut_as_the_rows_of_the_weight() -> None:
    rows = torch.tensor([0, 1, 4]), torch.tensor([2, 3, 5])
    held = [{"positions": {"m.weight": (each[:, None] * 3 + torch.arange(3))}} for each in rows]
    pieces = [WHOLE[:, each] for each in rows]
    found = records(pieces, held=held, shapes={"m.weight": (6, 3)}).whole("outputs", KEY, WHOLE, "m")
    assert found.tensor is not None and torch.equal(found.tensor, WHOLE)


def test_a_wrong_copy_is_taken_and_its_rank_named() -> None:
    found = records([WHOLE, WHOLE + 1]).whole("outputs", KEY, WHOLE, "m")
    assert found.tensor is not None and torch.equal(found.tensor, WHOLE + 1) and found.ranks == (1,)


def test_addends_are_summed_if_the_placement_says_so() -> None:
    addends = [WHOLE * 0.25, WHOLE * 0.75]
    unknown = records(addends, "gradients").whole("gradients", KEY, WHOLE, "m")
    assert unknown.tensor is not None and torch.equal(unknown.tensor, WHOLE)
    as_whole = records(addends, "gradients", placements={("m", "gradient"): placed(Replicate())})
    found = as_whole.whole("gradients", KEY, WHOLE, "m")
    assert found.tensor is not None and torch.equal(found.tensor, WHOLE * 0.25)
    of_output = records(addends, placements={("m", "output"): placed(Partial())}).whole(
        "outputs", KEY, WHOLE, "m"
    )
    assert of_output.tensor is not None and torch.equal(of_output.tensor, WHOLE)


def test_what_is_unknown_has_a_reason() -> None:
    assert (
        "unknown placement" in records([WHOLE[:1], WHOLE[:1]]).whole("outputs", KEY, WHOLE[:, :5], "m").reason
    )
    assert "own call" in records([WHOLE]).whole("inputs", KEY, WHOLE, "m").reason
    own = records([WHOLE, WHOLE], placements={("m", "output"): placed(PerRank())})
    assert own.whole("outputs", KEY, WHOLE, "m").tensor is None


def test_of_several_stages_the_one_with_values_counts() -> None:
    absent = torch.full_like(WHOLE, float("nan"))
    found = records([WHOLE, absent], stages=[0, 1]).whole("outputs", KEY, WHOLE, "m")
    assert found.tensor is not None and torch.equal(found.tensor, WHOLE)
