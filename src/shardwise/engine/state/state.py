"""Reading and writing model state from outside: bytes, gradients, whole parameters. Every function is collective.

A whole tensor is put together along the axes that cut it: first the flat ranges of its bucket, then its slices axis by
axis, and then the stage that holds it broadcasts it. Units are gathered one at a time, so that a rank never holds more
than one Unit beyond its own state (``full_parameters`` and ``gradients`` hold all).
"""

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from shardwise.base.errors import MismatchError, UsageError
from shardwise.base.policy import nearest
from shardwise.base.words import bytes_text, plain_name
from shardwise.comm.collectives import Group
from shardwise.comm.equality import are_equal, terms
from shardwise.engine.parts.metrics import agree
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state.start_weights import StartWeights
from shardwise.observe.memory import available_bytes
from shardwise.parallel.zero.bucket import NUMBERS, BucketState
from shardwise.plan.registry import TensorInfo
from shardwise.plan.unit import ParameterSlot

_CHUNK_BYTES = 1 << 26
"""Bytes of weights that are read at a time to compare them between ranks."""


_WORTH_ASKING_BYTES = 1 << 30
"""Bytes of a model below which it is gathered without a check of the free memory."""


def lacks_room(parts: EngineParts, on: torch.device | None = None) -> str:
    """Return the reason why the whole model does not fit into free memory, the same on all ranks. Collective if large.

    Args:
        parts: The running parts of the engine.
        on: The device for whole copies; None if the model's own parameters become whole on this rank's device.

    Returns:
        A sentence; empty if the model fits.
    """
    everything = sum(info.elements * info.dtype.itemsize for info in parts.registry.of_kind("parameter"))
    if everything < _WORTH_ASKING_BYTES:
        return ""
    device, world = on or parts.device, parts.world
    size = everything
    if on is None:  # weights that are whole already take no further memory
        size = sum(
            bucket.layout.elements * bucket.dtypes.compute.itemsize
            for bucket in buckets(parts)
            if bucket.weight.has_window
        )
    sharers = world.local_size if device.type == "cpu" else 1
    free = available_bytes(device)
    if not agree(parts, free is not None and size * sharers > free):
        return ""
    has = "unknown" if free is None else bytes_text(free)
    return (
        f"whole parameters take {bytes_text(size)} on each of {sharers} ranks that share this memory, and {has} of it "
        "are free here, or too little on another rank"
    )


def buckets(parts: EngineParts) -> list[BucketState]:
    """Return all buckets, including frozen ones, in order of Units."""
    return [bucket for hooks in parts.hooks for state in hooks.states for bucket in state.buckets]


def finish_updates(parts: EngineParts) -> None:
    """Wait until the updates that STEP began, between ranks or on another tier, have reached the weights.

    Raises:
        TierError, DamagedError: if an update on another tier has failed.
    """
    for bucket in buckets(parts):
        bucket.weight.finish_update()


def settle(parts: EngineParts, call: str = "") -> None:
    """Adopt an update that counts one step late (``offload.step: delayed``). Collective, between two steps.

    In the middle of a step the weights with which the step runs stay.

    Args:
        parts: The running parts of the engine.
        call: Name of the calling method if it needs the updated weights.

    Raises:
        UsageError: in the middle of a step, if ``call`` is given and an update is late.
        TierError, DamagedError: if the update on another tier has failed.
    """
    take_up_edits(parts)
    late = [bucket for bucket, _ in parts.trained if bucket.weight.is_late]
    if late and parts.accumulation.passes:
        if call:
            raise UsageError(
                f"{call}: in the middle of a step, whose gradients are those of weights without the update under way "
                "(offload.step: delayed); call it between two steps, or engine.discard() first"
            )
        return
    units = {
        hooks.windows.first + state.unit.index
        for hooks in parts.hooks
        for state in hooks.states
        if not set(late).isdisjoint(state.buckets)
    }
    with parts.walker.aside([each for each in parts.program.plan.own.skipped if each.unit in units]):
        parts.walker.run()
    for hooks in parts.hooks:
        hooks.windows.finish_updates()


