"""Weights to start from: a safetensors file or a Hugging Face folder, read slice by slice.

    source = open_weights("Llama-3.2-1B", policy)
    source.read("blocks.3.attention.qkv.weight", start, stop)       # flat elements of the Gpt's own tensor

A rank reads only the elements that it keeps, under any names in the file: a Gpt's tensor may be several stored
tensors joined, or a stored tensor transposed (``models/huggingface.py``). A user's own model reads its own names as
they are.

Cost: one open map and the memory of the slice.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from shardwise.base.errors import CheckpointError, ConfigError, MismatchError
from shardwise.base.policy import nearest
from shardwise.base.regular_files import read_small_file
from shardwise.base.strict_json import JSON_BYTES, StrictModel, read_object, validated
from shardwise.base.words import in_words
from shardwise.formats.safetensors import StoredTensor, read_header
from shardwise.models.gpt import GptPolicy
from shardwise.models.huggingface import joined_shape, parts_of, policy_of, stacked

_INDEX = "model.safetensors.index.json"
_SHOWN = 5
"""Tensors that an error names, at most."""

_SAME_FUNCTION = frozenset({"name", "dropout", "context"})
"""Keys that may differ between a folder's configuration and the policy."""
_TOLD_BY_SHAPES = frozenset({"vocab", "tied_head"})
"""Keys that may also differ if tensors may be missing, because the shapes of the tensors show the difference."""


class _WeightIndex(StrictModel):
    weight_map: dict[str, Annotated[str, Field(min_length=1, max_length=255)]]
    """The file of each tensor."""


class _StoredSlice(NamedTuple):
    stored: StoredTensor
    transposed: bool = False
    experts: int = 0
    """The number of experts of which the whole tensor is a stack; 0 for other tensors."""


