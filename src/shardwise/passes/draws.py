"""Random numbers of a forward pass on the ranks of one model: all ranks draw the same numbers.

A model's own noise (``torch.randn``, ``random.random``, numpy) is drawn by every rank that runs the line, from the
rank's own generators. Without coordination, a rank along "tp" would add other noise than its neighbours, and a stage
that needs at the end the noise that another stage has added would draw different noise. So passes begin with one state,
and numbers drawn in a part of the model that only one stage runs do not advance the generators for the other stages:

    along "tp"             a pass begins with the states of the first rank; passes follow one another as in one process
    in a pipeline          a walk begins with the states of the last stage, at which the walk before ended;
                           its first microbatch continues from them, each later one from states derived from them
    in a block, an         derived from the states of the walk, the microbatch and the name; code that runs on every
    embedding, a head      stage (the model's own forward) continues as if nothing had been drawn in the part

States are sent before the first pass of a kind, and later before passes of models that draw. Passes that draw nothing
leave the generators as they were, except for those first passes, after which all ranks of a model have equal states.

Cost: reading generators twice a pass (generators.py); for models that draw a message of 20 kB a pass, or a walk.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.comm.collectives import Group
from shardwise.passes.generators import RandomGenerators, States, own_generators, pack, unpack

_WHAT = "the states of random generators"


class PassStart(NamedTuple):
    """The states with which a pass began, and the key from which states of a pipeline's parts derive."""

    states: States
    key: str


