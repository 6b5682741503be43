"""Packed documents of a model of transformers, which positions that begin anew tell apart.

    position_ids   0 1 2 3 0 1 0 1 2        three documents

transformers takes positions for this where there is no ``attention_mask`` (its ``DataCollatorWithFlattening`` makes
such batches), and so does a cut of the sequences.

Shapes: B sequences, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shardwise.base.errors import UsageError
from shardwise.kernels.attention_view import PackedDocuments


def documents_of_positions(position_ids: Any, shape: Sequence[int], attention_mask: Any) -> PackedDocuments:
    """Return the documents of a batch whose positions begin anew in each of them.

    Args:
        position_ids: Position of each token in its document, [B, T] or [1, T].
        shape: Shape of the tokens, (B, T).
        attention_mask: The batch's mask, or None.

    Raises:
        UsageError: if a position neither follows the one before nor is 0, if there is not one for each token, or if a
            mask is given beside documents.
    """
    sequences, length = shape
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) not in (
        (1, length),
        (sequences, length),
    ):
        given = list(position_ids.shape) if isinstance(position_ids, Tensor) else type(position_ids).__name__
        raise UsageError(
            f"mesh.cp: the batch has tokens of the shape {[sequences, length]} and position_ids of the shape {given}; "
            "expected one position for each token, or leave them out"
        )
    numbers = position_ids.detach().cpu().expand(sequences, length).numpy()
    before = np.pad(numbers, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    is_start = numbers == 0
    wrong = ~is_start & ((numbers != before + 1) | (np.arange(length) == 0))
    if wrong.any():
        row, place = (int(each) for each in np.argwhere(wrong)[0])
        raise UsageError(
            f"mesh.cp: position_ids of sequence {row} are {int(numbers[row, place])} at token {place}, behind "
            f"{int(before[row, place]) if place else 'nothing'}; expected the position that follows, or 0 where a new "
            "document begins; or set mesh.cp: 1"
        )
    starts = tuple(tuple(np.flatnonzero(each).tolist()) for each in is_start)
    if attention_mask is not None and any(len(each) > 1 for each in starts):
        raise UsageError(
            "mesh.cp: the batch has position_ids that begin anew, which tell packed documents apart, and an "
            "attention_mask, beside which transformers ignores them; leave the attention_mask out"
        )
    return PackedDocuments(starts, length)
