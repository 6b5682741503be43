"""The experts of a layer as stacks: a parameter ``[E, ...]`` contains that of E modules of one form.

All have the interface that transformers 5 gave its own: ``experts(hidden [N, D], index [N, k], weights [N, k])`` is
Σ_j weights_j · expert_{index_j}(hidden), and ``compute`` works on rows that lie expert by expert. An expert without
rows runs too: its weights then have a gradient of 0 instead of none, and every rank of a layout keeps as many tensors.

Shapes: E experts, D width, F hidden, k experts of a token; N tokens, R rows of (token, expert).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.comm.collectives import Group
from shardwise.kernels.deferred import DefersProducts
from shardwise.kernels.gated import gated
from shardwise.kernels.grouped import gated_experts
from shardwise.kernels.initializers import Initializer, of_linear, of_torch
from shardwise.parallel.expert.dispatch import Beside, Compute, Dispatcher, PassRoutes
from shardwise.parallel.expert.stacks import ExpertStack, StackPlacement, gated_stack
from shardwise.parallel.expert.surroundings import Keep, make_anew
from shardwise.plan.placement import Replicate


def by_expert(
    compute: Compute,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: int,
    keep: Keep,
    beside: Beside | None = None,
) -> Tensor:
    """Run ``compute`` for all experts on one rank and return the weighted sum by token, [N, D].

    Args:
        compute: computes rows that are sorted by expert.
        hidden: tokens, [N, D].
        index: experts of each token, [N, k]; -1 adds nothing.
        weights: weights of these experts, [N, k].
        experts: number of experts, E.
        keep: stores the routes for a recomputation; see ``surroundings.Keep``.
        beside: computation that runs while rows travel.
    """
    alone = Dispatcher(Group.alone("ep"), Group.alone("etp"), experts)
    routes: PassRoutes = keep("routes", lambda: alone.routes(index))
    return alone(hidden, index, weights, compute, routes, beside)


class StackedExperts(nn.Module, ABC):
    """E experts of one form as stacks."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of experts, E."""

    @abstractmethod
    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute rows with their experts: [R, D] -> [R, D].

        Rows are sorted by expert; expert e has ``counts[e]`` of them.
        """

    def forward(
        self,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        keep: Keep = make_anew,
        beside: Beside | None = None,
    ) -> Tensor:
        """Return Σ_j weights_j · expert_{index_j}(hidden): [N, D], [N, k], [N, k] -> [N, D].

        An index of -1 adds nothing. ``beside`` is called once, while rows travel.
        """
        return by_expert(self.compute, hidden, index, weights, self.count, keep, beside)


class Experts(StackedExperts, DefersProducts):
    """E stacked experts down (silu(gate x) · up x): ``gate_up`` [E, 2F, D], gate first, and ``down`` [E, D, F].

    Args:
        width: numbers of a token, D.
        hidden: hidden features of an expert, F.
        experts: number of experts, E.
    """

    product_weights = ("gate_up", "down")

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the start weights of each expert as two of torch's linear layers do."""
        for stack in (self.gate_up, self.down):
            rule = of_linear(stack.shape[-1])
            nn.init.uniform_(stack, rule.low, rule.high)

    def initial_rules(self) -> dict[str, Initializer]:
        """Return the initializers of the parameters, for a model on meta."""
        return {name: of_linear(stack.shape[-1]) for name, stack in self.named_parameters()}

    def expert_stack(self) -> ExpertStack:
        """Return the placement of the tensors on ranks that share experts."""
        return gated_stack(self.count, self.down.shape[-1])

    @property
    def count(self) -> int:
        """Number of experts, E."""
        return len(self.down)

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute rows with their experts: [R, D] -> [R, D].

        Rows are sorted by expert; expert e has ``counts[e]`` of them.
        """
        return gated_experts(rows, self.gate_up, self.down, counts, self.products)


class MadeExperts(StackedExperts):
    """E modules made by ``make``, stacked: their parameter ``name`` is the stack ``name`` [E, ...] of this module.

    Args:
        make: makes one expert.
        experts: number of experts, E.

    Raises:
        ConfigError: if the experts differ in their parameters, or cannot be stacked.
    """

    def __init__(self, make: Callable[[], nn.Module], experts: int) -> None:
        super().__init__()
        made = [make() for _ in range(experts)]
        forms = [{name: each.shape for name, each in module.named_parameters()} for module in made]
        _check_form(made[0])
        if any(form != forms[0] for form in forms):
            raise ConfigError(
                "expert: made modules of different parameters; every expert must have the same shapes"
            )
        for name, first in made[0].named_parameters():
            stack = torch.stack([module.get_parameter(name).detach() for module in made])
            holder: nn.Module = self
            *path, local = name.split(".")
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(local, nn.Parameter(stack, first.requires_grad))
        self._count = experts
        # A tuple keeps nn.Module from registering the expert, whose own parameters would appear beside the stacks.
        self._one = (made[0].to("meta"),)

    def initial_rules(self) -> dict[str, Initializer]:
        """Return the initializers of torch's common modules.

        Raises:
            PlanError: if a parameter belongs to another module.
        """
        found: dict[str, Initializer] = {}
        for prefix, module in self._one[0].named_modules():
            for local, _ in module.named_parameters(recurse=False):
                name, rule = f"{prefix}.{local}" if prefix else local, of_torch(module, local)
                if rule is None:
                    raise PlanError(
                        f"start weights: parameter {name} of an expert belongs to a {type(module).__name__}, whose "
                        "start is not known; make the layer off meta"
                    )
                found[name] = rule
        return found

    def expert_stack(self) -> ExpertStack:
        """Return the placement of the tensors on ranks that share experts; a made expert is not cut itself."""
        whole = StackPlacement(Replicate(), Replicate())
        return ExpertStack(self.count, 0, {name: whole for name, _ in self.named_parameters()})

    @property
    def count(self) -> int:
        """Number of experts, E."""
        return self._count

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute rows with their experts: [R, D] -> [R, D].

        Rows are sorted by expert; expert e has ``counts[e]`` of them.

        Raises:
            UsageError: if an expert returns another shape.
        """
        (one,) = self._one
        stacks = dict(self.named_parameters())
        results = []
        for e, part in enumerate(rows[: sum(counts)].split(list(counts))):
            result = functional_call(one, {name: stack[e] for name, stack in stacks.items()}, (part,))
            if not isinstance(result, Tensor) or result.shape != part.shape:
                shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise UsageError(
                    f"expert: a {type(one).__name__} made {shape} of rows {list(part.shape)}; expected the same shape"
                )
            results.append(result)
        return torch.cat(results)


