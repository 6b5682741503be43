"""The modules and parameters that an engine was made of, and what a user has put in their place since.

A module that is replaced after ``initialize`` (``model.head = nn.Linear(...)``, ``blocks.append``, ``del blocks[3]``)
computes and never trains, and ``state_dict()`` and ``save()`` write the one that was taken out. Where blocks change
places, or a parameter is renamed (pruning makes ``weight_orig`` of ``weight``), a saved model would hold the values
under the old names. What has no parameters (a metric, a loss) comes and goes as it likes, and so do frozen parameters
that are new.

The stages of a pipeline run copies of the model and of modules around blocks. An attribute or a buffer that is set on
such a module (``model.alpha = 2``) is set on its copies before the next pass; a child that is replaced is refused.

Cost: a comparison of identities by module and step, of microseconds for tens of modules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from shardwise.base.errors import UsageError


class _ModuleMembers(NamedTuple):
    """The members of one module now, and the members that it had when the engine was made."""

    now: Mapping[str, Any]
    known: tuple[Any, ...]

    @property
    def is_same(self) -> bool:
        """True if these are the same objects as before, in the same order."""
        return len(self.now) == len(self.known) and all(map(is_, self.now.values(), self.known))


class _CopiedModule:
    """A module of the model that the stages of a pipeline run copies of."""

    def __init__(self, name: str, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self.name, self._module, self._copies = name, module, copies
        self._known = self._now()
        self._children = _ModuleMembers(module._modules, tuple(module._modules.values()))
        self._forward = vars(module).get("forward")

    def _now(self) -> dict[tuple[bool, str], Any]:
        """Return buffers and plain attributes by (is a buffer, name)."""
        plain = {(False, key): value for key, value in vars(self._module).items() if key not in _TORCHS_OWN}
        return plain | {(True, key): value for key, value in self._module._buffers.items()}

    def follow(self, call: str) -> None:
        """Set on the copies what was set on the module.

        Raises:
            UsageError: if ``forward`` was set, or a child replaced.
        """
        where = f"{self.name}." if self.name else ""
        if vars(self._module).get("forward") is not self._forward:
            raise UsageError(
                f"{call}: {f'{where}forward' if where else 'forward of the model'} was set after initialize(), and "
                "the stages of a pipeline run copies of this module, which would not call it. Put what "
                "it does into the model's class or into loss=..., or set mesh.pp: 1"
            )
        if not self._children.is_same and (changed := self._changed_child()):
            raise UsageError(
                f"{call}: module {where}{changed} was replaced after initialize(), and the stages of a pipeline run "
                f"copies of the module around it, which would go on with the one before. {_WAY_OUT}; or set mesh.pp: 1"
            )
        now, known = self._now(), self._known
        if len(now) == len(known) and all(known.get(key, known) is value for key, value in now.items()):
            return
        for place in {**known, **now}:
            is_buffer, key = place
            if now.get(place, now) is known.get(place, now):
                continue
            for twin in self._copies:
                held = twin._buffers if is_buffer else vars(twin)
                if place not in now:
                    held.pop(key, None)
                    continue
                value = now[place]
                if isinstance(value, MethodType) and value.__self__ is self._module:
                    value = MethodType(value.__func__, twin)
                held[key] = value
        self._known = now

    def _changed_child(self) -> str:
        """Return the name of a child that is another than at ``initialize``; a compiled one is none."""
        names = [*self._children.now]
        for name, known in zip(names, self._children.known, strict=False):
            child = self._children.now[name]
            if child is not known and getattr(child, "_orig_mod", None) is not known:
                return name
        return ""


class KnownModules:
    """Modules and parameters of one engine. ``roots``: the model, and the stages of it on this rank."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(dict.fromkeys(roots))
        self._names = {id(parameter): (name, parameter) for name, parameter in self._parameters()}
        self._members = self._look()
        self._copied = list(self._copied_modules())

    def check(self, call: str) -> None:
        """Refuse what was replaced, added, taken out or renamed since the engine was made.

        Raises:
            UsageError: names the parameters; ``call`` is what was asked for.
        """
        if all(map(_SAME, self._members)):
            self.follow(call)
            return
        here = {id(parameter): (name, parameter) for name, parameter in self._parameters()}
        new = [name for key, (name, each) in here.items() if key not in self._names and each.requires_grad]
        gone = [name for key, (name, _) in self._names.items() if key not in here]
        if new or gone:
            raise UsageError(f"{call}: {_in_words(new, gone)}")
        moved = {
            name: here[key][0]
            for key, (name, _) in self._names.items()
            if _uncompiled(here[key][0]) != _uncompiled(name)
        }
        if moved:
            raise UsageError(f"{call}: {_in_words_of_names(moved)}")
        self.follow(call)
        self._members = self._look()

    def follow(self, call: str) -> None:
        """Set on the modules of the stages what was set on those of the model since.

        Raises:
            UsageError: if a ``forward`` was set on a module that stages have a copy of, or a child of it replaced.
        """
        for each in self._copied:
            each.follow(call)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for root in self._roots:
            yield from root.named_parameters()

    def _copied_modules(self) -> Iterator[_CopiedModule]:
        """Yield the modules of the model in whose place the stages have copies."""
        model, *stages = self._roots
        own = [dict(stage.named_modules()) for stage in stages]
        for name, module in model.named_modules() if stages else ():
            copies = [held[name] for held in own if name in held and held[name] is not module]
            if copies:
                yield _CopiedModule(name, module, copies)

    def _look(self) -> list[_ModuleMembers]:
        modules = {id(module): module for root in self._roots for module in root.modules()}
        return [
            _ModuleMembers(members, tuple(members.values()))
            for module in modules.values()
            for members in (module._modules, module._parameters)
        ]


_WAY_OUT = (
    "Change the model before initialize(), or call engine.close(), change it and call initialize() again"
)
_TORCHS_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module."""
_SAME: Callable[[_ModuleMembers], bool] = _ModuleMembers.is_same.fget  # type: ignore[attr-defined]


def _in_words(new: Sequence[str], gone: Sequence[str]) -> str:
    replaced = [name for name in new if name in gone]
    said = []
    if replaced:
        said.append(
            "parameters replaced since initialize() (the new ones would never train, and a saved model would hold the "
            f"old ones): {_few(replaced)}"
        )
    elif new:
        said.append(f"new parameters since initialize(), which would never train: {_few(new)}")
    if gone and not replaced:
        said.append(
            "parameters that left the model since initialize() (deleted, replaced, or tied to others?), and that a "
            f"saved model would still hold: {_few(gone)}"
        )
    return (
        f"{'; '.join(said)}. {_WAY_OUT}; engine.full_parameters(write=True) writes other values into the parameters "
        "that are there. What is not to train needs requires_grad_(False)"
    )


def _in_words_of_names(moved: Mapping[str, str]) -> str:
    """Return the words for parameters whose names, by the names at initialize(), are others now."""
    pairs = [f"{before} is {now} now" for before, now in moved.items()]
    return (
        "parameters have other names than at initialize() (modules changed places, or were wrapped or pruned?), and a "
        f"saved model would hold their values under the old ones: {_few(pairs)}. {_WAY_OUT}"
    )


def _uncompiled(name: str) -> str:
    """Return a parameter's name without what ``torch.compile`` of a module adds to it."""
    return name.replace("_orig_mod.", "")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
