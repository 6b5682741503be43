"""Graphs of a model that were made before ``initialize`` and are still alive.

autograd has one node for each parameter that it accumulates gradients into. A graph keeps the nodes of its parameters,
which note the shape that a parameter had when the node was made. Where "tp" or "ep" cuts a parameter, the gradient of
the cut one would not fit: autograd would end the first backward pass with "invalid gradient ... expected shape".

Cost: microseconds by parameter that is cut, when the engine is built.
"""

import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.compose.spec import ModelSpec
from shardwise.plan.placement import Shard


def cut_under_a_graph(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the names of the parameters that the layout cuts, and that a living graph accumulates gradients into."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [
        name
        for name, axes in spec.slices.items()
        if any(isinstance(place.placement, Shard) for place in axes.values())
        and name in parameters
        and _has_node(parameters[name])
    ]


def refuse_old_graphs(names: list[str], is_alike: bool) -> None:
    """Refuse parameters that a living graph holds.

    Args:
        names: The parameters that were found on this rank.
        is_alike: True if every rank found the same number of parameters.

    Raises:
        UsageError: if a parameter was found, on this rank or on another rank.
    """
    if not names and is_alike:
        return
    held = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    where = f"still holds {held}" if names else "is still alive on another rank"
    raise UsageError(
        f"initialize: a graph of the model that was made before initialize() {where}. The layout cuts parameters, and "
        "that graph keeps autograd's notes of their whole shapes, so that the first backward pass would fail. Let the "
        "graph go first: delete the loss and the outputs of earlier passes (del loss, outputs), or make those passes "
        "under torch.no_grad()"
    )


def _has_node(parameter: nn.Parameter) -> bool:
    """Return True if autograd's node of the parameter exists already.

    A node notes the shape that the parameter has when the node is made. The parameter is given an empty shape for a
    moment: only a node that existed before has another shape.
    """
    if parameter.is_meta or not parameter.requires_grad or not parameter.numel():
        return False
    own = parameter.data
    parameter.data = own.new_empty(0)
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        shape = node._input_metadata[0].shape  # type: ignore[attr-defined]
    finally:
        parameter.data = own
    return bool(tuple(shape) != (0,))
