"""Products over symmetric memory: operators of torch that multiply one rank's part while the next one is on its way.

    gathered_product    all-gather of a cut sequence, then a product      torch.ops.symm_mem.fused_all_gather_matmul
    scattered_product   a product, then the reduce-scatter of its sum     torch.ops.symm_mem.fused_matmul_reduce_scatter

The ranks map one another's memory, so a copy engine reads a part without a kernel of NCCL, which would take
multiprocessors from the product. The operators run on the stream of the computation and on one stream of torch's own.
They are counted as the collectives whose bytes they move. No ``Work`` stands for them, so a rank that is late is
noticed at the next collective of the stream, by its deadline.

Not measured on a device, and not run on one: ``tensor.overlap: auto`` does not choose them.

Paper: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023.
Shapes: B samples, T tokens, D inputs, F outputs, N ranks; weight [F, D].
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.comm.collectives import Group
from shardwise.comm.transports import NoTransport, TorchTransport
from shardwise.plan.exchange_calls import Operation

_SEQUENCE = 1
"""Dim of an activation that is the sequence."""


def is_real(group: Group) -> bool:
    """Return True if ``group`` has several ranks, and bytes move between them."""
    return group.transport is not None and not isinstance(group.transport, NoTransport)


def lacking(group: Group) -> str:
    """Return what ``group`` lacks for symmetric memory, in words; "" if nothing."""
    transport = group.transport
    if not isinstance(transport, TorchTransport) or transport.device_type != "cuda":
        return "ranks on CUDA devices"
    if len(set(group.hosts)) > 1:
        return "all ranks of the group on one host"
    return ""


def begin(group: Group) -> None:
    """Make the symmetric memory of ``group``; all ranks make this call.

    Args:
        group: The ranks. One rank alone, and ranks that do not exist, need no memory.

    Raises:
        ConfigError: If the ranks cannot have symmetric memory.
    """
    if not is_real(group):
        return
    lack = lacking(group)
    if not lack:
        try:
            _make_memory(name_of(group))
        except (AttributeError, ImportError, RuntimeError) as error:
            lack = f"memory that each rank can map from the others, and a torch that makes it ({error})"
    if lack:
        raise ConfigError(
            f"tensor.overlap: symmetric_memory needs {lack}; the {group.size} ranks of axis {group.axis!r} do not have "
            "that; use auto, or a number of pieces"
        )


def _make_memory(name: Any) -> None:
    import torch.distributed._symmetric_memory as made_by_torch  # makes the operators known to torch; slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch needs no such call
        made_by_torch.enable_symm_mem_for_group(name)
    made_by_torch.get_symm_mem_workspace(name, 1)


def gathered_product(group: Group, x: Tensor, weight: Tensor, bias: Tensor | None, what: str) -> Tensor:
    """Return the product of the gathered sequence: [B, T/N, D] -> [B, T, F]."""
    call = partial(
        torch.ops.symm_mem.fused_all_gather_matmul, x, [weight.mT], _SEQUENCE, name_of(group), return_A=False
    )
    _, (y,) = _run(group, "all_gather", x, x.numel() * group.size, what, call)
    y = y.contiguous()
    return y if bias is None else y.add_(bias)


def scattered_product(group: Group, x: Tensor, weight: Tensor, what: str) -> Tensor:
    """Return this rank's tokens of the sum over the ranks of the products: [B, T, D] -> [B, T/N, F]."""
    call = partial(
        torch.ops.symm_mem.fused_matmul_reduce_scatter, x, weight.mT, "sum", _SEQUENCE, name_of(group)
    )
    elements = x.shape[:-1].numel() * weight.shape[0]
    y: Tensor = _run(group, "reduce_scatter", x, elements, what, call)
    return y.contiguous()


def name_of(group: Group) -> str:
    """Return torch's name of the ranks of ``group``."""
    assert isinstance(group.transport, TorchTransport), "checked in `begin`"
    return group.transport.group_name


def _run(group: Group, operation: Operation, x: Tensor, elements: int, what: str, call: Any) -> Any:
    """Run an operator of torch as the collective ``operation`` of ``elements``, and return its result."""
    results = []
    group.run_operator(operation, x, elements, what, lambda: results.append(call()))
    return results[0]
