"""A converter of checkpoints that DeepSpeed saved into Shardwise's format, from any number of ranks to any layout.

    DIR/latest                                               the newest tag
    DIR/TAG/mp_rank_00_model_states.pt                       stages 0 to 2: whole weights and buffers, counters, the
                                                             client's state; stage 0: the optimizer too
            [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt stages 1 to 3: rank R's part of masters and moments
            zero_pp_rank_R_mp_rank_00_model_states.pt        stage 3: buffers, frozen parts, counters

A rank's part is one flat tensor per optimizer group. Stages 1 and 2 concatenate the group's parameters and cut the
result in N parts; ``param_slice_mappings`` lists which piece of which parameter each rank has. Stage 3 cuts each
parameter in N pieces of ⌈elements / N⌉ and concatenates the pieces of a rank, over all groups and sub-groups, in the
order of ``param_shapes``.

Every piece is copied from the memory map of DeepSpeed's file to its range in the new step: no tensor is ever
assembled, so memory does not grow with the model. Masters become Shardwise's weights (in fp32); moments, step counts,
scale and counters keep their bits.

The files are pickles. A child process reads them with torch's ``weights_only``, which builds only tensors and plain
containers, plus stand-ins for four classes of DeepSpeed's that do nothing. Anything else in a file is refused.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.base.regular_files import read_small_text
from shardwise.base.words import in_words
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, FlatSlice, TensorPieces
from shardwise.checkpoint.piece import MODEL_KINDS
from shardwise.models.torch_file import check_places, check_torch_file

_LATEST = "latest"
_MODEL = "mp_rank_00_model_states.pt"
_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_(optim|model)_states\.pt")
_TAG_LIMIT = 4096
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_KNOWN = {
    *(
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "lr_scheduler",
    ),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "dp_world_size"),
    *("mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "moe"),
    *_COUNTERS,
}
"""DeepSpeed's own keys in a file of model states; all other keys are the client's."""


_OUR_KINDS = frozenset({*MODEL_KINDS, "master", "grad", "table"})
"""Kinds of tensors in a Shardwise step, which no optimizer state may be named after."""


class _FragmentStandIn:
    """A stand-in for ``fragment_address``, the range of a piece in a rank's flat tensor."""

    numel: int
    start: int


class _NumberStandIn(int):
    """A stand-in for an enumeration whose members are integers."""


class _ScalerStandIn:
    """A stand-in for a loss scaler, with the scaler's numbers as attributes."""


