"""The whole model in fp32 from a checkpoint of Shardwise or DeepSpeed, under the names of DeepSpeed's ``zero_to_fp32``.

    get_fp32_state_dict_from_zero_checkpoint         returns a dictionary of tensors
    load_state_dict_from_zero_checkpoint             returns a model with these weights
    convert_zero_checkpoint_to_fp32_state_dict       writes files of torch or safetensors, several if they are large
    main                                             runs the same as a command, for the script in a checkpoint

Weights come from masters if the step has masters. For files, each block of the step is written to its position as
soon as it is read, and files of torch are written from memory maps of temporary safetensors files.

Cost: memory of one block of the step (16 MiB) for files, of the whole model for the other two functions; a step of
DeepSpeed's is first converted to a Shardwise step without moments.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from torch import Tensor

from shardwise.base.errors import CheckpointError, DamagedError, UsageError
from shardwise.checkpoint import Checkpoints, FlatSlice, Manifest, TensorPieces
from shardwise.checkpoint.manifest import ManifestTensor
from shardwise.checkpoint.piece import ElementSource, Flat, LazySlice
from shardwise.deepspeed.files.saved import checked_tag, write_whole
from shardwise.deepspeed.files.their_checkpoint import convert, find_step, read_latest
from shardwise.formats.safetensors import SafetensorsWriter, read_header


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    **ignored: Any,
) -> dict[str, Tensor]:
    """Return the whole model in fp32 on the CPU, under all of its names, from a step of Shardwise or DeepSpeed.

    Args:
        checkpoint_dir: The folder of all checkpoints.
        tag: The name of the step's folder; None: the tag in the file ``latest``.
        exclude_frozen_parameters: Must be False.
        **ignored: DeepSpeed's other arguments, without effect.

    Raises:
        CheckpointError: if there is no such step, or the step cannot be read.
        UsageError: if ``exclude_frozen_parameters`` is True.
    """
    _check_wanted(exclude_frozen_parameters)
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}

    def choose(manifest: Manifest) -> list[TensorPieces]:
        asked = _asked(manifest)
        found.update({each.name: torch.empty(each.shape, dtype=_wide(each)) for each in asked})
        names.update({name: each.name for each in asked for name in manifest.names_of(each.name)})
        return _items(manifest, lambda each: found[each.name].view(-1))

    with tempfile.TemporaryDirectory(prefix="shardwise_") as scratch:
        Checkpoints(_as_ours(checkpoint_dir, tag, Path(scratch))).load(choose)
    return {name: found[home] for name, home in names.items()}


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Move ``model`` to the CPU, load the fp32 weights of a checkpoint into it, and return it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole fp32 model into ``output_dir``.

    A model of at most ``max_shard_size`` is one file, ``pytorch_model.bin`` or ``model.safetensors``. A larger model
    is several files (``-00001-of-00002``), each of at most that size or with a single tensor, and an index. Files of
    torch need disk space for a second copy of the model; so does a step that DeepSpeed saved.

    Args:
        checkpoint_dir: The folder of all checkpoints.
        output_dir: The folder to write into; created if it does not exist.
        max_shard_size: The size of the largest file: bytes, or text such as ``5GB``; None: one file.
        safe_serialization: True to write safetensors files.
        tag: The name of the step's folder; None: the tag in the file ``latest``.
        exclude_frozen_parameters: Must be False.

    Raises:
        CheckpointError: if the step cannot be read, or ``output_dir`` has such files of a model in another number of
            files.
        UsageError: if ``max_shard_size`` is not a size, or ``exclude_frozen_parameters`` is True.
    """
    _check_wanted(exclude_frozen_parameters)
    out, limit = Path(output_dir), _limit(max_shard_size)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".shardwise_", dir=out) as folder:
        scratch = Path(folder)
        step = _as_ours(checkpoint_dir, tag, scratch / "step")
        suffix = "safetensors" if safe_serialization else "bin"
        check = partial(_check_folder, out, suffix)
        if safe_serialization:
            files = _WeightFiles(out, "model", limit, copies_ties=True, check=check)
        else:
            files = _WeightFiles(scratch, "pytorch_model", limit, copies_ties=False, check=check)
        with files:
            Checkpoints(step).load(files.choose)
        if not safe_serialization:
            _write_for_torch(files, out)
    if len(files.stored) > 1:
        files.write_index(out, suffix)


