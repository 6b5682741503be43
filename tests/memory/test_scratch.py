"""State on disk: what is read is what was written, or an error."""

import os
from pathlib import Path

import pytest
import torch

from shardwise.memory.direct_io import aligned_empty
from shardwise.memory.scratch import DiskScratch

BLOCK = 8192
SIZES = {"first": 4 * BLOCK + 4096 + 17, "second": 3, "third": 2 * BLOCK}


def scratch(folder: Path, **options: int) -> DiskScratch:
    made = DiskScratch(folder, 0, 1, block_bytes=BLOCK, **options)
    made.reserve({"master": SIZES, "exp_avg": SIZES})
    return made


def drawn(size: int, seed: int = 0, aligned: bool = False) -> torch.Tensor:
    bytes_ = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return aligned_empty(size, torch.uint8).copy_(bytes_) if aligned else bytes_


@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_read_was_written(tmp_path: Path, aligned: bool) -> None:
    made = scratch(tmp_path)
    values = {
        (kind, owner): drawn(size, index, aligned)
        for index, (kind, owner, size) in enumerate(
            (kind, owner, size) for kind in ("master", "exp_avg") for owner, size in SIZES.items()
        )
    }
    for done in [made.write(*key, value) for key, value in values.items()]:
        done.result()
    for key, value in values.items():
        found = aligned_empty(value.numel(), torch.uint8) if aligned else torch.empty_like(value)
        made.read(*key, found.zero_()).result()
        assert torch.equal(found, value)
    assert made.bytes_written == made.bytes_read == 2 * sum(SIZES.values())
    made.close()
    made.close()
    assert os.listdir(tmp_path) == []
