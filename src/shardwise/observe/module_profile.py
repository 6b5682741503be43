"""Cost of each module of a model as a tree: parameters, operations and seconds.

    FLOPs of a module = those of the products in its own forward + those of its submodules;  MACs = FLOPs / 2

Products are matrix products, convolutions and attention, as in flops.py. The operations that ran are counted, so that
any model can be profiled; operations that a backward pass recomputes are not. An operation of a backward pass belongs
to the module that made its node of the graph: autograd numbers nodes in the order of forward, and the counter records
the number at which each module began and ended.

Cost: a dispatch mode and two hooks a module in the step that is counted, which takes several times longer; nothing in
other steps.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from pydantic import PositiveInt
from torch import nn

from shardwise.base.policy import Policy
from shardwise.observe.flops import FlopsCounter, flops_text, is_repeated
from shardwise.observe.progress import count_text, step_time_text
from shardwise.plan.trace import HostClock, TraceClock


class ModuleProfilePolicy(Policy):
    """Keys under ``module_profile:``: parameters, FLOPs and seconds of every module in one step.

    Counts are those of the whole model and the whole batch on any mesh; seconds are the slowest rank's. Rank 0 writes
    the profile.
    """

    step: PositiveInt = 2
    """Step that is counted; the first step allocates and compiles."""
    depth: PositiveInt | None = None
    """Levels of the tree that are shown; if left out, all."""
    top: PositiveInt = 3
    """Modules named at each level: those with the most parameters, FLOPs and seconds."""
    tree: bool = True
    """Show the tree of modules besides the sums."""
    output: str | None = None
    """File to write to; if left out, rank 0 prints."""


class ModuleCosts(NamedTuple):
    """Cost of one module."""

    forward: int = 0
    """FLOPs of the forward passes."""
    backward: int = 0
    """FLOPs of the backward passes."""
    seconds: float = 0.0
    """Seconds in forward passes, including submodules."""
    calls: int = 0

    def plus(self, other: "ModuleCosts") -> "ModuleCosts":
        """Return the sum of both costs."""
        return ModuleCosts(
            self.forward + other.forward,
            self.backward + other.backward,
            self.seconds + other.seconds,
            self.calls + other.calls,
        )


class ModuleCounter(FlopsCounter):
    """Counter of what runs ``with counter.forward():`` and ``with counter.backward():``, by module.

    Each module counts for itself, without its submodules.

    Args:
        modules: (name, module) of each module; the name is a path of the tree, "" for the root.
        clock: Clock of the device; None: the host's.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], clock: TraceClock | None = None) -> None:
        super().__init__()
        self._costs: dict[str, ModuleCosts] = {}
        self._modules = list(modules)
        self._clock = HostClock() if clock is None else clock
        self._passed: list[tuple[str, Any, Any]] = []
        """Modules whose forward passes are over, with unread marks: a device may not have reached the marks."""
        self._running: list[tuple[str, Any]] = []
        """Modules that run, with the marks of their starts."""
        self._numbers: list[int] = []
        self._names: list[str] = []
        """Module whose nodes of the graph begin at each number of ``_numbers``."""
        self._is_backward = False

    @property
    def costs(self) -> dict[str, ModuleCosts]:
        """Costs so far, by module; waits for the device if it is behind."""
        passed, self._passed = self._passed, []
        times = self._clock.seconds([mark for _, start, stop in passed for mark in (start, stop)])
        for (name, _, _), start_s, stop_s in zip(passed, times[::2], times[1::2], strict=True):
            self._add(name, ModuleCosts(seconds=stop_s - start_s, calls=1))
        return self._costs

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count a forward pass inside the ``with`` block."""
        with self._hooked(), self:
            yield
        self._running.clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count a backward pass inside the ``with`` block."""
        self._is_backward = True
        try:
            with self._hooked(), self:
                yield
        finally:
            self._is_backward = False
            self._running.clear()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for name, module in self._modules:
                handles.append(module.register_forward_pre_hook(self._enter(name)))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.flops
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if found := self.flops - before:
            if not self._is_backward:
                self._add(self._running[-1][0] if self._running else "", ModuleCosts(forward=found))
            elif not self._running:  # otherwise a Function of the model recomputes a forward pass
                self._add(self._maker(), ModuleCosts(backward=found))
        return out

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._running.append((name, self._clock.mark()))
            self._begins(name)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._running:
            return
        name, started = self._running.pop()
        self._begins(self._running[-1][0] if self._running else name.rpartition(".")[0])
        if not is_repeated():
            self._passed.append((name, started, self._clock.mark()))

    def _begins(self, name: str) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._names.append(name)

    def _maker(self) -> str:
        """Return the module that made the node of the graph that is running."""
        node = torch._C._current_autograd_node()
        number = getattr(node, "_sequence_nr", lambda: -1)()
        place = bisect.bisect_right(self._numbers, number) - 1
        return self._names[place] if place >= 0 else ""

    def _add(self, name: str, costs: ModuleCosts) -> None:
        self._costs[name] = self._costs.get(name, ModuleCosts()).plus(costs)


