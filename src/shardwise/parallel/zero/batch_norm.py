"""Batch norm over the samples of all data-parallel ranks.

    n = Σ n_r      mean = Σ Σx / n      var = Σ Σ(x - mean)² / n       sums over ranks r

With statistics of one rank's samples (the default) the numbers depend on the number of ranks, as in DDP. Synchronized
statistics are computed over the whole global batch. torch's SyncBatchNorm does the same, but only on GPUs, and stops
the host once for each layer.

On a CUDA device a layer is three kernels of torch forward and two backward, those of SyncBatchNorm:

    mean_r, invstd_r            batch_norm_stats                      invstd = 1 / sqrt(var + eps)
    mean, invstd, running       batch_norm_gather_stats_with_counts   of all ranks' (mean_r, invstd_r, n_r), one gather
    y                           batch_norm_elemt
    sum dy, sum dy (x - mean)   batch_norm_backward_reduce            summed over the ranks, one all-reduce
    dx                          batch_norm_backward_elemt

Elsewhere the plain form in torch's operations runs, about 25 of them forward.

Paper: Ioffe and Szegedy 2015, arXiv:1502.03167.
Cost:  on CUDA a gather of 2C + 1 elements a rank forward, an all-reduce of 2C backward; elsewhere two all-reduces of
       C (+1) elements each way.
Shapes: x [B/dp, C, ...], statistics [C], R ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group

FUSED = frozenset({"cuda"})
"""Device types for which torch has the kernels of synchronized batch norm."""
_NO_SAMPLES = 1e-30
"""Count of a rank without samples: 0 times infinity would be NaN in the kernel, and the total stays a whole number."""


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


class _FusedNorm(torch.autograd.Function):
    """Normalization by the statistics of all ranks, in torch's kernels for CUDA devices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: Any,
        group: Group,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, wide = _dense(x), torch.promote_types(x.dtype, torch.float32)
        channels, samples = x.shape[1], x.numel() // max(x.shape[1], 1)
        if samples:
            mean, invstd = torch.batch_norm_stats(x, eps)
        else:
            mean, invstd = x.new_zeros(channels, dtype=wide), x.new_full((channels,), eps**-0.5, dtype=wide)
        own = torch.cat([mean, invstd, mean.new_full((1,), samples or _NO_SAMPLES)])
        every = own.new_empty(group.size, len(own))
        group.all_gather(every.view(-1), own, "batch statistics", purpose="control").wait()
        means, invstds, counts = every.split([channels, channels, 1], 1)
        mean_of, var_of, momentum = running
        # Without running averages the kernel takes its dtype from the first argument, which must not be 16 bits.
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            means, means, invstds, mean_of, var_of, momentum, eps, counts.view(-1)
        )
        ctx.group, ctx.weight_dtype = group, None if weight is None else weight.dtype
        weight, bias = _fitting(weight, x.dtype), _fitting(bias, x.dtype)
        ctx.save_for_backward(x, weight, mean, invstd, counts.view(-1).to(torch.int32))
        ctx.mark_non_differentiable(mean, invstd, counts)
        y = torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps) if samples else torch.empty_like(x)
        return y, mean, invstd, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy, channels, of_weight, of_bias = _dense(dy), x.shape[1], None, None
        if x.numel():
            sum_dy, sum_dy_x, of_weight, of_bias = torch.batch_norm_backward_reduce(
                dy, x, mean, invstd, weight, needs_x, needs_weight, needs_bias
            )
        else:
            sum_dy, sum_dy_x = torch.zeros_like(mean), torch.zeros_like(mean)
            of_weight, of_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        dx = None
        if needs_x:
            sums = torch.cat([sum_dy, sum_dy_x])
            ctx.group.all_reduce(sums, "gradients of batch statistics", purpose="control").wait()
            sum_dy, sum_dy_x = sums.split(channels)
            wide = None if weight is None else weight.to(mean.dtype)
            dx = (
                torch.batch_norm_backward_elemt(dy, x, mean, invstd, wide, sum_dy, sum_dy_x, counts)
                if x.numel()
                else torch.zeros_like(x)
            )
        kind = ctx.weight_dtype
        return (
            dx,
            of_weight.to(kind) if needs_weight else None,
            of_bias.to(kind) if needs_bias else None,
            *(None,) * 3,
        )


def _dense(x: Tensor) -> Tensor:
    """Return x in an order of elements that the kernels take: contiguous, or channels last."""
    if (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)) or (
        x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d)
    ):
        return x
    return x.contiguous()


def _fitting(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the weight in a dtype that the kernels take beside inputs of ``dtype``: that one, or fp32 for 16 bits."""
    if weight is None or weight.dtype in (dtype, torch.promote_types(dtype, torch.float32)):
        return weight
    return weight.to(torch.promote_types(dtype, torch.float32))


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
        if x.device.type in FUSED:
            return self._fused(x)
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

    def _fused(self, x: Tensor) -> Tensor:
        module = self._module
        running_mean, running_var = module.running_mean, module.running_var
        wide = torch.promote_types(x.dtype, torch.float32)
        # The kernel divides by n - 1, and has no mean over all batches.
        by_kernel = (
            running_mean is not None
            and running_mean.dtype == wide
            and module.momentum is not None
            and x.numel() > x.shape[1]
        )
        running = (running_mean, running_var, module.momentum) if by_kernel else (None, None, 0.0)
        y, mean, invstd, counts = _FusedNorm.apply(
            x, module.weight, module.bias, module.eps, running, self._group
        )
        if not by_kernel:
            self._update_running(mean, invstd.pow(-2) - module.eps, counts.sum())
        elif module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        return y

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
