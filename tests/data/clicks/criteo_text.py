"""Criteo-like text for tests: made up, in the format of the real logs."""

import random
from pathlib import Path


def lines(rows: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    result = []
    for _ in range(rows):
        numbers = [
            "" if draw.random() < 0.2 else str(draw.choice([-3, -1, 0, 1, 7, 12, 905, 65535, 2_300_000]))
            for _ in range(13)
        ]
        keys = ["" if draw.random() < 0.1 else f"{draw.getrandbits(32):08x}" for _ in range(26)]
        result.append("\t".join([str(draw.randrange(2)), *numbers, *keys]))
    return result


def write(path: Path, content: list[str], end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in content).encode())
    return path