class ModuleRow(NamedTuple):
    """A module with the costs of all its submodules."""

    name: str
    kind: str
    """Name of the module's class."""
    parameters: int
    costs: ModuleCosts


class ModuleTree:
    """Rows of all modules in the order of the model; the first is the model.

    Args:
        kinds: Class name of each module, by name.
        parameters: Elements of each parameter, by the parameter's name.
        costs: Costs of each module without its submodules.
    """

    def __init__(
        self, kinds: Mapping[str, str], parameters: Mapping[str, int], costs: Mapping[str, ModuleCosts]
    ) -> None:
        sums: dict[str, int] = dict.fromkeys(kinds, 0)
        whole: dict[str, ModuleCosts] = {name: ModuleCosts() for name in kinds}
        for name, elements in parameters.items():
            for outer in _paths(name.rpartition(".")[0]):
                if outer in sums:
                    sums[outer] += elements
        for name, own in costs.items():
            for outer in _paths(name):
                if outer in whole:
                    here = own if outer == name else own._replace(seconds=0.0, calls=0)
                    whole[outer] = whole[outer].plus(here)
        self.rows = [ModuleRow(name, kind, sums[name], whole[name]) for name, kind in kinds.items()]

    @property
    def root(self) -> ModuleRow:
        """The row of the whole model."""
        return next(row for row in self.rows if row.name == "")

    def text(self, policy: ModuleProfilePolicy, title: str = "") -> str:
        """Return the profile as text."""
        root = self.root
        lines = [
            f"{title}{count_text(root.parameters)} parameters; forward {_flops(root.costs.forward)}, "
            f"backward {_flops(root.costs.backward)}"
        ]
        deepest = max(_depth(row.name) for row in self.rows)
        deepest = deepest if policy.depth is None else min(policy.depth, deepest)
        for depth in range(1, deepest + 1):
            level = [row for row in self.rows if _depth(row.name) == depth]
            lines.append(f"depth {depth}: " + "; ".join(_most(level, policy.top)))
        if policy.tree:
            lines += self._tree(deepest)
        return "\n".join(lines)

    def _tree(self, deepest: int) -> list[str]:
        root = self.root
        cells = [("module", "parameters", "forward", "share", "backward", "seconds", "share")]
        for row in self.rows:
            if _depth(row.name) > deepest:
                continue
            short = row.name.rpartition(".")[2]
            costs = row.costs
            cells.append(
                (
                    "  " * _depth(row.name) + f"{short} {row.kind}".strip(),
                    count_text(row.parameters),
                    flops_text(costs.forward),
                    _share(costs.forward, root.costs.forward),
                    flops_text(costs.backward),
                    step_time_text(costs.seconds),
                    _share(costs.seconds, root.costs.seconds),
                )
            )
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        return [
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
                ]
            )
            for row in cells
        ]


def _paths(name: str) -> Iterator[str]:
    """Yield ``a.b.c``, ``a.b``, ``a`` and the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else ""


def _flops(flops: int) -> str:
    return f"{flops_text(flops)} ({flops_text(flops / 2).replace('FLOP', 'MAC')})"


def _most(rows: list[ModuleRow], top: int) -> Iterator[str]:
    def named(what: str, value: Callable[[ModuleRow], float], text: Callable[[float], str]) -> str:
        best = sorted(rows, key=value, reverse=True)[:top]
        return f"most {what}: " + ", ".join(f"{row.name} {text(value(row))}" for row in best)

    yield named("parameters", lambda row: row.parameters, count_text)
    yield named("FLOPs", lambda row: row.costs.forward, flops_text)
    yield named("seconds", lambda row: row.costs.seconds, step_time_text)


def scaled(costs: ModuleCosts, share: Fraction) -> ModuleCosts:
    """Return ``costs`` times the ``share`` that the model needs; the rest was done more than once."""
    return costs._replace(forward=int(costs.forward * share), backward=int(costs.backward * share))
