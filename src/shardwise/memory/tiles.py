"""TilesPolicy: what is computed a tile of tokens at a time, so that it never exists whole.

logits   head and loss as one (kernels/head_loss.py): no whole logits, and no gradient of them
mlp      feed-forward parts (memory/tiled.py): what lies between their matrices
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveInt

from shardwise.plan.policy import Policy


def _said(given: Any) -> Any:
    """YAML reads ``off`` as false, and ``on`` as true, which would pass for the number 1."""
    if given is True:
        raise ValueError("expected auto, off or a number of tokens")
    return "off" if given is False else given


Tokens = Annotated[
    Literal["auto", "off"] | PositiveInt,
    BeforeValidator(_said, json_schema_input_type=Literal["auto", "off", False] | PositiveInt),
]


class TilesPolicy(Policy):
    """Keys under ``tiles:``. A number is one of tokens in a tile, of a rank's microbatch."""

    logits: Tokens | None = None
    """Head and loss by tiles of so many tokens: whole logits never exist. ``auto``: as many as give 64 MiB of a rank's
    logits on a CPU, 512 MiB elsewhere, at least 128; what fits into one tile is computed without, and so are few tokens
    of a wide model, where tiles would save nothing. Left out: ``auto`` for models whose training pass gives the loss
    alone (ours), ``off`` for others. A model that it does not serve is refused."""
    mlp: Tokens = "off"
    """Feed-forward parts by tiles of so many tokens, computed again in the backward pass: their intermediate results
    exist for one tile. ``auto``: as many tokens as give 64 MiB of them on a CPU, 512 MiB elsewhere. A model without
    such parts is refused; a part that does more than treat every token alone is computed whole, which the log says."""
