"""Adam, AdamW and SGD on the host: torch's own fused kernels, a chunk of the flat master at a time.

    for each chunk    g = grad, in the master's dtype                      into a block that stays in the cache
                      master, moments: torch's kernel, with g / divisor    g is written back, in the cache
                      weight = master, rounded                             read from the cache

On a whole tensor the first and the last line are separate passes over memory, and the kernel also writes back the
divided gradients. A parameter with moments in fp32 and a weight and a gradient in 16 bits is 28 bytes of traffic, 46 by
whole tensors: 0.4 of the time. A gradient of the master's dtype is not copied, and the whole is one call and one
rounding: chunks were measured 1.1 to 1.3 times as slow there.

Results have the bits of a call on the whole: the update of an element depends on no other element, and a chunk begins
at the boundary of a vector of the kernel. Step counts advance once a step.

Threads are torch's own, as many as the calling thread may use.

Moments in 16 or 8 bits (coded_moments.py) are decoded, updated and encoded by the chunk, on a device too, and with any
elementwise class: if the class has no such kernel, its own step runs on a leaf that is each chunk in turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from shardwise.optim.coded_moments import CodedPart

CHUNK = 2**17
"""Elements of a chunk for each thread, a multiple of a vector's: the data that is used twice, master and block of
gradients, takes 1 MiB; with half as many the calls cost more, twice as many do not fit into the cache.
"""
DEVICE_CHUNK = 2**23
"""Elements of a chunk on an accelerator: about 0.5 GiB while they are encoded."""


class ChunkKernel(NamedTuple):
    """One of torch's kernels with the numbers of this step."""

    moments: tuple[str, ...]
    """Labels of the state that the kernel takes, in its order."""
    call: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None, Tensor | None], object]
    """Function of (master, gradient, moments, count of steps, divisor) that updates these elements."""


def chunk_kernel(optimizer: optim.Optimizer) -> ChunkKernel | None:
    """Return the fused kernel that ``optimizer`` would call; None if it has none, or if its numbers are tensors."""
    group = optimizer.param_groups[0]
    if type(optimizer) not in (optim.Adam, optim.AdamW, optim.SGD) or not group.get("fused"):
        return None
    if any(isinstance(each, Tensor) for value in group.values() for each in _members(value)):
        return None
    if isinstance(optimizer, optim.SGD):
        return _sgd(group)
    decoupled = isinstance(optimizer, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    return _adam(group, torch._fused_adamw_ if decoupled else torch._fused_adam_)


def _members(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _adam(group: Mapping[str, Any], kernel: Callable[..., object]) -> ChunkKernel:
    beta1, beta2 = group["betas"]
    numbers = {key: group[key] for key in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
    numbers |= {"beta1": beta1, "beta2": beta2}

    def call(
        w: Tensor, g: Tensor, moments: Sequence[Tensor], count: Tensor | None, divisor: Tensor | None
    ) -> None:
        m, v, *largest = moments
        kernel([w], [g], [m], [v], largest, [count], grad_scale=divisor, found_inf=None, **numbers)

    return ChunkKernel(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])), call)


def _sgd(group: Mapping[str, Any]) -> ChunkKernel:
    keys = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    numbers: dict[str, Any] = {key: group[key] for key in keys}

    def call(
        w: Tensor, g: Tensor, moments: Sequence[Tensor], count: Tensor | None, divisor: Tensor | None
    ) -> None:
        torch._fused_sgd_(
            [w], [g], list(moments), **numbers, is_first_step=False, grad_scale=divisor, found_inf=None
        )

    return ChunkKernel(("momentum_buffer",) if group["momentum"] else (), call)


def class_kernel(optimizer: optim.Optimizer, labels: Sequence[str], state: dict[str, Any]) -> ChunkKernel:
    """Return the own step of ``optimizer`` as a kernel; its one leaf becomes each chunk.

    Args:
        optimizer: an elementwise optimizer with one leaf.
        labels: labels of the moments.
        state: the single numbers of these elements, which advance as in one step.
    """
    (leaf,) = optimizer.param_groups[0]["params"]
    before = _copied(state)

    def call(
        w: Tensor, g: Tensor, moments: Sequence[Tensor], count: Tensor | None, divisor: Tensor | None
    ) -> None:
        leaf.data, leaf.grad = w, g
        if divisor is not None:
            optimizer.grad_scale, optimizer.found_inf = divisor, torch.zeros_like(divisor)  # type: ignore[attr-defined]
        optimizer.state[leaf] = _copied(before) | dict(zip(labels, moments, strict=True))
        optimizer.step()
        after, leaf.grad = optimizer.state.pop(leaf), None
        for label, moment in zip(labels, moments, strict=True):
            if after[label] is not moment:
                moment.copy_(after[label])
        state.update((label, value) for label, value in after.items() if label not in labels)

    return ChunkKernel(tuple(labels), call)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {label: value.clone() if isinstance(value, Tensor) else value for label, value in state.items()}


def step_by_chunk(
    kernel: ChunkKernel,
    master: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    divisor: float,
    in_kernel: bool,
    weight: Tensor | None,
    coded: CodedPart | None = None,
) -> None:
    """Update ``master`` [N] from ``grad / divisor`` [N], and round the result into ``weight`` [N] if there is one.

    Args:
        kernel: updates a chunk.
        master: the master.
        grad: the gradient, which may be overwritten.
        state: torch's state of these elements.
        divisor: divisor of the gradient.
        in_kernel: True if the kernel divides.
        weight: the weight in 16 bits; may be None.
        coded: the moments, if torch's state does not have them.
    """
    count = state.get("step")
    if count is not None:
        count += 1
    scale = torch.full((), divisor, device=master.device) if in_kernel and divisor != 1.0 else None
    factor = 1.0 if in_kernel else 1.0 / divisor
    is_cast = grad.dtype != master.dtype or factor != 1.0
    if (
        not is_cast and coded is None
    ):  # measured: calls by the chunk cost more than one separate pass that rounds
        kernel.call(master, grad, [state[label] for label in kernel.moments], count, scale)
        if weight is not None:
            weight.copy_(master)
        return
    size = CHUNK * torch.get_num_threads() if master.device.type == "cpu" else DEVICE_CHUNK
    block = (
        torch.empty(min(size, master.numel()), dtype=master.dtype, device=master.device) if is_cast else None
    )
    whole = [] if coded is not None else [state[label] for label in kernel.moments]
    for first in range(0, master.numel(), size):
        here = slice(first, min(first + size, master.numel()))
        w, g = master[here], grad[here]
        if block is not None:
            g = block[: g.numel()].copy_(g)
        if factor != 1.0:
            g.mul_(factor)
        held = [moment[here] for moment in whole] if coded is None else coded.chunk(here)
        kernel.call(w, g, held, count, scale)
        if coded is not None:
            coded.keep(here, held)
        if weight is not None:
            weight[here].copy_(w)