class PassDraws:
    """The random generators around the passes of one engine. Without ``share`` the generators are only observed."""

    def __init__(self) -> None:
        self._generators = RandomGenerators()
        self._groups: Sequence[tuple[Group, int]] = ()
        self._device = torch.device("cpu")
        self._in_walks = False
        self._known: dict[bool, bool] = {}
        """Whether passes draw, by whether they are training passes; kinds that have not run yet are absent."""
        self._walk: tuple[States, str] | None = None
        """States with which the running walk began, and the key from which its microbatches' states derive."""
        self._walks = 0
        self.drew: list[str] = []
        """Names of the generators that passes have drawn from."""
        self.keeps = False
        """True while the states with which passes begin are kept, for a second run (engine/step/check.py)."""
        self.begun: dict[int, PassStart] = {}
        """States with which the last pass of each microbatch began, if states are kept."""
        self.key = ""
        """Key from which the states of parts derive in the running pass."""

    def share(self, tp: Group, pp: Group, last: int, model: nn.Module, device: torch.device) -> None:
        """Make the ranks that share a model draw the same numbers.

        Args:
            tp: The ranks along "tp".
            pp: The ranks along "pp".
            last: Index on "pp" of the rank that has the last stage.
            model: The model, whose own generators are included.
            device: The device of the computation, whose generator is included.
        """
        self._generators = RandomGenerators([device], own_generators(model))
        self._groups = [(pp, last), (tp, 0)] if pp.size * tp.size > 1 else []
        self._device, self._in_walks = device, pp.size > 1

    @property
    def generators(self) -> RandomGenerators:
        """The generators that are observed."""
        return self._generators

    @property
    def isolates(self) -> bool:
        """True while parts of the model that only one stage runs draw from separate states."""
        return bool(self.key)

    @contextmanager
    def again(self, begun: "PassStart") -> Iterator[None]:
        """Run a pass a second time inside the context with the numbers that the first run drew."""
        self._generators.put(begun.states)
        self.key = begun.key
        try:
            yield
        finally:
            self.key = ""

    def note(self, draws: bool) -> None:
        """Record whether a pass of the running step has drawn on a rank of the model. Called on all ranks alike.

        Args:
            draws: True if a rank has drawn.

        Raises:
            UsageError: If a pipeline began to draw in this step, because its stages did not begin with one
                state.
        """
        was_known = self._known.get(True, True)
        if draws:
            self._known = {True: True, False: True}
        if draws and self._in_walks and not was_known:
            raise UsageError(
                f"the forward pass draws random numbers ({', '.join(self.drew) or 'on another stage'}), and those of "
                "the steps before drew none, so the stages were not given one state for this step. No weight has "
                "moved, and from now on they are given one: call train_step again with these batches, or let the "
                "model draw from its first step on"
            )

    # Around passes ---------------------------------------------------------------------------------------------

    @contextmanager
    def at(self, microbatch: int, trains: bool) -> Iterator[None]:
        """Enclose a forward pass. Collective along "tp" if the ranks get one state.

        Args:
            microbatch: Index of the microbatch.
            trains: True for a training pass.

        Raises:
            UsageError: If the pass drew from unequal states, after passes that did not draw.
        """
        if not self._groups and not self.keeps:
            yield
            return
        is_given = self._walk is None and self._gives(trains)
        if self._walk is not None:
            states, key = self._walk
            self._generators.put(states)
            if microbatch:
                self._generators.seed(f"{key} {microbatch}", states)
            self.key = f"{key} {microbatch}"
        before = self._given() if is_given else self._generators.look()
        if self.keeps:
            self.begun[microbatch] = PassStart(before, self.key)
        try:
            yield
        finally:
            self.key = ""
        drawn = self._generators.drawn(before)
        self._noted(drawn)
        if self._groups and not self._in_walks:
            if drawn and not is_given:
                self._check_alike(before)
            self._known[trains] = self._known.get(trains, False) or bool(drawn)

    @contextmanager
    def walk(self, step: int, trains: bool) -> Iterator[None]:
        """Enclose a walk of a pipeline. Collective if the ranks get one state.

        Args:
            step: The optimizer step.
            trains: True for a training walk.
        """
        if not self._gives(trains):
            yield
            return
        self._walks += 1
        states, before = self._given(), len(self.drew)
        digest = hashlib.blake2b(pack(states), digest_size=8).hexdigest()
        self._walk = states, f"{digest} {step} {self._walks}"
        try:
            yield
        finally:
            self._walk = None
        if trains not in self._known:
            drew = torch.tensor([float(len(self.drew) > before)], device=self._device)
            for group, _ in self._groups:
                group.all_reduce(drew, "a vote on random numbers", purpose="control").wait()
            self._known[trains] = bool(drew.item())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Enclose a part of the model that only this stage runs."""
        before = self._generators.states() if self.isolates else {}
        if not before:
            yield
            return
        self._generators.seed(f"{self.key} {name}", before)
        seeded = self._generators.states()
        try:
            yield
        finally:
            self._noted(self._generators.drawn(seeded))
            self._generators.put(before)

    def around(self, parts: Sequence[tuple[str, nn.Module]]) -> AbstractContextManager[Any]:
        """Return a context in which each of ``parts`` draws as inside ``part``."""
        if not self.isolates:
            return ExitStack()
        return _DrawHooks(self.part, parts)

    def _gives(self, trains: bool) -> bool:
        return bool(self._groups) and self._known.get(trains, True)

    def _given(self) -> States:
        """Broadcast the states of one rank of the model to all its ranks, set them and return them."""
        data = pack(self._generators.states())
        for group, root in self._groups:
            if group.size == 1:
                continue
            size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
            group.broadcast(size, root, _WHAT).wait()
            buffer = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
            if group.index == root:
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            group.broadcast(buffer, root, _WHAT).wait()
            data = bytes(buffer.cpu().numpy())
        states = unpack(data)
        self._generators.put(states)
        return states

    def _check_alike(self, before: States) -> None:
        """Check that the ranks began a pass that draws with equal states.

        Raises:
            UsageError: If the states differ.
        """
        number = int.from_bytes(hashlib.blake2b(pack(before), digest_size=7).digest(), "little")
        for group, _ in self._groups:
            if group.size > 1 and not group.all_equal(number, _WHAT, self._device):
                raise UsageError(
                    "the forward pass draws random numbers, and passes before drew none; the generators of the ranks "
                    f"of one model (along {group.axis}) stand differently by now, so each would compute with other "
                    "numbers. From the next pass on they are given one state: run the pass again, or seed these ranks "
                    "alike"
                )

    def _noted(self, names: Sequence[str]) -> None:
        self.drew += [name for name in names if name not in self.drew]


class _DrawHooks(AbstractContextManager[None]):
    """Hooks on parts of a stage for one pass."""

    def __init__(
        self, part: Callable[[str], AbstractContextManager[None]], parts: Sequence[tuple[str, nn.Module]]
    ):
        self._part = part
        self._parts = parts
        self._handles: list[Any] = []
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        for name, module in self._parts:
            self._handles += [
                module.register_forward_pre_hook(self._begins(name), prepend=True),
                module.register_forward_hook(self._ends, always_call=True),
            ]

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _begins(self, name: str) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            context = self._part(name)
            context.__enter__()
            self._open.append(context)

        return begin

    def _ends(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
