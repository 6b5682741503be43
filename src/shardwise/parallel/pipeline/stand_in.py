"""Stand-ins: replacements of modules and parameters that lie on another stage.

A stage runs the whole model's own forward pass, so every absent part needs an answer to the calls of that pass:

    absent                          answer
    last block before the stage     the received value: the output of the last block of the stage before
    earlier block                   absent values
    block after the stage           an error: the pass should have ended
    module outside the blocks       absent values of the shapes that the module itself would return
    parameter, read or listed       an absent value; the local parameter if a tied parameter has a name on this stage
    plain attribute of a block      the block's own, unless blocks set it while they run

In the first pass of each kind absent values are marked (passes/absent.py), so that any use of them that reaches a
message or the loss is an error that names the absent value; in later passes absent values are plain tensors of NaN.
Stand-ins are instances of the class that they replace, and all modules inside a foreign block are stand-ins too.

Hooks on foreign modules run only in a marked pass, in which the outputs that they keep are marked.
"""

import contextlib
import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from shardwise.base.errors import PlanError
from shardwise.base.user_hooks import is_users, user_hooks
from shardwise.passes.absent import AbsentTensor, AbsentTrace, place_of_use

_PLAIN = (bool, int, float, str, type(None))
_CHANGES = (list, dict, set)


class StageEndSignal(BaseException):
    """The signal that the stage's last block has run, which ends the pass.

    Not an ``Exception``, so that a model's own ``except Exception`` does not catch it.

    Args:
        output: Output of the last block.
    """

    def __init__(self, output: Any):
        super().__init__("a stage's pass ended")
        self.output = output


