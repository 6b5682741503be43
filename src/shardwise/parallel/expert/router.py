"""Router: chooses the experts of each token and computes their weights.

    logits   l = x Wᵀ                                            in fp32 at least; with jitter x · u
    scores   s = softmax(l) over all experts, or sigmoid(l)
    choice   the k experts of largest s + b                      b: the balance bias; ties: the lower expert
             ... of s(l + gumbel) + b, with Gumbel noise; without it for the best one if ``gumbel_rest``
             ... inside the best groups, if experts lie in groups
    weights  w_j = scale · s_j / Σ_j s_j                         divided by the sum if ``normalize``
    room     a pair that its expert has no room for has expert -1 and weight 0

The choice has no gradient; the weights of the chosen experts carry the gradient to the router. Ties are resolved by a
stable sort, because torch's topk does not define their order, and the scores of a router that starts at zero are all
ties. Choice, room and counts are decided once a pass (``ExpertContext.keep``): a recomputation reuses them and computes
the weights anew, so that gradients flow.

Papers: Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020 (GShard), arXiv:2006.16668; Fedus et al. 2021
        (Switch), arXiv:2101.03961, jitter; DeepSeek-AI 2024 (V2, V3), arXiv:2405.04434 and arXiv:2412.19437, groups,
        sigmoid, bias.
Cost:   2·n·E·D operations, a sort of [n, E].
Shapes: B sequences, n tokens of this rank, D width, E experts, k experts of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, NonFiniteError
from shardwise.kernels.expert_choice import (
    chosen_experts,
    expert_weights,
    is_fused,
    largest,
    load_counts,
    normalized,
    scores_of,
)
from shardwise.kernels.initializers import of_linear
from shardwise.kernels.operation import operation
from shardwise.parallel.expert.balance import move_bias, note_loads, pair_counts, term
from shardwise.parallel.expert.capacity import choose_kept
from shardwise.parallel.expert.noise import gumbel, jitter
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.surroundings import BESIDE_PAIRS, ExpertContext, RoutedTokens


@dataclass(frozen=True)
class Routing:
    """Experts and weights of this rank's tokens."""

    index: Tensor
    """Experts of each token, -1 for a pair that was dropped: int64 [n, k]."""
    weights: Tensor
    """Weight of each expert: [n, k], with gradients."""
    balance: Tensor | None
    """Addend of this rank's tokens to balance and z, with gradients; None if there is no such term."""
    chosen: Tensor
    """Experts of each token before any drop; -1 for a token that does not count: int64 [n, k]."""
    scores: Tensor
    """Scores of all experts: [n, E], with gradients."""


