"""The whole model as tensors in a mapped file, for exports of models that are larger than memory.

    all ranks    gather one Unit after the other
    rank 0       writes each tensor into one file, maps the file, and removes its name

Functions that read the tensors (``save_pretrained``, ``torch.save``) read the file, of which the system caches as much
as memory allows. When the last tensor is freed, the system frees the file's space.

Cost: the model written and read once more, to and from a disk or the page cache; memory of one Unit.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError
from shardwise.base.words import in_words, plain_name
from shardwise.engine.parts.metrics import agree
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state import state
from shardwise.formats.safetensors import SafetensorsWriter, read_header


def mapped_state_dict(
    parts: EngineParts, folder: Path, trained_only: bool, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the whole model in a mapped file; see ``Engine.mapped_state_dict``."""
    state.settle(parts)
    infos = {info.name: info for info in parts.registry.of_kind("parameter")}
    if trained_only:
        infos = {name: info for name, info in infos.items() if parts.spec.parameters[name].trained}
    else:
        kept = {name for name, (_, _, is_saved) in parts.spec.buffers.items() if is_saved}
        infos |= {info.name: info for info in parts.registry.of_kind("buffer") if info.name in kept}
    dtypes = {
        name: dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
        for name, info in infos.items()
    }
    order = sorted(infos, key=lambda name: -dtypes[name].itemsize)  # aligns each tensor to its itemsize
    tensors, failed, found = _each(parts, trained_only), "", {}
    if parts.world.rank == 0:
        file = folder / f".shardwise_{token_hex(6)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with SafetensorsWriter(file, {name: infos[name].shape for name in order}, dtypes) as writer:
                for name, tensor in tensors:
                    writer.write(name, tensor)
            found = {name: stored.mapped() for name, stored in read_header(file).items()}
        except OSError as error:
            failed = in_words(error)
        finally:
            with suppress(OSError):
                file.unlink()
    # Other ranks, and rank 0 after a failed write, run the remaining gathers: they are collective.
    for _ in tensors:
        pass
    if agree(parts, bool(failed)):
        size = sum(info.elements * dtypes[name].itemsize for name, info in infos.items())
        raise CheckpointError(
            f"the whole model takes {size / 1e9:.3f} GB in {folder} while it is exported: "
            f"{failed or 'rank 0 could not write it; see its log'}"
        )
    found |= {alias: found[name] for alias, name in parts.spec.canonical.items() if name in found}
    return {plain_name(name): found[name] for name in parts.spec.order if name in found}


def _each(parts: EngineParts, trained_only: bool) -> Iterator[tuple[str, Tensor]]:
    for info, tensor in state.each_parameter(parts, trained_only):
        yield info.name, tensor
    if not trained_only:
        yield from state.whole_buffers(parts, state.own_buffers(parts)).items()
