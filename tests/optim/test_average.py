"""Keys under ``ema:``."""

import pytest
from pydantic import ValidationError

from shardwise.optim.average import EmaPolicy


def test_a_share_is_kept_and_less_than_all() -> None:
    assert EmaPolicy(decay=0).decay == 0 and EmaPolicy(decay=0.999).evaluate
    for decay in (1, -0.1, None):
        with pytest.raises(ValidationError):
            EmaPolicy(decay=decay)
    with pytest.raises(ValidationError, match="Field required"):
        EmaPolicy()  # type: ignore[call-arg]
