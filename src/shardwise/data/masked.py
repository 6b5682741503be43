"""Masked text: windows in which some tokens are hidden, to be restored by the model.

    each token, by (seed, position): with probability p it is a target, else its target is -100
    a target's token      80 % the mask token, 10 % any token of the vocabulary, 10 % unchanged

Devlin et al. 2018, arXiv:1810.04805, appendix A.1. Each epoch masks anew, on any number of ranks the same tokens.
Shapes: B batch, T context.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.data.placed import PlacedDataset, PositionedSample, draws_at
from shardwise.data.windows import TokenWindows

_IGNORED = -100
_MASKED, _REPLACED = 0.8, 0.9


class MaskedWindows(PlacedDataset):
    """Batches ``{"tokens": [B, T], "targets": [B, T]}`` of windows with hidden tokens.

    Args:
        windows: the windows.
        mask: id of the mask token, the first id behind the vocabulary.
        share: share of the tokens that are targets.
    """

    def __init__(self, windows: TokenWindows, mask: int, share: float) -> None:
        self.windows, self._mask, self._share = windows, mask, share

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, places: Sequence[PositionedSample], key: int) -> dict[str, Tensor]:
        """Return the masked windows at these places; see ``PlacedDataset.batch``."""
        tokens = torch.stack([self.windows[place.sample]["tokens"] for place in places]).numpy()
        targets = np.full_like(tokens, _IGNORED)
        for row, target, place in zip(tokens, targets, places, strict=True):
            draws = draws_at(key, place.position)
            hidden = draws.random(len(row)) < self._share
            target[hidden] = row[hidden]
            how, others = draws.random(len(row)), draws.integers(0, self._mask, len(row))
            row[hidden & (how < _MASKED)] = self._mask
            replaced = hidden & (how >= _MASKED) & (how < _REPLACED)
            row[replaced] = others[replaced]
        return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}

    def fingerprint(self) -> str:
        """Return the fingerprint of the windows with the mask token and the share."""
        return f"{self.windows.fingerprint()} masked {self._mask} {self._share}"
