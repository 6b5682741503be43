"""The export of a Gpt as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` opens.

The folder contains config.json and model.safetensors. Tensors are passed one at a time under a Gpt's names, as an
engine gathers them, so the export needs memory for one tensor. The folder loads without this package and computes the
same logits.
"""

import json
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from shardwise.base.errors import MismatchError
from shardwise.base.policy import nearest
from shardwise.formats.safetensors import SafetensorsWriter
from shardwise.models.gpt import GptPolicy
from shardwise.models.huggingface import config_of, joined_shape, parts_of


def write_huggingface(
    folder: str | Path,
    policy: GptPolicy,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a model as a folder that transformers opens.

    Args:
        folder: The folder; created if it does not exist.
        policy: The shape of the model.
        tensors: (name, whole tensor) pairs under the model's names.
        dtype: The dtype of the file; None: the dtype of the first tensor.

    Returns:
        The folder.

    Raises:
        ConfigError: if transformers has no such model.
        MismatchError: if a tensor is missing, unknown, or has another shape.
    """
    folder = Path(folder)
    table = parts_of(policy)
    iterator = iter(tensors)
    first = next(iterator, None)
    if first is None:
        raise MismatchError(f"export to {folder}: no tensors; expected {len(table)}")
    dtype = dtype or first[1].dtype
    config = config_of(policy, str(dtype).removeprefix("torch."))
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {part.name: part.shape for parts in table.values() for part in parts}
    with SafetensorsWriter(folder / "model.safetensors", shapes, dtype) as file:
        for name, tensor in chain([first], iterator):
            if name == "head.weight" and name not in table:
                continue  # a tied head is a second name of the embedding
            if name not in table:
                raise MismatchError(f"export to {folder}: a Gpt has no tensor {name!r}{nearest(name, table)}")
            expected = joined_shape(table[name])
            if tuple(tensor.shape) != expected:
                raise MismatchError(
                    f"export to {folder}: {name} has shape {list(tensor.shape)}, the model's is {list(expected)}"
                )
            rows = [part.our_shape[0] for part in table[name]]
            if table[name][0].experts:
                tensor = tensor.flatten(0, 1)
            for part, piece in zip(table[name], tensor.split(rows), strict=True):
                file.write(part.name, piece.T if part.transposed else piece)
    _write_json(folder / "config.json", config)
    return folder


def _write_json(file: Path, content: dict[str, object]) -> None:
    temporary = file.with_name(file.name + ".part")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, file)  # a reader never finds an incomplete file
