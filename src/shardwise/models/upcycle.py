"""Upcycling: a mixture of experts that starts as the dense model it is made of.

    experts.gate_up[e], experts.down[e]  =  the block's gate_up.weight, down.weight       for each of the E experts
    router.weight                        =  the start rule of a new model, by (seed, name)

Each expert begins as a copy of the feed-forward part in its place. Where the weights of a token's experts add up to 1,
the new model computes what the dense one did, whatever its routers choose; training tells the copies apart.

Paper: Komatsuzaki et al. 2023, arXiv:2212.05055.
Cost:  one tensor at a time.
Shapes: E experts, F hidden, D width; gate_up [2F, D] -> [E, 2F, D], down [D, F] -> [E, D, F].
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.models.gpt import Gpt, GptExperts, GptPolicy
from shardwise.models.initial import draw
from shardwise.plan.errors import ConfigError


def upcycled_policy(dense: GptPolicy, experts: GptExperts) -> GptPolicy:
    """``dense`` with ``experts``. Errors: ConfigError where these would not start as it."""
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


class Made(NamedTuple):
    """A tensor that is made when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def upcycled(
    policy: GptPolicy, read: Callable[[str], Tensor], dtype_of: Callable[[str], torch.dtype], seed: int = 0
) -> dict[str, Made]:
    """The tensors of ``policy``, which has experts, out of a dense model's; ``read`` gives one of these by its name."""
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
            found[name] = Made(tuple(parameter.shape), torch.float32, partial(drawn, name, parameter.shape))
        elif ".mlp.experts." in name:
            dense = name.replace(".experts.", ".") + ".weight"
            found[name] = Made(
                tuple(parameter.shape), dtype_of(dense), partial(copies, dense, parameter.shape)
            )
        else:
            found[name] = Made(tuple(parameter.shape), dtype_of(name), partial(read, name))
    return found
