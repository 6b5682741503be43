"""Outputs of a cut model, returned whole: hidden states, attentions, and all other tensors that a forward pass returns.

Between the cut layers a rank holds part of an activation. A model that returns such a part (``hidden_states`` and
``attentions`` of transformers, features of a user's own model) would give each rank a loss of its own tokens or heads.
So each tensor that leaves the module around all cut layers is checked. The graph of the tensor determines its state:
the nearest functions of the cut layers that the tensor was computed from.

    nearest functions                        the tensor holds               returned
    row layer, scatter, slice of tokens      this rank's tokens             joined along the sequence
    column layer, copy, gather               this rank's heads              joined along the heads, dim 1 of four
                                             this rank's features           withheld: any use is an error
    sum, join                                everything                     as it is
    scale by tp                              everything; gradient: addend   gradient divided by tp (region.py, the note)

A tensor without a graph, or from a compiled block, is compared over the ranks: if values differ, the shape determines
what was cut. The first pass of each kind decides; later passes of the kind repeat the decision.

Keys and values in a cache object of transformers (``cache``, or ``past_key_values`` in older releases) are this rank's
heads, which is what the cut layers need in the next pass. A pass with gradients returns a stand-in that the model
accepts as the cache; no other code can use its keys and values. Passes without gradients, generation among them, return
the cache itself.

Cost: a walk over some nodes of the graph and one small all-gather for each kind of pass; in later passes the gathers of
the tensors that are joined. A model that returns a loss or whole logits pays nothing.
Shapes: B batch, T sequence, H heads, tp ranks.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.caches import is_transformers_cache
from shardwise.base.pytree import rebuilt, tensors_by_path
from shardwise.comm import duals
from shardwise.comm.operators import ExchangeSite
from shardwise.comm.transports import NoTransport
from shardwise.parallel.tensor.region import ParallelRegion, WithheldValue
from shardwise.passes.absent import AbsentTensor

_NODES = 4096
"""Graph nodes that a walk visits; a tensor with a longer graph is compared over the ranks."""
_WORDS = 1 << 18
"""Elements of a projection that are multiplied at once."""
_HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "heads")
_CACHE = "past_key_values"
"""Name of cached keys and values that a model returns as tuples of tensors, or in an object of a class of its own."""
_LENGTHS = frozenset(
    (
        "get_seq_length",
        "get_max_length",
        "get_max_cache_shape",
        "get_mask_sizes",
        "is_compileable",
        "is_initialized",
    )
)
"""Attributes of a cache that contain nothing of its keys and values."""
_ROUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of two ranks' projections of equal tensors, relative to the norm; 2^-5 for 16 bits."""


class _OutputHolding(Enum):
    """State of a tensor on a rank: the part of the whole that the tensor holds."""

    WHOLE = "everything"
    ADDENDS = "everything, with gradients that are addends"
    TOKENS = "this rank's tokens"
    HEADS = "this rank's heads or features"
    UNKNOWN = "unknown"


class _OutputDecision(Enum):
    KEEP = "as it is"
    SCALE = "divide the gradient"
    JOIN_TOKENS = "join along the sequence"
    JOIN_HEADS = "join along the heads"
    WITHHOLD = "refuse any use"


