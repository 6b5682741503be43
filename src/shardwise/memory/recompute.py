"""Recomputation: what a block would keep for its backward pass is computed again there.

    none        everything that autograd saves is kept
    full        a block keeps its inputs; its forward runs again when its backward begins
    selective   the parts that cost most bytes for the fewest operations run again:
                  attention    blocks that are given an ``attention`` function (our models) keep its queries, keys and
                               values, and not the attention weights
                  operations   any other block keeps the outputs of matrix products, convolutions and fused attention,
                               and runs norms, activations, masks and plain attention again

A block's forward is wrapped on the instance, so that hooks on the block stay outside: its weights are gathered when its
backward window opens, once. Recomputation is torch's non-reentrant checkpoint; it puts back torch's random state and
ours (``memory.replay``), runs on the buffers that the first run saw, and stops at the last tensor that is needed, so
that a block's last product is not repeated. Ranks that hold experts end together however many rows they had: the last
exchange keeps its tensors behind it ([Note: the same calls on every rank] in parallel/expert/dispatch.py).
Collectives inside run again, in the order of the blocks' backward passes, which is the same on every rank.

Papers: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198 (selective).
Cost:   ``memory.recompute_cost``: bytes kept and operations repeated, in closed form.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.memory.replay import Replay
from shardwise.plan.errors import ConfigError, UsageError
from shardwise.plan.names import chosen_by
from shardwise.plan.policy import Policy
from shardwise.plan.pytree import tensors_in

Share = Annotated[float, Field(gt=0, le=1)]

_ATTENTION = "attention"
"""Name of the attribute that holds a block's attention function."""

_SMALL_BYTES = 1 << 16
"""Buffers up to this size are copied in every pass, whether they have changed before or not."""

_HUGGING_FACE_CACHES = ("past_key_values", "past_key_value", "layer_past")


