"""Keys under ``tiles:``."""

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.passes.tiles import TilesPolicy


def test_a_number_a_word_or_nothing() -> None:
    assert [TilesPolicy(mlp=given).mlp for given in ("auto", 64, "off")] == ["auto", 64, "off"]
    assert TilesPolicy(mlp=False).mlp == "off" and TilesPolicy(logits=False).logits == "off"
    assert TilesPolicy().logits is None and TilesPolicy().mlp == "off"


@pytest.mark.parametrize("given", [True, 0, -1, "on"])
def test_what_is_no_number_of_tokens(given: Any) -> None:
    for key in ("logits", "mlp"):
        with pytest.raises(ValidationError):
            TilesPolicy(**{key: given})
