"""Recomputation: tensors that a block would keep for its backward pass are computed again in that pass.

    none        everything that autograd saves is kept
    full        a block keeps its inputs; its forward runs again when its backward begins
    selective   the parts that cost most bytes for the fewest operations run again:
                  attention    blocks that are given an ``attention`` function (our models) keep its queries, keys and
                               values, and not the attention weights
                  operations   any other block keeps the outputs of matrix products, convolutions and fused attention,
                               and runs norms, activations, masks and plain attention again

A block's forward is wrapped on the instance, so that hooks on the block stay outside: its weights are gathered when its
backward window opens, once. Recomputation is torch's non-reentrant checkpoint. It restores our random numbers
(replay.py), torch's, and the buffers that the first run read (second_run.py), and stops at the last tensor that is
needed, so that a block's last product is not repeated. Ranks that hold experts end together however many rows they had:
the last exchange keeps its tensors behind it ([Note: the same calls on every rank] in parallel/expert/dispatch.py).
Collectives inside run again, in the order of the blocks' backward passes, which is the same on every rank.

Papers: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198 (selective).
Cost:   docs/techniques/recomputation.md: elements kept and operations repeated, in closed form.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.base.caches import holds_past, is_transformers_cache
from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.names import chosen_by
from shardwise.base.policy import Policy
from shardwise.base.pytree import tensors_in
from shardwise.passes.generators import RandomGenerators, own_generators
from shardwise.passes.replay import DrawReplay
from shardwise.passes.second_run import BlockBuffers, BlockDraws, SecondRuns, different

Share = Annotated[float, Field(gt=0, le=1)]

_ATTENTION = "attention"
"""Name of the attribute that holds a block's attention function."""

_HUGGING_FACE_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments of transformers' blocks that are a cache whatever their class is; tuples in models of older releases."""


class RecomputePolicy(Policy):
    """Keys under ``recompute:``; a single word (``recompute: full``) sets ``scope``."""

    scope: Literal["none", "full", "selective"] = "none"
    """Parts that run again. ``full``: whole blocks; ``selective``: the parts that cost most bytes for the fewest
    operations."""
    blocks: Literal["all"] | PositiveInt | Share | list[str] = "all"
    """Blocks that recompute: ``all``; an integer n for every n-th; a share such as 0.5, evenly spread; or patterns
    of module names, in which ``*`` stands for one part of the name."""
    select: Literal["auto", "attention", "operations"] = "auto"
    """Part that ``selective`` runs again: the attention function, or all operations but the expensive ones.
    ``auto`` takes the attention function of blocks that are given one."""

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
    """Return the names of the blocks that recompute.

    Args:
        names: Names of all blocks of the model, in order.
        policy: The recompute keys of the run.

    Returns:
        Names in order; empty if ``policy.scope`` is "none".

    Raises:
        ConfigError: If a pattern matches no block, or if the model has no blocks.
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
    blocks: Sequence[tuple[str, nn.Module]], policy: RecomputePolicy, replay: DrawReplay
) -> list[str]:
    """Wrap the forward of the blocks that the policy chooses.

    With compiled blocks: compile first, then wrap; ``operations`` then runs the whole block again, since the
    compiler hides its operations.

    Args:
        blocks: All blocks of the model with their names, in order.
        policy: The recompute keys of the run.
        replay: The position of random numbers, which a second run restores.

    Returns:
        The names of the chosen blocks.

    Raises:
        ConfigError: If the policy does not fit the blocks.
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
    replay: DrawReplay,
    saves: Callable[..., CheckpointPolicy] | None = None,
    buffers: BlockBuffers | None = None,
    block: nn.Module | None = None,
    name: str = "",
) -> Callable[..., Any]:
    """Return a function whose saved tensors are computed again in the backward pass.

    [Note: compiled blocks]
    A compiler cannot trace our contexts, and if it gives up inside a checkpoint it goes on without them: other
    masks, silently. So this frame is never compiled; the functions that it calls may be.

    Args:
        function: The function.
        replay: The position of random numbers, which a second run restores.
        saves: Function that decides by operation which outputs are kept, or None to keep only inputs.
        buffers: Buffers that a second run restores, or None.
        block: The block that ``function`` belongs to, or None; its own random generators are restored.
        name: Name of the block in errors.

    Returns:
        The wrapped function.
    """
    told = f"block {name}" if name else f"the function {getattr(function, '__qualname__', function)}"
    runs, generators = SecondRuns(told), dict[frozenset[torch.device], RandomGenerators]()
    own = {} if block is None else own_generators(block)
    generators[frozenset()] = RandomGenerators((), own)

    @torch.compiler.disable(recursive=False)
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        devices = frozenset(each.device for each in tensors_in((args, kwargs)) if each.device.type != "cpu")
        if devices not in generators:
            generators[devices] = RandomGenerators(devices, own)
        contexts = partial(_contexts, replay, saves, buffers, BlockDraws(generators[devices]), runs)
        versions = [(each, each._version) for each in tensors_in((args, kwargs)) if not each.is_inference()]
        output = checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )
        for given, version in versions:
            if given._version != version:
                raise UsageError(
                    f"recompute: {told} writes over a tensor that it is given ({given.dtype} {tuple(given.shape)}) in "
                    "its forward pass, so its second run would begin with other numbers. Write into a copy "
                    "(x = x * 1.5 in the place of x.mul_(1.5)), leave the block out (recompute.blocks), or set "
                    "recompute: none"
                )
        return output

    return run


