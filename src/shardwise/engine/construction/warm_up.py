"""Compiles the fused kernels of a model's layers and of its optimizer while the engine is built.

Triton compiles a kernel when it is first launched, in 0.3 to 2 s, for each combination of dtypes, widths and strides.
In the first step the kernels of a model would be compiled one after another, and a rank that finishes late would hold
up all others at the next collective. So each kernel is launched once here for every layer that uses it, on a few rows
of zeros with the width and the dtype of the layer's activations. A kernel that this file does not know is compiled in
the first step.

    RmsNorm                      rms_normed, rms_norm_gradients
    TransformerBlock's norms     rms_normed, rms_normed_sum, rms_norm_sum_gradients
    Attention with rotations     split_heads, join_heads
    SwiGlu, experts              gated, gated_gradient
    MixtureOfExperts             chosen_experts, expert_weights and their gradient, load_counts, pairs_by_expert,
                                 sum_rows, pair_gradients; over several ranks route_counts, message_places (one hop,
                                 counted rows)
    Head, cut or not             row_numbers, row_gradient
    KeyedDropout                 dropped
    Adam, AdamW                  adam_step

No weight, gradient or random number is touched, no rank waits for another, and nothing is done on a device that the
kernels do not serve (``kernels/choice.py``), or inside compiled blocks, which do not launch the kernels.

Cost: the compilations; the results stay in Triton's cache on the disk for later runs.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from shardwise.kernels import choice
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.dropout import MaskKey, keyed_dropout
from shardwise.kernels.expert_choice import chosen_experts, expert_weights, load_counts, route_counts
from shardwise.kernels.expert_rows import RowPlaces, message_places, pair_gradients, pairs_by_expert
from shardwise.kernels.gated import gated
from shardwise.kernels.rms_norm import rms_norm, rms_norm_of_sum
from shardwise.kernels.rotary import angles, split_heads
from shardwise.models.dropout import KeyedDropout
from shardwise.models.layers import Attention, Head, RmsNorm, TransformerBlock
from shardwise.optim.flat import FlatOptimizer
from shardwise.parallel.expert.experts import Experts
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.router import Router
from shardwise.parallel.expert.surroundings import BESIDE_PAIRS
from shardwise.parallel.pipeline.stand_in import AbsentModule
from shardwise.parallel.tensor.layers import VocabularyHead
from shardwise.parallel.zero.bucket import BucketState

Call = Callable[[torch.device], object]
_ROWS = 16
"""Number of rows of each call. Kernels are not compiled again for another number of rows."""


def compile_kernels(
    modules: Iterable[nn.Module],
    trained: Iterable[tuple[BucketState, FlatOptimizer]],
    dtypes: Iterable[torch.dtype],
    device: torch.device,
) -> int:
    """Launch once each kernel that the modules and the optimizers will launch, and return the number of launches.

    Args:
        modules: the modules of this rank's stages.
        trained: the trained buckets, each with its optimizer.
        dtypes: dtypes of the activations.
        device: the device of this rank.
    """
    if device.type not in choice.DEVICES:
        return 0
    calls = {key: call for dtype in dtypes for module in modules for key, call in _calls_of(module, dtype)}
    for call in calls.values():
        call(device)
    return len(calls) + sum(
        optimizer.compile_kernel({bucket.dtypes.grad, bucket.dtypes.reduce}, bucket.dtypes.compute)
        for bucket, optimizer in trained
        if bucket.state is None
    )


def _calls_of(root: nn.Module, dtype: torch.dtype) -> Iterator[tuple[tuple[object, ...], Call]]:
    """Yield what each layer launches, with a key that is equal for equal launches."""
    has_rotations = any(isinstance(each, RmsNorm) for each in root.modules())  # the LLaMA family
    for module in root.modules():
        if isinstance(module, AbsentModule):
            continue  # a stand-in for a module of another stage launches nothing
        if isinstance(module, RmsNorm):
            yield ("norm", dtype, module.weight.dtype, *module.weight.shape), _norm(module, dtype)
        elif isinstance(module, Attention) and has_rotations:
            yield ("rotary", dtype, module.head_size, module.head_counts), _rotations(module, dtype)
        elif isinstance(module, TransformerBlock):
            for norm, adds in ((module.attention_norm, False), (module.mlp_norm, True)):
                if isinstance(norm, RmsNorm):
                    key = ("norm of a sum", dtype, norm.weight.dtype, *norm.weight.shape, adds)
                    yield key, _norm_of_sum(norm, adds, dtype)
        elif isinstance(module, Head | VocabularyHead):
            yield ("loss", dtype, len(module.weight)), _loss(len(module.weight), dtype)
        elif isinstance(module, MixtureOfExperts):
            own = len(next(module.experts.parameters()))
            yield ("choice", module.router.policy, len(module.router.weight)), _choice(module.router)
            yield (
                ("rows", dtype, module.router.policy, module.width, own),
                _rows_of_experts(module, own, dtype),
            )
        elif isinstance(module, KeyedDropout):
            yield ("dropout", dtype, module.p), _dropout(module.p, dtype)
        gate_up = getattr(getattr(module, "gate_up", None), "weight", None)
        if isinstance(gate_up, nn.Parameter) and gate_up.dim() == 2:
            yield ("gated", dtype, len(gate_up)), _gated(len(gate_up), dtype)
        stack = getattr(module, "gate_up", None)
        if isinstance(module, Experts) and isinstance(stack, nn.Parameter):
            width = stack.shape[1]
            if choice.has_grouped_mm(stack.device):  # else a loop of torch's operations
                yield ("gated", dtype, width), _gated(width, dtype)


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)


def _norm(module: RmsNorm, dtype: torch.dtype) -> Call:
    width, kind, eps = module.weight.shape[0], module.weight.dtype, module.eps or 0.0

    def call(device: torch.device) -> None:
        x = _zeros(_ROWS, width, dtype=dtype, device=device)
        weight = _zeros(width, dtype=kind, device=device)
        rms_norm(x, weight, eps).backward(torch.zeros_like(x))

    return call


def _norm_of_sum(norm: RmsNorm, adds: bool, dtype: torch.dtype) -> Call:
    width, kind, eps = norm.weight.shape[0], norm.weight.dtype, norm.eps or 0.0

    def call(device: torch.device) -> None:
        x, added = (_zeros(_ROWS, width, dtype=dtype, device=device) for _ in range(2))
        if not norm.joins_sum(x):
            return
        weight = _zeros(width, dtype=kind, device=device)
        total, y = rms_norm_of_sum(x, added if adds else None, weight, eps)
        torch.autograd.backward([total, y], [torch.zeros_like(total), torch.zeros_like(y)])

    return call


def _rotations(module: Attention, dtype: torch.dtype) -> Call:
    counts, size = module.head_counts, module.head_size

    def call(device: torch.device) -> None:
        product = _zeros(1, _ROWS, sum(counts) * size, dtype=dtype, device=device)
        parts = split_heads(product, counts, size, angles(0, _ROWS, size, 1e4, device))
        torch.autograd.backward(parts, [torch.zeros_like(part) for part in parts])

    return call


def _gated(width: int, dtype: torch.dtype) -> Call:
    def call(device: torch.device) -> None:
        y = gated(_zeros(_ROWS, width, dtype=dtype, device=device))
        y.backward(torch.zeros_like(y))

    return call


def _loss(vocabulary: int, dtype: torch.dtype) -> Call:
    def call(device: torch.device) -> None:
        logits = _zeros(_ROWS, vocabulary, dtype=dtype, device=device)
        cross_entropy(logits, torch.zeros(_ROWS, dtype=torch.int64, device=device)).backward()

    return call


def _dropout(p: float, dtype: torch.dtype) -> Call:
    def call(device: torch.device) -> None:
        y = keyed_dropout(_zeros(1, _ROWS, 64, dtype=dtype, device=device), p, MaskKey(0, 0, 0, 1, 0))
        y.backward(torch.zeros_like(y))

    return call


def _choice(router: Router) -> Call:
    policy, experts = router.policy, len(router.weight)
    is_sigmoid = policy.score == "sigmoid"
    adds = policy.balance == "loss" or policy.z_weight > 0

    def call(device: torch.device) -> None:
        logits = _zeros(_ROWS, experts, dtype=torch.float32, device=device)
        index = torch.zeros(_ROWS, policy.top_k, dtype=torch.int64, device=device)
        if router.chooses_in_one(logits):
            bias = None if router.bias is None else torch.zeros_like(router.bias)
            index = chosen_experts(logits.detach(), bias, policy.top_k, is_sigmoid)
            weights, scores = expert_weights(logits, index, is_sigmoid, policy.normalizes, policy.scale)
            results = [weights, scores] if adds else [weights]
            torch.autograd.backward(results, [torch.zeros_like(each) for each in results])
        load_counts(index, index, torch.zeros_like(logits), is_sigmoid, BESIDE_PAIRS)

    return call


def _rows_of_experts(layer: MixtureOfExperts, own: int, dtype: torch.dtype) -> Call:
    width, experts, top_k = layer.width, len(layer.router.weight), layer.router.policy.top_k
    ranks = experts // own

    @torch.no_grad()
    def call(device: torch.device) -> None:
        index = torch.zeros(_ROWS, top_k, dtype=torch.int64, device=device)
        weights = torch.zeros(_ROWS, top_k, dtype=torch.float32, device=device)
        if ranks > 1:
            route_counts(index, experts, [ranks], 0)
            _, places = message_places(index, 0, experts, ranks, _ROWS, False)
            messages = RowPlaces(places, _ROWS)
            messages.sum(weights)
            messages.sum(torch.zeros(_ROWS, width, dtype=dtype, device=device))
            index = index.int()  # experts' numbers arrive in 32 bits
        slots, rows, places, _ = pairs_by_expert(index, 0, own, _ROWS * top_k, 0)
        pairs, values = (
            RowPlaces(places, _ROWS * top_k),
            _zeros(_ROWS * top_k, width, dtype=dtype, device=device),
        )
        pairs.sum(values)
        grad = pairs.sum(values, weights)
        pair_gradients(grad, values, weights, slots, rows)

    return call
