"""TensorPolicy: the cut of a layer's matrices along "tp"."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveInt

from shardwise.base.policy import Policy


def _said(given: Any) -> Any:
    """Turn YAML's false into "off", and refuse true, which would otherwise be taken for the number 1."""
    if given is True:
        raise ValueError("expected auto, off, symmetric_memory or a number of pieces")
    return "off" if given is False else given


Overlap = Annotated[
    Literal["auto", "off", "symmetric_memory"] | PositiveInt,
    BeforeValidator(
        _said, json_schema_input_type=Literal["auto", "off", "symmetric_memory", False] | PositiveInt
    ),
]


class TensorPolicy(Policy):
    """Keys under ``tensor:``; ``mesh.tp`` sets the number of ranks."""

    sequence_parallel: bool = True
    """True lets norms, dropout and residuals hold 1/tp of the sequence between the cut layers: less memory, a
    quarter more traffic."""
    gather_logits: bool = False
    """True makes a training pass with labels return full logits beside the loss, as on one process, which costs
    the memory of full logits on every rank. False computes the loss on logits cut over the vocabulary;
    ``outputs.logits`` is then withheld."""
    overlap: Overlap = "auto"
    """Exchanges of the forward pass beside its products. A number: each gather of a cut sequence, and each sum or
    scatter behind a row layer, goes in so many pieces, and one piece travels while another is multiplied. ``off``:
    one piece. ``auto``: ``off`` on CPUs, which copy the bytes themselves; on a device up to 4 pieces, of at least
    8 MiB and 1,024 rows each. ``symmetric_memory``: torch's operators in which the ranks of one host read one
    another's memory, for a cut sequence; not measured on a device yet, so ``auto`` does not choose them.
    Layers with ``precision.linear: fp8``, and parts by tiles, do not overlap their exchanges."""
    table: dict[str, str] = {}
    """Rows added to the model's table: pattern of module names (``*`` stands for one part) to style, as in
    ``{"blocks.*.up": "column", "blocks.*.down": "row", "blocks.*.norm": "sequence"}``."""
