"""The index of rows on disk: memory is taken by the piece."""

from pathlib import Path

import torch

from shardwise.tiers import segment_index
from shardwise.tiers.row_segments import RowSegments
from tests.tiers.test_row_segments import SMALL, drawn, read


def test_the_index_takes_memory_by_the_piece(tmp_path: Path) -> None:
    made = RowSegments(tmp_path, "table 't'", 8, 2**33, **SMALL)
    assert made.figures().index_bytes < 2**15
    far = torch.tensor([0, 2**32, 2**33 - 1])
    made.write(far, drawn(far, 0, 8))
    assert torch.equal(read(made, far), drawn(far, 0, 8))
    assert made.figures().index_bytes < 3 * segment_index._PIECE_BYTES + 2**15
    made.close()