def _check_wanted(excludes_frozen: bool) -> None:
    # A parameter without masters and moments is frozen, or had no gradient yet, or its optimizer has no state.
    if excludes_frozen:
        raise UsageError(
            "exclude_frozen_parameters: True: a step does not say which of its parameters train; leave it out and drop "
            "their names from the result, or have the engine leave them out: "
            "save_16bit_model(folder, exclude_frozen_parameters=True)"
        )


def _check_folder(out: Path, suffix: str, files: Collection[str]) -> None:
    """Raise CheckpointError if the folder ``out`` has other files that a reader would take for the new ones.

    Args:
        out: The folder.
        suffix: The suffix of the files.
        files: The names of the files to be written, without ``suffix``.
    """
    stem = next(iter(files)).partition("-")[0]
    mine = {f"{file}.{suffix}" for file in files}
    mine |= {f"{stem}.{suffix}.index.json"} if len(files) > 1 else set()
    found = {
        path.name
        for pattern in (f"{stem}*.{suffix}", f"{stem}.{suffix}.index.json")
        for path in out.glob(pattern)
    }
    if left := sorted(found - mine):
        raise CheckpointError(
            f"output_dir: {out} holds {left[0]}{f' and {len(left) - 1} more' * (len(left) > 1)}, of a model in another "
            f"number of files than the {len(files)} to be written; a reader may take them for it: remove them, or give "
            "another folder"
        )


def _limit(size: str | int | None) -> int | None:
    try:
        return None if size is None else int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise UsageError(f"max_shard_size: {size!r} is no size; expected a number of bytes or 5GB") from None


def _as_ours(checkpoint_dir: str | Path, tag: str | None, scratch: Path) -> Path:
    """Return the folder of a Shardwise step; a step that DeepSpeed saved is converted into ``scratch``.

    Raises:
        CheckpointError: if the folder holds no step.
    """
    root = Path(checkpoint_dir)
    name = tag if tag is not None else read_latest(root)
    folder = root / checked_tag(name)
    if any(folder.glob("step_*/manifest.json")):
        return folder
    step = find_step(root, name)
    if step is None:
        raise CheckpointError(f"{folder} holds no step, neither ours nor DeepSpeed's")
    convert(step, scratch, weights_only=True)
    return scratch


def _asked(manifest: Manifest) -> list[ManifestTensor]:
    """Return the masters, the weights that have no master, and the buffers."""
    masters = {each.name for each in manifest.tensors if each.kind == "master"}
    return [
        each
        for each in manifest.tensors
        if each.kind in ("master", "buffer") or (each.kind == "weight" and each.name not in masters)
    ]


def _wide(each: ManifestTensor) -> torch.dtype:
    return torch.float32 if each.torch_dtype.is_floating_point else each.torch_dtype


def _items(manifest: Manifest, flat_of: Callable[[ManifestTensor], Flat]) -> list[TensorPieces]:
    """Return a read request for every tensor of a step; the wanted tensors are read into ``flat_of(tensor)``."""
    asked = {id(each) for each in _asked(manifest)}
    items = []
    for each in manifest.tensors:
        is_asked = id(each) in asked
        pieces = [FlatSlice(0, prod(each.shape), flat_of(each))] if is_asked else []
        dtype = _wide(each) if is_asked else each.torch_dtype
        items.append(TensorPieces(each.kind, each.name, tuple(each.shape), dtype, pieces))
    return items


