"""Order of use: the order in which a model calls its modules, recorded in one pass without numbers.

A module outside the blocks belongs to the stage of the next block. For most models the order of registration determines
the next block. For a norm or a head that is registered in front of the blocks and used behind them the orders differ:

    registered   embed  head  block 0  block 1 | block 2  block 3          head on stage 0, but absent where it is used
    used         embed  block 0  block 1 | block 2  block 3  head          head on stage 1

The pass also determines which rows of blocks can be cut at all. Every block of a decoder takes the encoder's result,
which does not pass from block to block; a block of the encoder takes only its predecessor's output. So a model of both
is cut among the blocks of its encoder, and the decoder belongs to the last stage.

The pass runs on fake tensors (no memory, no numbers, no generator), in evaluation mode, with the model's own modules,
whose changes are undone. A model that branches on numbers cannot be recorded in this way, and keeps the order of
registration.

Cost: once, before the model is cut; a tenth of a millisecond per operation.
"""

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.parallel.pipeline.stand_in import tensors_of

_TOKENS = (2, 8)
_CHANGES = (list, dict, set)


class _ModuleCall(NamedTuple):
    """One call of a module; ``given`` and ``made`` contain identities of tensors."""

    module: nn.Module
    start: int
    stop: int
    given: frozenset[int]
    made: frozenset[int]


class ModuleUses:
    """The calls of one pass through a model.

    Args:
        model: The model.
        calls: Every call of a module in the pass.
    """

    def __init__(self, model: nn.Module, calls: Sequence[_ModuleCall]):
        self._model = model
        self._calls = sorted(calls, key=lambda call: call.start)
        self._places: dict[tuple[str, ...], dict[str, int]] = {}

    def runs_in_a_row(self, blocks: Sequence[str]) -> bool:
        """Return True if the blocks can be cut from each other.

        Each block must run once, in order. Apart from the output of the block before, a block may take no
        tensor that a module with parameters had computed when that earlier block began.

        Args:
            blocks: Names of the blocks, in order.

        Returns:
            True if all of this holds.
        """
        rows = self._rows(blocks)
        if rows is None:
            return False
        sources = [
            call
            for call in self._calls
            if not self._is_in(call, rows) and next(call.module.parameters(), None) is not None
        ]
        for before, block in zip(rows, rows[1:], strict=False):
            given = block.given - before.made
            if any(given & source.made for source in sources if source.stop < before.start):
                return False
        return True

    def places(self, blocks: Sequence[str]) -> dict[str, int]:
        """Return how many blocks have ended when a module outside the blocks is called first, by name of the module.

        Parts that are used without a call belong to the module around them. The result is computed once, and so
        describes the model before cut layers replaced its own.

        Args:
            blocks: Names of the blocks, in order.

        Returns:
            Numbers of blocks. Modules with several names, modules around blocks and modules that are never
            called are left out; the result is empty if the blocks do not run in order.
        """
        if tuple(blocks) not in self._places:
            self._places[tuple(blocks)] = self._find_places(blocks)
        return self._places[tuple(blocks)]

    def _find_places(self, blocks: Sequence[str]) -> dict[str, int]:
        rows = self._rows(blocks)
        if rows is None:
            return {}
        first: dict[int, _ModuleCall] = {}
        for call in self._calls:
            first.setdefault(id(call.module), call)
        names: dict[int, list[str]] = {}
        for name, module in self._model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        holds = {around for block in blocks for around in _around(block)}
        found: dict[str, int] = {}
        for name, module in self._model.named_modules():
            inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
            if inside or name in holds or len(names[id(module)]) > 1:
                continue
            around = name.rpartition(".")[0]
            if id(module) in first:
                start = first[id(module)].start
                found[name] = sum(row.stop < start for row in rows)
            elif around in found:
                found[name] = found[around]
        return found

    def _rows(self, blocks: Sequence[str]) -> list[_ModuleCall] | None:
        """Return the blocks' calls, or None if the blocks do not run once each and in order."""
        modules = [self._model.get_submodule(name) for name in blocks]
        among = {id(module) for module in modules}
        calls = [call for call in self._calls if id(call.module) in among]
        in_order = [call.module for call in calls] == modules
        return (
            calls
            if in_order and all(a.stop < b.start for a, b in zip(calls, calls[1:], strict=False))
            else None
        )

    @staticmethod
    def _is_in(call: _ModuleCall, rows: Sequence[_ModuleCall]) -> bool:
        """Return True if a call lies inside a block's call or around one."""
        return any(row.start <= call.start < row.stop or call.start <= row.start < call.stop for row in rows)


