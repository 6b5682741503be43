"""Feed each module what the reference fed it, so that each wrong module shows for itself (``--isolate``).

In an ordinary run one wrong module makes everything behind it wrong. In an isolated run, which has one step,

    the inputs and the output of a module   are recorded, and then replaced by the reference's, cut as the rank's are
    the gradient of its output              is recorded, and then replaced by the reference's

so that an output is wrong only if its module is, an input only if the code between two modules is, and a gradient of a
parameter only if the backward pass of its module or a sum over ranks is.

A tensor whose part on the rank is not known is not replaced.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.pytree import rebuilt
from shardwise.plan.placement import Partial, PerRank, Shard
from shardwise.plan.registry import TensorInfo
from shardwise.verify.activations import ActivationRecorder


class _Replaced(torch.autograd.Function):
    """Another value in the forward pass, another gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor | None, gradient: Tensor | None) -> Tensor:
        """Return a copy of ``value``, or of ``tensor`` if there is none."""
        ctx.gradient = gradient
        return (tensor if value is None else value).to(tensor.dtype).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the other gradient, or the one that arrived if there is no other."""
        return (gradients[0] if ctx.gradient is None else ctx.gradient), None, None


class FedTensors(NamedTuple):
    """The tensors of the reference, and how this rank holds its part of them."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """Gradients of outputs, for the mean over the step."""
    divisor: float
    """The divisor of the layout's sums of gradients."""
    tp: tuple[int, int]
    """The place of the rank along "tp", and the number of ranks there."""
    placements: Mapping[tuple[str, str], TensorInfo]
    """Placements of the modules' tensors along "tp", as ``RankRecords`` takes them."""
    rows: Mapping[str, Tensor]
    """The rows of each weight that this rank holds, by name of the module."""


class IsolatingRecorder(ActivationRecorder):
    """Records the tensors of modules that are fed by the reference.

    Args:
        *given: Arguments of ``ActivationRecorder``.
        fed: The tensors of the reference.
        **more: Keyword arguments of ``ActivationRecorder``.
    """

    def __init__(self, *given: Any, fed: FedTensors, **more: Any) -> None:
        super().__init__(*given, **more)
        self._fed = fed

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
            wanted = self._fed.inputs.get(str(self._key(f"{name}#{number}")))
            if wanted is None or not value.is_floating_point():
                return value
            piece = self._piece(wanted, value, self._fed.placements.get((name, "input")), None)
            return value if piece is None else _Replaced.apply(value, piece, None)

        return tuple(fed(each) for each in args)

    def _ran(self, module: nn.Module, args: Any, output: Any) -> Any:
        name = self._names.get(id(module))
        if not name or not self._replay.is_running or type(output) is not Tensor:
            return super()._ran(module, args, output)
        if not output.is_floating_point():
            return None
        if self._has_weights:
            self._keep_weights(name, module)
        self._keep_output(name, output)
        key, fed = str(self._key(name)), self._fed
        value, gradient = fed.outputs.get(key), fed.gradients.get(key)
        rows = fed.rows.get(name)
        if value is not None:
            value = self._piece(value, output, fed.placements.get((name, "output")), rows)
        if gradient is not None:
            placement = fed.placements.get((name, "gradient"))
            gradient = self._piece(gradient * fed.divisor, output, placement, rows)
        replaced = _Replaced.apply(output, value, gradient)
        self._watch_gradient(name, replaced)
        return replaced

    def _piece(
        self, whole: Tensor, like: Tensor, info: TensorInfo | None, rows: Tensor | None
    ) -> Tensor | None:
        """Return what this rank holds of a whole tensor; None if that is not known."""
        index, ranks = self._fed.tp
        placement = None if info is None else info.on("tp")
        if isinstance(placement, PerRank) or whole.dim() != like.dim():
            return None
        if whole.shape == like.shape:
            return whole / ranks if isinstance(placement, Partial) else whole
        dims = [d for d in range(whole.dim()) if whole.shape[d] != like.shape[d]]
        if len(dims) != 1 or like.shape[dims[0]] * ranks != whole.shape[dims[0]]:
            return None
        is_last = dims[0] == whole.dim() - 1
        if rows is not None and is_last and len(rows) == like.shape[dims[0]]:
            return whole.index_select(dims[0], rows)
        if isinstance(placement, Shard) and placement.blocks:
            return None  # such as tokens [B · T] of which each rank holds a part of each sequence
        return whole.chunk(ranks, dims[0])[index]