class DenseExpert(nn.Module):
    """Gated feed-forward layer for every token: down (silu(gate x) · up x), [n, D] -> [n, D].

    Args:
        width: numbers of a token, D.
        hidden: hidden features, F.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down (silu(gate x) · up x)."""
        return self.down(gated(self.gate_up(x)))


def _check_form(module: nn.Module) -> None:
    """Raise ConfigError for a module that computes something else when its parameters are stacked."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"expert: returned a {type(module).__name__}; expected a function that makes a module"
        )
    kind = type(module).__name__
    if not any(True for _ in module.parameters()):
        raise ConfigError(f"expert: a {kind} has no parameters; expected those of one expert")
    if dropping := list(dropouts_in(module)):
        raise ConfigError(
            f"expert: a {kind} has dropout inside ({', '.join(dropping)}), whose mask would depend on how rows are "
            "dealt to ranks; put it behind the layer, or set it to 0"
        )
    if buffers := [name for name, _ in module.named_buffers()]:
        raise ConfigError(
            f"expert: a {kind} has buffers ({', '.join(buffers)}), and parameters alone are stacked; compute them in "
            "forward"
        )
    if len(list(module.named_parameters())) != len(list(module.named_parameters(remove_duplicate=False))):
        raise ConfigError(f"expert: a {kind} has tied parameters, which a stack does not keep; untie them")


def dropouts_in(module: nn.Module) -> Iterator[str]:
    """Yield the dropouts inside a module with their probabilities, as far as classes and attributes show them."""
    for name, each in module.named_modules():
        if isinstance(each, nn.modules.dropout._DropoutNd):
            shares = {"p": each.p}
        else:
            shares = {key: value for key, value in vars(each).items() if "drop" in key}
        for key, value in shares.items():
            if isinstance(value, float) and value > 0:
                yield f"{name or type(each).__name__} ({key}={value})"
