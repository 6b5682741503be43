"""Which model: the key ``model:`` of a configuration.

model: {name: gpt, layers: 6, width: 384, heads: 6, context: 256}
model: {target: "my_package.models:build", depth: 12}              # calls build(depth=12)
"""

import re
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Discriminator, Tag, model_validator

from shardwise.models.gpt import GptPolicy
from shardwise.plan.policy import Policy

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class TargetPolicy(Policy):
    """A model of the user's own: ``target`` is imported and called with the other keys."""

    model_config = ConfigDict(extra="allow")

    target: str
    """``module:function`` that returns an ``nn.Module``."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of ``target``; they may as well stand beside it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        return given  # Here every other key is an argument of the target.

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(
                f"target is {self.target!r}; expected 'module:function', as in 'my_package.models:build'"
            )
        twice = sorted(set(self.arguments) & set(self.model_extra or {}))
        if twice:
            raise ValueError(f"{', '.join(twice)} stands both in arguments and beside it; keep one")
        return self

    def keywords(self) -> dict[str, Any]:
        """What the target is called with."""
        return {**self.arguments, **(self.model_extra or {})}


def _kind(given: Any) -> str:
    target = "target" in given if isinstance(given, dict) else isinstance(given, TargetPolicy)
    return "target" if target else "gpt"


ModelPolicy = Annotated[
    Annotated[GptPolicy, Tag("gpt")] | Annotated[TargetPolicy, Tag("target")], Discriminator(_kind)
]
"""The type of ``model:`` in a configuration."""