def take_up_edits(parts: EngineParts) -> None:
    """Copy parameters that were edited in place since the last update into their masters.

    Edits such as ``p.data.clamp_()`` or ``p.copy_()`` would otherwise be overwritten from the masters. Every rank
    copies its own part; all ranks must have edited alike.

    Raises:
        TierError, DamagedError: if masters on a disk cannot be read or written.
    """
    for bucket, _ in parts.trained:
        places = bucket.weight.edited_places()
        if places:
            bucket.take_up_edits(places)


def gradients(parts: EngineParts, divisor: float) -> dict[str, Tensor]:
    """Return the gradients summed over ranks and microbatches and divided by ``divisor``, by name."""
    votes = [float(used) for bucket, _ in parts.trained for used in bucket.gradient.used]
    vector = torch.tensor(votes, dtype=torch.float64, device=parts.device)
    parts.dp.all_reduce(vector, "which parameters were used", purpose="control").wait()
    used = vector.tolist()
    found: dict[str, Tensor] = {}
    place = 0
    for bucket, _ in parts.trained:
        full = bucket.weight.gathered_copy(bucket.gradient.owned)
        for slot, view in zip(bucket.layout.slots, bucket.views.fresh(full), strict=True):
            if used[place]:
                found[slot.name] = view / divisor
            place += 1
    return assembled(parts, found, parts.registry.of_kind("gradient"))


@contextmanager
def summoned_parameters(parts: EngineParts) -> Iterator[None]:
    """Keep all weights of this rank gathered inside. Implements ``Engine.gathered``."""
    if why := lacks_room(parts):
        raise UsageError(f"gathered: {why}; without it each pass gathers Unit by Unit")
    settle(parts)
    summoned = _summon(parts)
    try:
        yield
    finally:
        for bucket, places in summoned:
            with bucket.opened(kinds=()):
                bucket.weight.restore(places, keep=False)


Which = str | nn.Parameter | nn.Module | Iterable[str | nn.Parameter | nn.Module] | None
"""Names, parameters or modules that select some of a model's parameters; None for all."""


@contextmanager
def full_parameters(
    parts: EngineParts, which: Which, write: bool, from_rank: int | None
) -> Iterator[dict[str, nn.Parameter]]:
    """Yield whole parameters by name, and take back their edits. Implements ``Engine.full_parameters``."""
    if which is None and (why := lacks_room(parts, parts.device if _is_cut(parts) else None)):
        raise UsageError(f"full_parameters: {why}; it hands all of them over, so name some at a time")
    names = None if which is None else _names_of(parts, which)
    world = parts.groups["world"]
    if from_rank is not None and not 0 <= from_rank < world.size:
        raise UsageError(
            f"full_parameters: from_rank is {from_rank}; the engine's ranks are 0 to {world.size - 1}"
        )
    keep = write or from_rank is not None
    settle(parts, "full_parameters(write=True)" if keep else "")
    summoned = _summon(parts, names)
    is_cut = _is_cut(parts)
    whole = {
        bucket.layout.slots[place].name: bucket.parameters[place]
        for bucket, _ in summoned
        for place in _places(bucket, names)
    }
    versions: dict[str, int] = {}
    if is_cut:
        own = {name: parameter.detach() for name, parameter in whole.items()}
        infos = [info for info in parts.registry.of_kind("parameter") if names is None or info.name in names]
        whole = {
            name: nn.Parameter(tensor, requires_grad=False)
            for name, tensor in assembled(parts, own, infos).items()
        }
        versions = {name: parameter._version for name, parameter in whole.items()}
    aliases = parts.spec.canonical.items()
    edited: list[str] = []
    is_alike = True
    try:
        with torch.no_grad():
            yield {alias: whole[name] for alias, name in aliases if name in whole}
            if from_rank is not None:
                for name in sorted(whole):
                    _send(world, whole[name], from_rank, name)
            elif write:
                is_alike = are_alike(parts, [whole[name] for name in sorted(whole)])
    finally:
        for bucket, places in summoned:
            for place in places if is_cut and keep else ():
                name = bucket.layout.slots[place].name
                take(parts, name, whole[name].data, bucket.parameters[place].data)
            with bucket.opened(changes=keep, kinds=NUMBERS if keep else ()):
                edited += bucket.weight.restore(places, keep and is_alike)
        edited += [name for name, version in versions.items() if whole[name]._version != version]
    if edited and not keep:
        raise UsageError(
            f"full_parameters: {', '.join(edited[:5])} was edited in a context for reading, in which some ranks "
            "and stages lose the edit; use full_parameters(write=True)"
        )
    if not is_alike:
        raise UsageError(
            "full_parameters: the ranks edited the weights to unlike values; edit alike on all ranks, or say whose "
            "edits count: full_parameters(..., from_rank=0)"
        )


