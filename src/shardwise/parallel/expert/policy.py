"""RouterPolicy: which experts a token goes to, and how much each of them counts."""

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, model_validator

from shardwise.plan.policy import Policy


class RouterPolicy(Policy):
    """How a router chooses: by default the two experts of largest probability, weights divided by their sum."""

    top_k: Annotated[int, Field(ge=1)] = 2
    """Experts of a token."""
    normalize: bool | None = None
    """Whether the weights of a token's experts are divided by their sum; left out, where there are several: a single
    one divided by itself is 1, and the router would learn nothing."""
    scale: PositiveFloat = 1.0
    """What the weights are multiplied by at last."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.normalize and self.top_k == 1:
            raise ValueError(
                "normalize: true makes the weight of a token's only expert 1 (top_k is 1), so that the router gets no "
                "gradient; leave normalize out or set top_k to 2 or more"
            )
        return self

    @property
    def normalizes(self) -> bool:
        """Whether weights are divided by their sum."""
        return self.top_k > 1 if self.normalize is None else self.normalize
