"""``deepspeed.zero``: contexts in which sharded parameters are whole.

with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
    if rank == 0:
        model.head.weight.zero_()            # afterwards every rank has rank 0's values, in the masters too
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.comm import default_group
from shardwise.deepspeed.calls.living import find
from shardwise.engine.construction.sharded_init import PieceTensor


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802
    params: Any,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Return a context in which parameters are whole on every rank.

    The context works for parameters that no engine has, too: they are sent from rank ``modifier_rank`` to all ranks.

    Args:
        params: A parameter, several parameters, or a module, for all of its parameters.
        modifier_rank: The rank whose edits of weights and masters all ranks take over; None: the parameters are only
            read.
        fwd_module: No effect.
        enabled: False to do nothing.

    Raises:
        UsageError: if ``params`` contains something else than tensors.
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
                        continue  # the context of its piece sends the edits when it cuts the parameter again
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
    """Do nothing: a parameter that another module reads belongs to the Unit around both modules (``zero.units``).

    A use of the parameter outside of that Unit raises an error that names the line.
    """


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing, because ``register_external_parameter`` does nothing."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Return a context in which all weights are gathered once, for many passes without gradients."""
    with model.ours.gathered():
        yield model.module
