"""Masked text: the share of tokens that are targets, and draws that depend on the position alone."""

from typing import Any

import torch
from torch import Tensor

from shardwise.data.masked import MaskedWindows
from shardwise.data.placed import PositionedSample

CONTEXT, MASK = 50, 40


class Counted:
    """Windows of the tokens 0 to 39, in turn."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        return {"tokens": (torch.arange(CONTEXT) + sample) % MASK}

    def fingerprint(self) -> str:
        return "counted"


def masked(share: float = 0.3) -> MaskedWindows:
    windows: Any = Counted()
    return MaskedWindows(windows, MASK, share)


def test_targets_are_the_hidden_tokens_and_all_others_stay() -> None:
    places = [PositionedSample(position, position % 7) for position in range(400)]
    batch = masked().batch(places, key=3)
    originals = torch.stack([Counted()[place.sample]["tokens"] for place in places])
    hidden = batch["targets"] != -100
    assert torch.equal(batch["targets"][hidden], originals[hidden])
    assert torch.equal(batch["tokens"][~hidden], originals[~hidden])
    share = float(hidden.float().mean())
    how = batch["tokens"][hidden]
    is_mask, is_kept = how == MASK, how == originals[hidden]
    assert abs(share - 0.3) < 0.02 and abs(float(is_mask.float().mean()) - 0.8) < 0.02
    # A tenth stays, and one in 40 of the tenth that is drawn.
    assert abs(float(is_kept.float().mean()) - 0.1 - 0.1 / MASK) < 0.02
    assert int(how.max()) == MASK and len(how[~is_mask & ~is_kept].unique()) == MASK


def test_a_position_has_the_same_draws_in_every_batch_and_others_with_another_key() -> None:
    one, two = PositionedSample(5, 1), PositionedSample(6, 1)
    together, alone = masked().batch([one, two], 3), masked().batch([two], 3)
    assert torch.equal(together["tokens"][1], alone["tokens"][0])
    assert not torch.equal(together["targets"][0], together["targets"][1])
    assert not torch.equal(masked().batch([two], 4)["targets"], alone["targets"])


def test_the_fingerprint_tells_mask_and_share() -> None:
    assert len(masked()) == 7
    assert len({masked().fingerprint(), masked(0.2).fingerprint(), "counted"}) == 3
