"""Stand-ins: what takes the place of modules and parameters that live on another stage.

A stage runs the whole model's own forward pass, so whatever is absent has to answer the calls that pass reaches:

    absent                          answers with
    block before the stage          the received value: the output of the last block of the stage before
    block after the stage           an error: the pass should have ended
    module outside the blocks       a tensor of the right shape that holds nothing but NaN
    parameter read as an attribute  the same; the local one where a tied parameter has a name on this stage

The model throws these values away: the stand-in just before the stage's first block hands over the received value. NaN
says loudly where it does not; a zero might pass for a result. Filler tensors are expanded from one element.
"""

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.plan.errors import PlanError


class Ended(BaseException):
    """The stage's last block has run. No ``Exception``: a model's own ``except`` must not catch it."""

    def __init__(self, output: Any):
        super().__init__("a stage's pass ended")
        self.output = output


class Relay:
    """What the stand-ins of one stage share: the received value, and fillers for what is absent."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.received: Any = None
        self.handed_over = False
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self._fillers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def load(self, received: Any) -> None:
        """Take the received value of the pass that begins; fillers follow its dtype and device."""
        self.received, self.handed_over = received, False
        tensors = list(tensors_of(received))
        self.device = tensors[0].device if tensors else None
        self.dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)

    def clear(self) -> None:
        """Hold nothing any more: a received value keeps a graph alive."""
        self.received = None

    def filler(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that holds nothing but NaN (integers: 0)."""
        if dtype.is_floating_point and self.dtype is not None:
            dtype = self.dtype
        empty = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        return torch.full((), empty, dtype=dtype, device=device).expand(shape)

    def parameter(self, key: int, like: Tensor, home: torch.device) -> Tensor:
        """The filler of an absent parameter, one object per parameter: models compare tied ones with ``is``."""
        at = (key, self.dtype or like.dtype, self.device or home)
        if at not in self._fillers:
            self._fillers[at] = self.filler(tuple(like.shape), like.dtype, at[2])
        return self._fillers[at]


class AbsentBlock(nn.Module):
    """A block of another stage. Plain attributes (``layer_type``, say) read as those of the block itself."""

    def __init__(self, block: nn.Module, name: str, relay: Relay, comes: str, in_row: bool) -> None:
        super().__init__()
        plain = (bool, int, float, str, type(None))
        for key, value in block.__dict__.items():
            if not key.startswith("_") and key != "training" and isinstance(value, plain):
                self.__dict__[key] = value
        self._state = (name, relay, comes, in_row)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``comes``: "before" the stage, "just before" it, or "after" it."""
        name, relay, comes, in_row = self._state
        if comes == "after":
            raise PlanError(
                f"stage {relay.stage}: block {name!r} of a later stage is called before this stage's last block; "
                "the blocks do not run in the order in which they are registered. Give the model as a list of layers"
            )
        if comes == "just before":
            relay.handed_over = True
        if in_row:
            return relay.received
        # What a model does between two blocks that are attributes (a ReLU, say) may write in place.
        if comes == "just before":
            return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, relay.received)
        return tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, relay.received
        )


class AbsentLeaf(nn.Module):
    """A module outside the blocks that belongs to another stage: an embedding, a norm, a head."""

    def __init__(self, module: nn.Module, relay: Relay, absent: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        for key, value in module.__dict__.items():
            if not key.startswith("_") and key not in ("training", "forward"):
                self.__dict__[key] = value
        self._absent = absent
        self._relay = relay
        self._outline = (_outline(module),)  # in a tuple: no child of this module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A filler of the shape that the module itself would return."""
        given = next(tensors_of((args, kwargs)), None)
        if given is None:
            return None
        outline = self._outline[0]
        dtype = next(iter(outline.parameters(recurse=False))).dtype
        if hasattr(outline, "embedding_dim"):
            return self._relay.filler((*given.shape, outline.embedding_dim), dtype, given.device)  # type: ignore[arg-type]
        if hasattr(outline, "out_features"):
            return self._relay.filler((*given.shape[:-1], outline.out_features), dtype, given.device)  # type: ignore[arg-type]
        if hasattr(outline, "normalized_shape"):
            return given
        on_meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with torch.no_grad():
            result = outline(*on_meta[0], **on_meta[1])
        return tree_map(
            lambda leaf: (
                self._relay.filler(tuple(leaf.shape), leaf.dtype, given.device)
                if isinstance(leaf, Tensor)
                else leaf
            ),
            result,
        )

    def __getattr__(self, name: str) -> Any:
        absent = self.__dict__.get("_absent", {})
        return absent[name]() if name in absent else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A model that ties its weights again assigns them here too; a stand-in owns none.
        if name not in self.__dict__.get("_absent", ()):
            super().__setattr__(name, value)


def shallow_copy(module: nn.Module, kind: type | None = None) -> Any:
    """The same children, parameters and buffers under a module of its own, of class ``kind`` before its own class."""
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


class Hollow:
    """Mixed into a module some of whose own parameters are absent."""

    def __getattr__(self, name: str) -> Any:
        absent = self.__dict__.get("_absent", {})
        return absent[name]() if name in absent else super().__getattr__(name)  # type: ignore[misc]


class LastBlock:
    """Mixed into a stage's last block: when it and all its hooks have run, the pass ends."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Ended(super().__call__(*args, **kwargs))  # type: ignore[misc]


class StageRoot(Hollow):
    """Mixed into the root of a stage that is not the last.

    Hooks on the root see an ordinary pass that returns the stage's output; the pass of whoever called the root, a
    user's loss function, say, ends thereafter.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, up to the stage's last block."""
        own = self.__dict__.get("_own_forward") or super().forward  # type: ignore[misc]
        try:
            return own(*args, **kwargs)
        except Ended as ended:
            self.__dict__["_has_ended"] = True
            return ended.output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_has_ended"] = False
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self.__dict__["_has_ended"]:
            raise Ended(result)
        return result


def call_until_ended(call: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether ``call`` was ended by a stage's last block, and its result or that block's output."""
    try:
        return False, call()
    except Ended as ended:
        return True, ended.output


@functools.cache
def _mixed(kind: Any, cls: Any) -> type:
    """One class for each pair, under the module's own name: models and their tools look at it."""
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _outline(module: nn.Module) -> nn.Module:
    """The module on the meta device: shapes without memory."""
    twin: nn.Module = shallow_copy(module)
    held: tuple[dict[str, Any], ...] = (twin._parameters, twin._buffers)
    for tensors in held:
        for name, tensor in tensors.items():
            if tensor is not None:
                empty = torch.empty_like(tensor, device="meta")
                tensors[name] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    for hooks in (
        twin._forward_hooks,
        twin._forward_pre_hooks,
        twin._backward_hooks,
        twin._backward_pre_hooks,
    ):
        hooks.clear()
    return twin


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value as torch takes it apart, with the classes that were registered there, in order."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
