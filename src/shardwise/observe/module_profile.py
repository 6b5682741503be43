"""What each module of a model costs: parameters, operations and seconds, as a tree.

    FLOPs of a module = those of the products in its own forward + those of its submodules;  MACs = FLOPs / 2

Products are matrix products, convolutions and attention, as everywhere in flops.py. What ran is counted, so any model
can be; what a backward pass computes again is not. An operation of a backward pass belongs to the module that made its
node of the graph: autograd numbers nodes in the order of forward, and the counter notes at which number each module
began and ended.

Cost: a dispatch mode and two hooks a module in the step that is counted, which takes some times longer; nothing in the
others.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from pydantic import PositiveInt
from torch import nn

from shardwise.observe.flops import Counter, flops_text, is_repeated
from shardwise.observe.progress import count_text, step_time_text
from shardwise.plan.policy import Policy
from shardwise.plan.trace import HostClock, TraceClock


class ModuleProfilePolicy(Policy):
    """Keys under ``module_profile:``: parameters, FLOPs and seconds of every module in one step. Counts are those of
    the whole model and the whole batch on any mesh; seconds are the slowest rank's. Written by rank 0."""

    step: PositiveInt = 2
    """The step that is counted; the first one allocates and compiles."""
    depth: PositiveInt | None = None
    """Levels of the tree that are shown; left out, all."""
    top: PositiveInt = 3
    """Modules that are named at each level, as those with the most parameters, FLOPs and seconds."""
    tree: bool = True
    """Show the tree of modules, and not the sums alone."""
    output: str | None = None
    """File to write to; left out, rank 0 prints."""


class Costs(NamedTuple):
    """Of one module."""

    forward: int = 0
    """FLOPs."""
    backward: int = 0
    """FLOPs."""
    seconds: float = 0.0
    """In its forward passes, those of its submodules included."""
    calls: int = 0

    def plus(self, other: "Costs") -> "Costs":
        """Both."""
        return Costs(
            self.forward + other.forward,
            self.backward + other.backward,
            self.seconds + other.seconds,
            self.calls + other.calls,
        )


class ModuleCounter(Counter):
    """Counts what runs ``with counter.forward():`` and ``with counter.backward():``, by the names of ``modules`` (a
    path of the tree each, "" for the root), each for itself without its submodules."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], clock: TraceClock | None = None) -> None:
        super().__init__()
        self._costs: dict[str, Costs] = {}
        self._modules = list(modules)
        self._clock = HostClock() if clock is None else clock
        self._passed: list[tuple[str, Any, Any]] = []
        """Modules whose forward passes are over, their marks unread: a device may not have come to them."""
        self._running: list[tuple[str, Any]] = []
        """Modules that run, and since when."""
        self._numbers: list[int] = []
        self._names: list[str] = []
        """Whose nodes of the graph begin at which number."""
        self._is_backward = False

    @property
    def costs(self) -> dict[str, Costs]:
        """So far, by module; waits for the device where it is behind."""
        passed, self._passed = self._passed, []
        times = self._clock.seconds([mark for _, start, stop in passed for mark in (start, stop)])
        for (name, _, _), start_s, stop_s in zip(passed, times[::2], times[1::2], strict=True):
            self._add(name, Costs(seconds=stop_s - start_s, calls=1))
        return self._costs

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        with self._hooked(), self:
            yield
        self._running.clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
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
                self._add(self._running[-1][0] if self._running else "", Costs(forward=found))
            elif not self._running:  # else it is computed again, in a Function of the model's own
                self._add(self._maker(), Costs(backward=found))
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
        """The module that made the node of the graph under way."""
        node = torch._C._current_autograd_node()
        number = getattr(node, "_sequence_nr", lambda: -1)()
        place = bisect.bisect_right(self._numbers, number) - 1
        return self._names[place] if place >= 0 else ""

    def _add(self, name: str, costs: Costs) -> None:
        self._costs[name] = self._costs.get(name, Costs()).plus(costs)


class ModuleRow(NamedTuple):
    """A module with all that is inside it."""

    name: str
    kind: str
    """Its class."""
    parameters: int
    costs: Costs


class ModuleTree:
    """Rows in the order of the model; the first is the model."""

    def __init__(
        self, kinds: Mapping[str, str], parameters: Mapping[str, int], costs: Mapping[str, Costs]
    ) -> None:
        """``parameters`` by their own names; ``costs`` by module, each for itself."""
        sums: dict[str, int] = dict.fromkeys(kinds, 0)
        whole: dict[str, Costs] = {name: Costs() for name in kinds}
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
        """The whole model."""
        return next(row for row in self.rows if row.name == "")

    def text(self, policy: ModuleProfilePolicy, title: str = "") -> str:
        """As people read it."""
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
    """``a.b.c``, ``a.b``, ``a`` and the root."""
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


def scaled(costs: Costs, share: Fraction) -> Costs:
    """``costs`` of which ``share`` is the model's, the rest being done more than once."""
    return costs._replace(forward=int(costs.forward * share), backward=int(costs.backward * share))
