"""``deepspeed.moe.layer.MoE``: DeepSpeed's layer of experts on Shardwise's, and functions that inspect such layers.

    y, l_aux, counts = MoE(hidden_size=D, expert=module, num_experts=E, ep_size=2, k=1)(x)     x, y [..., D]

    l_aux = E · Σ_e f_e P_e     f_e: share of the tokens that chose expert e, for k = 2 only by their first choice,
                                for larger k by any choice, over k; before drops; P_e: mean probability

All n tokens of a rank's microbatch count as one sequence: an expert's capacity and ``l_aux`` are computed over the
microbatch, as in DeepSpeed, and depend on how a batch is cut into microbatches. ``shardwise.MixtureOfExperts`` counts
sequence by sequence. ``l_aux`` is an output with gradients that the script adds to its loss: the layer adds no
gradient of its own.

Shapes: D hidden_size, E num_experts, n tokens of a microbatch.
"""

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, UsageError
from shardwise.parallel.expert.balance import pair_counts
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.router import Routing

_log = logging.getLogger(__name__)

_NOISES = (None, "None", "Jitter", "RSample")
_INSTEAD = {
    "deepspeed_moe": "the layer returns (output, l_aux, exp_counts); weights are layer.router.weight [E, D] and "
    "layer.experts.<name> [E, ...], one stack for all experts",
    "mlp": "it is layer.residual",
    "coefficient": "it is layer.mix",
}
_LAYERS: "WeakSet[MoE]" = WeakSet()


class MoE(MixtureOfExperts):
    """DeepSpeed's layer of experts, which returns ``(output, l_aux, exp_counts)``.

    docs/guides/deepspeed.md documents each argument.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """Make the layer; ``expert`` is a module [n, D] -> [n, D], of which every expert starts as a copy.

        Raises:
            ConfigError: if an argument is wrong; the error names it.
        """
        if ep_size < 1 or num_experts % ep_size:
            raise ConfigError(
                f"MoE: num_experts {num_experts} does not divide by ep_size {ep_size}, and every rank holds as many; "
                f"give a multiple of {max(ep_size, 1)}, or another ep_size"
            )
        room: dict[str, Any] = {}
        if drop_tokens:
            room = {"capacity": capacity_factor, "min_capacity": min_capacity}
        noise = _noise(k, noisy_gate_policy, top2_2nd_expert_sampling)
        policy = RouterPolicy(top_k=k, noise=noise, **room)
        super().__init__(
            hidden_size,
            hidden_size,  # the hidden width, which is unused if ``expert`` is given
            num_experts,
            router=policy,
            expert=lambda: copy.deepcopy(expert),
            residual=use_residual,
        )
        if use_residual:
            self.residual = expert  # not a copy, because layers that were given the same module share it
        self.num_experts, self.ep_size = num_experts, ep_size
        evaluated = {**room, "capacity": eval_capacity_factor} if room else room
        self._policies = policy, RouterPolicy(top_k=k, noise=noise, **evaluated)
        if enable_expert_tensor_parallelism:
            _log.info(
                "MoE: enable_expert_tensor_parallelism has no effect: it acts with an mpu, which is refused"
            )
        _LAYERS.add(self)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        _LAYERS.add(self)  # a copied or unpickled layer must be found by ``is_moe_param`` too

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise AttributeError(f"MoE.{name}: not here: {_INSTEAD[name]}")
        return super().__getattr__(name)

    @property
    def num_local_experts(self) -> int:
        """The number of experts on each rank."""
        return self.num_experts // self.ep_size

    @property
    def expert_group_name(self) -> str:
        """The name of the layer's group of ranks, for ``groups`` and for groups of parameters."""
        return f"ep_size_{self.ep_size}"

    @property
    def use_residual(self) -> bool:
        """True if a dense branch is mixed into the output."""
        return self.residual is not None

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: ``initialize`` assigns experts to ranks."""

    def train(self, mode: bool = True) -> "MoE":
        """Set the training mode and choose the matching capacity factor."""
        super().train(mode)
        self.router.policy = self._policies[0 if mode else 1]
        return self

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (output, l_aux, exp_counts) for tokens.

        Args:
            hidden_states: The tokens, [..., D].
            used_token: [n]; zero for tokens that are sent to no expert. None: all tokens are used.

        Returns:
            The output with the shape of ``hidden_states``, l_aux [], and the number of tokens that chose each expert,
            int64 [E].

        Raises:
            UsageError: if the last dim of ``hidden_states`` is not D.
        """
        if hidden_states.shape[-1] != self.width:
            raise UsageError(
                f"{self.surroundings.name or 'MoE'}: was given a tensor of shape {list(hidden_states.shape)}; expected "
                f"[..., {self.width}]"
            )
        mask = None if used_token is None else used_token.reshape(1, -1) != 0
        y, routing = self.routed(hidden_states.reshape(1, -1, self.width), mask)
        return y.view(hidden_states.shape), self._balance(routing), self._counts(routing.chosen)

    def _balance(self, routing: Routing) -> Tensor:
        tokens, experts = routing.scores.shape
        k = routing.chosen.shape[1]
        counts = self._counts(routing.chosen if k > 2 else routing.chosen[:, :1])
        shares = counts.to(routing.scores.dtype) / (max(tokens, 1) * (k if k > 2 else 1))
        return experts * (shares * routing.scores.sum(0) / max(tokens, 1)).sum()

    def _counts(self, chosen: Tensor) -> Tensor:
        one = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
        return pair_counts(chosen, one, 1, self.num_experts)[0]


