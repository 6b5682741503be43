"""``deepspeed.zero``: parameters in pieces, made whole for a while.

with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
    if rank == 0:
        model.head.weight.zero_()            # every rank has rank 0's values afterwards, masters too
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.comm import default_group
from shardwise.deepspeed.living import find
from shardwise.engine.sharded_init import PieceTensor
from shardwise.plan.errors import UsageError


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802
    params: Any,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A context in which ``params`` (a parameter, several, or a module's) are whole on every rank.

    ``modifier_rank``: the rank whose edits all ranks take, weights and masters; None: they are read alone. Parameters
    that no engine has are as they are, and rank ``modifier_rank``'s edits of them are sent to all.
    """
    given = _listed(params)
    if not enabled or not given:
        yield
        return
    names: dict[Any, list[str]] = {}
    free: list[nn.Parameter] = []
    for parameter in given:
        found = find(parameter)
        if found is None:
            free.append(parameter)
        else:
            names.setdefault(found[0], []).append(found[1])
    with contextlib.ExitStack() as stack:
        for engine, some in names.items():
            stack.enter_context(engine.ours.full_parameters(some, from_rank=modifier_rank))
        for parameter in free:
            if isinstance(parameter, PieceTensor):
                stack.enter_context(parameter.piece.whole(modifier_rank))
        yield
        if modifier_rank is not None and default_group.size() > 1:
            with torch.no_grad():
                for parameter in free:
                    if isinstance(parameter, PieceTensor):
                        continue  # sent when it is cut again
                    default_group.broadcast(parameter.data, modifier_rank)


def _listed(params: Any) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, torch.Tensor):
        return [params] if isinstance(params, nn.Parameter) else []
    listed = list(params) if isinstance(params, Iterable) else [params]
    if strange := [each for each in listed if not isinstance(each, torch.Tensor)]:
        raise UsageError(
            f"GatheredParameters: expected parameters, or a module, given {strange[0]!r:.100}; take them from "
            "engine.module"
        )
    return [each for each in listed if isinstance(each, nn.Parameter)]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing before ``initialize``: a parameter that another module reads belongs to the Unit around both
    (``zero.units``); a use outside of it is an error that names the line."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing, as ``register_external_parameter``."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The model with its weights gathered once, for many passes without gradients."""
    with model.ours.gathered():
        yield model.module
