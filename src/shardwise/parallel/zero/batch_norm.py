"""Batch norm over the samples of all data-parallel ranks.

    n = Σ n_r      mean = Σ Σx / n      var = Σ Σ(x - mean)² / n       sums over ranks r

With statistics of one rank's samples (the default) the numbers depend on the number of ranks, as in DDP. Synchronized
statistics are computed over the whole global batch. torch's SyncBatchNorm does the same, but only on GPUs.

Paper: Ioffe and Szegedy 2015, arXiv:1502.03167.
Cost:  two all-reduces of C (+1) elements forward, two backward.
Shapes: x [B/dp, C, ...], statistics [C].
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks: y = Σ_r x_r on every rank.

    Each rank's loss is an addend of the global loss, so the backward is the same sum.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = value.detach().clone()
        group.all_reduce(total, "batch statistics", purpose="control").wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        ctx.group.all_reduce(total, "gradients of batch statistics", purpose="control").wait()
        return total, None


class _NormalizeForward:
    """Replacement of one module's forward, which holds the group so that no attribute is set on the module.

    No compiled graph contains the call: a compiler would trace the collectives with tensors that have no
    numbers.
    """

    def __init__(self, module: _BatchNorm, group: Group):
        self._module = module
        self._group = group
        self._alone = module.forward

    @_disable_dynamo
    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        if (
            not module.training
        ):  # evaluation makes no rank wait for another, also where it takes batch statistics
            return self._alone(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        sums = torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() / x.shape[1])])
        sums = _SumOverRanks.apply(sums, self._group)
        count = sums[-1]
        mean = sums[:-1] / count
        centred = wide - mean.view(shape)
        var = _SumOverRanks.apply(centred.square().sum(dims), self._group) / count
        self._update_running(mean.detach(), var.detach(), count.detach())
        y = centred * torch.rsqrt(var + module.eps).view(shape)
        if module.weight is not None:
            y = y * module.weight.view(shape) + module.bias.view(shape)
        return y.to(x.dtype)

    def _update_running(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        module = self._module
        if module.running_mean is None or module.running_var is None or not module.training:
            return
        assert module.num_batches_tracked is not None, "a module with running statistics counts its batches"
        module.num_batches_tracked.add_(1)
        unbiased = var * (count / (count - 1).clamp_min(1))
        for running, found in ((module.running_mean, mean), (module.running_var, unbiased)):
            new = found.to(running.dtype)
            if module.momentum is not None:
                running.lerp_(new, module.momentum)
            else:  # the mean over all batches; the count stays a tensor, so that the host does not wait for it
                running.lerp_(new, module.num_batches_tracked.to(running.dtype).reciprocal())


def synchronize_batch_norm(model: nn.Module, group: Group) -> None:
    """Make every batch norm of the model use the statistics of all ranks.

    Args:
        model: The model; the ``forward`` of its batch norms is replaced.
        group: The data-parallel ranks.

    Raises:
        UsageError: If the model has no batch norm.
    """
    found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not found:
        raise UsageError("batch_norm: synchronized, but the model has no batch norm; leave the key out")
    for module in found:
        module.forward = _NormalizeForward(module, group)  # type: ignore[method-assign, assignment]
