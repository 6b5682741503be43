"""Making a model that no rank could hold: each rank keeps 1/N of every parameter as soon as it is made.

    with shardwise.sharded_init():
        model = Transformer(...)              # values are rank 0's; of each parameter this rank keeps a piece
    engine = shardwise.initialize(model, {"zero": {"stage": 3}})      # the pieces become its shards

A parameter is cut when its module is done: when the module becomes a child of another one, or at the end of the
context. From then on the Parameter is a ``PieceTensor`` of the full shape that only holds its piece. Any operation on
the Parameter gathers it and runs on the whole values; the Parameter is cut again when later ones are gathered. So
``model.apply(init_weights)`` works as usual, with rank 0's values. All ranks make the same model by the same calls.

    shapes, dtypes, zeros_like      no gather
    p.normal_(), p.data.copy_(x)    gathers p, acts on the whole; rank 0's values count
    a view that is still held when two others have been gathered      an error: writes to it would be lost

No part of torch is patched: torch's own hooks on the registration of modules show when a module is done, and a cut
Parameter is recognised by its class. With one rank a model is made as usual.

Paper: Rajbhandari et al. 2020, arXiv:1910.02054 (the state that is cut); Ren et al. 2021, arXiv:2104.07857 (at making).
Cost:  rank 0 sends each parameter once; a rank holds 1/N and up to three whole parameters more.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_map

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.policy import CommPolicy
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World, join
from shardwise.observe.memory import HeapTrimmer
from shardwise.parallel.zero.bucket import BucketState
from shardwise.plan.unit import ParameterSlot

_OPEN = 2
"""Parameters that may be whole at a time, between operations."""
_CHUNK_BYTES = 64 << 20
"""Bytes of a chunk of memory in which pieces lie together.