class RecomputePolicy(Policy):
    """Keys under ``recompute:``; one word (``recompute: full``) sets ``scope``."""

    scope: Literal["none", "full", "selective"] = "none"
    """``full`` runs whole blocks again, ``selective`` the parts that cost most bytes for the fewest operations."""
    blocks: Literal["all"] | PositiveInt | Share | list[str] = "all"
    """Which blocks: ``all``; an integer n, every n-th; a share such as 0.5, evenly spread; or patterns of module names,
    in which ``*`` stands for one part of the name."""
    select: Literal["auto", "attention", "operations"] = "auto"
    """What ``selective`` runs again: the attention function, or all operations but the expensive ones. ``auto`` takes
    the attention function of blocks that are given one."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, given: Any) -> Any:
        return {"scope": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.select != "auto" and self.scope != "selective":
            raise ValueError(
                f"select: {self.select} belongs to scope selective, not to {self.scope}; set scope: selective"
            )
        return self


def chosen(names: Sequence[str], policy: RecomputePolicy) -> list[str]:
    """The blocks, out of all of the model's in order, that recompute.

    Errors: ConfigError where a pattern matches no block, or there are none.
    """
    if policy.scope == "none":
        return []
    if not names:
        raise ConfigError(
            f"recompute: {policy.scope}, but the model's blocks are not found (modules of one class that repeat in a "
            "ModuleList or a Sequential); name them in zero.units: [pattern], or set recompute: none"
        )
    blocks = policy.blocks
    if isinstance(blocks, list):
        return chosen_by(blocks, names, "recompute.blocks", "block")
    if isinstance(blocks, int):
        return list(names[::blocks])
    share = 1.0 if blocks == "all" else blocks
    count = max(1, round(share * len(names)))
    return [names[i * len(names) // count] for i in range(count)]


def apply_recompute(
    blocks: Sequence[tuple[str, nn.Module]], policy: RecomputePolicy, replay: Replay
) -> list[str]:
    """Wrap the chosen of ``blocks`` (all of the model's, in order, with their names); returns the names of the chosen.

    With compiled blocks: compile first, then wrap; ``operations`` then runs the whole block again, since the compiler
    hides its operations.
    Errors: ConfigError where the policy does not fit the blocks.
    """
    modules = dict(blocks)
    names = chosen(list(modules), policy)
    for name in names:
        block = modules[name]
        if any(getattr(module, "gradient_checkpointing", False) for module in block.modules()):
            raise ConfigError(
                f"recompute: block {name} already recomputes by itself (gradient_checkpointing is set); call "
                "model.gradient_checkpointing_disable(), or set recompute: none"
            )
        if policy.scope == "full":
            _wrap_forward(block, name, replay, None)
        else:
            _select(block, name, policy, replay)
    return names


def recomputed(
    function: Callable[..., Any],
    replay: Replay,
    saves: Callable[..., CheckpointPolicy] | None = None,
    buffers: "_Buffers | None" = None,
) -> Callable[..., Any]:
    """``function``, whose saved tensors are computed again in backward; ``saves``: but for what this keeps.

    [Note: compiled blocks]
    A compiler cannot trace our contexts, and where it gives up inside a checkpoint it goes on without them: other
    masks, silently. So this frame is never compiled; what it calls may be.
    """

    @torch.compiler.disable(recursive=False)
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        devices = {each.device for each in tensors_in((args, kwargs)) if each.device.type != "cpu"}
        contexts = partial(_contexts, replay, saves, buffers, _Draws(devices))
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )

    return run


class _Both(AbstractContextManager[None]):
    """Two contexts as one that can be entered many times: every recomputation enters it anew."""

    def __init__(self, *contexts: AbstractContextManager[Any]):
        self._contexts = contexts
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for context in self._contexts:
            stack.enter_context(context)
        self._stacks.append(stack)

    def __exit__(self, *exception: Any) -> None:
        self._stacks.pop().__exit__(*exception)


class _Draws(AbstractContextManager[None]):
    """What a piece draws from torch's generators, its second run draws, too. Entered around the first run, ``again``
    around every further one.

    Keyed dropout draws nothing there, so most pieces leave the states alone; then the second run does, too. torch's own
    checkpoint sets and restores the states of host and device in any case.
    """

    def __init__(self, devices: Iterable[torch.device]):
        self._devices = list(devices)
        self._before: list[Tensor] = []
        """States that the first run began with, where it has drawn."""

    def __enter__(self) -> None:
        self._before = self._states()

    def __exit__(self, *exception: Any) -> None:
        if all(map(torch.equal, self._before, self._states())):
            self._before = []

    def again(self) -> "_Redrawn":
        """With the states as they were."""
        return _Redrawn(self)

    def rewind(self) -> list[Tensor]:
        """To where the first run began, if it drew; returns the states now, for ``put``."""
        held = self._states() if self._before else []
        self.put(self._before)
        return held

    def _states(self) -> list[Tensor]:
        on_devices = (torch.get_device_module(each).get_rng_state(each) for each in self._devices)
        return [torch.get_rng_state(), *on_devices]

    def put(self, states: Sequence[Tensor]) -> None:
        """Let the generators stand there; nothing where ``states`` is empty."""
        if states:
            torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=False):
            torch.get_device_module(device).set_rng_state(state, device)


class _Redrawn(AbstractContextManager[None]):
    def __init__(self, draws: _Draws):
        self._draws = draws
        self._held: list[list[Tensor]] = []

    def __enter__(self) -> None:
        self._held.append(self._draws.rewind())

    def __exit__(self, *exception: Any) -> None:
        self._draws.put(self._held.pop())


class _Buffers:
    """The buffers of one block: batch statistics, counters, codebooks, the vectors of a spectral norm.

    What the forward pass changes in them stands once: a second run begins with the values that the first one saw, or
    it would compute other numbers, and what it changes is dropped. The first pass shows which buffers change; of those,
    and of all that are small, a pass keeps a copy until its backward pass.
    """

    def __init__(self, block: nn.Module, name: str):
        self._block = block
        self._name = name
        self._modules: list[nn.Module] = []
        self._changing: set[tuple[int, str]] | None = None
        """(module by its place, name) of what a pass has changed; None before the first pass."""

    def before(self) -> "_Snapshot":
        """The values now, at the beginning of a pass."""
        if self._changing is None:
            self._modules = list(self._block.modules())
        held = list(self._each())
        keeps_all = self._changing is None
        kept = {
            (place, name): buffer.detach().clone()
            for place, name, buffer in held
            if keeps_all or buffer.nbytes <= _SMALL_BYTES or (place, name) in (self._changing or ())
        }
        versions = {(place, name): (buffer, buffer._version) for place, name, buffer in held}
        return _Snapshot(self, kept, versions, keeps_all)

    def note(self, snapshot: "_Snapshot") -> None:
        """After the first run: which buffers has it changed?

        Errors: UsageError where a large one changes that did not change in the first pass.
        """
        changing = set() if self._changing is None else self._changing
        for place, name, buffer in self._each():
            key = (place, name)
            before, version = snapshot.versions.get(key, (None, 0))
            changed = buffer is not before or buffer._version != version
            # A write by way of .data counts no version.
            if not changed and snapshot.is_first:
                changed = not torch.equal(buffer, snapshot.kept[key])
            if not changed:
                if snapshot.is_first and buffer.nbytes > _SMALL_BYTES:
                    del snapshot.kept[key]
                continue
            if before is not None and key not in snapshot.kept:
                raise UsageError(
                    f"recompute: block {self._name} changed its buffer {name!r} ({buffer.nbytes} bytes) in this "
                    "pass and not in its first one, so that no copy was kept for the second run, which would compute "
                    "other numbers. Leave the block out of recompute.blocks, or set recompute: none"
                )
            changing.add(key)
        self._changing = changing

    def put(self, values: Mapping[tuple[int, str], Tensor]) -> dict[tuple[int, str], Tensor]:
        """Let the block hold ``values``; returns what it held in their places."""
        held = {}
        for (place, name), value in values.items():
            buffers = self._modules[place]._buffers
            held[place, name] = buffers[name]
            buffers[name] = value
        return held  # type: ignore[return-value]

    def _each(self) -> Iterator[tuple[int, str, Tensor]]:
        for place, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield place, name, buffer


@dataclass
class _Snapshot(AbstractContextManager[None]):
    """A pass: entered around its first run; ``again`` around every further one."""

    buffers: _Buffers
    kept: dict[tuple[int, str], Tensor]
    versions: dict[tuple[int, str], tuple[Tensor, int]]
    is_first: bool

    def __enter__(self) -> None:
        """The values were taken already."""

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.buffers.note(self)
        self.versions.clear()

    def again(self) -> "_Before":
        """With the buffers as they were."""
        return _Before(self)


class _Before(AbstractContextManager[None]):
    def __init__(self, snapshot: _Snapshot):
        self._snapshot = snapshot
        self._held: list[dict[tuple[int, str], Tensor]] = []

    def __enter__(self) -> None:
        snapshot = self._snapshot
        self._held.append(snapshot.buffers.put({key: kept.clone() for key, kept in snapshot.kept.items()}))

    def __exit__(self, *exception: Any) -> None:
        self._snapshot.buffers.put(self._held.pop())


def _contexts(
    replay: Replay, saves: Callable[..., CheckpointPolicy] | None, buffers: _Buffers | None, draws: _Draws
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the forward pass, and around each recomputation."""
    piece = replay.again()
    first: list[AbstractContextManager[Any]] = [piece.first(), draws]
    again: list[AbstractContextManager[Any]] = [piece, draws.again()]
    if buffers is not None:
        snapshot = buffers.before()
        first.append(snapshot)
        again.append(snapshot.again())
    if saves is not None:
        forward, backward = create_selective_checkpoint_contexts(saves)
        first.append(forward)
        again.append(backward)
    return _Both(*first), _Both(*again)


def _wrap_forward(
    block: nn.Module, name: str, replay: Replay, saves: Callable[..., CheckpointPolicy] | None
) -> None:
    inner = recomputed(block.forward, replay, saves, _Buffers(block, name))

    @wraps(block.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            # A cache would be extended a second time. Training does not read it, as in Hugging Face's own checkpoints.
            kwargs = {key: None if key in _HUGGING_FACE_CACHES else value for key, value in kwargs.items()}
            if any(
                hasattr(value, "extend") and not isinstance(value, list)
                for value in [*args, *kwargs.values()]
            ):
                raise UsageError(
                    f"recompute: block {name} was given a cache in a pass with gradients, which its second run would "
                    "extend again; generate under torch.no_grad(), or set recompute: none"
                )
        return inner(*args, **kwargs)

    block.forward = forward  # type: ignore[method-assign]


# Selective ---------------------------------------------------------------------------------------------------------


def _select(block: nn.Module, name: str, policy: RecomputePolicy, replay: Replay) -> None:
    holders = [module for module in block.modules() if callable(vars(module).get(_ATTENTION))]
    if policy.select == "attention" and not holders:
        raise ConfigError(
            f"recompute.select: attention, but no module in block {name} holds a function in an attribute "
            f"{_ATTENTION!r}; set recompute.select: operations"
        )
    if policy.select == "operations" or not holders:
        _wrap_forward(block, name, replay, _keep_expensive)
        return
    for holder in holders:
        setattr(holder, _ATTENTION, _recomputed_attention(getattr(holder, _ATTENTION), replay))


def _recomputed_attention(attention: Callable[..., Any], replay: Replay) -> Callable[..., Any]:
    run = recomputed(attention, replay)

    @wraps(attention)
    def core(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # draws nothing, so that the compiler's own checkpoint will do
            return checkpoint(attention, *args, use_reentrant=False, **kwargs)
        return run(*(_compact(args) if torch.is_grad_enabled() else args), **kwargs)

    return core


def _compact(args: Sequence[Any]) -> tuple[Any, ...]:
    """The same tensors, copied where they are views of something larger, which would be kept with them.

    Values are a slice of the output of the fused projection; queries and keys were turned into memory of their own.
    """
    needed: dict[int, int] = {}
    for arg in args:
        if isinstance(arg, Tensor):
            storage = arg.untyped_storage()._cdata
            needed[storage] = needed.get(storage, 0) + arg.numel() * arg.element_size()
    return tuple(
        arg.contiguous()
        if isinstance(arg, Tensor) and needed[arg.untyped_storage()._cdata] < arg.untyped_storage().nbytes()
        else arg
        for arg in args
    )


_EXPENSIVE = frozenset(
    {
        "mm",
        "addmm",
        "convolution",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Operations of many operations a byte: a product with weights costs 2·(inner width) per element that it writes, fused
attention twice the sequence. A batched product (plain attention's) is not among them: it writes the square of the
sequence at 2·(head size) an element."""


def _keep_expensive(
    context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    # The name of a variant that writes into given memory has a suffix: what it wrote may be overwritten.
    is_kept = operation.name().removeprefix("aten::") in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