class StandInState:
    """State that the stand-ins of one stage share: the received value, and fillers for absent values.

    Args:
        stage: Number of the stage.
        advice: Last sentence of errors about a model that cannot be cut in this way.
    """

    def __init__(self, stage: int, advice: str = "") -> None:
        self.stage = stage
        self.advice = advice
        """Last sentence of errors about a model that cannot be cut in this way."""
        self.received: Any = None
        self.handed_over = False
        self.is_running = False
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.watch: AbsentTrace | None = None
        """Trace of the running pass if its absent values are marked, else None."""
        self.read: dict[str, str] = {}
        """Plain attributes of foreign blocks that the marked pass has read, each with the block's name."""
        self.taken: dict[int, tuple[Any, str]] = {}
        """Lists, dictionaries and sets that the marked pass has given to foreign blocks, each with the block's
        name."""
        self._writes = True
        self._outputs: list[tuple[Tensor, int]] = []
        self._fillers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._marked: dict[int, Tensor] = {}

    def load(self, received: Any, watch: AbsentTrace | None = None, writes: bool = True) -> None:
        """Store the received value of the pass that begins; fillers follow its dtype and device.

        Args:
            received: Output of the stage before, or None.
            watch: Trace of a marked pass, or None.
            writes: True if the model may write into a block's output in place.
        """
        self.received, self.handed_over, self._writes = received, False, writes
        tensors = list(tensors_of(received))
        self.device = tensors[0].device if tensors else None
        self.dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        self.is_running, self.watch = True, watch
        if watch is not None:
            watch.counts = False

    def clear(self) -> None:
        """Drop the values of the pass, because a received value keeps a graph alive."""
        self.received, self.is_running, self.watch = None, False, None
        self.read.clear()
        self.taken.clear()
        self._marked.clear()
        self._outputs.clear()

    @property
    def wrote(self) -> bool:
        """True if the marked pass wrote in place into the outputs of foreign blocks."""
        return any(tensor._version != version for tensor, version in self._outputs)

    def handed(self, leaf: Any) -> Any:
        """Return a leaf of the received value as a block's output, cloned if the model may write into it."""
        if not isinstance(leaf, Tensor) or not self._writes:
            return leaf
        leaf = leaf.clone()
        self._outputs.append((leaf, leaf._version))
        return leaf

    def at_home(self, leaf: Any) -> Any:
        """Return a leaf of the same shape and dtype without numbers, on the device of the received value."""
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty((), dtype=leaf.dtype, device=self.device or "cpu").expand(leaf.shape)

    def stand_in(self, leaf: Any, what: str) -> Any:
        """Return a replacement of a leaf that an earlier block would have returned.

        Args:
            leaf: A leaf of the received value, or a value of the same shape.
            what: Description of the absent value in errors.

        Returns:
            A filler for a tensor, else the leaf itself.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        filler = self.filler(tuple(leaf.shape), leaf.dtype, leaf.device).clone()
        if not self._writes:
            return filler
        self._outputs.append((filler, filler._version))
        return self.marked(filler, what)

    def hand_over(self) -> None:
        """Record that the pass has come to the stage's first block; uses of absent values count from now on."""
        self.handed_over = True
        if self.watch is not None:
            self.watch.counts = True

    def refuse(self, text: str) -> PlanError:
        """Return the error with ``text`` about this stage and the line of the model that runs."""
        names = self.watch.names if self.watch is not None else {}
        return PlanError(f"stage {self.stage}: {text}, {place_of_use(names)}. {self.advice}")

    def marked(self, value: Tensor, what: str) -> Tensor:
        """Return ``value`` as an absent value in a marked pass, else ``value`` itself."""
        if self.watch is None or isinstance(value, AbsentTensor):
            return value
        return AbsentTensor(value, what, self.watch)

    def filler(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of NaN (integers: 0), expanded from one element."""
        if dtype.is_floating_point and self.dtype is not None:
            dtype = self.dtype
        empty = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        return torch.full((), empty, dtype=dtype, device=device).expand(shape)

    def output(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
        """Return the filler of a module's output, in separate memory because models write into outputs in place."""
        return self.marked(self.filler(shape, dtype, device).clone(), what)

    def parameter(self, key: int, like: Tensor, home: torch.device, name: str) -> Tensor:
        """Return the filler of an absent parameter.

        There is one object per parameter, because models compare tied parameters with ``is``.

        Args:
            key: Identity of the parameter in the whole model.
            like: A tensor of the parameter's shape and dtype.
            home: Device of the stage's parameters.
            name: Name of the parameter in the whole model.

        Returns:
            The filler.
        """
        at = (key, self.dtype or like.dtype, self.device or home)
        if at not in self._fillers:
            self._fillers[at] = _as_parameter(self.filler(tuple(like.shape), like.dtype, at[2]))
        if self.watch is None:
            return self._fillers[at]
        if key not in self._marked:
            what = f"parameter {name!r}, which lives on another stage,"
            self._marked[key] = _as_parameter(self.marked(self._fillers[at], what))
        return self._marked[key]


def _as_parameter(filler: Any) -> Any:
    """Mark a filler as a Parameter for torch (for ``get_parameter``) and return it."""
    filler._is_param = True
    return filler


class AbsentModule:
    """Mixin for a module with absent parameters of its own.

    The module lists and returns absent values while a pass runs; between passes it has none of these
    parameters.
    """

    @property
    def stands_for(self) -> str:
        """Name of the module that this one replaces."""
        return str(self.__dict__.get("_name", ""))

    @property
    def _parameters(self) -> dict[str, Any]:
        own: dict[str, Any] = self.__dict__["_parameters"]
        absent = self.__dict__.get("_absent")
        if not absent or not self.__dict__["_relay"].is_running:
            return own
        return {**own, **{name: read() for name, read in absent.items()}}

    @_parameters.setter
    def _parameters(self, given: dict[str, Any]) -> None:
        self.__dict__["_parameters"] = given

    def __getattr__(self, name: str) -> Any:
        absent = self.__dict__.get("_absent", {})
        return absent[name]() if name in absent else super().__getattr__(name)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        # A model that ties its weights again assigns them to stand-ins too, which must not own any.
        if name not in self.__dict__.get("_absent", ()):
            super().__setattr__(name, value)


class _InsideAbsentBlock(AbsentModule):
    """Mixin for a module of a foreign block, whose plain attributes (for example ``layer_type``) can be read."""

    __call__ = nn.Module.__call__  # the class's own code around a call runs only on the stage of the module
    train = nn.Module.train  # a stand-in does not have what the class's own ``train`` changes

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_plain", ()):
            self._relay.read.setdefault(name, self._name)
            return self._plain[name]
        if name in self.__dict__.get("_known", ()) and self._relay.is_running:
            raise self._relay.refuse(f"{name!r} of {self._name!r}, which lives on another stage, is read")
        return super().__getattr__(name)

    def __iter__(self) -> Iterator[Any]:
        inside = getattr(super(), "__iter__", None)
        if inside is None:
            raise self._relay.refuse(f"{self._name!r}, which lives on another stage, is taken apart")
        return inside()  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error, because the module is called past the block around it."""
        raise self._relay.refuse(
            f"{self._name!r}, a part of a block of another stage, is called past that block"
        )


class AbsentBlock(_InsideAbsentBlock):
    """Mixin for the stand-in of a block of another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received value for the block just before the stage, and absent values for an earlier block.

        Args:
            *args: Arguments of the block.
            **kwargs: Keyword arguments of the block.

        Returns:
            The output.

        Raises:
            PlanError: If the block belongs to a later stage, or if the pass has come to this stage already.
        """
        name, relay, comes = self._name, self._relay, self._comes
        if comes == "after":
            raise relay.refuse(
                f"block {name!r} of a later stage is called before this stage's last block; the blocks do not run in "
                "the order in which they are registered"
            )
        if relay.handed_over:
            raise relay.refuse(
                f"block {name!r} of an earlier stage is called after the pass has come to this stage; the model runs "
                "its blocks more than once, or not in the order in which they are registered"
            )
        if relay.watch is not None:
            for each in (args, kwargs, *args, *kwargs.values()):
                if isinstance(each, _CHANGES):
                    relay.taken[id(each)] = (each, name)
            self._tell_hooks()
        if comes == "before":
            what = f"the output of block {name!r}, which lives on another stage,"
            return tree_map(lambda leaf: relay.stand_in(leaf, what), self._like(args, kwargs))
        relay.hand_over()
        return tree_map(relay.handed, relay.received)

    def _like(self, args: Any, kwargs: Any) -> Any:
        """Return a value of the same structure and shapes as the block's output.

        The value comes from the block on the meta device; for blocks in a row, or if that fails, it is the
        received value.
        """
        outline = self._outline[0]
        if outline is not None:
            with contextlib.suppress(Exception):
                return tree_map(self._relay.at_home, on_meta(outline, args, kwargs))
        return self._relay.received

    def _tell_hooks(self) -> None:
        """Call the hooks on modules inside with absent outputs, because hooks may keep outputs for the loss."""
        relay = self._relay
        like = next(tensors_of(relay.received), None)
        if like is None:
            return
        for module in [inner for inner in self.modules() if inner is not self]:  # type: ignore[attr-defined]
            _tell_hooks(
                module,
                relay,
                relay.marked(like.detach(), f"the output of {module._name!r}, which lives on another stage,"),
            )


class AbsentLeaf(AbsentModule):
    """Mixin for a module outside the blocks that belongs to another stage: an embedding, a norm, a head."""

    __call__ = nn.Module.__call__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return fillers of the shapes that the module itself would return.

        Args:
            *args: Arguments of the module.
            **kwargs: Keyword arguments of the module.

        Returns:
            The output.
        """
        relay: StandInState = self._relay
        outline, home = self._outline
        given = next(tensors_of((args, kwargs)), None)
        device = given.device if given is not None else (relay.device or home())
        what = f"the output of {self._name!r}, which lives on another stage,"
        own = next((each.dtype for each in outline.parameters() if each.is_floating_point()), None)
        width = getattr(outline, "embedding_dim", getattr(outline, "out_features", None))
        if isinstance(width, int) and given is not None and own is not None:  # right if cut over "tp" too
            shape = given.shape if hasattr(outline, "embedding_dim") else given.shape[:-1]
            result: Any = torch.empty((*shape, width), dtype=own, device="meta")
        else:
            result = self._on_meta(args, kwargs, what)
        result = tree_map(
            lambda leaf: (
                relay.output(tuple(leaf.shape), leaf.dtype, device, what)
                if isinstance(leaf, Tensor)
                else leaf
            ),
            result,
        )
        if relay.watch is not None:
            _tell_hooks(self, relay, result)
        return result

    def _on_meta(self, args: Any, kwargs: Any, what: str) -> Any:
        try:
            return on_meta(self._outline[0], args, kwargs)
        except Exception as error:
            watch = self._relay.watch
            if watch is not None:
                watch.trouble = watch.trouble or (error, what)
            raise


def on_meta(outline: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a module on the meta device.

    Args:
        outline: A copy of the module on the meta device.
        args: Arguments, on any device.
        kwargs: Keyword arguments, on any device.

    Returns:
        The output, without numbers.
    """
    dtype = next((each.dtype for each in outline.parameters() if each.is_floating_point()), None)

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_like = dtype is not None and leaf.is_floating_point()
        return torch.empty(leaf.shape, dtype=dtype if is_like else leaf.dtype, device="meta")

    with torch.no_grad():
        meta_args, meta_kwargs = tree_map(moved, (args, kwargs))
        return outline(*meta_args, **meta_kwargs)


def _tell_hooks(module: Any, relay: StandInState, output: Any) -> None:
    watch = relay.watch
    assert watch is not None, "hooks are told in marked passes"
    before = watch.refusal, watch.trouble
    for hook in [*module.__dict__["_forward_hooks"].values(), *module.__dict__["_foreign_hooks"]]:
        with contextlib.suppress(
            Exception
        ):  # a hook that reads numbers, for example to print them, does not count as a use
            hook(module, (), output)
    watch.refusal, watch.trouble = before


def absent_block(
    block: nn.Module,
    name: str,
    relay: StandInState,
    comes: str,
    in_row: bool,
    read: Callable[[nn.Parameter, str], Any],
) -> nn.Module:
    """Return the stand-in for a foreign block and all modules inside.

    Args:
        block: The block.
        name: Name of the block in the model.
        relay: Shared state of the stage's stand-ins.
        comes: "before" the stage, "just before" it, or "after" it.
        in_row: True if the block is one of several that return values of the same shapes.
        read: Function that returns the reader of an absent parameter, from the parameter and its name.

    Returns:
        The stand-in.
    """
    twin = _inside(block, name, relay, read, AbsentBlock)
    outline = None if in_row or comes != "before" else _outline_of_all(block)
    twin.__dict__.update(_comes=comes, _outline=(outline,))  # in a tuple: no child of this module
    return twin


def _inside(
    module: nn.Module, name: str, relay: StandInState, read: Callable[[nn.Parameter, str], Any], kind: type
) -> nn.Module:
    cls: Any = _mixed_or_plain(kind, type(module))
    twin: nn.Module = object.__new__(cls)
    nn.Module.__init__(twin)
    plain = {
        key: value
        for key, value in module.__dict__.items()
        if not key.startswith("_") and key != "training" and isinstance(value, _PLAIN)
    }
    held: dict[str, Any] = {
        "_name": name,
        "_relay": relay,
        "_plain": plain,
        "_known": {*module.__dict__, *module._buffers} - {"training"},
        "_absent": {key: read(p, f"{name}.{key}") for key, p in module._parameters.items() if p is not None},
        "_foreign_hooks": list(module._forward_hooks.values()),
        "training": module.training,
    }
    twin.__dict__.update(held)
    for key, child in module._modules.items():
        twin._modules[key] = (
            None if child is None else _inside(child, f"{name}.{key}", relay, read, _InsideAbsentBlock)
        )
    return twin


def absent_leaf(
    module: nn.Module,
    name: str,
    relay: StandInState,
    absent: dict[str, Callable[[], Tensor]],
    home: Callable[[], torch.device],
) -> nn.Module:
    """Return the stand-in for a module without children, outside the blocks.

    Args:
        module: The module.
        name: Name of the module in the model.
        relay: Shared state of the stage's stand-ins.
        absent: Readers of the absent parameters, by name.
        home: Function that returns the device of the stage's parameters.

    Returns:
        The stand-in.
    """
    twin: nn.Module = shallow_copy(module, AbsentLeaf)
    for key in ("_parameters", "_buffers", *_HOOKS):
        twin.__dict__[key] = type(twin.__dict__[key])()
    for key in ("forward", "_flat_weights"):
        twin.__dict__.pop(key, None)
    twin.__dict__.update(
        _name=name,
        _relay=relay,
        _absent=absent,
        _outline=(_outline(module), home),  # in a tuple: no child of this module
        _foreign_hooks=list(module._forward_hooks.values()),
    )
    return twin


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def shallow_copy(module: nn.Module, kind: type | None = None) -> Any:
    """Return a new module object with the same children, parameters and buffers.

    Args:
        module: The module.
        kind: Mixin that comes before the module's own class, or None.

    Returns:
        The copy.
    """
    own: Any = type(module)
    cls = own if kind is None else _mixed(kind, own)
    twin: Any = object.__new__(cls)
    for key, value in module.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            value = types.MethodType(value.__func__, twin)
        elif key.startswith("_") and isinstance(value, dict | set):
            value = copy.copy(value)
        twin.__dict__[key] = value
    return twin


class LastBlock:
    """Mixin for a stage's last block: the pass ends when the block and all its hooks have run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and end the pass with its output.

        Args:
            *args: Arguments of the block.
            **kwargs: Keyword arguments of the block.

        Raises:
            Ended: Always, with the block's output.
        """
        raise StageEndSignal(super().__call__(*args, **kwargs))  # type: ignore[misc]


class StageRoot(AbsentModule):
    """Mixin for the root of a stage that is not the last.

    The pass of the code that called the root, for example a user's loss function, ends when the root has
    returned.

    A user's hooks on the root's output and on its gradient run only on the last stage, which has that output.
    Other stages drop these hooks and ignore later registrations. Hooks on the root's inputs run on every stage.
    """

    def leave_out_hooks(self) -> None:
        """Drop the user's hooks on the root's output and on its gradient."""
        for kind, number, _ in list(user_hooks(self)):  # type: ignore[arg-type]
            if kind == "_forward_pre_hooks":
                continue
            del vars(self)[kind][number]
            for beside in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
                if kind == "_forward_hooks":
                    vars(self)[beside].pop(number, None)

    def register_forward_hook(self, hook: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook as ``nn.Module`` does, but ignore a user's hook.

        Args:
            hook: The hook.
            **kwargs: Options of ``nn.Module.register_forward_hook``.

        Returns:
            A handle that removes the hook.
        """
        if is_users(hook):
            return RemovableHandle(OrderedDict())
        return super().register_forward_hook(hook, **kwargs)  # type: ignore[misc, no-any-return]

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook as ``nn.Module`` does, but ignore a user's hook.

        Args:
            hook: The hook.
            prepend: True to run the hook before all others.

        Returns:
            A handle that removes the hook.
        """
        if is_users(hook):
            return RemovableHandle(OrderedDict())
        return super().register_full_backward_hook(hook, prepend)  # type: ignore[misc, no-any-return]

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Register a hook as ``nn.Module`` does, but ignore a user's hook.

        Args:
            hook: The hook.
            prepend: True to run the hook before all others.

        Returns:
            A handle that removes the hook.
        """
        if is_users(hook):
            return RemovableHandle(OrderedDict())
        return super().register_full_backward_pre_hook(hook, prepend)  # type: ignore[misc, no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward up to the stage's last block.

        Args:
            *args: Arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The output of the last block.
        """
        own = self.__dict__.get("_own_forward") or super().forward  # type: ignore[misc]
        try:
            return own(*args, **kwargs)
        except StageEndSignal as ended:
            self.__dict__["_has_ended"] = True
            return ended.output

    @property
    def stage_has_ended(self) -> bool:
        """True if the output of the running call is that of the stage's last block, for hooks on the root."""
        ended: bool = self.__dict__.get("_has_ended", False)
        return ended

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage, and end the call around the root.

        Args:
            *args: Arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            The model's result, if no block ended the pass.

        Raises:
            Ended: If the stage's last block ended the pass, with that block's output.
        """
        self.__dict__["_has_ended"] = False
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self.__dict__["_has_ended"]:
            raise StageEndSignal(result)
        return result


def call_until_ended(call: Callable[[], Any]) -> tuple[bool, Any]:
    """Run a function that a stage's last block may end.

    Args:
        call: The function.

    Returns:
        True and the block's output if the block ended the call, else False and the function's result.
    """
    try:
        return False, call()
    except StageEndSignal as ended:
        return True, ended.output


@functools.cache
def _mixed(kind: Any, cls: Any) -> type:
    """Return the class of ``kind`` mixed into ``cls``, one for each pair.

    The class has the name of the module's own class, because models and tools read the name.
    """
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _mixed_or_plain(kind: Any, cls: Any) -> type:
    """Return the class of ``kind`` mixed into ``cls``.

    If ``cls`` refuses subclasses, ``kind`` is mixed into ``nn.Module`` instead.
    """
    try:
        return _mixed(kind, cls)
    except (TypeError, RuntimeError):
        return _mixed(kind, nn.Module)


def _outline(module: nn.Module) -> nn.Module:
    """Return a copy of a module without children on the meta device: shapes without memory."""
    twin: nn.Module = shallow_copy(module)
    held: tuple[dict[str, Any], ...] = (twin._parameters, twin._buffers)
    for tensors in held:
        for name, tensor in tensors.items():
            if tensor is not None:
                empty = torch.empty_like(tensor, device="meta")
                tensors[name] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    for hooks in _HOOKS:
        twin.__dict__[hooks].clear()
    if "_flat_weights" in twin.__dict__:  # an RNN's list of its weights
        names: Any = twin._flat_weights_names
        twin.__dict__["_flat_weights"] = [getattr(twin, name, None) for name in names]
    return twin


def _outline_of_all(module: nn.Module) -> nn.Module | None:
    """Return a copy of a module and all modules inside on the meta device, or None if it cannot be copied."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    try:
        twin: nn.Module = copy.deepcopy(module, memo)
    except Exception:
        return None
    for inner in twin.modules():
        for hooks in _HOOKS:
            inner.__dict__[hooks].clear()
        if "_flat_weights" in inner.__dict__:
            names: Any = inner._flat_weights_names
            inner.__dict__["_flat_weights"] = [getattr(inner, name, None) for name in names]
    return twin


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a pytree in order; classes that are registered with torch are taken apart too."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