def _names_of(parts: EngineParts, which: Which) -> set[str]:
    """Return the first names of the parameters that a user has selected.

    Raises:
        UsageError: for an unknown name, parameter or module.
    """
    canonical, found = parts.spec.canonical, set()
    held = {
        id(parameter): slot.name
        for bucket in buckets(parts)
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
    }
    one = isinstance(which, str | nn.Parameter | nn.Module)
    for each in (which,) if one else which or ():  # type: ignore[union-attr]
        if isinstance(each, str):
            if each not in canonical:
                raise UsageError(
                    f"full_parameters: no parameter is called {each!r}{nearest(each, [*canonical])}"
                )
            found.add(canonical[each])
        elif not isinstance(each, nn.Parameter | nn.Module):
            raise UsageError(
                f"full_parameters: expected names, parameters or modules, given a {type(each).__name__}"
            )
        elif parts.mesh.pp > 1:
            raise UsageError(
                "full_parameters: with mesh.pp above 1 no rank has all parameters, so all ranks say which by name"
            )
        else:
            objects = [each] if isinstance(each, nn.Parameter) else list(each.parameters())
            if not all(id(parameter) in held for parameter in objects):
                raise UsageError(
                    f"full_parameters: a {type(each).__name__} that is not the engine's (a copy, another model's, or "
                    "of a layer that was cut along tp); take it from engine.module, or say which by name"
                )
            found |= {held[id(parameter)] for parameter in objects}
    return found


def _places(bucket: BucketState, names: Collection[str] | None) -> list[int]:
    slots = enumerate(bucket.layout.slots)
    return [place for place, slot in slots if names is None or slot.name in names]


def _summon(parts: EngineParts, names: Collection[str] | None = None) -> list[tuple[BucketState, list[int]]]:
    """Gather the buckets of ``names`` (default: all).

    Returns:
        The buckets, each with the indices of its parameters that show whole weights until ``restore``.
    """
    wanted = [(bucket, _places(bucket, names)) for bucket in buckets(parts)]
    found = []
    for bucket, places in wanted:
        if places:
            with bucket.opened(kinds=("weight",)):
                found.append((bucket, bucket.weight.summon(places)))
    return found


def _send(group: Group, tensor: Tensor, root: int, what: str) -> None:
    """Overwrite ``tensor`` with that of rank ``root``."""
    flat = tensor.detach().contiguous().view(-1)
    group.broadcast(flat, root, what).wait()
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def are_alike(parts: EngineParts, tensors: Sequence[Tensor]) -> bool:
    """Return whether all ranks hold the same bits. Collective."""
    world = parts.groups["world"]
    if world.size == 1:
        return True
    mark = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(bits), _CHUNK_BYTES):
            mark = zlib.crc32(bits[start : start + _CHUNK_BYTES].cpu().numpy().tobytes(), mark)
    sums = torch.tensor(terms(mark, 32), dtype=torch.float64, device=parts.device)
    world.all_reduce(sums, "whether edits are alike", purpose="control").wait()
    return are_equal(world.size, sums.tolist())


def give_back(parts: EngineParts) -> None:
    """Give the model's parameters their weights back, when the engine closes.

    The parameters are whole over the data-parallel ranks, each in the dtype that it had before, as are buffers. A
    second call does nothing.
    """
    settle(parts)
    for name, buffer in own_buffers(parts).items():
        buffer.data = buffer.data.to(parts.spec.buffers[name].dtype)
    for bucket in buckets(parts):
        with bucket.opened(kinds=NUMBERS):
            bucket.weight.give_back([parts.spec.parameters[slot.name].dtype for slot in bucket.layout.slots])


