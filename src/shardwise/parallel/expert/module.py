"""MixtureOfExperts: a feed-forward layer of E experts, of which a token uses k; its own single-process reference.

    y = Σ_j w_j · expert_{i_j}(x)           i, w: the router's choice of k experts and what they count
    expert_e(x) = down_e (silu(gate_e x) · up_e x)

    parameter             shape         what it is
    router.weight         [E, D]
    experts.gate_up       [E, 2F, D]    rows of gate first, then of up
    experts.down          [E, D, F]

Papers: Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020 (GShard), arXiv:2006.16668; Fedus et al. 2021
        (Switch), arXiv:2101.03961.
Cost:   6·D·F multiplications a token and expert forward, whatever E is.
Shapes: B batch, T sequence, D width, E experts, F hidden, k experts of a token; N tokens, R rows of (token, expert).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.initializers import Initializer, Uniform
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.router import Router
from shardwise.parallel.expert.surroundings import Surroundings
from shardwise.plan.errors import ConfigError, UsageError


class Experts(nn.Module):
    """E gated feed-forward layers as two stacks."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as two of torch's linear layers start."""
        for name, rule in self.initial_rules().items():
            nn.init.uniform_(getattr(self, name), rule.low, rule.high)

    def initial_rules(self) -> dict[str, Uniform]:
        """The same for a model on meta."""
        return {name: _of_linear(weight.shape[-1]) for name, weight in self.named_parameters()}

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Σ_j weights_j · expert_{index_j}(hidden); an index of -1 adds nothing: [N, D], [N, k], [N, k] -> [N, D]."""
        return by_expert(self, hidden, index, weights, len(self.down))

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows sorted by expert, ``counts[e]`` of them for expert e, through their experts: [R, D] -> [R, D].

        An expert without rows runs too: its weights then have a gradient of 0 instead of none.
        """
        results = []
        for e, part in enumerate(rows.split(counts)):
            gate, up = F.linear(part, self.gate_up[e]).chunk(2, -1)  # [R_e, F] each
            results.append(F.linear(F.silu(gate) * up, self.down[e]))
        return torch.cat(results)


def by_expert(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, count: int) -> Tensor:
    """``experts.compute`` on the rows of each expert in turn, summed by token with their weights: [N, D]."""
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]  # [R], places of pairs
    counts = torch.bincount(flat[order], minlength=count).tolist()
    token = order.div(index.shape[1], rounding_mode="floor")
    results = experts.compute(hidden[token], counts)
    weighted = results * weights.reshape(-1)[order, None]
    total = weighted.new_zeros(len(hidden), results.shape[1])
    return total.index_add(0, token, weighted).to(hidden.dtype)


class MixtureOfExperts(nn.Module):
    """``[B, T, D] -> [B, T, D]``: a router sends each token to a few of E experts; for any model, in the place of its
    feed-forward layer.

        layer = shardwise.MixtureOfExperts(384, 256, 8, router=shardwise.RouterPolicy(top_k=2))
        y = x + layer(norm(x))
    """

    def __init__(self, width: int, hidden: int, experts: int, router: RouterPolicy | None = None) -> None:
        """``width`` D, ``hidden`` F, ``experts`` E; ``router``: how it chooses.

        Errors: ConfigError for sizes that make no layer.
        """
        super().__init__()
        for name, size in (("width", width), ("hidden", hidden), ("experts", experts)):
            if size < 1:
                raise ConfigError(f"MixtureOfExperts: {name} is {size}; expected 1 or more")
        self.width = width
        self.router = Router(width, experts, router or RouterPolicy())
        self.experts = Experts(width, hidden, experts)
        self.surroundings = Surroundings()
        """What it knows of the place it runs at; an engine fills it in."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result: [B, T, D].

        Errors: UsageError where ``x`` has another shape; NonFiniteError where the router makes a NaN.
        """
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise UsageError(
                f"{self.surroundings.name or 'MixtureOfExperts'}: was given a tensor of shape {list(x.shape)}; "
                f"expected [batch, sequence, {self.width}]"
            )
        tokens = self.surroundings.take(x)
        routing = self.router(tokens, self.surroundings)
        y = self.experts(tokens.hidden, routing.index, routing.weights)  # [n, D]
        return self.surroundings.give(y, x)

    def initial_rules(self) -> dict[str, Initializer]:
        """How its parameters start where it was made on meta: as torch's linear layers."""
        return {name: _of_linear(weight.shape[-1]) for name, weight in self.named_parameters()}


def _of_linear(inputs: int) -> Uniform:
    bound = 1 / math.sqrt(inputs)
    return Uniform(-bound, bound)
