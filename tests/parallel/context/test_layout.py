"""Ranks of context parallelism hold every token once, as many as the others, with nearly the same area of attention."""

import random

import pytest
import torch

from shardwise.parallel.context.layout import (
    TokenRange,
    balance,
    cut_sequences,
    needed_keys,
    token_areas,
)


@pytest.mark.parametrize("length", [1, 2, 7, 33, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_every_token_is_on_one_rank(length: int, ranks: int, parts: int) -> None:
    layout = cut_sequences(length, ranks, parts)
    held = torch.cat([layout.places(rank) for rank in range(ranks)])
    assert sorted(held.tolist()) == list(range(layout.padded)) and layout.padded >= length
    assert layout.tokens % parts == 0
    assert {sum(each.tokens for each in own) for own in layout.ranges} == {layout.tokens}


def test_one_document_is_cut_in_a_zigzag() -> None:
    assert cut_sequences(64, 4).ranges == tuple(
        (TokenRange(8 * i, 8 * i + 8), TokenRange(56 - 8 * i, 64 - 8 * i)) for i in range(3)
    ) + ((TokenRange(24, 40),),)
    assert balance(cut_sequences(64, 4), token_areas(64, [[0]])) == 1


def test_equal_documents_are_cut_in_contiguous_parts() -> None:
    assert cut_sequences(64, 4, starts=[range(0, 64, 4)]).ranges == tuple(
        (TokenRange(16 * i, 16 * i + 16),) for i in range(4)
    )


def drawn_starts(draw: random.Random, length: int) -> list[int]:
    starts, longest = [0], draw.choice([50, 300, 2000, 8000])
    while (step := draw.randint(1, longest)) + starts[-1] < length:
        starts.append(starts[-1] + step)
    return starts


def test_areas_are_nearly_equal_whatever_is_packed() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        starts = [drawn_starts(draw, 8192) for _ in range(draw.choice([1, 1, 2, 4]))]
        window = draw.choice([None, None, 256, 1024])
        areas = token_areas(8192, starts, window)
        for ranks in (2, 3, 4, 8, 16):
            layout = cut_sequences(8192, ranks, starts=starts, window=window)
            assert balance(layout, areas) <= 1.05, (seed, ranks)


def test_areas_are_the_keys_that_a_mask_shows() -> None:
    starts, window = [[0, 3, 4], [0, 5]], 3
    q, k = torch.arange(9)[:, None], torch.arange(9)
    total = torch.zeros(9, dtype=torch.int64)
    for each in starts:
        document = torch.bucketize(torch.arange(9), torch.tensor(each), right=True)
        total += ((document[:, None] == document) & (k <= q) & (k > q - window)).sum(1)
    assert token_areas(9, starts, window).tolist() == total.tolist()


def test_needed_keys_are_those_that_a_mask_shows() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        starts = [sorted({0, *(draw.randrange(60) for _ in range(draw.randint(0, 4)))}) for _ in range(2)]
        window, ranks = draw.choice([None, 1, 5]), draw.choice([2, 3, 4])
        layout = cut_sequences(60, ranks, starts=starts, window=window)
        for rank in range(ranks):
            places = layout.places(rank)
            q, k = places[places < 60][:, None], torch.arange(60)
            seen = torch.zeros(60, dtype=torch.bool)
            for each in starts:
                document = torch.bucketize(torch.arange(60), torch.tensor(each), right=True)
                shown = (document[q] == document) & (k <= q) & (k > q - (window or 60))
                seen |= shown.any(0)
            found = torch.zeros(60, dtype=torch.bool)
            for start, stop in needed_keys(layout, rank, starts, window):
                found[start:stop] = True
            assert bool((found >= seen).all())
            if len(starts[0]) == 1 or starts[0] == starts[1]:
                assert torch.equal(found, seen)
