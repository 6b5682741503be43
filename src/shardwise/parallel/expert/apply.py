"""Cuts stacks of experts to the ranks of "ep" and "etp", and wraps what is left of them in a dispatcher.

    experts(hidden, index, weights)     before   Σ_j weights_j · expert_{index_j}(hidden), of all E experts
                                        after    the same; rows travel to the ranks that hold their experts

The module, its Parameter objects, names and hooks stay: dispatch, compute and combine run where the module's forward
ran, inside the window of its Unit, also in the backward pass. ``ExpertContext`` decide which tokens a rank routes: a
MixtureOfExperts has its own; any other stack, which is called with the tokens of all ranks, gets some from this file.

Shapes: N tokens of this rank, D width, E experts, k experts of a token.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError, UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.parallel.expert.dispatch import Beside, Dispatcher
from shardwise.parallel.expert.loads import ExpertLoads
from shardwise.parallel.expert.module import MixtureOfExperts
from shardwise.parallel.expert.stacks import ExpertStack
from shardwise.parallel.expert.surroundings import ExpertContext, Layout, SequencePart
from shardwise.parallel.expert.transformers_experts import compute_of
from shardwise.passes.replay import DrawReplay
from shardwise.plan.placement import AxisCut, Shard, local_shape, spans


class ExpertRanks(NamedTuple):
    """Ranks that share experts, and ranks that share a sequence."""

    ep: Group
    """Ranks over which experts are spread."""
    etp: Group
    """Ranks over which the features of an expert are cut."""
    tokens: Group
    """Ranks that get the same microbatch: along "tp"."""
    layout: Callable[[], Layout]
    """Function that returns how activations of the running pass lie on ``tokens``."""
    levels: tuple[Group, ...] = ()
    """Groups of the hops of ``ep`` if it spans hosts, as ``World.levels`` returns them."""
    rows: int | None = None
    """Largest number of pairs that a rank works on at once; None is without limit."""
    in_blocks: bool = False
    """True if rows travel in blocks of fixed size."""


def mixtures(model: nn.Module, by_first_name: bool = False) -> dict[str, MixtureOfExperts]:
    """Return the mixtures of experts in ``model`` by name.

    Stand-ins for layers on other stages have no parameters and are left out.

    Args:
        model: the model.
        by_first_name: True names a shared module once, False by every name.
    """
    named = model.named_modules(remove_duplicate=by_first_name)
    found = {name: module for name, module in named if isinstance(module, MixtureOfExperts)}
    return {name: layer for name, layer in found.items() if next(layer.parameters(), None) is not None}


def surround(
    model: nn.Module,
    seed: int,
    replay: DrawReplay,
    loads: ExpertLoads | None = None,
    tokens: Group | None = None,
    layout: Callable[[], Layout] = lambda: "cut",
    part: Callable[[], SequencePart | None] = lambda: None,
) -> None:
    """Set the surroundings of each mixture of experts that does not have those of ``replay`` yet.

    Args:
        model: the model.
        seed: seed of the run, for noise.
        replay: position of the running microbatch, and the store of what recomputations reuse.
        loads: counts the tokens of each expert; None counts in the layer.
        tokens: ranks that get the same microbatch.
        layout: returns how activations of the running pass lie on ``tokens``.
        part: returns the part of the sequences that ``tokens`` have together in the running pass; None for whole ones.
    """
    for name, layer in mixtures(model, by_first_name=True).items():
        if layer.surroundings.replay is not replay:
            layer.surroundings = ExpertContext(
                name, tokens, layout, replay.keep, lambda: replay.scale, replay, seed, loads, part=part
            )


def check_blocks(model: nn.Module) -> None:
    """Check that rows may travel in blocks: that a router of the whole model has a capacity.

    A single stage cannot check this, because it may only have other routers.

    Raises:
        PlanError: if no router has a capacity.
    """
    routers = [layer.router for layer in mixtures(model).values()]
    if routers and all(router.policy.capacity is None for router in routers):
        raise PlanError(
            "experts: exchange: blocks, but no router has a capacity, so nothing bounds what an expert may get; set "
            "RouterPolicy.capacity, or experts.exchange: counted"
        )


def cut_experts(
    model: nn.Module, stacks: Mapping[str, ExpertStack], ranks: ExpertRanks, replay: DrawReplay
) -> None:
    """Cut the ``stacks`` that ``model`` has and that are not cut yet, in place.

    A parameter on meta becomes a smaller one on meta. A real parameter becomes this rank's piece of the values, which
    all ranks have.

    Args:
        model: the model, or a stage of it.
        stacks: stacks by module name.
        ranks: ranks that share experts.
        replay: store of what recomputations reuse.
    """
    mixture_of: dict[nn.Module, MixtureOfExperts] = {
        layer.experts: layer for layer in mixtures(model).values()
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, stack in stacks.items():
        module = modules.get(name)
        if module is None or not {*stack.parameters} <= {leaf for leaf, _ in module.named_parameters()}:
            continue  # on another stage
        if isinstance(vars(module).get("forward"), _DispatchedForward):
            continue
        for leaf, stacked in stack.parameters.items():
            parameter, axes = (
                module.get_parameter(leaf),
                ((Shard(0), ranks.ep), (stacked.placement, ranks.etp)),
            )
            parameter.data = _piece(parameter.data, [AxisCut(where, on.index, on.size) for where, on in axes])
        layer = mixture_of.get(module)
        own = ExpertContext(name, ranks.tokens, ranks.layout) if layer is None else None
        forward: Any = _DispatchedForward(name, module, stack, ranks, replay, own, layer)
        module.forward = forward


@torch.no_grad()
def _piece(full: Tensor, cuts: Sequence[AxisCut]) -> Tensor:
    """Return a copy of the part of a tensor that ``cuts`` leave."""
    if full.is_meta:
        return full.new_empty(local_shape(full.shape, cuts))
    piece = full
    for dim in sorted({cut.dim for cut in cuts if cut.dim is not None}):
        held, _ = spans(full.shape[dim], dim, cuts)
        piece = torch.cat([piece.narrow(dim, span.full, span.size) for span in held], dim)
    return piece.clone()


class _DispatchedForward:
    """Forward function of a stack that was cut."""

    runs_uncompiled = True
    """True: ``compile: blocks`` leaves this forward as it is, because its sizes are read on the host."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        stack: ExpertStack,
        ranks: ExpertRanks,
        replay: DrawReplay,
        surroundings: ExpertContext | None,
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
        """Return the weighted sums of the experts' results: (hidden [N, D], index [N, k], weights [N, k]) -> [N, D].

        The arguments may have any names that the class gives them.
        """
        given = self._signature.bind(None, *args, **kwargs).arguments
        _, hidden, index, weights, *_ = given.values()
        if self._surroundings is None:
            return self._dispatch(hidden, index, weights, given.get("beside") if self._layer else None)
        index = torch.where(index < self._stack.experts, index, -1)  # E is "no expert" in transformers
        tokens = self._surroundings.take(hidden[None])
        own_weights = self._surroundings.take(weights[None]).hidden
        own_index = index if len(index) == len(tokens.place) else index[tokens.place]
        return self._surroundings.give(self._dispatch(tokens.hidden, own_index, own_weights), hidden[None])[0]

    def _dispatch(
        self, hidden: Tensor, index: Tensor, weights: Tensor, beside: Beside | None = None
    ) -> Tensor:
        layer, room = self._layer, None
        if layer is not None and self._in_blocks and torch.is_grad_enabled():
            room = layer.surroundings.room
        routes = self._replay.keep((self._name, "routes"), lambda: self._dispatcher.routes(index, room))
        if layer is not None and layer.training and torch.is_grad_enabled():
            around = layer.surroundings
            if around.loads is not None:
                around.loads.sent(around.name, routes.rows_sent, routes.rows_crossed)
        return self._dispatcher(hidden, index, weights, self._compute, routes, beside)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            f"copy.deepcopy(model): the experts of {self._name} lie on several ranks, and a copy would not reach "
            "them; take engine.state_dict(), or copy the model before initialize()"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError("torch.save(model), pickle: a pickle would be code. Save engine.state_dict()")
