"""Cuts stacks of experts to the ranks of "ep" and "etp", and puts a dispatcher around what is left of them.

    experts(hidden, index, weights)     before   Σ_j weights_j · expert_{index_j}(hidden), of all E experts
                                        after    the same; rows travel to the ranks that hold their experts

The module, its Parameter objects, names and hooks stay: dispatch, compute and combine run where its forward ran, inside
the window of its Unit, in the backward pass too. Which tokens are this rank's own is the business of ``Surroundings``:
a MixtureOfExperts asks its own; any other stack, which is called with the tokens of all ranks, gets some here.

Shapes: N tokens here, D width, E experts, k experts of a token.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.memory.replay import Replay
from shardwise.parallel.expert.dispatch import Dispatcher
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.stacks import Stack
from shardwise.parallel.expert.surroundings import Layout, Surroundings
from shardwise.parallel.expert.transformers_experts import compute_of
from shardwise.plan.errors import PlanError, UsageError
from shardwise.plan.placement import Cut, Shard, local_shape, spans


class ExpertRanks(NamedTuple):
    """The ranks that share experts, and those that share a sequence."""

    ep: Group
    etp: Group
    tokens: Group
    """The ranks that are given the same microbatch: along "tp"."""
    layout: Callable[[], Layout]
    """How the running pass lies on ``tokens``."""
    levels: tuple[Group, ...] = ()
    """Of ep where it spans hosts, as ``World.levels`` gives them."""
    rows: int | None = None
    """Pairs that a rank works on at once; None: all."""
    in_blocks: bool = False
    """Whether rows travel in blocks of fixed size."""


def mixtures(model: nn.Module, by_first_name: bool = False) -> dict[str, MixtureOfExperts]:
    """The mixtures of experts in ``model``, by every name or by the first; stand-ins of those on other stages have no
    parameters, and are left out."""
    named = model.named_modules(remove_duplicate=by_first_name)
    found = {name: module for name, module in named if isinstance(module, MixtureOfExperts)}
    return {name: layer for name, layer in found.items() if next(layer.parameters(), None) is not None}


def surround(
    model: nn.Module,
    seed: int,
    replay: Replay,
    loads: ExpertLoads | None = None,
    tokens: Group | None = None,
    layout: Callable[[], Layout] = lambda: "cut",
) -> None:
    """Tell each mixture of experts that was not told before of the run: where random numbers are drawn, what it chose
    before, what its microbatch counts, who counts its tokens; and the ranks that are given the same microbatch."""
    for name, layer in mixtures(model, by_first_name=True).items():
        if layer.surroundings.replay is not replay:
            layer.surroundings = Surroundings(
                name, tokens, layout, replay.keep, lambda: replay.scale, replay, seed, loads
            )


def check_blocks(model: nn.Module) -> None:
    """Of the whole model, where rows are to travel in blocks: a stage of it may have other routers alone.

    Errors: PlanError where no router has a capacity.
    """
    routers = [layer.router for layer in mixtures(model).values()]
    if routers and all(router.policy.capacity is None for router in routers):
        raise PlanError(
            "experts: exchange: blocks, but no router has a capacity, so nothing bounds what an expert may get; set "
            "RouterPolicy.capacity, or experts.exchange: counted"
        )


def cut_experts(model: nn.Module, stacks: Mapping[str, Stack], ranks: ExpertRanks, replay: Replay) -> None:
    """Cut those of ``stacks``, by module name, that ``model`` has and that are not cut yet, in place.

    A parameter on meta becomes a smaller one on meta; a real one this rank's piece of the values that all ranks have.
    """
    mixture_of: dict[nn.Module, MixtureOfExperts] = {
        layer.experts: layer for layer in mixtures(model).values()
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, stack in stacks.items():
        module = modules.get(name)
        if module is None or not {*stack.parameters} <= {leaf for leaf, _ in module.named_parameters()}:
            continue  # on another stage
        if isinstance(vars(module).get("forward"), _Dispatched):
            continue
        for leaf, stacked in stack.parameters.items():
            parameter, axes = (
                module.get_parameter(leaf),
                ((Shard(0), ranks.ep), (stacked.placement, ranks.etp)),
            )
            parameter.data = _piece(parameter.data, [Cut(where, on.index, on.size) for where, on in axes])
        layer = mixture_of.get(module)
        own = Surroundings(name, ranks.tokens, ranks.layout) if layer is None else None
        forward: Any = _Dispatched(name, module, stack, ranks, replay, own, layer)
        module.forward = forward


@torch.no_grad()
def _piece(full: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """A copy of what ``cuts`` leave of a tensor."""
    if full.is_meta:
        return full.new_empty(local_shape(full.shape, cuts))
    piece = full
    for dim in sorted({cut.dim for cut in cuts if cut.dim is not None}):
        held, _ = spans(full.shape[dim], dim, cuts)
        piece = torch.cat([piece.narrow(dim, span.full, span.size) for span in held], dim)
    return piece.clone()


class _Dispatched:
    """The forward of a stack that was cut."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        stack: Stack,
        ranks: ExpertRanks,
        replay: Replay,
        surroundings: Surroundings | None,
        layer: MixtureOfExperts | None,
    ):
        self._name = name
        self._stack = stack
        self._replay = replay
        self._surroundings = surroundings
        self._layer = layer
        self._dispatcher = Dispatcher(
            ranks.ep, ranks.etp, stack.experts, ranks.rows, name, ranks.levels, replay.has_numbers
        )
        self._in_blocks = ranks.in_blocks
        self._compute = compute_of(module, adds_bias=ranks.etp.index == 0)
        self._signature = inspect.signature(type(module).forward)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """(hidden [N, D], index [N, k], weights [N, k]), by whatever names the class gives them: [N, D]."""
        _, hidden, index, weights, *_ = self._signature.bind(None, *args, **kwargs).arguments.values()
        index = torch.where(index < self._stack.experts, index, -1)  # "nobody" in classes of transformers
        if self._surroundings is None:
            return self._dispatch(hidden, index, weights)
        tokens = self._surroundings.take(hidden[None])
        own_weights = self._surroundings.take(weights[None]).hidden
        own_index = index if len(index) == len(tokens.place) else index[tokens.place]
        return self._surroundings.give(self._dispatch(tokens.hidden, own_index, own_weights), hidden[None])[0]

    def _dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        layer, room = self._layer, None
        if layer is not None and self._in_blocks and torch.is_grad_enabled():
            room = layer.surroundings.room
        routes = self._replay.keep((self._name, "routes"), lambda: self._dispatcher.routes(index, room))
        if layer is not None and layer.training and torch.is_grad_enabled():
            around = layer.surroundings
            if around.loads is not None:
                around.loads.sent(around.name, routes.rows_sent, routes.rows_crossed)
        return self._dispatcher(hidden, index, weights, self._compute, routes)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            f"copy.deepcopy(model): the experts of {self._name} lie on several ranks, and a copy would not reach "
            "them; take engine.state_dict(), or copy the model before initialize()"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError("torch.save(model), pickle: a pickle would be code. Save engine.state_dict()")