def order_of_use(
    model: nn.Module, call: Callable[[nn.Module], Any] | None = None, device: torch.device | None = None
) -> ModuleUses | None:
    """Record the uses of a model's modules.

    Args:
        model: The model.
        call: Function that calls the model; None calls models of transformers with tokens, and with labels if
            possible.
        device: Device of the fake tensors; None for the CPU.

    Returns:
        The uses, or None if there is no call to make or the model cannot run without numbers.
    """
    if call is None and getattr(model, "main_input_name", None) != "input_ids":
        return None
    place = device or torch.device("cpu")
    tokens = functools.partial(torch.zeros, _TOKENS, dtype=torch.long, device=place)
    attempts: list[Callable[[nn.Module], Any]] = [
        lambda root: root(input_ids=tokens(), labels=tokens()),
        lambda root: root(input_ids=tokens()),
    ]
    for attempt in attempts if call is None else [call]:
        calls: list[_ModuleCall] = []
        with contextlib.suppress(Exception):
            with FakeTensorMode(allow_non_fake_inputs=True), _hollow(model, place), _noted(model, calls):
                attempt(model)
            return ModuleUses(model, calls)
    return None


@contextlib.contextmanager
def _noted(model: nn.Module, calls: list[_ModuleCall]) -> Iterator[None]:
    """Append every call of a module inside the context to ``calls``."""
    held: list[Tensor] = []
    """Tensors of the pass, kept alive so that identities stay unique."""
    begun: list[tuple[int, frozenset[int]]] = []
    clock = iter(range(1 << 62))

    def of(*values: Any) -> frozenset[int]:
        tensors = list(tensors_of(values))
        held.extend(tensors)
        return frozenset(map(id, tensors))

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append((next(clock), of(args, kwargs)))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        start, given = begun.pop()
        calls.append(_ModuleCall(module, start, next(clock), given, of(output)))

    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))
)


@contextlib.contextmanager
def _hollow(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Prepare a model for a pass without numbers, and undo everything afterwards.

    The model is in evaluation mode without gradients, and fake tensors on ``device`` replace all parameters and
    buffers. Hooks do not run, and conversions of modules do nothing. Attributes and the contents of lists are
    restored.
    """
    modules = list(model.modules())
    before = [dict(vars(module)) for module in modules]
    held = [
        (value, copy.copy(value)) for each in before for value in each.values() if type(value) in _CHANGES
    ]
    twins: dict[int, Any] = {}

    def twin(tensor: Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in twins:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return None if tensor is None else twins[id(tensor)]

    try:
        model.eval()
        for module in modules:
            vars(module).update({name: OrderedDict() for name in _HOOKS})
            vars(module)["_apply"] = lambda *args, module=module, **kwargs: module
            elsewhere: Any = getattr(module, "elsewhere", None)
            if elsewhere is not None:  # vectors of tables: their shapes are enough
                absent = elsewhere("", functools.partial(_empty, device), lambda tensor: tensor.to(device))
                vars(module).update({name: getattr(absent, name) for name in absent.calls})
            module._parameters.update({name: twin(each) for name, each in module._parameters.items()})
            module._buffers.update({name: twin(each) for name, each in module._buffers.items()})
        with torch.no_grad():
            yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        for value, was in held:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(was)


def _empty(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, from the innermost to the root."""
    while name:
        name = name.rpartition(".")[0]
        yield name
