"""Placements of all tensors in one pass on shapes, derived operation by operation.

A dispatch mode sees every operation below autograd, forward and backward, and keeps for each tensor how it lies on the
ranks of one axis:

    whole      equal on all ranks (Replicate)
    slice      each rank holds a slice of one dim (Shard)
    addend     the sum over the ranks is the tensor (Partial)
    own        values of each rank's own, which are no slice and no addend (PerRank)
    zero       zeros, which are whole and addends at once
    unknown    no rule covers the operation that made the tensor

Parameters and the batch have their placements from the registry. An operation hands placements on by the rule of its
class (placement_rules.py); a collective moves them, and the transport of the pass reports it (``PlacementTransport``).
The backward pass runs under the same rules, so that the placement of each gradient is derived from the model's code:
a sum over a dim that is cut is an addend. An operation that is not linear in an addend is a problem.

A dim that is cut may be one factor of a dim: tokens cut along T that are flattened to [B·T] are cut in runs. The cut is
kept as (dim, factor, inner): the factor's size and the elements of the dim inside one of its places.

Papers: the types of ``spmd_types`` (replicate, invariant, varying, partial) are these placements, found by a pass
        instead of annotations; Korthikanti et al. 2022, arXiv:2205.05198, for gradients under sequence parallelism.
Cost:   some 100 microseconds for each operation, whatever the sizes and the number of ranks.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.flights import PendingCollective
from shardwise.comm.transports import Move, NoTransport
from shardwise.passes.absent import AbsentTensor
from shardwise.plan.placement import Partial, PerRank, Placement, Replicate, Shard, ShardBlock
from shardwise.simulate.placement_blocks import as_one, mixed, placements_of
from shardwise.simulate.placement_rules import (
    ADDEND,
    OWN,
    UNKNOWN,
    UNMASKED,
    WHOLE,
    ZERO,
    Lie,
    Mismatch,
    beside_unit,
    in_memory,
    slice_of,
    viewed_back,
)
from shardwise.simulate.storages import line_of_model

_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")


class PlacementProblem(NamedTuple):
    """A tensor that does not lie as an operation, a collective or the registry needs it."""

    name: str
    """Name of the parameter, or of the operation whose operand is wrong."""
    module: str
    """Name of the module in whose forward, or in the gradient of whose forward, it was found."""
    line: str
    """``file:line`` of the model's source; empty if unknown."""
    wanted: str
    found: str

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return (
            f"{self.name} in {self.module or 'the model'}{where}: expected {self.wanted}, found {self.found}"
        )


class UnknownOperation(NamedTuple):
    """An operation that no rule covers, with operands that differ by rank."""

    operation: str
    module: str
    line: str