The system returns a chunk of this size apart from the heap. Pieces between whole parameters would fragment the heap: an
aligned block does not fit into the hole that a block of its own size has left, so the heap would grow to the size of
the whole model.
"""
_ALIGN_BYTES = 64
_ATEN = torch.ops.aten
_SHAPE_ONLY = {
    _ATEN.zeros_like.default,
    _ATEN.ones_like.default,
    _ATEN.empty_like.default,
    _ATEN.full_like.default,
    _ATEN.rand_like.default,
    _ATEN.randn_like.default,
    _ATEN.new_zeros.default,
    _ATEN.new_ones.default,
    _ATEN.new_empty.default,
    _ATEN.new_full.default,
}
"""Operations whose result does not depend on the values of their input."""


class ShardedConstruction:
    """The ranks that make a model together, and the parameters that are whole at the moment."""

    def __init__(self, world: World) -> None:
        self.world = world
        policy = CommPolicy()
        ranks = tuple(range(world.size))
        self.group: Group = world.group_among(ranks, "construction", policy, world.clock(policy), Traffic())
        self.done: WeakSet[nn.Module] = WeakSet()
        """Modules whose parameters are in pieces."""
        self._open: list[KeptPiece] = []
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self.freed = HeapTrimmer()
        """Bytes of whole parameters that have been released."""

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for one piece."""
        if device.type != "cpu":
            return torch.zeros(elements, dtype=dtype, device=device)
        size = -(-elements * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._chunk.numel() < size:
            self._chunk = torch.empty(max(size, _CHUNK_BYTES), dtype=torch.uint8)
        taken, self._chunk = self._chunk[:size], self._chunk[size:]
        return taken[: elements * dtype.itemsize].view(dtype).zero_()

    def cut_module(self, module: nn.Module) -> None:
        """Cut the parameters of ``module`` and of all modules inside. Collective."""
        for inner in module.modules():
            if inner in self.done:
                continue
            self.done.add(inner)
            for parameter in inner._parameters.values():
                if parameter is not None and _is_to_cut(parameter):
                    _show_piece(parameter, KeptPiece(parameter, self))
                    self.freed.note(parameter.nbytes)

    def note_open(self, piece: "KeptPiece") -> None:
        """Record that ``piece`` is whole, and cut the others that have been whole for longest."""
        if piece in self._open:
            return
        self._open.append(piece)
        idle = [each for each in self._open if not each.is_held]
        for each in idle[:-_OPEN]:
            each.cut()

    def note_cut(self, piece: "KeptPiece") -> None:
        """Record that ``piece`` is cut again."""
        if piece in self._open:
            self._open.remove(piece)

    def cut_all(self) -> None:
        """Cut every parameter that is whole."""
        for piece in list(self._open):
            piece.cut()


class KeptPiece:
    """The part of one tensor that this rank keeps; several PieceTensors may show it.

    The part has the elements [rank · s, (rank + 1) · s) of the flattened values, s = ⌈elements / N⌉, padded.
    """

    def __init__(self, whole: Tensor, construction: ShardedConstruction) -> None:
        self.shape, self.dtype, self.device = whole.shape, whole.dtype, whole.device
        self._construction = construction
        self._whole: Tensor | None = None
        self._is_changed = True
        self._kept = construction.memory(self._size, self.dtype, self.device)
        self._keep_part_of(whole.detach().contiguous(), 0)
        self.is_held = False
        """True while the context ``whole`` keeps the values whole."""

    @property
    def world(self) -> World:
        """The ranks that hold the other pieces."""
        return self._construction.world

    @property
    def _size(self) -> int:
        return -(-prod(self.shape) // self._construction.group.size)

    def open(self, is_changed: bool) -> Tensor:
        """Return the whole values. Collective if they are not whole already.

        Args:
            is_changed: True if the caller may write the values.
        """
        if self._whole is None:
            group = self._construction.group
            gathered = torch.empty(self._size * group.size, dtype=self.dtype, device=self.device)
            group.all_gather(gathered, self._kept, "a parameter that is being made").wait()
            # A storage of its own, because ``_holders`` counts the tensors that share it.
            self._whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._whole.view(-1).copy_(gathered[: prod(self.shape)])
            self._is_changed = False
        self._is_changed = self._is_changed or is_changed
        self._construction.note_open(self)
        return self._whole

    def cut(self, root: int = 0) -> None:
        """Release the whole values and keep only this rank's part. Collective.

        Args:
            root: Rank whose values count if the values may have changed.

        Raises:
            UsageError: if a view of the whole values is still held.
        """
        whole = self._whole
        if whole is None:
            return
        if _holders(whole) > 1:
            raise UsageError(
                f"sharded_init: a view of a parameter of shape {list(self.shape)} is still held while others are being "
                "made, and what is written into it would be lost; take it again when you use it"
            )
        self._construction.note_cut(self)
        self._keep_part_of(whole, root)
        self._construction.freed.note(whole.nbytes)
        self._whole = None

    @contextlib.contextmanager
    def whole(self, root: int | None) -> Iterator[None]:
        """Keep the values whole on every rank inside. Collective.

        Args:
            root: Rank whose values count afterwards; None restores the values from before.
        """
        self.open(False)
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
            self._is_changed = root is not None
            self.cut(root or 0)

    def _keep_part_of(self, whole: Tensor, root: int) -> None:
        """Store this rank's part of rank ``root``'s values, if they may have changed."""
        if not self._is_changed:
            return
        group = self._construction.group
        group.broadcast(whole.view(-1), root, "a parameter that is being made").wait()
        start = min(group.index * self._size, whole.numel())
        mine = whole.view(-1)[start : start + self._size]
        self._kept[: mine.numel()].copy_(mine)

    def cast(self, dtype: torch.dtype) -> "KeptPiece":
        """Return the same values in another dtype."""
        self.cut()
        made = object.__new__(KeptPiece)
        made.__dict__.update(self.__dict__, dtype=dtype, _kept=self._kept.to(dtype))
        return made

    def drop(self) -> None:
        """Release all memory, after the values have been written to the buckets."""
        self._construction.note_cut(self)
        self._whole, self._kept = None, self._kept.new_empty(0)


def _holders(whole: Tensor) -> int:
    """Return the number of tensors that share this memory, including ``whole``."""
    storage = whole.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


class PieceTensor(Tensor):
    """A tensor of the full shape whose values are in a ``KeptPiece``."""

    piece: KeptPiece

    @staticmethod
    def __new__(cls, piece: KeptPiece) -> "PieceTensor":
        """Make a tensor without memory that shows ``piece``."""
        made: PieceTensor = Tensor._make_wrapper_subclass(
            cls, piece.shape, dtype=piece.dtype, device=piece.device
        )
        made.piece = piece
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PieceTensor({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a whole copy, which is cut when the copied module becomes a child of another module. Collective."""
        if id(self) not in memo:
            copied = self.piece.open(False).clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        first = args[0]
        if isinstance(first, PieceTensor):
            if func is _ATEN.detach.default or func is _ATEN.alias.default:
                return PieceTensor(first.piece)
            if func is _ATEN._to_copy.default and named.get("device") in (None, first.device):
                return PieceTensor(first.piece.cast(named.get("dtype") or first.dtype))
        if func in _SHAPE_ONLY:
            return func(_stand_in(first), *args[1:], **named)
        shown: dict[int, Tensor] = {}
        schema = func._schema
        changes = schema.is_mutable or any(r.alias_info is not None for r in schema.returns)

        def whole(value: Any) -> Any:
            if not isinstance(value, PieceTensor):
                return value
            opened = value.piece.open(changes)
            shown[id(opened)] = value
            return opened

        found = func(*tree_map(whole, args), **tree_map(whole, named))
        return tree_map(
            lambda value: shown.get(id(value), value) if isinstance(value, Tensor) else value, found
        )


def _stand_in(shown: Tensor) -> Tensor:
    """Return a tensor of the same shape, without memory."""
    return torch.empty(1, dtype=shown.dtype, device=shown.device).expand(shown.shape)


@contextlib.contextmanager
def sharded_init(world: World | None = None) -> Iterator[None]:
    """Make modules in pieces inside this context: each rank keeps 1/N of every parameter.

    All ranks enter the context together and make the same modules in the same order. The values are rank 0's.

    Args:
        world: The ranks, as for ``initialize``; None joins the job.
    """
    if world is None:
        world = join()
        world.ends_with_engine = True
    if world.size == 1:
        yield
        return
    construction = ShardedConstruction(world)
    begun: WeakSet[nn.Module] = WeakSet()

    def on_child(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            construction.cut_module(child)

    def on_parameter(module: nn.Module, name: str, parameter: Any) -> None:
        begun.add(module)
        construction.done.discard(module)

    handles = [
        hooks.register_module_module_registration_hook(on_child),
        hooks.register_module_parameter_registration_hook(on_parameter),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for module in list(begun):
        construction.cut_module(module)
    construction.cut_all()


def cut_made(model: nn.Module, world: World | None = None) -> None:
    """Keep 1/N of every parameter of a model that is made already; values are rank 0's. Collective.

    Args:
        model: The model; its Parameters stay the same objects.
        world: The ranks, as for ``initialize``; None joins the job.
    """
    if world is None:
        world = join()
        world.ends_with_engine = True
    if world.size > 1:
        ShardedConstruction(world).cut_module(model)


def _is_to_cut(parameter: Tensor) -> bool:
    return not parameter.is_meta and parameter.is_floating_point() and not isinstance(parameter, PieceTensor)


def _show_piece(parameter: nn.Parameter, piece: KeptPiece) -> None:
    """Let ``parameter``, which stays the same object, show ``piece``."""
    shown = nn.Parameter(PieceTensor(piece), requires_grad=parameter.requires_grad)
    shown.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, shown)


# In initialize -----------------------------------------------------------------------------------------------------


def world_of(model: nn.Module) -> World | None:
    """Return the ranks that made ``model`` in pieces; None if the model was made whole."""
    made = (p.piece.world for p in model.parameters() if isinstance(p, PieceTensor))
    return next(made, None)


def take_pieces(model: nn.Module, is_cut: bool) -> dict[str, KeptPiece]:
    """Return the pieces of ``model`` by name, and make its parameters ordinary ones. Collective.

    Args:
        model: A model that was made in pieces.
        is_cut: True if slices or stages are cut out of the parameters. Then the parameters become whole with their
            values,
            and no pieces are returned. Otherwise they have no memory until ``deal``.
    """
    found: dict[str, KeptPiece] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, PieceTensor):
            continue
        piece = parameter.piece
        piece.cut()
        if is_cut:
            plain = piece.open(False).clone()
        else:
            plain = _stand_in(parameter)
            found[name] = piece
        shown = nn.Parameter(plain, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, shown)
        if is_cut:
            piece.drop()
    return found


def deal(pieces: Mapping[str, KeptPiece], buckets: Sequence[BucketState]) -> None:
    """Write to every rank's buckets the elements that the rank owns, one parameter after the other. Collective."""
    homes = {slot.name: bucket for bucket in buckets for slot in bucket.layout.slots}
    with contextlib.ExitStack() as state:
        last: BucketState | None = None
        for name, piece in pieces.items():
            whole = piece.open(False).reshape(-1)

            def read(
                slot: ParameterSlot, start: int, stop: int, dtype: torch.dtype, whole: Tensor = whole
            ) -> Tensor:
                return whole[start:stop]

            if homes[name] is not last:  # state on a disk is read once for all parameters of a bucket
                state.close()
                last = homes[name]
                state.enter_context(last.opened(changes=True))
            homes[name].write(read, _is_called(name))
            del whole, read
            piece.drop()
    for bucket in buckets:
        if any(slot.name in pieces for slot in bucket.layout.slots):
            bucket.settle()


def _is_called(name: str) -> Callable[[ParameterSlot], bool]:
    return lambda slot: slot.name == name
