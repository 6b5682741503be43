"""TensorPolicy: how the matrices of a layer are cut along "tp"."""

from shardwise.plan.policy import Policy


class TensorPolicy(Policy):
    """Keys under ``tensor:``; ``mesh.tp`` says over how many ranks."""

    sequence_parallel: bool = True
    """Norms, dropout and residuals hold 1/tp of the sequence between the cut layers: less memory, a quarter
    more traffic."""
    gather_logits: bool = False
    """A training pass with labels gives whole logits beside the loss, as on one process. Costs the memory of them on
    every rank; left false, the loss is computed on logits cut over the vocabulary and ``outputs.logits`` is withheld.
    """
    table: dict[str, str] = {}
    """Rows added to the model's table: pattern of module names (``*`` stands for one part) to style, as in
    ``{"blocks.*.up": "column", "blocks.*.down": "row", "blocks.*.norm": "sequence"}``."""
