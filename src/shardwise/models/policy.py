"""The policy of the key ``model:`` of a configuration.

model: {name: gpt, layers: 6, width: 384, heads: 6, context: 256}
model: {name: bert, layers: 12, width: 768, heads: 12, context: 512}
model: {name: dlrm, width: 16, bottom: [64], top: [128, 64]}       # or logistic_regression, wide_deep, deepfm, dcn
model: {name: resnet, depth: 50}                                   # or alexnet; pictures
model: {target: "my_package.models:build", depth: 12}              # calls build(depth=12)
"""

import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Tag, model_validator

from shardwise.base.policy import Policy, nearest
from shardwise.models.bert import BertPolicy
from shardwise.models.ctr.policy import (
    CTR_POLICIES,
    DcnPolicy,
    DeepFmPolicy,
    DlrmPolicy,
    LogisticRegressionPolicy,
    WideDeepPolicy,
)
from shardwise.models.gpt import GptPolicy
from shardwise.models.images.policy import IMAGE_POLICIES, AlexNetPolicy, ResNetPolicy

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class TargetPolicy(Policy):
    """A user's own model: ``target`` is imported and called with the other keys."""

    model_config = ConfigDict(extra="allow")

    target: str
    """``module:function`` that returns an ``nn.Module``."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of ``target``; they may also be given as keys beside it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        return given  # not an error: every other key is an argument of the target

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
        """Return the keyword arguments of the call of ``target``."""
        return {**self.arguments, **(self.model_extra or {})}


def reads_clicks(given: Any) -> bool:
    """Return True if the value of ``model:``, as a dictionary or a policy, is a built-in click-through model."""
    return _kind(given) in CTR_POLICIES


def reads_images(given: Any) -> bool:
    """Return True if the value of ``model:``, as a dictionary or a policy, is a built-in model of images."""
    return _kind(given) in IMAGE_POLICIES


def _kind(given: Any) -> str:
    is_target = "target" in given if isinstance(given, dict) else isinstance(given, TargetPolicy)
    if is_target:
        return "target"
    name = given.get("name", "gpt") if isinstance(given, dict) else getattr(given, "name", "gpt")
    return str(name)


def _is_known(given: Any) -> Any:
    ours = ("gpt", "bert", *CTR_POLICIES, *IMAGE_POLICIES)
    if (kind := _kind(given)) not in ("target", *ours):
        raise ValueError(f"there is no model {kind!r}{nearest(kind, ours)}")
    return given


ModelPolicy = Annotated[
    Annotated[GptPolicy, Tag("gpt")]
    | Annotated[LogisticRegressionPolicy, Tag("logistic_regression")]
    | Annotated[WideDeepPolicy, Tag("wide_deep")]
    | Annotated[DeepFmPolicy, Tag("deepfm")]
    | Annotated[DcnPolicy, Tag("dcn")]
    | Annotated[DlrmPolicy, Tag("dlrm")]
    | Annotated[BertPolicy, Tag("bert")]
    | Annotated[AlexNetPolicy, Tag("alexnet")]
    | Annotated[ResNetPolicy, Tag("resnet")]
    | Annotated[TargetPolicy, Tag("target")],
    Discriminator(_kind),
    BeforeValidator(_is_known),
]
"""The type of ``model:`` in a configuration."""
