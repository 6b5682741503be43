"""A function of single tokens, computed a tile of tokens at a time and computed again in the backward pass.

    y[tile] = f(x[tile], W)                       forward: only x is kept
    dx[tile], dW += Jᵀ dy[tile]                   backward: f runs again for a tile, and is differentiated there

Intermediate results of f exist for one tile of tokens. The sums dW are kept in fp32 (fp64 for fp64) and returned once,
because all tiles are one function of autograd. Tiles with separate backward passes would give each parameter one
gradient per tile, but a Unit begins its reduction after each parameter's first gradient.

Paper: Kitaev et al. 2020, arXiv:2001.04451, section 4 (chunks of a feed-forward part).
Cost:  one more forward pass of f; weights' gradients of one tile beside their sums.
Shapes: N tokens, D width; x [..., D].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from shardwise.passes.replay import DrawReplay

Place = tuple[nn.Module, str]
"""A parameter: its module, and its name in that module."""
OfTile = Callable[[Tensor, int], Tensor]
"""Function of a tile: (rows of x [C, D], index of their first row) -> result [C, ...]."""


@_disable_dynamo
def tiled(
    places: Sequence[Place],
    function: OfTile,
    x: Tensor,
    tokens: int,
    replay: DrawReplay,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Return ``function`` of ``x``, computed ``tokens`` rows at a time.

    Args:
        places: The trained parameters that ``function`` uses.
        function: The function of a tile.
        x: Input [..., D].
        tokens: Rows in a tile.
        replay: The position of random numbers, which the second run restores.
        inside: Function that returns a context around each run of ``function``.

    Returns:
        Result [..., D'].
    """
    kind = x.device.type
    autocast = partial(
        torch.autocast,
        kind,
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )
    run = _TiledRun(function, places, tokens, replay.again(), inside, autocast)
    weights = [owner._parameters[key] for owner, key in places]
    y: Tensor = _Tiled.apply(run, x.reshape(-1, x.shape[-1]), *weights)
    return y.view(*x.shape[:-1], -1)


class _TiledRun:
    """A function of tiles, its parameters, and the contexts around its runs."""

    def __init__(
        self,
        function: OfTile,
        places: Sequence[Place],
        tokens: int,
        again: AbstractContextManager[Any],
        inside: Callable[[], AbstractContextManager[Any]],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.function = function
        self.places = places
        self.tokens = tokens
        self.again = again
        self.inside = inside
        self.autocast = autocast

    def starts(self, x: Tensor) -> Iterator[tuple[slice, int]]:
        """Return the tiles of ``x`` [N, D] with the indices of their first rows."""
        return ((slice(start, start + self.tokens), start) for start in range(0, len(x), self.tokens))

    @contextmanager
    def holding(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Replace the modules' parameters by ``weights`` inside the context."""
        before = [owner._parameters[key] for owner, key in self.places]
        self._put(weights)
        try:
            yield
        finally:
            self._put(before)

    def _put(self, weights: Sequence[Any]) -> None:
        for (owner, key), weight in zip(self.places, weights, strict=True):
            owner._parameters[key] = weight


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _TiledRun, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x, *weights)
        y = None
        with run.inside():
            for tile, start in run.starts(x):
                part = run.function(x[tile], start)
                if y is None:
                    y = part.new_empty(len(x), part.shape[-1])
                y[tile] = part
        assert y is not None, "there is more than one tile"
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        run = ctx.run
        x, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[1:]
        leaves = [weight.detach().requires_grad_(need) for weight, need in zip(weights, needs, strict=True)]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums: dict[int, Tensor] = {}
        d_x = x.new_empty(x.shape) if needs_x else None
        with torch.enable_grad(), run.again, run.inside(), run.holding(leaves), run.autocast():
            for tile, start in run.starts(x):
                here = x[tile].detach().requires_grad_(needs_x)
                wanted = [here, *trained] if needs_x else trained
                part = run.function(here, start)
                found = list(torch.autograd.grad(part, wanted, grad[tile], allow_unused=True))
                if d_x is not None:
                    d_x[tile] = found.pop(0)
                for leaf, each in zip(trained, found, strict=True):
                    _add(sums, leaf, each)
        return None, d_x, *(sums[id(leaf)].to(leaf.dtype) if id(leaf) in sums else None for leaf in leaves)


def _add(sums: dict[int, Tensor], leaf: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        return
    if id(leaf) in sums:
        sums[id(leaf)] += grad
    else:
        sums[id(leaf)] = grad.to(torch.promote_types(grad.dtype, torch.float32))
