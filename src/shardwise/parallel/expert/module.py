"""MixtureOfExperts: a feed-forward layer of E experts, of which a token uses k. The layer is its own reference.

    y = Σ_j w_j · expert_{i_j}(x)                  i, w: the k experts that the router chose and their weights
      + shared(x)                                  experts that every token uses, if there are any
    expert_e(x) = down_e (silu(gate_e x) · up_e x)

    PR-MoE:  y' = c_0 · y + c_1 · dense(x)         c = softmax(mix x), two numbers a token

    parameter                 shape              what it is
    router.weight             [E, D]
    experts.gate_up           [E, 2F, D]         rows of gate first, then of up
    experts.down              [E, D, F]
    experts.<name>            [E, ...]           instead, with ``expert``: its parameters, stacked
    shared.gate_up.weight     [2·S·F, D]         S shared experts are one of S times the size
    shared.down.weight        [D, S·F]
    residual.<name>           those of dense     with ``residual``
    mix.weight, mix.bias      [2, D], [2]
    router.bias               [E], fp32          a buffer, with ``balance: bias``
    router.loads              [E], fp32          a buffer, with ``balance_over: batch``

Papers: Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020 (GShard), arXiv:2006.16668; Fedus et al. 2021
        (Switch), arXiv:2101.03961; Rajbhandari et al. 2022 (PR-MoE), arXiv:2201.05596; Dai et al. 2024 (DeepSeekMoE,
        shared experts), arXiv:2401.06066.
Cost:   6·D·F operations a token and expert forward, whatever E is, and 2·D·E for the router.
Shapes: B batch, T sequence, D width, E experts, F hidden, k experts of a token, S shared experts, n tokens of this
        rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm.duals import uncompiled
from shardwise.kernels.initializers import Initializer, of_linear
from shardwise.kernels.opaque import OpaqueModule
from shardwise.parallel.expert.balance import inject
from shardwise.parallel.expert.capacity import most_pairs
from shardwise.parallel.expert.experts import DenseExpert, Experts, MadeExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.router import Router, Routing
from shardwise.parallel.expert.surroundings import ExpertContext


class MixtureOfExperts(nn.Module):
    """Feed-forward layer of E experts, to which a router sends each token: ``[B, T, D] -> [B, T, D]``.

    The layer replaces the feed-forward layer of any model.

    Args:
        width: numbers of a token, D.
        hidden: hidden features of an expert, F.
        experts: number of experts, E.
        router: choice of experts; None takes the defaults of ``RouterPolicy``.
        expert: function that makes one expert, called E times: any module [n, D] -> [n, D] without dropout and buffers.
            None makes a gated feed-forward layer of ``hidden`` features.
        shared: number of experts that every token uses in addition.
        residual: True adds a dense expert, mixed with the others by a learned two-way softmax.

    Raises:
        ConfigError: if sizes are too small, or if the experts cannot be stacked.

    Example:
        >>> layer = shardwise.MixtureOfExperts(384, 256, 8, router=shardwise.RouterPolicy(top_k=2))
        >>> y = x + layer(norm(x))
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        router: RouterPolicy | None = None,
        expert: Callable[[], nn.Module] | None = None,
        shared: int = 0,
        residual: bool = False,
    ) -> None:
        super().__init__()
        least = {"width": 1, "hidden": 1, "experts": 1, "shared": 0}
        for (name, low), size in zip(least.items(), (width, hidden, experts, shared), strict=True):
            if size < low:
                raise ConfigError(f"MixtureOfExperts: {name} is {size}; expected {low} or more")
        if expert is not None and shared:
            raise ConfigError(
                f"MixtureOfExperts: shared is {shared} beside expert=, whose size nobody knows; add a module of your "
                "own to what the layer returns"
            )
        self.width = width
        self.router = Router(width, experts, router or RouterPolicy())
        self.experts = Experts(width, hidden, experts) if expert is None else MadeExperts(expert, experts)
        self.shared = DenseExpert(width, shared * hidden) if shared else None
        self.residual: nn.Module | None = None
        self.mix: nn.Linear | None = None
        """Logits of the weights of the experts and of the dense branch, two for each token."""
        if residual:
            self.residual = DenseExpert(width, hidden) if expert is None else expert()
            self.mix = nn.Linear(width, 2)
        self.surroundings = ExpertContext()
        """Ranks, microbatch and sinks of the layer, which an engine fills in."""
        self._opaque = OpaqueModule(self, _output_of)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return the output of the layer, [B, T, D].

        Args:
            x: input, [B, T, D].
            mask: tokens that count, [B, T]; None counts all. Others (padding, for example) go to no expert, take no
                room and count in no balance.
            labels: number of labels of each sequence in the loss, [B], by which balance and z weigh sequences; None
                weighs sequences by their tokens.

        Raises:
            UsageError: if ``x``, ``mask`` or ``labels`` has another shape.
            NonFiniteError: if the router produces a NaN and no engine runs.
        """
        if torch.compiler.is_compiling():
            return self._opaque(x, mask, labels)
        return self.routed(x, mask, labels)[0]

    @uncompiled
    def routed(
        self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Return the output of ``forward`` and the routing of this rank's tokens."""
        self._check_call(x, mask, labels)
        tokens = self.surroundings.take(x)
        counted = tokens.counted
        if mask is not None:
            masked = self.surroundings.here(mask, tokens).bool()
            counted = masked if counted is None else masked & counted
        routing = self.router(tokens, self.surroundings, counted, labels)
        self.surroundings.room = most_pairs(self.router.policy, tokens, len(self.router.weight))
        every: dict[str, Tensor] = {}

        def of_every_token() -> None:
            for name, dense in (("shared", self.shared), ("residual", self.residual)):
                if dense is not None:
                    every[name] = dense(tokens.hidden)

        # What every token uses is computed while rows travel to the experts.
        beside = of_every_token if self.shared is not None or self.residual is not None else None
        y = self.experts(
            tokens.hidden, routing.index, routing.weights, self.surroundings.keep, beside
        )  # [n, D]
        if "shared" in every:
            y = y + every["shared"]
        if "residual" in every and self.mix is not None:
            shares = self.mix(tokens.hidden).softmax(-1)  # [n, 2]
            y = y * shares[:, :1] + every["residual"] * shares[:, 1:]
        if routing.balance is not None:
            y = inject(y, routing.balance, self.surroundings.scale_of(tokens))
        return self.surroundings.give(y, x), routing

    def end_step(self) -> None:
        """Update what moves with loads in the router: with ``balance: bias`` or ``balance_over: batch``.

        Call this method once a step, after the optimizer's step. An engine calls it itself.
        """
        routed, self.surroundings.routed = self.surroundings.routed, None
        if routed is not None:
            self.router.end_step(routed)

    def initial_rules(self) -> dict[str, Initializer]:
        """Return the initializers of the parameters, for a layer that was made on meta.

        They are those of torch's linear layers, or of the modules that ``expert`` makes.
        """
        rules: dict[str, Initializer] = {}
        for name, child in self.named_children():
            if isinstance(child, Experts | MadeExperts):
                own = child.initial_rules()
            elif name == "residual" and isinstance(self.experts, MadeExperts):
                own = self.experts.initial_rules()  # the function that made the experts made this module too
            else:
                own = {
                    local: of_linear(weight.shape[-1] if weight.dim() > 1 else self.width)
                    for local, weight in child.named_parameters()
                }
            rules |= {f"{name}.{local}": rule for local, rule in own.items()}
        return rules

    def _check_call(self, x: Tensor, mask: Tensor | None, labels: Tensor | None) -> None:
        name = self.surroundings.name or "MixtureOfExperts"
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise UsageError(
                f"{name}: was given a tensor of shape {list(x.shape)}; expected [batch, sequence, {self.width}]"
            )
        if mask is not None and mask.shape != x.shape[:2]:
            raise UsageError(
                f"{name}: was given a mask of shape {list(mask.shape)}; expected {list(x.shape[:2])}, as the tokens"
            )
        if labels is not None and labels.shape != x.shape[:1]:
            raise UsageError(
                f"{name}: was given labels of shape {list(labels.shape)}; expected [{x.shape[0]}], how many each "
                "sequence has"
            )


def _output_of(layer: MixtureOfExperts, x: Tensor, mask: Tensor | None, labels: Tensor | None) -> Tensor:
    return layer.routed(x, mask, labels)[0]