class ActivationForm(NamedTuple):
    """Shape, dtype and placement of an activation or of its gradient on a rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    lie: Lie


class _Place(NamedTuple):
    """The module and the line of an operation."""

    module: str
    line: str


class _Written(NamedTuple):
    """The last write into a storage by an operation in place or by a collective."""

    order: int
    """Number of the write among all results and writes."""
    lie: Lie
    form: tuple[Sequence[int], Sequence[int]]
    """Shape and strides of the tensor through which it was written."""


class ModuleActivations:
    """Inputs and outputs of the modules of one model, with their placements, noted while the modules run.

    Args:
        module: The model.
        lie_of_tensor: Function that returns the placement of a tensor.
    """

    def __init__(self, module: nn.Module, lie_of_tensor: Callable[[Tensor], Lie]) -> None:
        self.outputs: dict[tuple[str, str], ActivationForm] = {}
        """Inputs and outputs in a module's first call, by name of the module and ``input`` or ``output``."""
        self.gradients: dict[tuple[str, str], ActivationForm] = {}
        """Gradients that reach these inputs and outputs."""
        self._names = {id(each): name for name, each in module.named_modules()}
        self._inside: list[str] = []
        self._handles: list[Any] = []
        self._lie_of = lie_of_tensor

    @property
    def running(self) -> str:
        """Name of the innermost module that runs; empty outside of modules."""
        return self._inside[-1] if self._inside else ""

    def watch(self) -> None:
        """Register hooks that note the tensors of all modules that run."""
        register = torch.nn.modules.module
        self._handles = [
            register.register_module_forward_pre_hook(self._begin),
            register.register_module_forward_hook(self._end, always_call=True),
        ]

    def end(self) -> None:
        """Remove the hooks that note tensors."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self._names.get(id(module), self.running))
        with torch._C.DisableTorchFunction():  # a caller may watch the torch functions of a module
            self._note(module, "input", args)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside:
            self._inside.pop()
        with torch._C.DisableTorchFunction():
            self._note(module, "output", output)

    def _note(self, module: nn.Module, label: str, value: Any) -> None:
        """Note the first tensor of an input or an output, and its gradient as soon as there is one."""
        tensor = value[0] if isinstance(value, tuple) and value else value
        key = self._names.get(id(module), ""), label
        if not key[0] or key in self.outputs or not isinstance(tensor, Tensor):
            return
        if isinstance(tensor, AbsentTensor) or not tensor.is_floating_point():
            return
        self.outputs[key] = ActivationForm(tuple(tensor.shape), tensor.dtype, self._lie_of(tensor))

        def reached(gradient: Tensor) -> None:
            form = ActivationForm(tuple(gradient.shape), gradient.dtype, self._lie_of(gradient))
            self.gradients.setdefault(key, form)

        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]


class PlacementMode(TorchDispatchMode):
    """Derives the placements on one axis of all tensors that operations make inside the ``with`` block.

    Args:
        module: The module that runs, for names.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.operations = 0
        """Number of operations that were checked."""
        self.unknown_results = 0
        """Number of operations whose result is unknown, those that follow an unknown operation included."""
        self.problems: list[PlacementProblem] = []
        self.unknown: list[UnknownOperation] = []
        self.modules = ModuleActivations(module, self.get)
        """Inputs and outputs of the modules that run."""
        self._lies: Any = WeakIdKeyDictionary()
        self._written: Any = WeakIdKeyDictionary()
        self._count = 0
        self._places: dict[int, _Place] = {}
        self._lines: dict[str, str] = {}
        self._viewed: dict[int, Lie] = {}
        """Placements of the tensors that views of the forward pass were given, by number of the view's node."""
        self._lost_view = False
        """True if a tensor was read whose memory was written through another view, and no rule covers that."""

    def __enter__(self) -> Any:
        self.modules.watch()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.modules.end()
        super().__exit__(*error)

    def set(self, tensor: Tensor, lie: Lie) -> None:
        """Set the placement of a tensor."""
        self._count += 1
        if lie.kind == "slice" and lie.factor * lie.inner > tensor.shape[lie.dim]:
            lie = slice_of(lie.dim, tensor.shape[lie.dim])
        if lie.kind == "slice" and lie.factor == 1:
            lie = beside_unit(lie, tensor.shape)
        self._lies[tensor] = (self._count, lie)

    def get(self, tensor: Tensor) -> Lie:
        """Return the placement of a tensor; of one made outside of the pass, or absent on this stage, whole."""
        if isinstance(tensor, AbsentTensor):
            return WHOLE
        count, lie = self._lies.get(tensor, (0, WHOLE))
        written = self._written.get(tensor.untyped_storage()) if self._written else None
        if written is None or written.order <= count:
            return lie
        if written.form == (tensor.shape, tensor.stride()) or written.lie.kind not in ("slice", "mixed"):
            return written.lie
        found = UNKNOWN if written.lie.kind == "mixed" else in_memory(written.lie, written.form, tensor)
        self._lost_view |= found is UNKNOWN
        return found

    def write(self, tensor: Tensor, lie: Lie) -> None:
        """Set the placement of a tensor and of all others in its storage."""
        if isinstance(tensor, AbsentTensor):
            return
        self.set(tensor, lie)
        if not tensor.numel():
            return
        self._written[tensor.untyped_storage()] = _Written(self._count, lie, (tensor.shape, tensor.stride()))

    def line_of(self, module: str) -> str:
        """Return the first line of source that ran inside a module in the forward pass."""
        return self._lines.get(module, "")

    def refuse(self, name: str, wanted: str, found: str, place: "_Place | None" = None) -> None:
        """Record a problem, each of one place once."""
        where = place or self._place()
        problem = PlacementProblem(name, where.module, where.line, wanted, found)
        if problem not in self.problems:
            self.problems.append(problem)

    def _place(self) -> _Place:
        """Return the place of the running operation; in a backward pass that of the forward operation."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is not None:
            return self._places.get(node._sequence_nr(), _Place("", ""))
        module = self.modules.running
        place = _Place(module, line_of_model(sys._getframe(2)))
        self._places[torch._C._autograd._get_sequence_nr() - 1] = place  # type: ignore[attr-defined]
        if place.line:
            self._lines.setdefault(module, place.line)
        return place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            return args[0]
        if func is torch.ops.aten.equal.default and args[0].dtype == torch.uint8:
            return True
        self._lost_view = False
        given = [self.get(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        out = func(*args, **kwargs)
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if not made:
            return out
        place = self._place()
        self.operations += 1
        name = str(func._overloadpacket).removeprefix("aten.")
        try:
            lies = self._of_results(func, name, args, kwargs, out)
        except Mismatch as error:
            self.refuse(name, error.wanted, error.found, place)
            lies = error.instead
        found = list(lies) if isinstance(lies, list) else [lies] * len(made)
        self.unknown_results += UNKNOWN in found
        if any(lie is UNKNOWN for lie in found) and (self._lost_view or UNKNOWN not in given):
            self.unknown.append(UnknownOperation(name, *place))
        if name == "embedding" and (self.get(args[0]).kind, self.get(args[0]).dim) == ("slice", 0):
            self.write(args[1], OWN)  # places among the rank's own rows
        inputs = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for tensor, lie in zip(made, found, strict=False):
            (self.write if id(tensor) in inputs else self.set)(tensor, lie)
        return out

    def _of_results(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> "Lie | list[Lie]":
        """Return the placements of an operation's results."""
        if name in _VIEWS:
            node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
            lie = self.get(args[0])
            if node is None:
                self._viewed[torch._C._autograd._get_sequence_nr() - 1] = lie  # type: ignore[attr-defined]
            elif lie.kind == "slice" and node._sequence_nr() in self._viewed:
                return viewed_back(args, out, self.get, self._viewed[node._sequence_nr()])
        found = placements_of(func, name, args, kwargs, out, self.get)
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if name in ("index", "index_select") and node is None:
            self._viewed[torch._C._autograd._get_sequence_nr() - 1] = self.get(args[0])  # type: ignore[attr-defined]
        elif name.rstrip("_") in ("index_put", "index_add") and node is not None:
            indices = [each for each in tree_leaves(args[1:3]) if isinstance(each, Tensor)]
            differ = any(
                self.get(each).kind in ("own", "slice") for each in indices if not each.is_floating_point()
            )
            if differ and self._viewed.get(node._sequence_nr()) == WHOLE:
                return ADDEND  # places of each rank's own in a whole tensor
        return found


