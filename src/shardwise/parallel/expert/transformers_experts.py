"""Computation of the experts of transformers' classes on rows sorted by expert: up, the class's own gate, down.

    hidden = gate(rows up_eᵀ + b_e)
    out    = hidden down_eᵀ + c_e           along "etp" an addend; one rank adds c

A rank that received no row makes the same calls and has a gradient of 0 for each tensor, as one process has.

Cost:   2·R·(D·2F + F·D) operations forward.
Shapes: R rows, D width, F hidden features of an expert on this rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.grouped import grouped_product, sizes_of
from shardwise.parallel.expert.dispatch import Compute
from shardwise.parallel.expert.stacks import flags_of


def compute_of(module: Any, adds_bias: bool = True) -> Compute:
    """Return the function that computes rows with the experts of a stack.

    It is ``module.compute``, or the computation of a class of transformers.

    Args:
        module: the stack.
        adds_bias: False on all ranks of "etp" but one.
    """
    if hasattr(module, "expert_stack"):
        compute: Compute = module.compute
        return compute
    return _TheirCompute(module, adds_bias)


class _TheirCompute:
    """Computation of the experts of one module of a transformers class."""

    def __init__(self, module: Any, adds_bias: bool):
        flags = flags_of(module)
        assert flags is not None, "it was found by them"
        self.module = module
        self.adds_bias = adds_bias
        self.has_gate, self.has_bias, _, self.is_transposed, _ = flags

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        module, first = self.module, "gate_up_proj" if self.has_gate else "up_proj"
        hidden = self._product(rows, counts, first, True)
        hidden = module._apply_gate(hidden) if self.has_gate else module.act_fn(hidden)
        return self._product(hidden, counts, "down_proj", self.adds_bias)

    def _product(self, rows: Tensor, counts: Sequence[int], name: str, adds_bias: bool) -> Tensor:
        weights = getattr(self.module, name)
        out = grouped_product(rows, weights.transpose(1, 2) if self.is_transposed else weights, counts)
        if not self.has_bias:
            return out
        bias = getattr(self.module, f"{name}_bias")
        places = torch.arange(len(rows), device=rows.device)
        expert = torch.searchsorted(sizes_of(counts).ends(rows.device), places, right=True).clamp_(
            max=len(counts) - 1
        )
        # A rank that does not add the bias still uses it: otherwise its gradient would be None instead of 0.
        return out + (bias if adds_bias else bias * 0)[expert]