class WeightSource:
    """Tensors under the model's names, each made of stored pieces joined along dim 0."""

    def __init__(self, where: Path, recipes: Mapping[str, list[_StoredSlice]]) -> None:
        self.where = where
        self._recipes = dict(recipes)

    def names(self) -> list[str]:
        """Return the model's names of all tensors."""
        return list(self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        pieces = self._recipe(name)
        shapes = [p.stored.shape[::-1] if p.transposed else p.stored.shape for p in pieces]
        joined = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return stacked(joined, pieces[0].experts)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the elements that ``read`` returns."""
        return reduce(torch.promote_types, (piece.stored.dtype for piece in self._recipe(name)))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of the flattened tensor and return them: [stop - start].

        Raises:
            CheckpointError: if the tensor does not have these elements.
        """
        pieces, total = self._recipe(name), math.prod(self.shape(name))
        if not 0 <= start <= stop <= total:
            raise CheckpointError(f"{self.where}: elements [{start}, {stop}) of {name}, which has {total}")
        read, begin = [], 0
        for stored, transposed, _ in pieces:
            low, high = max(start - begin, 0), min(stop - begin, stored.elements)
            if low < high:
                read.append(stored.read(low, high, transposed).to(self.dtype(name)))
            begin += stored.elements
        if len(read) == 1:
            return read[0]
        return torch.cat(read) if read else torch.empty(0, dtype=self.dtype(name))

    def check(
        self, shapes: Mapping[str, Iterable[int]], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        """Raise MismatchError if the source does not fit a model; the error names the first tensors.

        Args:
            shapes: The shapes of the model's tensors, by name.
            dtypes: The dtypes of the model's tensors, by name; None: all are floating.

        Raises:
            MismatchError: if a tensor is missing, has another shape, or contains integers where the model has
                floating numbers (quantised weights).
        """
        missing = [name for name in shapes if name not in self._recipes]
        if missing:
            raise MismatchError(
                f"{self.where}: {len(missing)} of the model's {len(shapes)} tensors are missing: "
                f"{_list(missing)}{nearest(missing[0], self._recipes)}"
            )
        wrong = [
            f"{name} is {list(self.shape(name))}, the model's is {list(shape)}"
            for name, shape in shapes.items()
            if self.shape(name) != tuple(shape)
        ]
        if wrong:
            raise MismatchError(f"{self.where}: {len(wrong)} tensors have another shape: {_list(wrong)}")
        whole = [
            f"{name} is {str(self.dtype(name)).removeprefix('torch.')}"
            for name in shapes
            if (dtypes is None or dtypes[name].is_floating_point) and not self.dtype(name).is_floating_point
        ]
        if whole:
            raise MismatchError(
                f"{self.where}: {len(whole)} tensors hold whole numbers where the model has fractions: {_list(whole)}; "
                "are they quantised? Take the model's 16-bit or 32-bit weights"
            )

    def _recipe(self, name: str) -> list[_StoredSlice]:
        if name not in self._recipes:
            raise MismatchError(f"{self.where}: no tensor {name!r}{nearest(name, self._recipes)}")
        return self._recipes[name]


def open_weights(
    path: str | Path, policy: GptPolicy | None = None, missing: Sequence[str] = ()
) -> WeightSource:
    """Open the tensors of a safetensors file or of a folder.

    Args:
        path: The file or folder.
        policy: The shape of a Gpt, whose names the tensors get; None: the tensors keep their stored names.
        missing: Patterns of names that may be missing or have another shape.

    Raises:
        CheckpointError: if the files cannot be read.
        MismatchError: if the weights are those of another model.
    """
    where = Path(path)
    stored = _stored_tensors(where)
    if policy is None:
        return WeightSource(where, {name: [_StoredSlice(tensor)] for name, tensor in stored.items()})
    policy = policy.resolved()
    if where.is_dir() and (where / "config.json").is_file():
        _check_same_model(where, policy, _SAME_FUNCTION | _TOLD_BY_SHAPES if missing else _SAME_FUNCTION)
    may_lack = [name for name in parts_of(policy) if any(fnmatchcase(name, each) for each in missing)]
    source = WeightSource(where, _recipes(where, stored, policy, may_lack))
    shapes = {name: joined_shape(parts) for name, parts in parts_of(policy).items()}
    source.check({name: shape for name, shape in shapes.items() if name not in may_lack})
    return source


def gpt_policy_from_huggingface(folder: str | Path) -> GptPolicy:
    """Return the policy of the model in a Hugging Face folder (llama, mistral, mixtral, gpt2).

    The dropout of the original training is left out: set ``model.dropout`` to train with dropout. Mistral's context
    is cut to its attention window, within which a Gpt computes the same.

    Raises:
        ConfigError: if the folder has no ``config.json``, or a Gpt does not compute the same function.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder}: no config.json; expected the folder of a Hugging Face model")
    return policy_of(_json(file), str(file))


def _recipes(
    where: Path, stored: Mapping[str, StoredTensor], policy: GptPolicy, may_lack: Collection[str]
) -> dict[str, list[_StoredSlice]]:
    table = parts_of(policy)
    if "embed.weight" in stored or "head.weight" in stored:
        own = {name: [_StoredSlice(stored[name])] for name in table if name in stored}
        if policy.tied_head and "embed.weight" not in own:
            own["embed.weight"] = [_StoredSlice(stored["head.weight"])]
        return own
    # Files of GPT-2 itself, and of models saved without their head, lack the first component of each name.
    found: dict[str, list[_StoredSlice]] = {}
    missing = []
    for name, parts in table.items():
        names = [part.name if part.name in stored else part.name.partition(".")[2] for part in parts]
        absent = [part.name for part, key in zip(parts, names, strict=True) if key not in stored]
        wrong = [
            f"{key} is {list(stored[key].shape)}, the model's is {list(part.shape)}"
            for part, key in zip(parts, names, strict=True)
            if key in stored and stored[key].shape != part.shape
        ]
        if name in may_lack and (absent or wrong):
            continue
        missing += absent
        if wrong:
            raise MismatchError(f"{where}: tensors have another shape than model: says: {_list(wrong)}")
        if all(key in stored for key in names):
            found[name] = [
                _StoredSlice(stored[key], part.transposed, part.experts)
                for part, key in zip(parts, names, strict=True)
            ]
    if missing:
        hint = "; set model.tied_head: true" if missing == ["lm_head.weight"] else nearest(missing[0], stored)
        raise MismatchError(
            f"{where}: {len(missing)} tensors of a {policy.family} model are missing: {_list(missing)}{hint}"
        )
    return found


def _check_same_model(folder: Path, policy: GptPolicy, may_differ: Collection[str]) -> None:
    """Raise MismatchError if the folder's ``config.json`` describes another model than ``policy``.

    Shapes are not enough: 8 heads of 64 features and 16 heads of 32 have the same tensors.
    """
    theirs, ours = gpt_policy_from_huggingface(folder).resolved(), policy
    if policy.experts is not None:
        same = policy.experts.router.without_training()
        ours = policy.model_copy(update={"experts": policy.experts.model_copy(update={"router": same})})
    differ = [
        f"{key} is {getattr(ours, key)!r}, there it is {getattr(theirs, key)!r}"
        for key in GptPolicy.model_fields
        if key not in may_differ and getattr(ours, key) != getattr(theirs, key)
    ]
    if differ:
        raise MismatchError(f"{folder}: config.json describes another model than model: {_list(differ)}")


def _stored_tensors(where: Path) -> dict[str, StoredTensor]:
    if where.is_file():
        return read_header(where)
    if not where.is_dir():
        raise CheckpointError(f"init_from: {where} is neither a file nor a folder")
    tensors: dict[str, StoredTensor] = {}
    for file in _files(where):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{where}: {name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(validated(_WeightIndex, _json(index), str(index)).weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{index}: names files outside its folder: {_list(outside)}")
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{index}: {len(absent)} of {len(names)} files are missing: {_list(absent)}"
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: no *.safetensors file; weights in other formats have to be converted (shardwise convert)"
        )
    return files


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_object(read_small_file(file, JSON_BYTES), str(file))
    except OSError as error:
        raise CheckpointError(in_words(error)) from None


def _list(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return "; ".join(items[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
