"""Upcycling: a mixture of experts that is initialized from a dense model.

    experts.gate_up[e], experts.down[e]  =  the block's gate_up.weight, down.weight       for each of the E experts
    router.weight                        =  the initial rule of a new model, by (seed, name)

Each expert starts as a copy of the feed-forward part that it replaces. If the weights of a token's experts add up to
1, the new model computes the same function as the dense one for any choice of its routers; training makes the copies
different.

Paper: Komatsuzaki et al. 2023, arXiv:2212.05055.
Cost:  one tensor at a time.
Shapes: E experts, F hidden, D width; gate_up [2F, D] -> [E, 2F, D], down [D, F] -> [E, D, F].
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.models.gpt import Gpt, GptExperts, GptPolicy
from shardwise.models.initial import draw


def upcycled_policy(dense: GptPolicy, experts: GptExperts) -> GptPolicy:
    """Return the policy of ``dense`` with ``experts``.

    Raises:
        ConfigError: if the model with experts would not start with the function of the dense model.
    """
    hidden = dense.resolved().hidden
    router = experts.router
    wrong = ""
    if dense.experts is not None:
        wrong = "the model has experts already; expected a dense one"
    elif experts.hidden not in (None, hidden):
        wrong = f"hidden is {experts.hidden}; each expert is a copy of {hidden} features, so leave hidden out"
    elif experts.shared:
        wrong = f"shared is {experts.shared}; a dense model has nothing to make shared experts of, so leave it out"
    elif not router.normalizes or router.scale != 1 or router.capacity is not None:
        wrong = (
            "the weights of a token's experts must add up to 1 for the model to start as the dense one; set top_k to 2 "
            "or more, and leave normalize, scale and capacity out"
        )
    if wrong:
        raise ConfigError(f"experts: {wrong}")
    return GptPolicy.model_validate(dense.model_dump() | {"experts": experts.model_dump()}).resolved()


class ComputedTensor(NamedTuple):
    """A tensor that is computed when ``make`` is called."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def upcycled(
    policy: GptPolicy, read: Callable[[str], Tensor], dtype_of: Callable[[str], torch.dtype], seed: int = 0
) -> dict[str, ComputedTensor]:
    """Return the tensors of a model with experts, made from a dense model's tensors.

    Args:
        policy: The shape of the model with experts.
        read: A function that returns a tensor of the dense model by name.
        dtype_of: A function that returns the dtype of a tensor of the dense model by name.
        seed: The seed of the routers' weights.
    """
    with torch.device("meta"):
        model = Gpt(policy)
    rules = model.initial_rules()

    def drawn(name: str, shape: torch.Size) -> Tensor:
        return draw(rules[name], seed, name, 0, shape.numel(), torch.float32).view(shape)

    def copies(dense: str, shape: torch.Size) -> Tensor:
        return read(dense).expand(shape).contiguous()

    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.router.weight"):
            found[name] = ComputedTensor(
                tuple(parameter.shape), torch.float32, partial(drawn, name, parameter.shape)
            )
        elif ".mlp.experts." in name:
            dense = name.replace(".experts.", ".") + ".weight"
            found[name] = ComputedTensor(
                tuple(parameter.shape), dtype_of(dense), partial(copies, dense, parameter.shape)
            )
        else:
            found[name] = ComputedTensor(tuple(parameter.shape), dtype_of(name), partial(read, name))
    return found