_STAND_INS: list[Any] = [
    (_FragmentStandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_NumberStandIn, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_ScalerStandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_ScalerStandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def find_step(folder: Path, tag: str | None = None) -> Path | None:
    """Return the folder of a step that DeepSpeed saved; None if there is no such step.

    Args:
        folder: The folder of all checkpoints, or of a step.
        tag: The name of the step's folder in ``folder``; None: the tag in the file ``latest``, or ``folder`` itself
            if there is no such file.

    Raises:
        CheckpointError: if the tag is not a plain name, or the file ``latest`` cannot be read.
    """
    if tag is None and (folder / _LATEST).is_file() and not (folder / _LATEST).is_symlink():
        tag = read_latest(folder)
    step = folder if tag is None else folder / tag
    if tag is not None and (Path(tag).name != tag or tag in (".", "..")):
        raise CheckpointError(f"{folder}: the tag {tag!r} is not a plain name")
    if not step.is_dir():
        return None
    names = [path.name for path in step.iterdir()]
    return step if _MODEL in names or any(_SHARD.fullmatch(name) for name in names) else None


def read_latest(folder: Path) -> str:
    """Return the tag that the file ``folder/latest`` contains.

    Raises:
        CheckpointError: if the file does not open, is not a small regular file, or does not contain text.
    """
    try:
        return read_small_text(folder / _LATEST, _TAG_LIMIT).strip()
    except OSError as error:
        raise CheckpointError(
            f"{in_words(error)}; expected a file that holds the newest tag, which save_checkpoint writes; give the tag"
        ) from None


def convert(
    step: Path, out: Path, groups: Sequence[Sequence[str]] | None = None, weights_only: bool = False
) -> list[str]:
    """Convert the step that DeepSpeed saved in ``step`` into a Shardwise step under ``out``, in a separate process.

    Args:
        step: The folder of the step.
        out: The folder to write into.
        groups: Names of the parameters of each optimizer group, in order. Stage 0 saves moments without names; if the
            names are not given and do not follow from the shapes, the moments are left out.
        weights_only: True to leave out the moments.

    Returns:
        A description of each part that was left out.

    Raises:
        CheckpointError: if the files are not DeepSpeed's, are incomplete, or contain more than tensors and plain
            data.
    """
    task = json.dumps({"step": str(step), "out": str(out), "groups": groups, "weights_only": weights_only})
    ended = subprocess.run(
        [sys.executable, "-m", "shardwise.deepspeed.files.their_checkpoint"],
        input=task,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        raise CheckpointError(f"{step}: the process that reads it failed: {last[0]}") from None
    if answer["error"]:
        raise CheckpointError(answer["error"])
    return [str(line) for line in answer["left_out"]]


# In the process that reads -----------------------------------------------------------------------------------------


class DeepSpeedStepFiles:
    """The files of one step, opened and compared with one another."""

    def __init__(self, step: Path) -> None:
        self.step = step
        files: dict[str, dict[int, Path]] = {"optim": {}, "model": {}}
        for path in step.iterdir():
            match = _SHARD.fullmatch(path.name)
            if match is not None:
                files[match[2]][int(match[1])] = path
        self._check_layout()
        self.optimizers = [self._load(path) for path in self._all(files["optim"])]
        self.models = [self._load(path) for path in self._all(files["model"])]
        if not self.models:
            self.models = [self._load(step / _MODEL)]
        self.model = self.models[0]
        self.parts = [self._part(state) for state in self.optimizers]
        self.stage = int(self.parts[0]["zero_stage"]) if self.parts else 0
        self.left_out: list[str] = []
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Check that the files of all ranks exist and belong to one step.

        Raises:
            DamagedError: if a rank's file is missing or differs from rank 0's; the error names the rank.
        """
        if not self.parts and (self.model.get("param_shapes") or _has_pieces(self.model)):
            raise DamagedError(
                f"{self.step}: the files of optimizer states, which hold the fp32 weights, are missing; copy all of "
                "the step's files"
            )
        for rank, part in enumerate(self.parts):
            count = part["partition_count"]
            for ranks in map(int, count if isinstance(count, list) else [count]):
                if ranks != len(self.parts):
                    raise DamagedError(
                        f"{self.step}: the state of rank {rank} is cut in {ranks}, and {len(self.parts)} files of "
                        "optimizer states are there"
                    )
            if int(part["zero_stage"]) != self.stage:
                raise DamagedError(
                    f"{self.step}: rank {rank}'s file is of ZeRO stage {int(part['zero_stage'])} and rank 0's of "
                    f"{self.stage}; the files are of different runs"
                )
        if self.stage == 3 and len(self.models) != len(self.parts):
            raise DamagedError(
                f"{self.step}: {len(self.parts)} files of optimizer states and {len(self.models)} of model states are "
                "there, and at stage 3 each rank has one of both; copy all of the step's files"
            )
        for rank, model in enumerate(self.models):
            for key in (*_COUNTERS, "param_shapes", "frozen_param_shapes", "shared_params", "buffer_names"):
                if model.get(key) != self.model.get(key):
                    raise DamagedError(
                        f"{self.step}: {key} of rank {rank} is not that of rank 0; the files are of different steps or "
                        "models"
                    )
        numbers = [_numbers(states) for states in (self._flats(part)[1] for part in self.parts)]
        for rank, found in enumerate(numbers):
            if found != numbers[0]:
                raise DamagedError(
                    f"{self.step}: the optimizer of rank {rank} counts {found}, and that of rank 0 {numbers[0]}; the "
                    "files are of different steps"
                )

    def _check_layout(self) -> None:
        names = sorted(path.name for path in self.step.iterdir())
        write = "write it out with DeepSpeed (zero_to_fp32, or save_16bit_model)"
        # DeepSpeed's own exports do not contain the experts of other ranks.
        gather = "load it in DeepSpeed with ep_size=1, to have all experts on a rank, write it out (save_16bit_model)"
        for pattern, what, do in (
            (r"layer_\d+-model_\d+.*", "stages of a pipeline", write),
            (r"layer_\d+_expert_\d+.*|expp_rank_.*", "experts", gather),
            (r".*mp_rank_(?!00_)\d+_.*", "tensor-parallel ranks", write),
        ):
            found = [name for name in names if re.fullmatch(pattern, name)]
            if found:
                raise CheckpointError(
                    f"{self.step}: {found[0]} is of {what}, which is not read here; {do} and load "
                    "these weights"
                )

    def _all(self, files: Mapping[int, Path]) -> list[Path]:
        missing = sorted(set(range(len(files))) - set(files))
        if missing:
            raise DamagedError(
                f"{self.step}: rank {missing[0]}'s file beside {files[max(files)].name} is missing; copy all of the "
                "step's files"
            )
        return [files[rank] for rank in sorted(files)]

    def _load(self, path: Path) -> dict[str, Any]:
        _, parts = check_torch_file(path)
        with torch.serialization.safe_globals(_STAND_INS):
            try:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # torch raises many types; in no case was code of the file executed
                first = str(error).strip().splitlines()
                named = re.search(r"GLOBAL (\S+)", str(error))
                what = f"it holds {named[1]}" if named else (first or [type(error).__name__])[0]
                raise CheckpointError(
                    f"{path}: {what}; a pickle can hold code, which is never run here: only tensors, numbers, text, "
                    "lists and dictionaries are read. Save the step again without it in the client state"
                ) from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: expected what DeepSpeed's save_checkpoint wrote")
        tensors = list(_tensors_in(found))
        check_places(path, tensors, parts)
        for tensor in tensors:
            if tensor.numel() * tensor.dtype.itemsize > tensor.untyped_storage().nbytes():
                raise DamagedError(
                    f"{path}: a tensor of shape {list(tensor.shape)} has {tensor.untyped_storage().nbytes()} bytes in "
                    "the file; the file was put together by hand"
                )
        return found

    def _part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        part = state.get("optimizer_state_dict")
        if not isinstance(part, dict) or "zero_stage" not in part or "partition_count" not in part:
            raise CheckpointError(
                f"{self.step}: a file of optimizer states has no ZeRO state; expected DeepSpeed 0.14 or later"
            )
        return part

    # -- names and shapes

    @property
    def buffers(self) -> list[str]:
        """The names of the model's buffers."""
        return [str(name) for name in self.model.get("buffer_names") or []]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained parameters, in the order of the optimizer's groups; empty at stage 0."""
        groups = self.model.get("param_shapes") or []
        return {name: tuple(shape) for group in groups for name, shape in group.items()}

    def aliases(self) -> dict[str, list[str]]:
        """Return the other names of each tied weight."""
        found: dict[str, list[str]] = {}
        for alias, name in (self.model.get("shared_params") or {}).items():
            found.setdefault(str(name), []).append(str(alias))
        if self.stage == 0:
            first: dict[tuple[Any, ...], str] = {}
            for name, tensor in self._weights().items():
                key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
                if tensor.numel() and key in first:
                    found.setdefault(first[key], []).append(name)
                first.setdefault(key, name)
        return found

    def _weights(self) -> dict[str, Tensor]:
        """Return the whole weights of the model, which stages 0 to 2 save."""
        module = self.model.get("module") or {}
        taken = set(self.buffers)
        return {
            name: tensor
            for name, tensor in module.items()
            if name not in taken and isinstance(tensor, Tensor)
        }

    # -- pieces

    def items(self, groups: Sequence[Sequence[str]] | None) -> list[TensorPieces]:
        """Return all tensors of the step as pieces of its files.

        Raises:
            DamagedError: if a tensor is incomplete or has no shape, or the step has no parameter.
        """
        pieces: dict[tuple[str, str], list[FlatSlice]] = {}
        shapes = self.shapes()
        if self.stage == 0:
            shapes |= self._whole(pieces, groups)
        elif self.stage == 3:
            self._cut_each(pieces, shapes)
        else:
            self._cut_groups(pieces)
        self._frozen(pieces, shapes)
        items = []
        for (kind, name), found in pieces.items():
            if name not in shapes:
                raise DamagedError(f"{self.step}: {name} has state and no shape")
            covered, wanted = sum(each.stop - each.start for each in found), prod(shapes[name])
            if covered != wanted:
                raise DamagedError(f"{self.step}: {kind} of {name} has {covered} of its {wanted} elements")
            items.append(TensorPieces(kind, name, shapes[name], found[0].tensor.dtype, found))
        if not any(item.kind == "weight" for item in items):
            raise DamagedError(
                f"{self.step}: it has no parameter; param_shapes or the module's state is empty"
            )
        if (self.parts or self.model.get("optimizer")) and all(item.kind == "weight" for item in items):
            self.left_out += [] if self.left_out else ["moments: the optimizer's state holds none"]
        module = self.model.get("module") or {}
        for name in self.buffers:
            if isinstance(module.get(name), Tensor):
                flat = module[name].contiguous().view(-1)
                whole = [FlatSlice(0, flat.numel(), flat)]
                items.append(TensorPieces("buffer", name, tuple(module[name].shape), flat.dtype, whole))
        return items

    def _flats(self, part: Mapping[str, Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Return (masters, states) of one rank, per group or sub-group."""
        masters = part["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]
        inner = part.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if not isinstance(inner, dict):
            raise CheckpointError(
                f"{self.step}: the optimizer's state is of an elastic checkpoint "
                "(zero_optimization.elastic_checkpoint), which is not read here"
            )
        states = [dict(inner.get("state", {}).get(number, {})) for number in range(len(masters))]
        for number, state in enumerate(states):
            group = inner["param_groups"][min(number, len(inner["param_groups"]) - 1)]
            if state and "step" not in state and "step" in group:
                state["step"] = group["step"]  # DeepSpeed's fused Adam stores its step count in the group
        return list(masters), states

    def _cut_groups(self, pieces: dict[tuple[str, str], list[FlatSlice]]) -> None:
        """Add the pieces of stages 1 and 2, where the concatenated parameters of a group are cut in N."""
        reached: dict[tuple[str, str], int] = {}
        for part in self.parts:
            mappings = part.get("param_slice_mappings")
            if mappings is None:
                raise CheckpointError(
                    f"{self.step}: it has no param_slice_mappings; save it with DeepSpeed 0.14 or later"
                )
            masters, states = self._flats(part)
            for fragments, master, state in zip(mappings, masters, states, strict=True):
                for name, fragment in fragments.items():
                    for kind, flat in self._kinds(master, state):
                        first = reached.get((kind, name), 0)
                        reached[kind, name] = first + fragment.numel
                        tensor = self._piece(flat, fragment.start, fragment.numel)
                        pieces.setdefault((kind, name), []).append(
                            FlatSlice(first, first + fragment.numel, tensor)
                        )

    def _cut_each(
        self, pieces: dict[tuple[str, str], list[FlatSlice]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Add the pieces of stage 3, where each parameter is cut in N and a rank's pieces are concatenated."""
        ranks = len(self.parts)
        for rank, part in enumerate(self.parts):
            masters, states = self._flats(part)
            number = place = 0
            for name, shape in shapes.items():
                elements = prod(shape)
                size = -(-elements // ranks)
                start, stop = min(rank * size, elements), min((rank + 1) * size, elements)
                while number < len(masters) and place + size > masters[number].numel():
                    number, place = number + 1, 0  # the rest of a flat tensor is padding
                if number == len(masters):
                    raise DamagedError(f"{self.step}: rank {rank}'s state ends before {name}")
                for kind, flat in self._kinds(masters[number], states[number]):
                    tensor = self._piece(flat, place, stop - start)
                    pieces.setdefault((kind, name), []).append(FlatSlice(start, stop, tensor))
                place += size
            elements, flats = (
                sum(-(-prod(shape) // ranks) for shape in shapes.values()),
                sum(map(Tensor.numel, masters)),
            )
            if elements != flats:
                raise DamagedError(
                    f"{self.step}: rank {rank}'s fp32 weights have {flats} elements, and the shapes of the parameters "
                    f"ask for {elements}"
                )

    def _whole(
        self, pieces: dict[tuple[str, str], list[FlatSlice]], groups: Sequence[Sequence[str]] | None
    ) -> dict[str, tuple[int, ...]]:
        """Add the tensors of stage 0, whose optimizer states have only numbers; return the shapes of all weights."""
        others = {alias for names in self.aliases().values() for alias in names}
        weights = {name: tensor for name, tensor in self._weights().items() if name not in others}
        for name, tensor in weights.items():
            flat = tensor.contiguous().view(-1)
            pieces["weight", name] = [FlatSlice(0, flat.numel(), flat)]
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        optimizer = self.model.get("optimizer") or {}
        inner = optimizer.get("optimizer_state_dict", optimizer)
        masters = [tensor for group in optimizer.get("fp32_groups", []) for tensor in group]
        numbers = [number for group in inner.get("param_groups", []) for number in group["params"]]
        names = self._names_of(numbers, inner.get("state", {}), masters, shapes, groups)
        for place, name in enumerate(names):
            state = inner["state"].get(numbers[place], {})
            if masters:
                pieces["weight", name] = [self._all_of(masters[place])]
            for kind, tensor in state.items():
                if not isinstance(tensor, Tensor) or not tensor.dim():
                    continue
                if tuple(tensor.shape) == shapes[name]:
                    pieces[self._kind(kind), name] = [self._all_of(tensor)]
                elif f"{kind}: " not in "".join(self.left_out):
                    self.left_out.append(
                        f"{kind}: that of {name} has the shape {list(tensor.shape)} and not that of its parameter"
                    )
        return shapes

    def _names_of(
        self,
        numbers: Sequence[int],
        states: Mapping[int, Mapping[str, Any]],
        masters: Sequence[Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        groups: Sequence[Sequence[str]] | None,
    ) -> list[str]:
        """Return the names of the parameters that an optimizer of stage 0 numbers; empty if they are unknown."""

        def shape_of(place: int) -> tuple[int, ...] | None:
            if masters:
                return tuple(masters[place].shape)
            tensors = [
                v for v in states.get(numbers[place], {}).values() if isinstance(v, Tensor) and v.dim()
            ]
            return tuple(tensors[0].shape) if tensors else None

        names = list(shapes) if groups is None else [name for group in groups for name in group]
        fits = len(names) == len(numbers) and all(
            shape_of(place) in (None, shapes.get(name)) for place, name in enumerate(names)
        )
        if fits:
            return names
        if numbers and groups is not None:
            raise CheckpointError(
                f"{self.step}: its optimizer has {len(numbers)} tensors in other groups or shapes than the one "
                "given now; give the groups that it was saved with, or load the weights alone"
            )
        if numbers:
            self.left_out.append(
                "the optimizer's state: stage 0 saves it without names; load it in the script that makes the optimizer"
            )
        return []

    def _frozen(
        self, pieces: dict[tuple[str, str], list[FlatSlice]], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        """Add the weights that do not train, which are cut at stage 3 and whole at lower stages."""
        aliases = {alias for names in self.aliases().values() for alias in names}
        if self.stage < 3:
            for name, tensor in self._weights().items():
                if name not in aliases and ("weight", name) not in pieces:
                    pieces["weight", name] = [self._all_of(tensor)]
                    shapes[name] = tuple(tensor.shape)
            return
        frozen = self.model.get("frozen_param_shapes") or {}
        for rank, model in enumerate(self.models):
            for name, shape in frozen.items():
                elements = prod(tuple(shape))
                size = -(-elements // len(self.models))
                start, stop = min(rank * size, elements), min((rank + 1) * size, elements)
                fragment = model["frozen_param_fragments"][name]
                if fragment.numel() not in (size, stop - start):
                    raise DamagedError(
                        f"{self.step}: rank {rank}'s part of {name} has {fragment.numel()} elements; {size} are "
                        "expected"
                    )
                tensor = self._piece(fragment.view(-1), 0, stop - start)
                pieces.setdefault(("weight", name), []).append(FlatSlice(start, stop, tensor))
                shapes[name] = tuple(shape)

    def _kinds(self, master: Tensor, state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Return the flat tensors of one group: the masters as ``weight``, and each optimizer state under its own name.

        Raises:
            DamagedError: if an optimizer state is shorter than the masters.
        """
        moments = []
        for kind, value in state.items():
            if (
                not isinstance(value, Tensor)
                or value.dim() == 0
                or (value.numel() == 1 and master.numel() != 1)
            ):
                continue
            # DeepSpeed saves the masters without the padding at their end, and the moments with the padding.
            if value.dim() != 1 or value.numel() < master.numel():
                raise DamagedError(
                    f"{self.step}: {kind} has the shape {list(value.shape)}, and the fp32 weights beside it have "
                    f"{master.numel()} elements; the files were cut or are of different runs"
                )
            moments.append((self._kind(kind), value))
        return [("weight", master), *moments]

    def _kind(self, name: Any) -> str:
        if str(name) in _OUR_KINDS or not str(name).isidentifier():
            raise DamagedError(
                f"{self.step}: the optimizer has a state called {str(name)[:80]!r}, which names something else here; "
                "load the weights alone"
            )
        return str(name)

    def _all_of(self, tensor: Tensor) -> FlatSlice:
        flat = tensor.contiguous().view(-1)
        return FlatSlice(0, flat.numel(), flat)

    def _piece(self, flat: Tensor, start: int, elements: int) -> Tensor:
        if start + elements > flat.numel():
            raise DamagedError(
                f"{self.step}: a flat tensor has {flat.numel()} elements; {start + elements} are needed"
            )
        return flat[start : start + elements]

    # -- numbers

    def trainer(self, weights_only: bool = False) -> dict[str, Any]:
        """Return ``trainer.json`` of the new step: counters, step counts, loss scale, and the client's state."""
        counters = {name: int(self.model.get(name) or 0) for name in _COUNTERS}
        client = {str(key): value for key, value in self.model.items() if key not in _KNOWN}
        step = counters["global_steps"]
        return {
            "engine": {
                "step": step,
                "applied": step - counters["skipped_steps"],
                "loss_scale": self._loss_scale(),
                "optimizer": {"common": {} if weights_only else self._scalars(), "exceptions": {}},
            },
            "user": {
                "counters": counters,
                "lr_scheduler": _plain(self.model.get("lr_scheduler"), "lr_scheduler"),
                "client": _plain(client, "the client's state"),
            },
        }

    def _loss_scale(self) -> dict[str, Any] | None:
        """Return the state of the dynamic loss scale; None if the step has none."""
        if self.parts:
            told = (
                vars(self.parts[0]["loss_scaler"])
                if hasattr(self.parts[0].get("loss_scaler"), "__dict__")
                else {}
            )
            if not self.parts[0].get("dynamic_loss_scale"):
                return None
        else:
            told = self.model.get("optimizer") or {}
            if not told.get("dynamic_loss_scale"):
                return None
        clean = int(told.get("cur_iter", 0)) - int(told.get("last_overflow_iter", -1)) - 1
        # After an overflow, DeepSpeed waits one step more before the first growth: precision.loss_scale.growth_delay.
        window = int(told.get("scale_window") or 0)
        return {
            "scale": float(told["cur_scale"]),
            "clean_steps": (clean - 1) % window if clean > 0 and window else clean - 1,
            "overflows_left": int(told.get("cur_hysteresis", 1)),
        }

    def _scalars(self) -> dict[str, float]:
        """Return step counts and other single numbers, which must be equal for all parameters.

        Raises:
            CheckpointError: if parameters have had different numbers of steps.
        """
        if self.parts:
            states = self._flats(self.parts[0])[1]
        else:
            optimizer = self.model.get("optimizer") or {}
            states = list(optimizer.get("optimizer_state_dict", optimizer).get("state", {}).values())
        found: dict[str, float] = {}
        for numbers in _numbers(states):
            for name, value in numbers.items():
                if found.setdefault(name, value) != value:
                    raise CheckpointError(
                        f"{self.step}: its parameters have had different numbers of steps ({name} is {found[name]:g} "
                        f"and {value:g}), which is not read here; load the weights alone"
                    )
        return found


def _has_pieces(model: Mapping[str, Any]) -> bool:
    """Return True if a file of model states is of stage 3, whose weights are in the files of optimizer states."""
    module = model.get("module") or {}
    weights = [tensor for name, tensor in module.items() if isinstance(tensor, Tensor)]
    return bool(model.get("frozen_param_fragments")) or bool(weights and not any(map(Tensor.numel, weights)))


def _numbers(states: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the step counts and other single numbers of each group of one rank."""
    return [
        {
            str(name): float(value)
            for name, value in state.items()
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
        }
        for state in states
    ]


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries, lists, tuples and stand-ins."""
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
            continue
        inner = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        )
        if isinstance(value, _FragmentStandIn | _ScalerStandIn):
            inner = vars(value).values()
        if inner and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(inner)


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` in types of JSON.

    Raises:
        CheckpointError: if ``value`` has a type that JSON lacks; the error names the place.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{where}, {key!r}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    if isinstance(value, Tensor) and value.numel() <= 1024:
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}; numbers, text, lists and dictionaries are taken over"
    )


def rewrite(
    step: Path, out: Path, groups: Sequence[Sequence[str]] | None, weights_only: bool = False
) -> list[str]:
    """Convert the step that DeepSpeed saved in ``step`` into a Shardwise step under ``out``, in this process.

    Args:
        step: The folder of the step.
        out: The folder to write into.
        groups: Names of the parameters of each optimizer group, in order; see ``convert``.
        weights_only: True to leave out the moments.

    Returns:
        A description of each part that was left out.

    Raises:
        CheckpointError: if the files do not have DeepSpeed's layout.
    """
    try:
        found = DeepSpeedStepFiles(step)
        items, trainer, aliases = found.items(groups), found.trainer(weights_only), found.aliases()
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise CheckpointError(
            f"{step}: it is not laid out as DeepSpeed 0.14 to 0.19 lays a step out "
            f"({type(error).__name__}: {str(error)[:400]})"
        ) from None
    if weights_only:
        items = [item for item in items if item.kind in MODEL_KINDS]
    policy = CheckpointPolicy(asynchronous=False)
    Checkpoints(out, policy=policy, run=step.name).save(
        trainer["engine"]["step"], items, trainer, aliases=aliases
    )
    return found.left_out


def main() -> None:
    """Read a task from standard input, convert the step, and print the result as one line of JSON."""
    task = json.load(sys.stdin)
    answer: dict[str, Any] = {"error": "", "left_out": []}
    try:
        answer["left_out"] = rewrite(
            Path(task["step"]), Path(task["out"]), task["groups"], task["weights_only"]
        )
    except CheckpointError as error:
        answer["error"] = str(error)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