class PlacementTransport(NoTransport):
    """Moves placements instead of bytes: the collectives of one axis, as the pass on shapes calls them.

    Args:
        mode: The mode of the pass that runs, when the collective runs.
        is_axis: True for the axis whose placements the mode derives; on another axis placements stay as they are.
    """

    def __init__(self, mode: Callable[[], PlacementMode | None], is_axis: bool) -> None:
        self._mode = mode
        self._is_axis = is_axis

    def all_gather(self, output: Tensor, shard: Tensor, timeout_s: float, what: str) -> PendingCollective:
        """Make the output whole."""
        mode = self._mode()
        if mode is not None:
            lie = mode.get(shard)
            if self._is_axis and lie.kind == "addend":
                mode.refuse(what, "a slice for all-gather", str(lie))
            mode.write(output, (UNKNOWN if lie is UNKNOWN else WHOLE) if self._is_axis else lie)
        return super().all_gather(output, shard, timeout_s, what)

    def reduce_scatter(
        self, shard_out: Tensor, full: Tensor, timeout_s: float, what: str, accumulate: bool = False
    ) -> PendingCollective:
        """Note that addends are summed; ``moved`` has the dim of the result."""
        mode = self._mode()
        if mode is not None:
            self._sum(mode, full, what)
            mode.write(shard_out, OWN if self._is_axis else mode.get(full))
        return super().reduce_scatter(shard_out, full, timeout_s, what, accumulate)

    def all_reduce(self, tensor: Tensor, timeout_s: float, what: str) -> None:
        """Make the sum of addends whole."""
        mode = self._mode()
        if mode is not None and self._is_axis:
            mode.write(tensor, self._sum(mode, tensor, what))

    def all_to_all(
        self, output: Tensor, sent: Tensor, counts: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> PendingCollective:
        """Give the output the placement of what is sent on another axis."""
        mode = self._mode()
        if mode is not None:
            lie = mode.get(sent)
            mode.write(output, UNKNOWN if self._is_axis or lie.kind == "slice" else lie)
        return super().all_to_all(output, sent, counts, timeout_s, what)

    def _sum(self, mode: PlacementMode, tensor: Tensor, what: str) -> Lie:
        lie = mode.get(tensor)
        if lie is UNKNOWN:
            return UNKNOWN
        if self._is_axis and lie.kind not in ("addend", "own", "zero"):
            mode.refuse(what, "an addend for a sum over the ranks", str(lie))
        return WHOLE

    def moved(self, move: Move, before: Tensor, after: Tensor, dim: int) -> None:
        """Set the placement of the result of a move along ``dim``."""
        mode = self._mode()
        if mode is None or not self._is_axis:
            return
        lie, what = mode.get(before), f"the tensor of a {move}"
        if lie is UNKNOWN and move in ("gather", "piece"):
            mode.set(after, UNKNOWN)
        elif move == "gather":
            if lie.kind == "whole" or (lie.kind == "slice" and lie.dim != dim):
                mode.refuse(what, f"a slice of dim {dim}", str(lie))
            mode.set(after, WHOLE)
        elif move == "scale":
            mode.set(after, {"whole": ADDEND, "addend": WHOLE}.get(lie.kind, lie))
        elif move == "own rows":
            if mode.get(after) == UNMASKED:
                said = "rows that each rank looked up in its own part"
                mode.refuse(what, "zeros for the rows that other ranks hold", said)
            mode.set(after, ADDEND)
        elif move == "own places":
            mode.set(after, OWN)
        elif move == "same rows":
            if lie.kind == mode.get(after).kind == "slice":
                mode.set(after, lie)
        else:
            if move == "piece" and lie.kind not in ("whole", "zero"):
                mode.refuse(what, "a whole tensor", str(lie))
            mode.set(after, slice_of(dim, after.shape[dim]))


def lie_of(placement: Placement, shape: Sequence[int], ranks: int) -> Lie:
    """Return the form of a registered placement on a rank.

    Args:
        placement: The placement on the axis.
        shape: Shape of the rank's piece.
        ranks: Ranks on the axis.
    """
    if isinstance(placement, Shard) and placement.dim >= 0:
        dim = placement.dim
        blocks = []
        for block in placement.blocks:
            copies = block.replicas(ranks)
            size = block.size // (ranks // copies)
            part = min(block.size // block.parts, size)
            blocks.append((size, WHOLE if copies == ranks else slice_of(dim, size // part, part)))
        if sum(size for size, _ in blocks) == shape[dim]:
            return mixed(dim, blocks)
        return slice_of(dim, max(shape[dim] // max(len(blocks), 1), 1))
    forms = {Replicate: WHOLE, Partial: ADDEND, PerRank: OWN}
    return forms.get(type(placement), UNKNOWN)


def placement_of(form: ActivationForm, ranks: int) -> tuple[tuple[int, ...], Placement | None]:
    """Return the shape of the whole tensor, and its placement; None if the placement is unknown.

    A dim whose factor is cut is cut in blocks: tokens cut along T that are flattened to [B·T] have B blocks of T.

    Args:
        form: The tensor on one rank.
        ranks: Ranks on the axis.
    """
    lie, shape = form.lie, list(form.shape)
    if lie.kind == "mixed" and {each.kind for _, each in lie.blocks} <= {"whole", "slice"}:
        cuts = [_block_of(size, each, ranks) for size, each in lie.blocks]
        shape[lie.dim] = sum(each.size for each in cuts)
        return tuple(shape), Shard(lie.dim, tuple(cuts))
    lie = as_one(lie, shape[lie.dim]) if shape else lie
    if lie.kind == "slice":
        size = lie.factor * lie.inner
        blocks = max(shape[lie.dim] // max(size, 1), 1)
        shape[lie.dim] *= ranks
        cut = (ShardBlock(size * ranks, lie.factor * ranks),) * blocks if blocks > 1 else ()
        return tuple(shape), Shard(lie.dim, cut)
    found: dict[str, Placement] = {
        "whole": Replicate(),
        "zero": Replicate(),
        "addend": Partial(),
        "own": PerRank(),
    }
    return tuple(shape), found.get(lie.kind)


def gradient_suits(found: Lie, wanted: Placement, ranks: int) -> bool | None:
    """Return True if a derived gradient lies as registered, False if it does not, and None if that is unknown.

    A gradient of zeros suits every placement. Copies of a block that several ranks hold have addends: the engine sums
    them among the ranks that hold the same copy.

    Args:
        found: Derived placement of the gradient.
        wanted: Registered placement of the gradient.
        ranks: Ranks on the axis.
    """
    if found == ZERO:
        return True
    if found.kind in ("zero", "unknown") or (found.kind == "own" and not isinstance(wanted, PerRank)):
        return None
    if found.kind != "mixed":
        kinds = {"whole": Replicate, "slice": Shard, "addend": Partial, "own": PerRank}
        return isinstance(wanted, kinds[found.kind])
    if not isinstance(wanted, Shard) or wanted.dim != found.dim:
        return False
    kinds_found = []
    place = 0
    for block in wanted.blocks:
        copies = block.replicas(ranks)
        size = block.size // (ranks // copies)
        kinds_found.append((found_kinds(found, place, size), "addend" if copies == ranks else "slice"))
        place += size
    if not kinds_found:
        kinds_found = [({lie.kind for _, lie in found.blocks}, "slice")]
    return all(kinds <= {kind, "zero"} for kinds, kind in kinds_found)


def found_kinds(lie: Lie, start: int, size: int) -> set[str]:
    """Return the kinds of the blocks of a mixed dim that lie in [start, start + size)."""
    kinds: set[str] = set()
    first = 0
    for length, each in lie.blocks:
        if first < start + size and start < first + length:
            kinds.add(each.kind)
        first += length
    return kinds


def _block_of(size: int, lie: Lie, ranks: int) -> ShardBlock:
    """Return the block of a whole dim that has ``size`` places on a rank."""
    return ShardBlock(size, 1) if lie.kind == "whole" else ShardBlock(size * ranks, size * ranks)


def derive(
    mode: PlacementMode,
    parameters: Mapping[str, Tensor],
    forward: Callable[[], Sequence[Tensor]],
    returns_addends: Callable[[], bool] = lambda: False,
) -> dict[str, Lie]:
    """Run a pass under ``mode`` and return the placement of the gradient of each parameter that has one.

    Args:
        mode: The mode, in which the placements of parameters and inputs are set.
        parameters: The trained parameters by name.
        forward: The forward pass, which returns the loss or the tensors for the next stage.
        returns_addends: Returns, after the forward pass, whether the gradients of whole results are addends.
    """
    found: dict[str, Lie] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def seen(gradient: Tensor) -> None:
            found[name] = mode.get(gradient)

        return seen

    handles = [each.register_hook(note(name)) for name, each in parameters.items()]  # type: ignore[no-untyped-call]
    try:
        with mode:
            ends = [each for each in forward() if each.requires_grad]
            gradients = [torch.ones_like(each) for each in ends]
            for end, gradient in zip(ends, gradients, strict=True):
                lie = gradient_of(mode.get(end))
                mode.set(gradient, ADDEND if lie == WHOLE and returns_addends() else lie)
            if ends:
                torch.autograd.backward(ends, gradients)
    finally:
        for handle in handles:
            handle.remove()
        for each in parameters.values():
            each.grad = None
    return found


def gradient_of(lie: Lie) -> Lie:
    """Return the placement of the gradient that arrives for a result: zeros have a whole gradient."""
    return WHOLE if lie.kind == "zero" else lie