class CutOutputs:
    """Makes the outputs of one module whole.

    Args:
        module: The module, which gets two hooks.
        name: Name of the module in the model.
        region: The region of the model.
        heads_in_order: True if rank r holds heads [r·H/tp, (r+1)·H/tp).
    """

    def __init__(self, module: nn.Module, name: str, region: ParallelRegion, heads_in_order: bool) -> None:
        self._region = region
        self._what = name or type(module).__name__
        self._heads_in_order = heads_in_order
        config = getattr(module, "config", None)
        counts = {getattr(config, key, None) for key in _HEAD_COUNTS}
        self._heads = {count for count in counts if isinstance(count, int)}
        self._decided: dict[Any, list[_OutputDecision]] = {}
        self._has_cut_cache: bool | None = None
        """True if cached keys and values are cut; None before the first pass that returns a cache with gradients."""
        module.register_forward_pre_hook(_with_caches, with_kwargs=True)
        module.register_forward_hook(duals.apart(lambda *given: self._after(*given)))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with whole tensors, or None if nothing changes."""
        if self._region.keeps_cut_logits or vars(module).get(
            "_has_ended"
        ):  # a stage's output goes to the next stage
            return None
        made: dict[int, Any] = {}
        for path, cache in _caches_by_path(output) if torch.is_grad_enabled() else ():
            if self._is_cut_cache(cache):
                made[id(cache)] = WithheldCache(cache, path, self._what)
        found = [
            (path, each) for path, each in tensors_by_path(output) if each.is_floating_point() and each.dim()
        ]
        if not found:
            return _replaced(output, made) if made else None
        region = self._region
        mode = (region.cut, region.adds, torch.is_grad_enabled())
        kind = (mode, tuple((path, each.dim(), each.requires_grad) for path, each in found))
        decisions = self._decided.get(kind)
        if decisions is None:
            decisions = self._decide(found)
            if not any(isinstance(each, AbsentTensor) for _, each in found):
                self._decided[kind] = decisions
        for (path, each), decision in zip(found, decisions, strict=True):
            if decision is not _OutputDecision.KEEP and id(each) not in made:
                made[id(each)] = self._made(path, each, decision)
        return _replaced(output, made) if made else None

    def _is_cut_cache(self, cache: Any) -> bool:
        if self._has_cut_cache is None:
            held = [each for each in _cached(cache) if not isinstance(each, AbsentTensor)]
            if not held:
                return False
            self._has_cut_cache = any(_state_of(each) is not _OutputHolding.WHOLE for each in held)
        return self._has_cut_cache

    # Decisions -------------------------------------------------------------------------------------------------

    def _decide(self, found: list[tuple[str, Tensor]]) -> list[_OutputDecision]:
        decisions = [self._by_graph(path, each) for path, each in found]
        marks = self._differ([each for _, each in found])
        for i, (path, each) in enumerate(found):
            if decisions[i] is None:
                decisions[i] = self._by_shape(path, each) if marks[i] else self._by_path(path, each)
            elif marks[i] and decisions[i] in (_OutputDecision.KEEP, _OutputDecision.SCALE):
                decisions[i] = _OutputDecision.WITHHOLD  # made from slices past the cut layers
        return [each for each in decisions if each is not None]

    def _by_graph(self, path: str, tensor: Tensor) -> _OutputDecision | None:
        """Return the decision that follows from the graph, or None if the graph does not determine one."""
        if isinstance(tensor, AbsentTensor):
            return _OutputDecision.KEEP
        state = _state_of(tensor)
        if state is _OutputHolding.UNKNOWN:
            return None
        if state is _OutputHolding.WHOLE:
            return _OutputDecision.KEEP
        if state is _OutputHolding.ADDENDS:
            return _OutputDecision.SCALE
        if state is _OutputHolding.TOKENS and not _is_attention(path):
            return _OutputDecision.JOIN_TOKENS if self._is_cut_sequence(tensor) else _OutputDecision.WITHHOLD
        is_heads = tensor.dim() == 4 and self._heads_in_order and not _is_cache(path)
        return _OutputDecision.JOIN_HEADS if is_heads else _OutputDecision.WITHHOLD

    def _by_shape(self, path: str, tensor: Tensor) -> _OutputDecision:
        """Return the decision for a tensor without a graph that differs from rank to rank."""
        ranks = self._region.group.size
        if _is_cache(path):
            return _OutputDecision.KEEP if not torch.is_grad_enabled() else _OutputDecision.WITHHOLD
        if tensor.dim() == 4 and self._heads_in_order:
            if _is_attention(path) or tensor.shape[1] * ranks in self._heads:
                return _OutputDecision.JOIN_HEADS
        elif self._region.cut and self._is_cut_sequence(tensor):
            return _OutputDecision.JOIN_TOKENS
        return _OutputDecision.WITHHOLD

    def _by_path(self, path: str, tensor: Tensor) -> _OutputDecision:
        """Return the decision for a tensor without a known graph that is equal on all ranks.

        In a whole pass of a model that is made to be cut, the gradient of such a tensor is an addend inside the blocks
        and whole behind them. A compiled graph hides which, except for the logits.
        """
        is_logits = path in ("", "logits")
        hides = self._region.adds and not is_logits and _is_of_compiled_code(tensor)
        return _OutputDecision.WITHHOLD if hides else _OutputDecision.KEEP

    def _is_cut_sequence(self, tensor: Tensor) -> bool:
        tokens = self._region.tokens
        dim = duals.SEQUENCE
        return tensor.dim() > dim and (
            tokens is None or tensor.shape[dim] * self._region.group.size == tokens
        )

    def _differ(self, tensors: list[Tensor]) -> list[bool]:
        """Compare the tensors over the ranks: a projection and the norm of each. Collective."""
        group = self._region.group
        if isinstance(group.transport, NoTransport):  # tensors without numbers are equal
            return [False] * len(tensors)
        own = torch.stack([_projected(each.detach()) for each in tensors]).to(tensors[0].device)  # [n, 2]
        every = own.new_empty(group.size, *own.shape)
        with _uncounted(group):
            group.all_gather(every.view(-1), own.view(-1), "outputs of the ranks", "control").wait()
        spread = (every.amax(0) - every.amin(0)).amax(1).tolist()
        norms = every[:, :, 1].amax(0).tolist()
        return [
            far > _ROUNDS.get(each.dtype, 2.0**-5) * norm  # NaN of absent values differs from nothing
            for far, norm, each in zip(spread, norms, tensors, strict=True)
        ]

    def _made(self, path: str, tensor: Tensor, decision: _OutputDecision) -> Any:
        region = self._region
        if decision is _OutputDecision.SCALE:
            return region.inward(tensor, sees_whole=False)
        if decision is _OutputDecision.JOIN_TOKENS:
            return duals.join(tensor, ExchangeSite(region.group, path))
        if decision is _OutputDecision.JOIN_HEADS:
            return duals.join(tensor, ExchangeSite(region.group, path), dim=1)
        return WithheldValue(
            f"{path or 'the output'} of {self._what}: under tensor parallelism each rank holds a part of it (its "
            f"heads, features or tokens, {list(tensor.shape)} here), and how parts make the whole is not known. Hidden "
            "states and attention weights of the blocks are given back whole; take those, compute what you need from "
            "the model's final output, or set mesh.tp: 1"
        )


def _is_attention(path: str) -> bool:
    return "attentions" in path


def _is_cache(path: str) -> bool:
    return _CACHE in path


# Caches ------------------------------------------------------------------------------------------------------------


class WithheldCache(WithheldValue):
    """A stand-in for a cache whose keys and values are this rank's heads, which the model accepts as the cache.

    Args:
        cache: The cache.
        path: Path of the cache in the output.
        what: Name of the module that returned the cache, in errors.
    """

    def __init__(self, cache: Any, path: str, what: str) -> None:
        super().__init__(
            f"{path or 'the output'} of {what}: under tensor parallelism each rank caches the keys and values of its "
            "own heads, so a loss on them would be another one on each rank. Give the cache back to the model in its "
            "next pass, compute what you need from the model's final output or its hidden states, which are given back "
            "whole, or set mesh.tp: 1"
        )
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        if name in _LENGTHS:
            return getattr(self._cache, name)
        return super().__getattr__(name)


def is_cache(value: Any) -> bool:
    """Return True for a cache object of transformers, and for the stand-in of a cache."""
    return type(value).__name__.endswith("Cache") and not isinstance(value, Tensor)


def _caches_by_path(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every cache of a model's output with its path: ``cache``, or ``[1]``."""
    if is_transformers_cache(value) or (path == _CACHE and is_cache(value)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _caches_by_path(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for i, inner in enumerate(value):
            yield from _caches_by_path(inner, f"{path}[{i}]")


def _cached(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache object of transformers, including those of the caches inside."""
    for value in vars(cache).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Tensor):
                yield each
            elif type(each).__module__.startswith("transformers.") and hasattr(each, "__dict__"):
                yield from _cached(each)


def _with_caches(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Replace stand-ins among the module's arguments by their caches."""

    def real(value: Any) -> Any:
        return vars(value)["_cache"] if isinstance(value, WithheldCache) else value

    if not any(isinstance(each, WithheldCache) for each in (*args, *kwargs.values())):
        return None
    return tuple(map(real, args)), {name: real(value) for name, value in kwargs.items()}


# Graphs ------------------------------------------------------------------------------------------------------------


def _state_of(tensor: Tensor) -> _OutputHolding:
    """Return what a rank's tensor holds, by the nearest functions of cut layers in its graph."""
    if tensor.grad_fn is None or _is_of_compiled_code(tensor):
        return _OutputHolding.UNKNOWN
    waiting: deque[Any] = deque([tensor.grad_fn])
    seen: set[Any] = set()
    states: set[_OutputHolding] = set()
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > _NODES:
            return _OutputHolding.UNKNOWN
        state = _state_after(node)
        if state is not None:
            states.add(state)
        else:
            waiting.extend(parent for parent, _ in node.next_functions)
    if _OutputHolding.TOKENS in states and _OutputHolding.HEADS in states:
        return _OutputHolding.HEADS
    for state in (_OutputHolding.HEADS, _OutputHolding.TOKENS, _OutputHolding.ADDENDS, _OutputHolding.WHOLE):
        if state in states:
            return state
    return _OutputHolding.UNKNOWN


def _is_of_compiled_code(tensor: Tensor) -> bool:
    """Return True for a tensor that a graph of torch.compile returned, which hides the functions of the cut layers."""
    return type(tensor.grad_fn).__name__ == "CompiledFunctionBackward"


def _state_after(node: Any) -> _OutputHolding | None:
    """Return the state that a function of the cut layers gives its output, or None for any other node."""
    gives = getattr(node, "gives", None) or getattr(getattr(type(node), "_forward_cls", None), "gives", None)
    return _OutputHolding[gives] if gives else None


# Values ------------------------------------------------------------------------------------------------------------


def _projected(tensor: Tensor) -> Tensor:
    """Return (projection on a fixed direction, norm) of a tensor, in fp64."""
    flat = tensor.reshape(-1)
    total = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for start in range(0, len(flat), _WORDS):
        part = flat[start : start + _WORDS].double()
        place = torch.arange(start, start + len(part), dtype=torch.float64, device=tensor.device)
        total += torch.stack([(part * torch.cos(place * 2.399963)).sum(), part.square().sum()])
    total[1] = total[1].sqrt()
    return total


@contextmanager
def _uncounted(group: Any) -> Iterator[None]:
    """Leave the group's counts of traffic as they are."""
    traffic = group.traffic
    counts, sequence = dict(traffic.counts), traffic.sequence
    try:
        yield
    finally:
        traffic.counts.clear()
        traffic.counts.update(counts)
        traffic.sequence = sequence


def _replaced(value: Any, made: Mapping[int, Any]) -> Any:
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Tensor):
        return value
    change: Callable[[Any], Any] = lambda inner: _replaced(inner, made)  # noqa: E731
    return rebuilt(value, change)
