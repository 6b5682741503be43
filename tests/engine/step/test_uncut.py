"""Functions that are rebuilt for the copy of a model."""

import copy
from typing import Any

import pytest

from shardwise.engine.step.uncut import ClosureCopier


class Stubborn(list[Any]):
    """A list that fails its first copy."""

    fails = True

    def __copy__(self) -> "Stubborn":
        if Stubborn.fails:
            Stubborn.fails = False
            raise RuntimeError("not now")
        return Stubborn(self)


SEEN = Stubborn()


def test_a_function_that_could_not_be_rebuilt_is_rebuilt_the_next_time() -> None:
    """It counted as being rebuilt for ever, and the copy ran the original."""
    exchanged = ClosureCopier({})

    def hook(*given: Any) -> None:
        SEEN.append(given)

    with pytest.raises(RuntimeError, match="not now"):
        exchanged.function(hook)
    made = exchanged.function(hook)
    assert made is not hook
    made(1)
    assert not SEEN and copy.copy(SEEN) == []