def state_dict(parts: EngineParts, trained_only: bool = False) -> dict[str, Tensor]:
    """Return copies of the whole parameters and buffers on the CPU. Implements ``Engine.state_dict``."""
    if not trained_only and (why := lacks_room(parts, torch.device("cpu"))):
        raise UsageError(
            f"state_dict: {why}; take mapped_state_dict(folder), full_tensor(name), or save(directory)"
        )
    settle(parts)
    whole = whole_parameters(parts, trained_only)
    if not trained_only:
        whole |= whole_buffers(parts, own_buffers(parts))
    return {plain_name(name): whole[name] for name in parts.spec.order if name in whole}


def whole_parameters(parts: EngineParts, trained_only: bool = False) -> dict[str, Tensor]:
    """Return copies of the whole parameters on the CPU, tied parameters under each of their names."""
    whole = {
        info.name: tensor.detach().to("cpu", copy=True)
        for info, tensor in each_parameter(parts, trained_only)
    }
    return {alias: whole[name] for alias, name in parts.spec.canonical.items() if name in whole}


def each_parameter(parts: EngineParts, trained_only: bool = False) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Yield whole parameters one after the other, in the same order on all ranks. Collective.

    The buckets of one Unit are gathered at a time, so use a tensor before the next is requested.
    """
    places: dict[str, tuple[int, int, int]] = {}
    for number, ranks in enumerate(parts.program.plan.classes.values()):
        for unit in ranks.units:
            for place, layout in enumerate(unit.buckets):
                for slot in layout.slots:
                    places.setdefault(slot.name, (number, unit.index, place))
    own = {slot.name: (bucket, i) for bucket in buckets(parts) for i, slot in enumerate(bucket.layout.slots)}
    gathered: tuple[BucketState, list[Tensor]] | None = None
    for info in sorted(parts.registry.of_kind("parameter"), key=lambda info: places[info.name]):
        if trained_only and not parts.spec.parameters[info.name].trained:
            continue
        here: dict[str, Tensor] = {}
        if info.name in own:
            bucket, place = own[info.name]
            if gathered is None or gathered[0] is not bucket:
                gathered = None
                with bucket.opened(kinds=("weight",)):
                    gathered = bucket, bucket.views.fresh(bucket.weight.gathered_copy())
            here = {info.name: gathered[1][place]}
        yield info, assembled(parts, here, [info])[info.name]


def whole_buffers(parts: EngineParts, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU of the persistent buffers of all stages; ``held`` has the buffers of this rank."""
    whole: dict[str, Tensor] = {}
    stages = parts.stage_group
    for name, (shape, _, is_persistent) in parts.spec.buffers.items():
        if not is_persistent:
            continue
        info = parts.registry.get("buffer", name)
        owner = parts.owner(info)
        flat = torch.empty(prod(shape), dtype=info.dtype, device=parts.device)
        if stages.index == owner:
            flat.copy_(held[name].detach().reshape(-1))
        stages.broadcast(flat, owner, name).wait()
        whole[name] = flat.view(shape).to("cpu", copy=True)
    return whole


