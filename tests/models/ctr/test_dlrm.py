"""DLRM by its formula, with numbers and without."""

import pytest
import torch

from shardwise.base.errors import DataError
from shardwise.base.ragged import Ragged
from tests.models.ctr.parts import inputs, small


def test_numbers_become_one_more_vector() -> None:
    model = small("dlrm", width=4, bottom=(5,), top=(6,))
    dense, rows = inputs(4)
    u = model.bottom(dense)
    dots = torch.stack(
        [(u * rows[:, 0]).sum(1), (u * rows[:, 1]).sum(1), (rows[:, 0] * rows[:, 1]).sum(1)], 1
    )
    assert float(u.detach().min()) == 0 and u.shape == (4, 4)
    x = torch.cat([u, dots], 1)
    by_hand = model.top[2](model.top[0](x).clamp(min=0)).squeeze(1)
    assert torch.allclose(model.logits(dense, rows), by_hand)


def test_without_numbers_pairs_are_all_there_is() -> None:
    model = small("dlrm", dense=False, width=4, top=(6,))
    dense, rows = inputs(4, dense=0)
    assert model.bottom is None
    dots = (rows[:, 0] * rows[:, 1]).sum(1, keepdim=True)
    assert torch.allclose(model.logits(dense, rows), model.top(dots).squeeze(1))


@pytest.mark.parametrize("rows", [1, 3])
def test_dense_features_of_other_samples_are_refused(rows: int) -> None:
    """The loop over pairs once read beyond the shorter tensor."""
    model = small("dlrm", width=4, bottom=(5,), top=(6,))
    keys = {name: Ragged.of_ones(torch.arange(4)) for name in ("user", "item")}
    with pytest.raises(
        DataError, match=rf"dense features are \[{rows}, 3\] beside 4 samples .* takes \[4, 3\]"
    ):
        model(torch.zeros(rows, 3, dtype=torch.float64), keys)
    with pytest.raises(DataError, match="dense features are a list"):
        model([1.0], keys)
    assert model(torch.zeros(4, 3, dtype=torch.float64), keys)["logits"].shape == (4,)
