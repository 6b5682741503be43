"""Conversion of a batch to a call of the model, and of the model's result to a loss.

    mapping           model(**batch)
    tuple or list     model(*batch)
    anything else     model(batch)

The loss is the result itself, its "loss" entry or attribute, or the first of a tuple.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.base.pytree import part_named, rebuilt
from shardwise.base.ragged import Ragged
from shardwise.memory.streams import to_device
from shardwise.parallel.embedding.ahead import PreparedFeatures, are_features
from shardwise.parallel.pipeline.layers import Layers
from shardwise.precision.policy import PrecisionPolicy

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
Loss = Callable[[nn.Module, Any], Tensor]
"""Type of a user's ``loss``: a function of (model, batch) that returns the loss."""


def apply(model: nn.Module, batch: Any) -> Any:
    """Call the model with one batch, and return the result."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def call_model(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor] | None, batch: Any, device: torch.device
) -> Any:
    """Return the user's loss of the model for one batch, or the result of the model itself if ``loss`` is None.

    Args:
        model: the model.
        loss: the user's loss function, or None.
        batch: the batch.
        device: device that the tensors of the batch are moved to for a loss function.
    """
    if loss is not None:
        return loss(model, cast_inputs(batch, device, None))
    return apply(model, batch)


def cast_inputs(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a pytree with its tensors on ``device`` and floating tensors in ``dtype``.

    Features of embedding tables, {name: Ragged}, stay where they are; their collection moves the keys that it needs
    to the device.

    Args:
        value: the pytree.
        device: the device.
        dtype: dtype of floating tensors; None leaves their dtypes unchanged.
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
    """Register hooks that cast floating inputs to the compute dtype and 16-bit outputs to fp32.

    Targets of a list of layers keep their dtype.

    Args:
        model: the root module.
        precision: the dtypes.
        device: device that inputs are moved to.
        casts_output: True if outputs are cast, because a loss function reads them.

    Returns:
        The handles of the hooks.
    """
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
        return feature  # a batch has dozens of features, and a new tuple for each in every cast costs time
    return feature._replace(weights=feature.weights.to(dtype))


def find_loss(output: Any) -> Tensor:
    """Return the loss in the model's output.

    Raises:
        UsageError: if the output contains no loss of one number.
    """
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
