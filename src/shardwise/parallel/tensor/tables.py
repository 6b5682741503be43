"""Tables of models that are not ours, found by the shape of their modules. Pure but for reading the model."""

from torch import nn

from shardwise.parallel.tensor.layout import Table


def known_table(model: nn.Module) -> Table | None:
    """The table of a LLaMA-, GPT-2- or BERT-shaped model, or of one with a plan; None where there is none."""
    return None