class Router(nn.Module):
    """Router of a layer: weights ``[E, D]``, the bias of ``balance: bias`` and the loads of ``balance_over: batch``.

    Args:
        width: numbers of a token, D.
        experts: number of experts, E.
        policy: the rule.

    Raises:
        ConfigError: if the policy does not fit the number of experts.
    """

    shared_buffers: ClassVar[tuple[str, ...]] = ("bias", "loads")
    """Names of the buffers that all ranks update alike, in fp32."""

    bias: Tensor | None
    """Balance bias of each expert, [E], with ``balance: bias``; else None."""
    loads: Tensor | None
    """Shares of the experts in the pairs of the step before, [E], with ``balance_over: batch``; else None."""

    def __init__(self, width: int, experts: int, policy: RouterPolicy) -> None:
        super().__init__()
        if said := policy.check_experts(experts):
            raise ConfigError(said)
        self.policy = policy
        self.weight = nn.Parameter(torch.empty(experts, width))
        over_batch = policy.balance == "loss" and policy.balance_over == "batch"
        starts = {
            "bias": 0.0 if policy.balance == "bias" else None,
            "loads": 1 / experts if over_batch else None,
        }
        # Buffers are never made on meta, because initial_rules has no entry for buffers.
        here = torch.device("cpu") if self.weight.is_meta else self.weight.device
        for name, start in starts.items():
            made = None if start is None else torch.full((experts,), start, dtype=torch.float32, device=here)
            self.register_buffer(name, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the start weights as torch's linear layers do."""
        rule = of_linear(self.weight.shape[1])
        nn.init.uniform_(self.weight, rule.low, rule.high)

    def forward(
        self,
        tokens: RoutedTokens,
        surroundings: ExpertContext,
        counted: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Routing:
        """Choose the experts of each token.

        Args:
            tokens: the tokens of this rank.
            surroundings: ranks, microbatch and sinks of the layer.
            counted: tokens that count, [n]; None counts all.
            labels: weight of each sequence in balance and z, [B]; None weighs sequences by their tokens.

        Raises:
            NonFiniteError: if a logit is NaN or infinite and no engine runs; the step of an engine reports it on all
                ranks.
        """
        policy = self.policy
        hidden, shift = self._noised(tokens, surroundings)
        logits = router_logits(hidden, self.weight)  # [n, E]
        if surroundings.replay is None:
            self._check_finite(logits)
        is_sigmoid, in_one = policy.score == "sigmoid", self.chooses_in_one(logits)
        scores = None if in_one else scores_of(logits, is_sigmoid)
        learns = self.training and torch.is_grad_enabled()
        adds = learns and (policy.balance == "loss" or policy.z_weight > 0)

        def decide() -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
            index = self._index(scores, logits.detach(), shift)
            chosen, balances = _counted_alone(index, counted), adds and policy.balance == "loss"
            kept, counts = self._kept(chosen, scores, index, tokens, surroundings, balances)
            return index, kept, counts, surroundings.labels_of(labels, tokens) if adds else None

        index, kept, counts, labels = surroundings.keep(f"router:{surroundings.name}", decide)
        if scores is None:
            weights, scores = expert_weights(logits, index, is_sigmoid, policy.normalizes, policy.scale)
        else:
            weights = weights_of(scores, index, policy)
        chosen = _counted_alone(index, counted)
        stayed = chosen if kept is None else index.masked_fill(~kept, -1)
        if learns:
            self._count(chosen, stayed, scores.detach(), surroundings)
        weights = weights if kept is None else weights.masked_fill(~kept, 0)
        value = None
        if adds:
            assert counts is not None, "pairs are counted where a term needs them"
            value = term(
                policy,
                shares_of(scores, policy),
                logits,
                counts,
                tokens.sequence,
                counted,
                self.loads,
                labels,
            )
        return Routing(stayed, weights, value, chosen, scores)

    def _noised(self, tokens: RoutedTokens, surroundings: ExpertContext) -> tuple[Tensor, Tensor | None]:
        """Return the input of the router with jitter, and the addend of the logits that choose, if there is one."""
        hidden, noise = tokens.hidden, self.policy.noise if self.training else "none"
        if noise == "jitter":
            hidden = hidden * jitter(surroundings, tokens, hidden.shape[-1]).to(_wide(hidden, self.weight))
        shift = gumbel(surroundings, tokens, len(self.weight)) if noise.startswith("gumbel") else None
        return hidden, shift

    def _index(self, scores: Tensor | None, logits: Tensor, shift: Tensor | None) -> Tensor:
        """Return the experts of each token, by the scores of the logits plus noise ``shift``, if there is any."""
        policy = self.policy
        is_sigmoid = policy.score == "sigmoid"
        if scores is None:
            return chosen_experts(logits, self.bias, policy.top_k, is_sigmoid)
        seen = scores.detach()
        if shift is not None:
            seen = scores_of(logits + shift.to(logits.dtype), is_sigmoid)
            if policy.noise == "gumbel_rest":
                seen = seen.scatter(-1, largest(scores.detach(), 1), torch.inf)
        return choice(seen, self.bias, policy)

    def chooses_in_one(self, logits: Tensor) -> bool:
        """Return whether choice and weights are one launch each: on a device, if all tokens keep what they choose."""
        policy = self.policy
        limits = policy.top_groups is not None and policy.top_groups < policy.groups
        draws = self.training and policy.noise in ("gumbel", "gumbel_rest")
        return is_fused(logits) and policy.capacity is None and not limits and not draws

    def _check_finite(self, logits: Tensor) -> None:
        bad = int((~logits.isfinite().all(-1)).sum())
        if bad:
            raise NonFiniteError(
                f"MixtureOfExperts: the router has no finite logits for {bad} of {len(logits)} tokens, so "
                "there is no choice of experts; look for the NaN or infinity in the layers before it, or in its weights"
            )

    def _kept(
        self,
        chosen: Tensor,
        scores: Tensor | None,
        index: Tensor,
        tokens: RoutedTokens,
        surroundings: ExpertContext,
        balances: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the pairs that have room, and the number of pairs of each expert in whole sequences.

        None stands for all pairs, and for numbers that nothing needs.
        """
        policy, experts = self.policy, len(self.weight)
        if policy.capacity is not None:
            assert scores is not None, "room goes by scores"
            weights = weights_of(scores.detach(), index, policy)
            return choose_kept(policy, chosen, weights, tokens, experts, surroundings)
        kept = None if chosen is index else chosen >= 0
        if policy.balance != "loss" and not policy.z_weight:
            return kept, None
        counts = pair_counts(chosen, tokens.sequence, tokens.sequences, experts)
        if balances or policy.z_weight:
            counts = surroundings.summed(counts, tokens)
        return kept, counts

    def _count(self, chosen: Tensor, stayed: Tensor, scores: Tensor, surroundings: ExpertContext) -> None:
        """Report the loads of this rank's tokens to ``surroundings.loads``, or add them to ``surroundings.routed``."""
        if surroundings.loads is None:
            one = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
            routed = pair_counts(chosen, one, 1, len(self.weight))[0]
            before = surroundings.routed
            surroundings.routed = routed if before is None else before + routed
            return
        loads = load_counts(chosen, stayed, scores, self.policy.score == "sigmoid", BESIDE_PAIRS)
        surroundings.loads.add(surroundings.name, loads)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to the module and keep the buffers in fp32, because 16 bits would lose the steps of the bias."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and not buffer.is_meta:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def end_step(self, routed: Tensor) -> None:
        """Update bias and loads after a step in which ``routed`` [E] pairs chose each expert."""
        if self.bias is not None:
            move_bias(self.bias, routed, self.policy.bias_rate)
        if self.loads is not None:
            note_loads(self.loads, routed)

    def extra_repr(self) -> str:
        """Return the sizes and the fields of the policy that were set."""
        experts, width = self.weight.shape
        said = [f"{key}={getattr(self.policy, key)}" for key in sorted(self.policy.model_fields_set)]
        return ", ".join([str(width), str(experts), *said])


def _counted_alone(index: Tensor, counted: Tensor | None) -> Tensor:
    """Return ``index`` [n, k] with -1 for tokens that do not count."""
    return index if counted is None else index.masked_fill(~counted[:, None], -1)


def _wide(*tensors: Tensor) -> torch.dtype:
    """Return the promoted dtype of the tensors, fp32 at least."""
    dtype = torch.float32
    for each in tensors:
        dtype = torch.promote_types(dtype, each.dtype)
    return dtype


@operation("fp32")
def router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return ``hidden`` times the transposed ``weight`` in fp32 at least: [n, D], [E, D] -> [n, E]."""
    dtype = _wide(hidden, weight)
    return F.linear(hidden.to(dtype), weight.to(dtype))


def shares_of(scores: Tensor, policy: RouterPolicy) -> Tensor:
    """Return the scores of each token divided by their sum: [n, E] -> [n, E]."""
    return scores if policy.score == "softmax" else normalized(scores)


def choice(scores: Tensor, bias: Tensor | None, policy: RouterPolicy) -> Tensor:
    """Return the experts of each token, the best first: [n, E] -> int64 [n, k]."""
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if policy.top_groups is not None and policy.top_groups < policy.groups:
        grouped = scores.unflatten(-1, (policy.groups, -1))  # [n, groups, E/groups]
        best = 1 if policy.score == "softmax" else min(2, grouped.shape[-1])
        of_groups = grouped.sort(-1, descending=True).values[..., :best].sum(-1)
        outside = torch.ones_like(of_groups, dtype=torch.bool)
        outside.scatter_(-1, largest(of_groups, policy.top_groups), False)
        scores = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    return largest(scores, policy.top_k)


def weights_of(scores: Tensor, index: Tensor, policy: RouterPolicy) -> Tensor:
    """Return the weights of the chosen experts: [n, E], [n, k] -> [n, k]."""
    chosen = scores.gather(-1, index)
    return (normalized(chosen) if policy.normalizes else chosen) * policy.scale
