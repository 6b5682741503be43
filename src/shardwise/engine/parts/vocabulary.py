"""Checks on the host that the tokens of a batch are in the model's vocabulary, before a device computes with them.

On a device a token outside is an assertion that costs the context and shows up later, elsewhere; on the CPU an index
error without a name. The vocabulary is known of the models of transformers and of Shardwise. For other models an index
error of the pass is reported with the range of the batch's values and the rows of the model's embeddings.

Cost: the smallest and the largest of the tokens, a pass over a few kilobytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import DataError
from shardwise.kernels.cross_entropy import IGNORE
from shardwise.models.gpt import Gpt

_INPUTS, _TARGETS = ("input_ids", "tokens"), ("labels", "targets")


class KeyBound(NamedTuple):
    """The allowed values of one key of a batch: [0, rows), and ``IGNORE`` for a target."""

    rows: int
    ignores: bool
    what: str


class VocabularyBounds:
    """Bounds of the keys of a batch, and the embeddings of a model; made before the model is cut."""

    def __init__(self, model: nn.Module):
        self._bounds = dict(_bounds(model))
        self._positions = [key for key in ("tokens", "targets") if key in self._bounds]
        self._embeddings = {
            name: module.num_embeddings
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding)
        }

    @contextmanager
    def checked(self, batch: Any) -> Iterator[None]:
        """Check a batch before a pass, and explain index errors of the pass.

        Raises:
            DataError: if a value is out of range; the error names key, value and vocabulary.
        """
        values = dict(_integers(batch, self._positions))
        for key, bound in self._bounds.items():
            if key in values and values[key].device.type == "cpu":
                _check(key, values[key], bound)
        try:
            yield
        except (IndexError, RuntimeError) as error:
            text = str(error)
            if "out of range" not in text and "out of bounds" not in text:
                raise
            told = self._told(values)
            if not told:
                raise
            raise DataError(
                f"an index is out of range: {text.strip().splitlines()[0]}. {told}. Embeddings of the model: "
                + ", ".join(f"{name!r} has {rows} rows" for name, rows in list(self._embeddings.items())[:4])
                + "; the vocabulary of the data is larger than the model's, or ids are shifted"
            ) from error

    def _told(self, values: Mapping[str, Tensor]) -> str:
        smallest = min(self._embeddings.values(), default=0)
        outside = {
            key: (int(value.min()), int(value.max()))
            for key, value in values.items()
            if value.device.type == "cpu" and value.numel()
        }
        if not any(high >= smallest or low < 0 for low, high in outside.values()):
            return ""
        return "The batch holds " + ", ".join(
            f"{key!r} from {low} to {high}" for key, (low, high) in outside.items()
        )


def _check(key: str, values: Tensor, bound: KeyBound) -> None:
    if not values.numel():
        return
    low, high = (int(each) for each in torch.aminmax(values))
    if high < bound.rows and (low >= 0 or (bound.ignores and low == IGNORE)):
        counted = values[values != IGNORE] if bound.ignores and low < 0 else values
        if not counted.numel() or int(counted.min()) >= 0:
            return
    outside = (values < 0) | (values >= bound.rows)
    if bound.ignores:
        outside &= values != IGNORE
    if not bool(outside.any()):
        return
    place = outside.nonzero()[0].tolist()
    raise DataError(
        f"batch: {key!r} holds {int(values[outside][0])} at {place}, but {bound.what} knows {bound.rows} tokens: 0 to "
        f"{bound.rows - 1}{f', and {IGNORE} for no target' if bound.ignores else ''}. Is this the model's tokenizer? A "
        "tokenizer that was given new tokens asks for model.resize_token_embeddings before initialize"
    )


def _bounds(model: nn.Module) -> Iterator[tuple[str, KeyBound]]:
    reading, writing = _ends(model)
    if isinstance(reading, nn.Embedding):
        for key in _INPUTS:
            yield key, KeyBound(reading.num_embeddings, False, "the model's embedding")
    if isinstance(writing, nn.Linear):
        for key in _TARGETS:
            yield key, KeyBound(writing.out_features, True, "the model's head")


def _ends(model: nn.Module) -> tuple[Any, Any]:
    """Return the modules that read and write tokens; None for models without methods that return them."""
    if isinstance(model, Gpt):
        return model.embed, model.head
    try:
        return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # the model does not have, or does not implement, these methods
        return None, None


def _integers(batch: Any, positions: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the integer tensors of a batch, or of (args, kwargs), by name."""
    if (
        isinstance(batch, tuple)
        and len(batch) == 2
        and isinstance(batch[0], tuple)
        and isinstance(batch[1], dict)
    ):
        args, kwargs = batch
        inner = args[0] if len(args) == 1 and not kwargs else args
        yield from _integers(inner, positions)
        yield from _integers(kwargs, positions)
    elif isinstance(batch, Mapping):
        yield from ((str(key), value) for key, value in batch.items() if _is_integer(value))
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            if _is_integer(value):
                yield (positions[index] if index < len(positions) else f"position {index}"), value
    elif _is_integer(batch):
        yield (positions[0] if positions else "batch"), batch


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and not value.is_meta
