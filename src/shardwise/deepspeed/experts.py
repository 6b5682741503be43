"""``deepspeed.moe.layer.MoE``: DeepSpeed's layer of experts on ours, and what scripts ask of models that have some.

    y, l_aux, counts = MoE(hidden_size=D, expert=module, num_experts=E, ep_size=2, k=1)(x)     x, y [..., D]

    l_aux = E · Σ_e f_e P_e     f_e: share of the tokens that chose expert e, of k = 2 by their first choice alone,
                                of more by any over k; before drops; P_e: mean probability

All n tokens of a rank's microbatch are one sequence: room with an expert and ``l_aux`` are those of the microbatch, as
there, and depend on how a batch is cut into microbatches. ``shardwise.MixtureOfExperts`` counts sequence by sequence.
``l_aux`` is an output with gradients that the script adds to its loss: nothing is injected beside it.

Shapes: D hidden_size, E num_experts, n tokens of a microbatch.
"""

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shardwise.parallel.expert.balance import pair_counts
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.parallel.expert.router import Routing
from shardwise.plan.errors import ConfigError, UsageError

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
    """DeepSpeed's layer of experts: ``(output, l_aux, exp_counts)``. See docs/guides/deepspeed.md for each argument."""

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
        """``expert``: a module [n, D] -> [n, D], of which every expert starts as a copy.

        Errors: ConfigError names the argument.
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
            hidden_size,  # unused beside ``expert``
            num_experts,
            router=policy,
            expert=lambda: copy.deepcopy(expert),
            residual=use_residual,
        )
        if use_residual:
            self.residual = expert  # itself: layers that were given one module share it
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
        _LAYERS.add(self)  # a copy is one too

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise AttributeError(f"MoE.{name}: not here: {_INSTEAD[name]}")
        return super().__getattr__(name)

    @property
    def num_local_experts(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.ep_size

    @property
    def expert_group_name(self) -> str:
        """What ``groups`` and groups of parameters are asked for."""
        return f"ep_size_{self.ep_size}"

    @property
    def use_residual(self) -> bool:
        """Whether a dense branch is mixed in."""
        return self.residual is not None

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing: ``initialize`` deals experts to ranks."""

    def train(self, mode: bool = True) -> "MoE":
        """Also chooses between the two capacity factors."""
        super().train(mode)
        self.router.policy = self._policies[0 if mode else 1]
        return self

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(output as ``hidden_states`` [..., D], l_aux [], tokens that chose each expert, int64 [E]).

        ``used_token`` [n]: zero for tokens that go to no expert.
        Errors: UsageError for other shapes.
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
    """Errors: ConfigError."""
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
    """The layers of experts in ``model``."""
    return [each for each in model.modules() if isinstance(each, MoE)]


def expert_ranks(model: nn.Module, said: int, call: str) -> int:
    """Ranks over which experts of ``model`` lie, by its layers and by a configuration that ``said`` so many.

    Errors: UsageError where they disagree.
    """
    sizes = {layer.ep_size for layer in layers_of(model)} | ({said} if said > 1 else set())
    if len(sizes) > 1:
        raise UsageError(
            f"{call}: experts of ep_size {' and '.join(map(str, sorted(sizes)))}; all experts of a model lie over the "
            "same ranks here, so give every MoE the same ep_size, and the configuration none"
        )
    return sizes.pop() if sizes else 1


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether ``m`` has layers of experts, how many experts the first one has)."""
    found = layers_of(m)
    return bool(found), found[0].num_experts if found else 0


def is_moe_param(param: Tensor) -> bool:
    """Whether ``param`` is a stack of experts."""
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
    """The groups without their experts, then those of the experts: each with its numbers, ``moe`` True and the
    ``name`` of the group of ranks. ``max_group_size``: no effect, for a group is no buffer here."""
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
    """(those of all ranks, stacks of experts)."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, split as above; groups that are split already stay."""
    if not any(isinstance(each, Mapping) for each in model_parameters):
        group = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(group)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a group is of experts."""
    return bool(param_group.get("moe", False))
