"""ContextPolicy: the exchange of keys and values between the ranks that share a sequence."""

from typing import Any, Literal

from pydantic import PositiveInt, model_validator

from shardwise.base.policy import Policy

Method = Literal["auto", "ring", "ulysses", "planned"]


class ContextPolicy(Policy):
    """Keys under ``context:``; one word (``context: ring``) sets ``method``. ``mesh.cp`` sets the number of ranks."""

    method: Method = "auto"
    """The way in which the attention of a rank sees the tokens of other ranks. ``planned``: keys and values of the
    tokens that some query of another rank sees go there. ``ring``: all keys and values pass all ranks. ``ulysses``:
    ranks exchange heads for tokens, so that each has the whole sequence for some heads. ``auto``: the one that sends
    the fewest bytes to other hosts, then the fewest in all; print(engine.plan) shows what was chosen and why."""
    ulysses: PositiveInt | None = None
    """Neighbours along ``cp`` that exchange heads for tokens, a divisor of mesh.cp; keys travel between groups of so
    many ranks by ``method``. Left out: all ranks for ``ulysses``, 1 for ``ring`` and ``planned``, and the best number
    for ``auto``."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, given: Any) -> Any:
        return {"method": given} if isinstance(given, str) else given