def load_state_dict(parts: EngineParts, given: Mapping[str, Tensor], strict: bool) -> None:
    """Load whole tensors; each rank writes only the elements that it owns. Implements ``Engine.load_state_dict``."""
    whole = parts.spec
    settle(parts, "load_state_dict")
    names = {plain_name(name): name for name in whole.order}  # torch.compile adds words to the names
    given = {names.get(plain_name(name), name): value for name, value in given.items()}
    _check_names(parts, given, strict)
    if any(bucket.weight.is_summoned for bucket in buckets(parts)):
        raise UsageError(
            "load_state_dict: not inside engine.full_parameters() or engine.gathered(); call it outside of them"
        )
    tensors = {whole.canonical[name]: tensor for name, tensor in given.items() if name in whole.canonical}

    def elements(slot: ParameterSlot, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return tensors[slot.name].detach().reshape(-1)[start:stop].to(dtype)

    fill = StartWeights(elements, tensors).of_pieces(parts.slices).fill
    assert fill is not None, "there are elements to write"
    with torch.no_grad():
        for bucket in buckets(parts):
            bucket.fill(fill, lambda slot: slot.name in tensors)
        for name, buffer in own_buffers(parts).items():
            if name in given and whole.buffers[name][2]:
                buffer.copy_(given[name])


def _check_names(parts: EngineParts, given: Mapping[str, Tensor], strict: bool) -> None:
    whole = parts.spec
    if others := [name for name, value in given.items() if not isinstance(value, Tensor)]:
        raise MismatchError(f"load_state_dict: expected tensors by name; {others[:5]} are none")
    missing = [name for name in whole.order if name not in given]
    unknown = [name for name in given if name not in whole.order]
    shapes = {name: entry.shape for name, entry in whole.parameters.items()}
    shapes |= {alias: shapes[name] for alias, name in whole.canonical.items()}
    shapes |= {name: shape for name, (shape, _, _) in whole.buffers.items()}
    others = [
        f"{name} {tuple(tensor.shape)} for {shapes[name]}"
        for name, tensor in given.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if others or (strict and (missing or unknown)):
        raise MismatchError(
            f"load_state_dict: a state of another model: missing {missing[:5] or 'nothing'}, not known here "
            f"{unknown[:5] or 'nothing'}, of another shape {others[:5] or 'nothing'}. It takes whole tensors under the "
            "model's own names, as engine.state_dict() returns them; strict=False loads those names that are known"
        )


def own_buffers(parts: EngineParts) -> dict[str, Tensor]:
    """Return the model's buffers on this rank by name."""
    return {name: buffer for stage in parts.stages for name, buffer in stage.module.named_buffers()}


# Whole tensors -----------------------------------------------------------------------------------------------------


def assembled(
    parts: EngineParts, own: Mapping[str, Tensor], infos: Sequence[TensorInfo]
) -> dict[str, Tensor]:
    """Return whole tensors on every rank, put together over slices and stages.

    Args:
        parts: The running parts of the engine.
        own: This rank's pieces by name, already whole over the ranks that share their state.
        infos: The registry's entries of all wanted tensors, the same on all ranks.
    """
    model, stages = parts.groups["model"], parts.stage_group
    if not _is_cut(parts, infos):
        return dict(own)
    is_owner = [parts.owner(info) == stages.index and info.name in own for info in infos]
    present = torch.tensor(is_owner, dtype=torch.float64, device=parts.device)
    model.all_reduce(present, "which parameters were used", purpose="control").wait()
    found = {}
    for info, is_here, count in zip(infos, is_owner, present.tolist(), strict=True):
        if not count:
            continue
        full = torch.empty(info.shape, dtype=info.dtype, device=parts.device)
        if is_here:
            _put_together(parts, info, own[info.name].to(parts.device, info.dtype), full)
        stages.broadcast(full.view(-1), parts.owner(info), info.name).wait()
        found[info.name] = full
    return found


def _is_cut(parts: EngineParts, infos: Sequence[TensorInfo] | None = None) -> bool:
    """Return whether other ranks hold stages or slices of these tensors (default: of all parameters)."""
    wanted = parts.registry.of_kind("parameter") if infos is None else infos
    return parts.groups["model"].size > 1 or any(map(parts.slices.cut_axes, wanted))


def _put_together(parts: EngineParts, info: TensorInfo, piece: Tensor, full: Tensor) -> None:
    """Fill ``full`` from the pieces of all ranks of the stage, gathered over one axis after the other."""
    slices, gathered = parts.slices, piece.contiguous().view(-1)
    ranks: tuple[int, ...] = (slices.rank,)
    for axis in slices.cut_axes(info):
        group = parts.groups[axis]
        wider = torch.empty(group.size * gathered.numel(), dtype=info.dtype, device=parts.device)
        group.all_gather(wider, gathered, info.name, purpose="control").wait()
        # The gathered axis is the slowest: all elements of rank 0 of the axis, then all of rank 1.
        gathered, ranks = wider, slices.mesh.along(axis, ranks)
    for rank, held in zip(ranks, gathered.view(len(ranks), -1), strict=True):
        for whole, theirs in slices.of(rank).views(info, full, held):
            whole.copy_(theirs)


def take(parts: EngineParts, name: str, full: Tensor, piece: Tensor) -> None:
    """Write this rank's part of ``full`` into ``piece``."""
    for theirs, mine in parts.slices.views(parts.registry.get("parameter", name), full, piece):
        mine.copy_(theirs)
