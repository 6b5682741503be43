"""TensorPolicy: the cut of a layer's matrices along "tp"."""

from shardwise.base.policy import Policy


class TensorPolicy(Policy):
    """Keys under ``tensor:``; ``mesh.tp`` sets the number of ranks."""

    sequence_parallel: bool = True
    """True lets norms, dropout and residuals hold 1/tp of the sequence between the cut layers: less memory, a
    quarter more traffic."""
    gather_logits: bool = False
    """True makes a training pass with labels return full logits beside the loss, as on one process, which costs
    the memory of full logits on every rank. False computes the loss on logits cut over the vocabulary;
    ``outputs.logits`` is then withheld."""
    table: dict[str, str] = {}
    """Rows added to the model's table: pattern of module names (``*`` stands for one part) to style, as in
    ``{"blocks.*.up": "column", "blocks.*.down": "row", "blocks.*.norm": "sequence"}``."""