class _WeightFiles:
    """safetensors files of at most ``limit`` bytes or with a single tensor, written as elements are read from a step.

    ``copies_ties``: if True, a tied tensor is stored under each of its names, else only under the first. ``check`` is
    called with the file names, without suffix, before any file is created.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        limit: int | None,
        copies_ties: bool,
        check: Callable[[Collection[str]], None],
    ):
        self.folder = folder
        self.stored: dict[str, dict[str, ManifestTensor]] = {}
        """The tensors of each file: file name without suffix, then tensor name."""
        self.names: dict[str, tuple[str, ...]] = {}
        """All names of the tensor that is stored under each name."""
        self._stem, self._limit, self._copies_ties, self._check = stem, limit, copies_ties, check
        self._stack = ExitStack()

    def __enter__(self) -> "_WeightFiles":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def choose(self, manifest: Manifest) -> list[TensorPieces]:
        """Create the files for a step and return the read requests for its tensors.

        If a damaged step made the reader go back to an older one, the files of the damaged step are removed first.
        """
        damaged = DamagedError("the files of a step that was damaged")
        self._stack.__exit__(DamagedError, damaged, None)
        self._stack, self.names = ExitStack(), {}
        tensors: dict[str, ManifestTensor] = {}
        writers: dict[str, SafetensorsWriter] = {}
        for each in sorted(
            _asked(manifest), key=lambda each: -_wide(each).itemsize
        ):  # widest dtypes first, so that every tensor is aligned
            ties = manifest.names_of(each.name)
            found = {name: (name,) for name in ties} if self._copies_ties else {each.name: ties}
            self.names |= found
            tensors |= dict.fromkeys(found, each)
        self.stored = self._cut(tensors)
        self._check(self.stored)
        names_of: dict[int, list[str]] = {}
        for name, each in tensors.items():
            names_of.setdefault(id(each), []).append(name)
        for file, held in self.stored.items():
            shapes = {name: tuple(each.shape) for name, each in held.items()}
            dtypes = {name: _wide(each) for name, each in held.items()}
            writer = SafetensorsWriter(self.folder / f"{file}.safetensors", shapes, dtypes)
            writers |= dict.fromkeys(held, self._stack.enter_context(writer))

        def flat_of(wanted: ManifestTensor) -> LazySlice:
            names = names_of[id(wanted)]

            def read(start: int, stop: int) -> Tensor:
                assert start == stop, f"{wanted.name} is written here alone"
                return torch.empty(0, dtype=_wide(wanted))

            def write(start: int, values: Tensor) -> None:
                for name in names:
                    writers[name].write_part(name, start, values)

            return LazySlice(ElementSource(read, write), prod(wanted.shape), _wide(wanted))

        return _items(manifest, flat_of)

    def _cut(self, tensors: Mapping[str, ManifestTensor]) -> dict[str, dict[str, ManifestTensor]]:
        fills: list[dict[str, ManifestTensor]] = [{}]
        filled = 0
        for name, each in tensors.items():
            size = _bytes(each)
            if fills[-1] and self._limit is not None and filled + size > self._limit:
                fills.append({})
                filled = 0
            fills[-1][name] = each
            filled += size
        count = len(fills)
        files = (
            [f"{self._stem}-{i + 1:05d}-of-{count:05d}" for i in range(count)] if count > 1 else [self._stem]
        )
        return dict(zip(files, fills, strict=True))

    def write_index(self, folder: Path, suffix: str) -> None:
        """Write the index of ``folder``, which maps each tensor name to its file."""
        rows = [(file, home, each) for file, held in self.stored.items() for home, each in held.items()]
        index = {
            "metadata": {"total_size": sum(_bytes(each) for _, _, each in rows)},
            "weight_map": {name: f"{file}.{suffix}" for file, home, _ in rows for name in self.names[home]},
        }
        text = json.dumps(index, indent=2) + "\n"
        write_whole(
            folder / f"{self._stem}.{suffix}.index.json", lambda path: path.write_text(text, encoding="utf-8")
        )


def _bytes(each: ManifestTensor) -> int:
    return prod(each.shape) * _wide(each).itemsize


def _write_for_torch(files: _WeightFiles, out: Path) -> None:
    """Write each of ``files`` as a file of torch, from a memory map of the safetensors file, which is then removed."""
    for file in files.stored:
        source = files.folder / f"{file}.safetensors"
        state: dict[str, Tensor] = {}
        for home, stored in read_header(source).items():
            state |= dict.fromkeys(files.names[home], stored.mapped())
        write_whole(out / f"{file}.bin", partial(torch.save, state))
        source.unlink()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``zero_to_fp32.py`` as a command.

    Args:
        arguments: The command's arguments; None: those of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write the whole model of a checkpoint in fp32."
    )
    parser.add_argument("checkpoint_dir", help="folder of the checkpoints, with the file latest")
    parser.add_argument("output_dir", help="folder of what is written")
    parser.add_argument("--max_shard_size", default="5GB", help="size of the largest file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="a tag; left out, what the file latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="refused, with what to do")
    parser.add_argument("-d", "--debug", action="store_true", help="without effect")
    given = vars(parser.parse_args(arguments))
    given.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except (CheckpointError, UsageError) as error:
        parser.exit(1, f"{error}\n")
