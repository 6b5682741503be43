"""TilesPolicy: the parts of a model that are computed a tile of tokens at a time, so that no result exists whole.

logits   head and loss together (kernels/head_loss.py): no whole logits, and no whole gradient of the logits
mlp      feed-forward parts (passes/tiled.py): no whole intermediate results between their matrices
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveInt

from shardwise.base.policy import Policy


def _said(given: Any) -> Any:
    """Turn YAML's false into "off", and refuse true, which would otherwise be taken for the number 1."""
    if given is True:
        raise ValueError("expected auto, off or a number of tokens")
    return "off" if given is False else given


Tokens = Annotated[
    Literal["auto", "off"] | PositiveInt,
    BeforeValidator(_said, json_schema_input_type=Literal["auto", "off", False] | PositiveInt),
]


class TilesPolicy(Policy):
    """Keys under ``tiles:``. A number is the number of tokens in a tile, of a rank's microbatch."""

    logits: Tokens | None = None
    """Tokens in a tile of head and loss; whole logits then never exist. ``auto``: as many tokens as give 64 MiB of
    a rank's logits on a CPU, 512 MiB elsewhere, at least 128; no tiles are used if everything fits into one
    tile, or for few tokens of a wide model, where tiles would save nothing. Left out: ``auto`` for models whose
    training pass returns only the loss (ours), ``off`` for others. A model whose head and loss cannot be
    computed by tiles is refused."""
    mlp: Tokens = "off"
    """Tokens in a tile of the feed-forward parts, which are computed again in the backward pass; their
    intermediate results exist for one tile. ``auto``: as many tokens as give 64 MiB of them on a CPU, 512 MiB
    elsewhere. A model without feed-forward parts is refused; a part that does not treat every token separately
    is computed whole, which is logged."""
