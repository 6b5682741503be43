"""Feed each module what the reference fed it, so that each wrong module shows for itself (``--isolate``).

In an ordinary run one wrong module makes everything behind it wrong. In an isolated run, which has one step,

    the inputs of a module           are replaced by the reference's, cut as the rank's own inputs are
    the gradient of its output       is replaced by the reference's before the backward pass goes on into the module

so that an output is wrong only if its module is, and a gradient of a parameter only if the module's backward pass or
the sums over the ranks are. The gradient that reaches an output is recorded before it is replaced: it is wrong only if
the code between this module and the next one is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.pytree import rebuilt
from shardwise.verify.activations import ActivationRecorder


class _Replaced(torch.autograd.Function):
    """Another value in the forward pass, another gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor | None, gradient: Tensor | None) -> Tensor:
        """Return ``value``, or a view of ``tensor`` if there is none."""
        ctx.gradient = gradient
        return tensor.view_as(tensor) if value is None else value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the other gradient, or the one that arrived if there is no other."""
        return (gradients[0] if ctx.gradient is None else ctx.gradient), None, None


class IsolatingRecorder(ActivationRecorder):
    """Records the outputs of modules that are fed by the reference.

    Args:
        *given: Arguments of ``ActivationRecorder``.
        fed: ``inputs`` and ``gradients`` of the reference, by key.
        scale: Factor of the reference's gradients: the divisor of the layout's sums.
        tp: Place of the rank along "tp", and the number of ranks there.
        placements: Placements of the modules' tensors along "tp", as ``RankRecords`` takes them.
        **more: Keyword arguments of ``ActivationRecorder``.
    """

    def __init__(
        self,
        *given: Any,
        fed: Mapping[str, Mapping[str, Tensor]],
        scale: float,
        tp: tuple[int, int],
        placements: Mapping[tuple[str, str], str],
        **more: Any,
    ) -> None:
        super().__init__(*given, **more)
        self._fed = fed
        self._scale = scale
        self._tp = tp
        self._placements = placements

    def _begins(self, module: nn.Module, args: Any) -> Any:
        super()._begins(module, args)
        name = self._names.get(id(module))
        if not name or not self._replay.is_running:
            return None
        number = -1

        def fed(value: Any) -> Any:
            nonlocal number
            if not isinstance(value, Tensor):
                return rebuilt(value, fed)
            if type(value) is not Tensor:
                return value
            number += 1
            if not value.is_floating_point():
                return value
            wanted = self._fed["inputs"].get(str(self._key(f"{name}#{number}")))
            piece = None if wanted is None else self._piece(wanted, value, "")
            return value if piece is None else _Replaced.apply(value, piece, None)

        return tuple(fed(each) for each in args)

    def _ran(self, module: nn.Module, args: Any, output: Any) -> Any:
        name = self._names.get(id(module))
        if not name or not self._replay.is_running or type(output) is not Tensor or not output.requires_grad:
            super()._ran(module, args, output)
            return None
        wanted = self._fed["gradients"].get(str(self._key(name)))
        placement = self._placements.get((name, "gradient"), "")
        piece = None if wanted is None else self._piece(wanted * self._scale, output, placement)
        replaced = _Replaced.apply(output, None, piece)
        super()._ran(module, args, replaced)
        return replaced

    def _piece(self, whole: Tensor, like: Tensor, placement: str) -> Tensor | None:
        """Return what this rank holds of a whole tensor; None if that is not known."""
        index, ranks = self._tp
        if whole.shape == like.shape:
            return whole / ranks if placement == "addend" else whole
        dims = [d for d in range(whole.dim()) if d < like.dim() and whole.shape[d] != like.shape[d]]
        if whole.dim() != like.dim() or len(dims) != 1 or like.shape[dims[0]] * ranks != whole.shape[dims[0]]:
            return None
        return whole.chunk(ranks, dims[0])[index]
