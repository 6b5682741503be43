"""The dense part of a served model as a module: which model it is, and its weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from shardwise.base.errors import DamagedError, MismatchError, UsageError
from shardwise.models.ctr.build import from_description
from shardwise.models.ctr.model import ClickModel
from shardwise.models.dense_part import DensePart

_SHOWN = 3
"""Most names that an error lists."""


def built_in(dense: DensePart, folder: Path, way: str) -> ClickModel:
    """Build the built-in model that a dense part is of, without its weights.

    Args:
        dense: The dense part.
        folder: The folder that it is from, for errors.
        way: What to do with a model of the user's own, for the error.

    Raises:
        UsageError: if it is a model of the user's own.
        DamagedError: if the description of the model does not fit.
    """
    description = dense.about.get("click_model")
    if description is None:
        target = dense.about.get("target")
        named = f" (model.target: {target!r})" if target else ""
        raise UsageError(f"{folder}: holds a model of your own{named}; {way}")
    try:
        with torch.device("meta"):
            return from_description(description).to_empty(device="cpu")
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{folder}: the description of the model does not fit this version: {str(error)[:500]}"
        ) from None


def dtype_of(dense: DensePart) -> torch.dtype:
    """Return the dtype in which a dense part computes: fp64 if it has weights in fp64, else fp32."""
    is_double = torch.float64 in {tensor.dtype for tensor in dense.tensors.values()}
    return torch.float64 if is_double else torch.float32


def fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the dense part into a model.

    Args:
        model: The model.
        tensors: The tensors by their names in the model.
        folder: The folder that the tensors are from, for errors.

    Raises:
        MismatchError: if the model lacks a tensor, has another one, or has one in another shape.
    """
    wanted: dict[str, Tensor] = dict(model.named_parameters())
    kept = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    wanted |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    differ = [
        f"{name!r} is only in the {'model' if name in wanted else 'folder'}"
        for name in sorted(wanted.keys() ^ tensors.keys())
    ]
    differ += [
        f"{name!r} is {list(tensor.shape)} in the model and {list(tensors[name].shape)} in the folder"
        for name, tensor in wanted.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if differ:
        more = f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise MismatchError(
            f"{folder}: the dense part is of another model: {'; '.join(differ[:_SHOWN])}{more}",
            "Give the model that was trained",
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