@contextmanager
def told_again(replay: DrawReplay) -> Iterator[None]:
    """Enclose a backward pass, and name the block in torch's error for a second run that takes another path.

    Raises:
        UsageError: In place of torch's ``CheckpointError``.
    """
    try:
        yield
    except CheckpointError as error:
        text = " ".join(str(error).split())
        raise UsageError(
            different(replay.ran_again or "a block", f"takes another path the second time ({text})")
        ) from error


class _JoinedContexts(AbstractContextManager[None]):
    """Several contexts as one context that can be entered many times, once for every recomputation."""

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


def _contexts(
    replay: DrawReplay,
    saves: Callable[..., CheckpointPolicy] | None,
    buffers: BlockBuffers | None,
    draws: BlockDraws,
    runs: SecondRuns,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts around the forward pass and around each recomputation."""
    piece = replay.again(runs.name)
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
    alike = runs.next() if replay.has_numbers else None
    if alike is not None:  # the innermost context, so that its hooks get exactly the tensors that are saved
        first.append(alike)
        again.append(alike.again())
    return _JoinedContexts(*first), _JoinedContexts(*again)


def _wrap_forward(
    block: nn.Module, name: str, replay: DrawReplay, saves: Callable[..., CheckpointPolicy] | None
) -> None:
    inner = recomputed(block.forward, replay, saves, BlockBuffers(block, name), block, name)

    @wraps(block.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = _without_caches(block, name, args, kwargs)
        return inner(*args, **kwargs)

    block.forward = forward  # type: ignore[method-assign]


def _without_caches(
    block: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments with None in the place of an empty cache of transformers.

    Both runs of the block would extend the cache, the second run by tokens that the cache holds already. Training does
    not read the cache, and transformers' own checkpoints leave it out as well.

    Raises:
        UsageError: If the block would read keys and values from the cache, or if the cache is not of transformers.
    """
    if getattr(block, _ONLY_READS, False):
        return args, kwargs
    for cache in filter(is_transformers_cache, (*args, *kwargs.values())):
        if any(holds_past(cache, layer) for layer in _layers_of(block)):
            raise UsageError(
                f"recompute: block {name} was given a cache that holds keys and values of past tokens in a pass with "
                "gradients, and its second run would extend the cache again. Leave the block out (recompute.blocks), "
                "run the pass under torch.no_grad(), or set recompute: none"
            )
        if _reads_keys_from_cache(block) and _SHARED_KEYS not in kwargs:
            raise UsageError(
                f"recompute: block {name} takes the keys and values of an earlier block from the cache "
                "(num_kv_shared_layers), and recomputed blocks do not fill the cache. Take a newer release of "
                f"transformers, which passes them as {_SHARED_KEYS}, or set recompute: none"
            )
    args = tuple(None if is_transformers_cache(each) else each for each in args)
    kwargs = {
        key: None if key in _HUGGING_FACE_CACHES or is_transformers_cache(each) else each
        for key, each in kwargs.items()
    }
    if any(hasattr(each, "extend") and not isinstance(each, list) for each in (*args, *kwargs.values())):
        raise UsageError(
            f"recompute: block {name} was given a cache in a pass with gradients, which its second run would extend "
            "again; generate under torch.no_grad(), or set recompute: none"
        )
    return args, kwargs


_ONLY_READS = "_can_checkpoint_with_cache"
"""Flag of transformers' blocks that read a cache and never write into it."""


def _layers_of(block: nn.Module) -> set[int]:
    """Return the indices under which modules of transformers inside the block write into a cache."""
    found = (getattr(module, "layer_idx", None) for module in block.modules())
    return {index for index in found if isinstance(index, int)}


_SHARED_KEYS = "shared_kv_states"
"""Argument in which newer releases of transformers pass shared keys and values beside the cache."""


def _reads_keys_from_cache(block: nn.Module) -> bool:
    return any(getattr(module, "is_kv_shared_layer", False) for module in block.modules())


# Selective ---------------------------------------------------------------------------------------------------------


def _select(block: nn.Module, name: str, policy: RecomputePolicy, replay: DrawReplay) -> None:
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


def _recomputed_attention(attention: Callable[..., Any], replay: DrawReplay) -> Callable[..., Any]:
    run = recomputed(attention, replay)

    @wraps(attention)
    def core(*args: Any, **kwargs: Any) -> Any:
        # Attention draws no random numbers, so the compiler's own checkpoint suffices.
        if torch.compiler.is_compiling():
            return checkpoint(attention, *args, use_reentrant=False, **kwargs)
        return run(*(_compact(args) if torch.is_grad_enabled() else args), **kwargs)

    return core


def _compact(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the same tensors, copied if they are views of a larger storage, which would be kept with them.

    Values are a slice of the output of the fused projection; queries and keys have storages of their own.
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
"""Operations with many floating-point operations a byte. A product with weights costs 2·(inner width) per element that
it writes, fused attention twice the sequence. A batched product (plain attention's) is left out: it writes the square
of the sequence at 2·(head size) an element."""


def _keep_expensive(
    context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    # A variant that writes into given memory has a name with a suffix, which is not in the set: its output may be
    # overwritten, so the output must not be kept.
    is_kept = operation.name().removeprefix("aten::") in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
