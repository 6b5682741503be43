"""The evidence on a wrong tensor: addends of ranks, norms that leave something out, other tensors of the run."""

from typing import Any

import torch
from torch import Tensor

from shardwise.optim.policy import OptimizerPolicy
from shardwise.plan.mesh import Mesh
from shardwise.verify.diagnose import Diagnosis
from shardwise.verify.ranks import RankRecords
from shardwise.verify.reference import Reference, Truth
from shardwise.verify.tensors import ComparedTensor


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


POLICY = OptimizerPolicy.model_validate({"type": "adamw", "lr": 0.1})


def records(pieces: list[list[Tensor]], places: list[Tensor], tp: int, shape: tuple[int, ...]) -> RankRecords:
    """Records of ranks whose passes gave these gradients of ``a.weight``; the ranks along "tp" are the fastest."""
    ranks: list[dict[str, Any]] = []
    for rank, own in enumerate(pieces):
        held = {
            "positions": {"a.weight": places[rank % tp]},
            "addends": [{"a.weight": own}],
            "divisors": [2.0],
            "squares": [[float(own[0].square().sum())]],
            "buckets": [["a.weight"], ["b.weight"]],
        }
        ranks.append({"held": held, "place": {"pp": 0, "dp": rank // tp, "tp": rank % tp}})
    return RankRecords(ranks, tp, {"a.weight": shape})


def said(mesh: Mesh, held: RankRecords, got: Tensor, wanted: Tensor, what: str = "gradient") -> str:
    gradients = {"a.weight": wanted, "b.weight": drawn(9, 4)}
    norm = float(torch.cat([each.flatten() for each in gradients.values()]).norm())
    truth = Truth(1.0, norm, gradients, gradients, gradients)
    diagnosis = Diagnosis(Reference(gradients, [truth], [{}]), held, mesh, 2, POLICY, 1.0)
    if what == "norm":
        wanted = torch.tensor([norm], dtype=torch.float64)
    return diagnosis.explanation(ComparedTensor("gradients", what, "a.weight", 0, got, wanted, 1.0, "a"))


def test_addends_are_those_of_ranks_and_of_microbatches() -> None:
    addends = [[drawn(2 * rank + call, 3, 4) for call in range(2)] for rank in range(2)]
    held = records(addends, [torch.arange(12).view(3, 4)], 1, (3, 4))
    mesh, wanted = Mesh(dp_shard=2), torch.stack([each for own in addends for each in own]).sum(0) / 2
    got = torch.stack(addends[0]).sum(0) / 2
    assert said(mesh, held, got, wanted) == "the addends of the ranks at dp=1: missing in the sum"
    first = (addends[0][0] + addends[1][0]) / 2
    assert (
        said(mesh, held, wanted + first, wanted)
        == "the addends of microbatch 0 of each rank: counted twice in the sum"
    )
    one = wanted - addends[1][0] / 2
    assert (
        said(mesh, held, one, wanted) == "the addends of microbatch 1 of the global batch: missing in the sum"
    )


def test_parts_that_neighbours_hold_both_are_addends_of_their_own() -> None:
    """Of two ranks each has rows of its own, and both have the last row."""
    places = [torch.tensor([[0, 1], [4, 5]]), torch.tensor([[2, 3], [4, 5]])]
    pieces = [drawn(rank, 2, 2) for rank in range(2)]
    held = records([[each] for each in pieces], places, 2, (3, 2))
    wanted = torch.stack([pieces[0][0], pieces[1][0], pieces[0][1] + pieces[1][1]]) / 2
    got = wanted.clone()
    got[2] = pieces[1][1] / 2
    sentence = "the addends of copy 1 of the elements that neighbours along tp hold both: missing in the sum"
    assert said(Mesh(tp=2), held, got, wanted) == sentence


def test_norms_that_count_other_things_are_told_apart() -> None:
    wanted = drawn(1, 3, 4)
    held = records([[wanted], [2 * wanted]], [torch.arange(12).view(3, 4)], 1, (3, 4))
    mesh = Mesh(dp_shard=2)
    without = wanted.norm().view(1)
    assert said(mesh, held, without, wanted, "norm") == "it leaves out the squares of one Unit: b.weight"
    alone = (wanted.norm() * 2 / 2.0).view(1) * 1.0
    assert said(mesh, held, alone / 2, wanted, "norm") == "it counts the squares of the ranks at dp=0 alone"
    total = torch.cat([wanted.flatten(), drawn(9, 4)]).norm().view(1)
    assert said(mesh, held, total * 2, wanted, "norm").startswith("it is the right number times ")
