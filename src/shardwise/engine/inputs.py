"""How a batch becomes a call of the model, and its result a loss.

    mapping           model(**batch)
    tuple or list     model(*batch)
    anything else     model(batch)

The loss is the result itself, its "loss" entry or attribute, or the first of a tuple.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.memory.streams import to_device
from shardwise.parallel.embedding.ahead import PreparedFeatures, are_features
from shardwise.parallel.pipeline.layers import Layers
from shardwise.plan.errors import UsageError
from shardwise.plan.pytree import part_named, rebuilt
from shardwise.plan.ragged import Ragged
from shardwise.precision.policy import PrecisionPolicy

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
Loss = Callable[[nn.Module, Any], Tensor]
"""What a user may give as ``loss``: (model, batch) -> the loss."""


def apply(model: nn.Module, batch: Any) -> Any:
    """Call the model with one batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def call_model(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor] | None, batch: Any, device: torch.device
) -> Any:
    """What a step calls with one batch: the user's loss of the model, or the model itself."""
    if loss is not None:
        return loss(model, cast_inputs(batch, device, None))
    return apply(model, batch)


def cast_inputs(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Tensors of a pytree on ``device``, floating ones in ``dtype`` (None: as they are).

    Features of tables, {name: Ragged}, stay where they are: their collection brings what it needs to the device.
    """
    if isinstance(value, Tensor):
        there = to_device(value, device)
        return there.to(dtype) if dtype is not None and there.is_floating_point() else there
    if isinstance(value, PreparedFeatures):
        return value.changed(lambda inner: _weights_in(inner, dtype))
    if are_features(value):
        return {name: _weights_in(each, dtype) for name, each in value.items()}
    return rebuilt(value, lambda inner: cast_inputs(inner, device, dtype))


def cast_at_the_root(
    model: nn.Module, precision: PrecisionPolicy, device: torch.device, casts_output: bool
) -> list[Any]:
    """The 16-bit contract: floating inputs in the compute dtype, but for the targets of a list of layers; and what a
    loss function gets in fp32. Returns the hooks' handles."""
    dtype = precision.compute_dtype
    of_targets = None if isinstance(model, Layers) else dtype

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        by_name = {
            name: cast_inputs(value, device, of_targets if name == "targets" else dtype)
            for name, value in kwargs.items()
        }
        return (*cast_inputs(args[:1], device, dtype), *cast_inputs(args[1:], device, of_targets)), by_name

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_inputs(output, device, torch.float32)

    handles = [model.register_forward_pre_hook(before, with_kwargs=True)]
    if casts_output and (dtype in _SIXTEEN_BITS or precision.operations is not None):
        handles.append(model.register_forward_hook(after))
    return handles


def _weights_in(feature: Ragged, dtype: torch.dtype | None) -> Ragged:
    if feature.weights is None or dtype is None:
        return feature  # a batch has dozens, and each would be made anew in every cast
    return feature._replace(weights=feature.weights.to(dtype))


def find_loss(output: Any) -> Tensor:
    """The loss in what the model returned. Errors: UsageError where there is none."""
    loss = part_named(output, "loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            f"the model returned {_described(output)}, in which there is no loss of one number; return the loss, or "
            "give initialize(..., loss=function of (model, batch))"
        )
    return loss


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a mapping with keys {list(output)}"
    return f"a {type(output).__name__}"
