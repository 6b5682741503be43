"""Module profile: the costs of the step that ``module_profile:`` names, combined from all ranks.

    data-parallel ranks, microbatches    each computed other samples: their counts are added
    stages                               each ran other modules: added
    ranks along ep, etp                  each computed other rows, or another part of them: added
    ranks along tp                       cut modules: added. Work that all of them do alike (a module that is kept
                                         whole, a head of keys and values that several ranks hold) is counted once,
                                         by the placements in the registry:
                                             share = elements of the whole matrix / elements on all ranks

The numbers are therefore those of one process with the whole batch.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from pathlib import Path

import torch

from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.observe.module_profile import ModuleCosts, ModuleCounter, ModuleTree, scaled
from shardwise.plan.mesh import DENSE
from shardwise.plan.placement import AxisCut, Partial, Shard, shape_on
from shardwise.plan.registry import Registry, TensorInfo
from shardwise.plan.trace import PassSeconds, Trace, TraceClock


class ModuleProfile:
    """Counts the costs of every module in one step of one engine.

    Args:
        config: the resolved configuration.
        world: the ranks.
        registry: every persistent tensor with its placements.
        modules: (name in the whole model, module) of this rank's modules.
        clock: clock of the device.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        registry: Registry,
        modules: Sequence[tuple[str, torch.nn.Module]],
        clock: TraceClock,
    ) -> None:
        self._policy = config.module_profile
        self._world, self._registry, self._modules = world, registry, modules
        self._clock = clock
        self._limit_s = config.comm.limit_s
        self._counter: ModuleCounter | None = None
        self.tree: ModuleTree | None = None
        """Costs of the counted step, by module; None before that step."""
        self.step_begins(1)

    def step_begins(self, step: int) -> None:
        """Start counting if ``step`` is the step that the configuration names."""
        if self._policy is not None and step == self._policy.step:
            self._counter = ModuleCounter(self._modules, self._clock)

    def forward(self) -> AbstractContextManager[None]:
        """Return a context that counts a forward pass; passes without gradients are not counted."""
        counts = self._counter is not None and torch.is_grad_enabled()
        return self._counter.forward() if counts and self._counter is not None else nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Return a context that counts a backward pass."""
        return nullcontext() if self._counter is None else self._counter.backward()

    def step_ended(self, step: int, trace: Trace) -> None:
        """End the counting of ``step``, and write the profile on rank 0. Collective if the step was counted."""
        if self._counter is not None:
            counter, self._counter = self._counter, None
            self.tree = self._together(counter)
            if self._world.rank == 0:
                self._write(step, trace.seconds())
        self.step_begins(step + 1)

    def _together(self, counter: ModuleCounter) -> ModuleTree:
        kinds = {name: type(module).__name__ for name, module in self._modules}
        key = f"profile/{self._world.next_engine()}/modules"
        self._world.post(key, json.dumps([kinds, counter.costs]))
        told = [json.loads(text) for text in self._world.collect(key, self._limit_s)]
        costs: dict[str, ModuleCosts] = {}
        for _, its in told:
            for name, numbers in its.items():
                new, known = ModuleCosts(*numbers), costs.get(name, ModuleCosts())
                costs[name] = known.plus(new)._replace(seconds=max(known.seconds, new.seconds))
        parameters = {info.name: info for info in self._registry.of_kind("parameter")}
        shares = _WorkShares(parameters, self._registry.mesh.tp)
        whole = {name: scaled(own, shares.of(name)) for name, own in costs.items()}
        return ModuleTree(
            _merged([its for its, _ in told]),
            {name: info.elements for name, info in parameters.items()},
            whole,
        )

    def _write(self, step: int, seconds: PassSeconds) -> None:
        assert self._policy is not None and self.tree is not None, "counted"
        times = ", ".join(
            f"{name.removesuffix('_s')} {value:.3g} s" for name, value in seconds._asdict().items()
        )
        text = (
            self.tree.text(self._policy, f"step {step} on {self._world.size} ranks: ") + f"\nrank 0: {times}"
        )
        if self._policy.output is None:
            print(text, flush=True)
        else:
            path = Path(self._policy.output)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")


class _WorkShares:
    """The share of the work of all ranks along "tp" that one process would do, by module."""

    def __init__(self, parameters: Mapping[str, TensorInfo], tp: int) -> None:
        self._tp = tp
        self._matrices = {name: info for name, info in parameters.items() if len(info.shape) > 1}

    def of(self, module: str) -> Fraction:
        """Return the share of a module; 1 if no rank repeated work of another rank."""
        if self._tp == 1:
            return Fraction(1)
        own = [info for name, info in self._matrices.items() if name.rpartition(".")[0] == module]
        if own:
            return self._of_matrix(own[0])
        inside = [
            info for name, info in self._matrices.items() if name.startswith(f"{module}." if module else "")
        ]
        if not inside and module:
            return self.of(module.rpartition(".")[0])
        is_cut = any(self._of_matrix(info) != Fraction(1, self._tp) for info in inside)
        return Fraction(1) if is_cut else Fraction(1, self._tp)

    def _of_matrix(self, info: TensorInfo) -> Fraction:
        if info.axes != DENSE:
            return Fraction(1)
        where = info.on("tp")
        if isinstance(where, Shard):
            shapes = [shape_on(info.shape, [AxisCut(where, index, self._tp)]) for index in range(self._tp)]
            return Fraction(info.elements, sum(map(math.prod, shapes)))
        return Fraction(1) if isinstance(info.gradient_on("tp"), Partial) else Fraction(1, self._tp)


def _merged(told: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the class of each module of all ranks by name, in tree order, each level in order of first appearance."""
    inside: dict[str, dict[str, None]] = {}
    kinds: dict[str, str] = {}
    for its in told:
        for name, kind in its.items():
            kinds.setdefault(name, kind)
            if name:
                inside.setdefault(name.rpartition(".")[0], {})[name] = None

    def walk(name: str) -> Iterator[str]:
        yield name
        for inner in inside.get(name, {}):
            yield from walk(inner)

    return {name: kinds[name] for name in walk("")}