def _noise(k: int, policy: str | None, samples_second: bool) -> str:
    """Return Shardwise's name of the router noise for DeepSpeed's arguments.

    Raises:
        ConfigError: if the policy is unknown, or two kinds of noise are given.
    """
    if policy not in _NOISES:
        raise ConfigError(f"MoE: noisy_gate_policy is {policy!r}; expected None, 'Jitter' or 'RSample'")
    if policy == "Jitter":
        if k == 2 and samples_second:
            raise ConfigError(
                "MoE: noisy_gate_policy 'Jitter' beside top2_2nd_expert_sampling, which is on unless you say False, "
                "are two noises of one router; give top2_2nd_expert_sampling=False, or leave noisy_gate_policy out"
            )
        return "jitter"
    if k == 2:
        return "gumbel_rest" if samples_second else "none"
    return "gumbel" if policy == "RSample" and k == 1 else "none"


# Questions about experts -------------------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> list[MoE]:
    """Return the layers of experts in ``model``."""
    return [each for each in model.modules() if isinstance(each, MoE)]


def expert_ranks(model: nn.Module, said: int, call: str) -> int:
    """Return the number of ranks over which the experts of ``model`` are distributed.

    Args:
        model: The model, whose layers each give an ``ep_size``.
        said: The number in the configuration; 1 if the configuration gives none.
        call: The name of the calling function, for the error.

    Raises:
        UsageError: if the layers and the configuration disagree.
    """
    sizes = {layer.ep_size for layer in layers_of(model)} | ({said} if said > 1 else set())
    if len(sizes) > 1:
        raise UsageError(
            f"{call}: experts of ep_size {' and '.join(map(str, sorted(sizes)))}; all experts of a model lie over the "
            "same ranks here, so give every MoE the same ep_size, and the configuration none"
        )
    return sizes.pop() if sizes else 1


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (True if ``m`` has layers of experts, number of experts of the first layer)."""
    found = layers_of(m)
    return bool(found), found[0].num_experts if found else 0


def is_moe_param(param: Tensor) -> bool:
    """Return whether ``param`` is the stacked parameter of a layer's experts."""
    return _layer_of(param) is not None


def _layer_of(param: Tensor) -> MoE | None:
    return next(
        (layer for layer in list(_LAYERS) for each in layer.experts.parameters() if each is param), None
    )


Groups = Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""One group of parameters, or several, as torch's optimizers take them."""


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Groups, max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Split groups of parameters into groups without experts, followed by groups of only experts.

    Args:
        param_groups: One group, or several.
        max_group_size: No effect: a group is not a buffer.

    Returns:
        The given groups without their experts, then the groups of experts. Each group of experts has the numbers of
        its original group, ``moe`` True, and as ``name`` the name of the layer's group of ranks.
    """
    given = (
        [dict(param_groups)] if isinstance(param_groups, Mapping) else [dict(each) for each in param_groups]
    )
    experts: list[dict[str, Any]] = []
    for group in given:
        parameters = list(group["params"])
        by_name: dict[str, list[Any]] = {}
        for each in parameters:
            if layer := _layer_of(each):
                by_name.setdefault(layer.expert_group_name, []).append(each)
        group["params"] = [each for each in parameters if not is_moe_param(each)]
        experts += [{**group, "name": name, "moe": True, "params": held} for name, held in by_name.items()]
    return given + experts


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return (parameters outside of experts, stacked parameters of experts)."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Split parameters, or groups of parameters, into groups with and without experts.

    Groups that are split already are returned as they are.
    """
    if not any(isinstance(each, Mapping) for each in model_parameters):
        group = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(group)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Return whether a group of parameters contains experts."""
    return bool(param_group.get("moe", False))
