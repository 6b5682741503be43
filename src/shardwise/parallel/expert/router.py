"""Router: which experts each token goes to, and how much each of them counts.

    logits   l = x Wᵀ                                            in fp32 at least
    scores   s = softmax(l)                                      over all experts
    choice   the k experts of largest score                      ties: the lower expert
    weights  w_j = scale · s_j / Σ_j s_j                         the division where ``normalize``

The choice has no gradient; the weights of the chosen carry it to the router. Ties are settled, because a router that
starts at zero has nothing else: torch's topk promises nothing there, a stable sort does.

Papers: Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020 (GShard), arXiv:2006.16668.
Cost:   2·n·E·D operations, a sort of [n, E].
Shapes: n tokens here, D width, E experts, k experts of a token.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.operation import operation
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.surroundings import Decision, Surroundings, Tokens
from shardwise.plan.errors import ConfigError, NonFiniteError


@dataclass(frozen=True)
class Routing:
    """Where the tokens here go."""

    index: Tensor
    """Experts of each token: int64 [n, k]."""
    weights: Tensor
    """What they count: [n, k], with gradients."""


class Router(nn.Module):
    """The weights ``[E, D]`` and the rule."""

    def __init__(self, width: int, experts: int, policy: RouterPolicy) -> None:
        super().__init__()
        if policy.top_k > experts:
            raise ConfigError(
                f"router.top_k is {policy.top_k} but there are {experts} experts; expected at most as many"
            )
        self.policy = policy
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's linear layers start."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, tokens: Tokens, surroundings: Surroundings) -> Routing:
        """Errors: NonFiniteError where the router of this rank makes a NaN or an infinity."""
        logits = router_logits(tokens.hidden, self.weight)  # [n, E]
        bad = int((~logits.isfinite().all(-1)).sum())
        if bad:
            raise NonFiniteError(
                f"{surroundings.name or 'MixtureOfExperts'}: the router has no finite logits for {bad} of "
                f"{len(logits)} tokens, so there is no choice of experts; look for the NaN or infinity in the layers "
                "before it, or in its weights"
            )
        scores = logits.softmax(-1)

        def choose() -> Decision:
            return (largest(scores.detach(), self.policy.top_k),)

        (index,) = surroundings.keep(surroundings.name, choose)
        return Routing(index, weights_of(scores, index, self.policy))

    def extra_repr(self) -> str:
        experts, width = self.weight.shape
        return f"{width}, {experts}, top_k={self.policy.top_k}"


@operation("fp32")
def router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden`` times the transposed ``weight`` in fp32 at least: [n, D], [E, D] -> [n, E]."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    return F.linear(hidden.to(dtype), weight.to(dtype))


def largest(x: Tensor, k: int) -> Tensor:
    """Where the k largest of the last dim are, the largest first, of equals the lower first: int64 [..., k]."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def weights_of(scores: Tensor, index: Tensor, policy: RouterPolicy) -> Tensor:
    """What the chosen experts count: [n, E], [n, k] -> [n, k]."""
    chosen = scores.gather(-1, index)
    if policy.normalizes:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * policy.scale
