"""Room at an expert: how much, and which tokens get it."""

import random

import pytest
import torch

from shardwise.parallel.expert.capacity import kept_pairs, room
from shardwise.parallel.expert.policy import RouterPolicy


def test_room_is_rounded_up_as_on_paper() -> None:
    tokens = torch.tensor([0, 1, 10, 80])
    for capacity, expected in ((1.1, [0, 1, 3, 22]), (4 / 3, [0, 1, 4, 27]), (1.0, [0, 1, 3, 20])):
        assert room(RouterPolicy(capacity=capacity), tokens, 8).tolist() == expected
    assert room(RouterPolicy(capacity=0.5, min_capacity=2), tokens, 8).tolist() == [2, 2, 2, 10]


@pytest.mark.parametrize("drop", ["score", "position"])
def test_who_gets_the_room(drop: str) -> None:
    """Equal weights, tokens that do not count and a sequence without tokens among them."""
    draw = random.Random(3)
    for _ in range(20):
        experts, k = draw.randint(2, 4), draw.randint(1, 2)
        sequence = [b for b in (0, 1, 3) for _ in range(draw.randint(1, 5))]
        index = [draw.sample(range(experts), k) if draw.random() < 0.8 else [-1] * k for _ in sequence]
        weights = [[draw.choice([0.25, 0.5]) for _ in range(k)] for _ in sequence]
        limits = [draw.randint(0, 3) for _ in range(4)]
        expected = [[False] * k for _ in sequence]
        for b in range(4):
            for e in range(experts):
                mine = [
                    (n, j) for n, at in enumerate(sequence) for j in range(k) if at == b and index[n][j] == e
                ]
                if drop == "score":
                    mine.sort(key=lambda pair: -weights[pair[0]][pair[1]])
                for n, j in mine[: limits[b]]:
                    expected[n][j] = True
        given = (torch.tensor(index), torch.tensor(weights), torch.tensor(sequence), torch.tensor(limits))
        assert kept_pairs(*given, experts, drop).tolist() == expected
