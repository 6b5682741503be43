"""Stacks of experts of transformers: what is computed on a rank's part is the class's own result."""

import copy
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.parallel.expert.stacks import (
    ExpertStack,
    StackPlacement,
    find_stacks,
)
from shardwise.parallel.expert.transformers_experts import compute_of
from shardwise.plan.placement import Partial, Shard, pieces
from tests.foreign.wide import wide
from tests.parallel.expert.theirs import OFTEN, D, E, K, N, theirs

REFUSED = {
    "MuseSparkExperts",
    "LongcatFlashExperts",
    "Llama4TextExperts",
    "DbrxExperts",
    "SwitchTransformersExperts",
}


NOT_BUILT = {"JetMoeParallelExperts", "NllbMoeExperts", "InklingSharedExperts"}
"""Of another signature; and a dense net beside the experts."""


def chosen(experts: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts of each, one of them nobody's, and weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, dtype=torch.float64, generator=generator)
    index = torch.rand(N, experts - 1, generator=generator).argsort(1)[:, :K]  # the last expert gets no row
    return hidden, index, torch.rand(N, K, dtype=torch.float64, generator=generator)


def local(parameter: Tensor, place: StackPlacement, index: int, ranks: int) -> Tensor:
    """Rank ``index``'s features of one tensor."""
    if not isinstance(place.placement, Shard):
        return parameter.detach().clone()
    where = place.placement
    parts = [
        parameter.detach().narrow(where.dim, piece.start, piece.stop - piece.start)
        for piece in pieces(where, parameter.shape[where.dim], index, ranks)
    ]
    return torch.cat(parts, where.dim)


def cut(module: Any, stack: ExpertStack, ep: int, etp: int) -> Any:
    """By (ep, etp) index, copies of ``module`` that hold their part alone."""
    found = {}
    for i in range(ep):
        for j in range(etp):
            part = copy.deepcopy(module)
            for name, place in stack.parameters.items():
                here = local(getattr(module, name), place, j, etp).chunk(ep, 0)[i].clone()
                getattr(part, name).data = here
            found[i, j] = part
    return found


def by_ranks(module: Any, stack: ExpertStack, ep: int, etp: int, given: tuple[Tensor, Tensor, Tensor]) -> Any:
    """Σ over ranks of what they compute on the rows of their experts, and the parts that computed it."""
    hidden, index, weights = given
    parts = cut(module, stack, ep, etp)
    out = torch.zeros_like(hidden)
    held = stack.experts // ep
    for (i, j), part in parts.items():
        compute = compute_of(part, adds_bias=j == 0)
        pairs = [
            (token, slot, e)
            for e in range(i * held, (i + 1) * held)
            for token, slot in (index == e).nonzero().tolist()
        ]
        counts = [sum(e == i * held + k for _, _, e in pairs) for k in range(held)]
        tokens = torch.tensor([token for token, _, _ in pairs], dtype=torch.long)
        slots = torch.tensor([slot for _, slot, _ in pairs], dtype=torch.long)
        out = out.index_add(0, tokens, compute(hidden[tokens], counts) * weights[tokens, slots, None])
    return out, parts


def check(module: Any, ep: int, etp: int) -> None:
    """Result, and gradients of tokens, weights and every tensor, against the class's own forward."""
    stack = find_stacks(nn.ModuleDict({"experts": module})).stacks["experts"]
    given = chosen()
    for tensor in (given[0], given[2]):
        tensor.requires_grad_()
    wanted = module(*given)
    wanted.sin().sum().backward()
    grads = [given[0].grad, given[2].grad]
    given[0].grad = given[2].grad = None
    out, parts = by_ranks(module, stack, ep, etp, given)
    out.sin().sum().backward()
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([given[0].grad, given[2].grad], grads, rtol=1e-12, atol=1e-12)
    held = stack.experts // ep
    for name, place in stack.parameters.items():
        whole = getattr(module, name).grad
        for i in range(ep):
            rows = [getattr(parts[i, j], name).grad for j in range(etp)]
            if isinstance(place.gradient, Partial):
                assert etp == 1 or all(int(row.count_nonzero()) == 0 for row in rows[1:])
                torch.testing.assert_close(
                    sum(rows), whole[i * held : (i + 1) * held], rtol=1e-12, atol=1e-12
                )
                continue
            for j, row in enumerate(rows):
                torch.testing.assert_close(
                    row, local(whole, place, j, etp)[i * held : (i + 1) * held], rtol=1e-12, atol=1e-12
                )


@pytest.mark.parametrize(("folder", "name"), OFTEN, ids=[name for _, name in OFTEN])
def test_parts_of_a_stack_compute_what_the_class_does(folder: str, name: str) -> None:
    module = theirs(folder, name)
    with wide():
        check(module, ep=2, etp=2)


def test_a_rank_without_rows_has_a_gradient_for_each_tensor() -> None:
    """In one process an expert without tokens has a gradient of 0, and the optimizer moves it."""
    module = theirs("gpt_oss", "GptOssExperts")
    out = compute_of(module, adds_bias=False)(torch.zeros(0, D, dtype=torch.float64), [0] * E)
    out.sum().backward()
    assert out.shape == (0, D)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.soak
def test_every_class_of_transformers() -> None:
    """Whichever there are: a stack that computes the same in parts, or refused."""
    pytest.importorskip("transformers", minversion="5")
    models = importlib.import_module("transformers.models")
    refused, exact = set(), set()
    for folder in sorted(each.name for each in pkgutil.iter_modules(models.__path__)):
        path = f"transformers.models.{folder}.modeling_{folder}"
        if importlib.util.find_spec(path) is None:
            continue
        text = Path(importlib.util.find_spec(path).origin).read_text()
        for name in re.findall(r"^class (\w+Experts)\(nn", text, re.MULTILINE):
            if name in NOT_BUILT:
                continue
            module = theirs(folder, name)
            if "experts" in find_stacks(nn.ModuleDict({"experts": module})).refused:
                refused.add(name)
                continue
            with wide():
                check(module, ep=2, etp=2)
            exact.add(name)
    assert refused == REFUSED
    assert len(exact) >= 60
