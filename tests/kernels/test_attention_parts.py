"""Attention by parts of the keys, merged, equals attention to all keys under a mask, with its gradients."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels import attention_parts
from shardwise.kernels.attention_parts import (
    RowGroup,
    Runs,
    TokenRun,
    attend,
    attend_backward,
    row_products,
    sink_gradient,
    visible_blocks,
    visible_tiles,
    with_sink,
)


def runs(positions: list[int], documents: list[int]) -> Runs:
    """Return the runs of tokens at ``positions``, of which token p belongs to document documents[p]."""
    found: list[TokenRun] = []
    for place, position in enumerate(positions):
        document, last = documents[position], found[-1] if found else None
        if last and last.document == document and last.position + last.tokens == position:
            found[-1] = last._replace(tokens=last.tokens + 1)
        else:
            found.append(TokenRun(document, position, place, 1))
    return tuple(found)


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None) -> Tensor:
    """Plain attention [B, H, T, K] with a mask [B, T, T]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen[:, None], float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def case(seed: int) -> dict[str, Any]:
    """A drawn cut of a drawn packing: (documents of two rows, positions of each part, window, whether a sink)."""
    draw = random.Random(seed)
    length = draw.choice([1, 5, 40, 300])
    documents = []
    for _ in range(2):
        ends = sorted(draw.randrange(length) for _ in range(draw.choice([0, 0, 3])))
        documents.append([sum(end < place for end in ends) for place in range(length)])
    parts = draw.choice([1, 2, 3])
    cuts = sorted(draw.randrange(length + 1) for _ in range(2 * parts - 1))
    pieces = [list(range(a, b)) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    return {
        "length": length,
        "documents": documents,
        "parts": [[p for piece in pieces[i::parts] for p in piece] for i in range(parts)],
        "window": draw.choice([None, None, 1, 7, 150]),
        "sink": draw.choice([True, False]),
        "heads": draw.choice([(4, 2), (3, 3), (2, 1), (1, 1)]),
    }


@pytest.mark.parametrize("seed", range(24))
def test_parts_of_the_keys_merge_to_attention_to_all(seed: int) -> None:
    drawn = case(seed)
    (heads, kv), length, window = drawn["heads"], drawn["length"], drawn["window"]
    torch.manual_seed(seed)
    q = torch.randn(2, heads, length, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sink = torch.randn(heads, dtype=torch.float64, requires_grad=True) if drawn["sink"] else None
    document = torch.tensor(drawn["documents"])
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (document[:, :, None] == document[:, None]) & (distance >= 0) & (distance < (window or length))
    wanted = masked(q, k, v, seen, sink)
    grad = torch.randn_like(wanted)
    inputs = [q, k, v] if sink is None else [q, k, v, sink]
    gradients = torch.autograd.grad(wanted, inputs, grad)

    d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
    d_sink = torch.zeros(heads, dtype=torch.float64)
    with torch.no_grad():
        for mine in drawn["parts"]:
            groups = [
                [
                    RowGroup((row, row + 1), runs(mine, own), runs(theirs, own), window)
                    for row, own in enumerate(drawn["documents"])
                ]
                for theirs in drawn["parts"]
            ]
            q_m, g_m = q[:, :, mine], grad[:, :, mine]
            out, lse = attend(q_m, k[:, :, drawn["parts"][0]], v[:, :, drawn["parts"][0]], groups[0])
            for theirs, group in zip(drawn["parts"][1:], groups[1:], strict=True):
                attend(q_m, k[:, :, theirs], v[:, :, theirs], group, (out, lse))
            if sink is not None:
                lse = with_sink(out, lse, sink)
            torch.testing.assert_close(out, wanted[:, :, mine], rtol=1e-12, atol=1e-12)
            d_q, seen_lse = torch.zeros_like(q_m), lse.masked_fill(lse == float("-inf"), 0)
            for theirs, group in zip(drawn["parts"], groups, strict=True):
                more = attend_backward(q_m, k[:, :, theirs], v[:, :, theirs], group, g_m, seen_lse, out, d_q)
                d_k[:, :, theirs] += more[0]
                d_v[:, :, theirs] += more[1]
            torch.testing.assert_close(d_q, gradients[0][:, :, mine], rtol=1e-11, atol=1e-11)
            if sink is not None:
                d_sink += sink_gradient(sink, lse, row_products(out, g_m))
    torch.testing.assert_close(d_k, gradients[1], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(d_v, gradients[2], rtol=1e-11, atol=1e-11)
    if sink is not None:
        torch.testing.assert_close(d_sink, gradients[3], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(12))
def test_both_forms_compute_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = case(seed)
    (heads, kv), (mine, *_, theirs) = drawn["heads"], [*drawn["parts"], *drawn["parts"]]
    groups = [
        RowGroup((row, row + 1), runs(mine, own), runs(theirs, own))
        for row, own in enumerate(drawn["documents"])
    ]
    torch.manual_seed(seed)
    q, grad = (torch.randn(2, heads, len(mine), 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, kv, len(theirs), 8, dtype=torch.float64) for _ in range(2))
    assert attention_parts._is_fused(q, groups[0])
    found = []
    for fused in (True, False):
        monkeypatch.setattr(attention_parts, "_is_fused", lambda q, group, fused=fused: fused)
        out, lse = attend(q, k, v, groups)
        attend(q, k, v, groups, (out, lse))  # the same keys a second time: the same output, twice the sum
        d_q, finite = torch.zeros_like(q), lse.masked_fill(lse == float("-inf"), 0)
        found.append([out, lse, *attend_backward(q, k, v, groups, grad, finite, out, d_q), d_q])
    for tiles, blocks in zip(*found, strict=True):
        torch.testing.assert_close(tiles, blocks, rtol=1e-12, atol=1e-12)


def test_what_nobody_sees_is_not_computed() -> None:
    documents = [0] * 256 + [1] * 256
    whole = runs(list(range(512)), documents)
    blocks = visible_blocks(whole, whole)
    assert sum((e - a) * sum(p.stop - p.start for p in pieces) for a, e, pieces in blocks) == 6 * 128 * 128
    assert [piece.is_whole for _, _, pieces in blocks for piece in pieces] == [False] * 4
    assert (
        sum((e - a) * (d - c) // (1 + tri) for a, e, c, d, tri, _ in visible_tiles(whole, whole)) == 256 * 256
    )
    later = visible_blocks(runs(list(range(128)), documents), runs(list(range(128, 256)), documents))
    assert later == ()
    window = visible_blocks(whole, whole, 64)
    assert max(piece.stop - piece.start for _, _, pieces in window for piece in pieces) == 128 + 63
