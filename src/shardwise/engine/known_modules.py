"""The modules and parameters that an engine was made of, and what a user has put in their place since.

A module that is replaced after ``initialize`` (``model.head = nn.Linear(...)``, ``blocks.append``, ``del blocks[3]``)
computes and never trains, and ``state_dict()`` and ``save()`` write the one that was taken out. Where blocks change
places, or a parameter is renamed (pruning makes ``weight_orig`` of ``weight``), a saved model would hold the values
under the old names. What has no parameters (a metric, a loss) comes and goes as it likes, and so do frozen parameters
that are new.

Cost: a comparison of identities by module and step, of microseconds for tens of modules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import nn

from shardwise.plan.errors import UsageError


class _Members(NamedTuple):
    """Members of one module, and what they were."""

    now: Mapping[str, Any]
    known: tuple[Any, ...]

    @property
    def is_same(self) -> bool:
        """True if these are the same objects as before, in the same order."""
        return len(self.now) == len(self.known) and all(map(is_, self.now.values(), self.known))


class KnownModules:
    """Modules and parameters of one engine. ``roots``: the model, and the stages of it on this rank."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(dict.fromkeys(roots))
        self._names = {id(parameter): (name, parameter) for name, parameter in self._parameters()}
        self._members = self._look()
        self._copied = [
            (name, module, vars(module).get("forward")) for name, module in self._copied_modules()
        ]

    def check(self, call: str) -> None:
        """Refuse what was replaced, added, taken out or renamed since the engine was made.

        Raises:
            UsageError: names the parameters; ``call`` is what was asked for.
        """
        for name, module, forward in self._copied:
            if vars(module).get("forward") is not forward:
                raise UsageError(
                    f"{call}: {f'{name}.forward' if name else 'forward of the model'} was set after initialize(), and "
                    "the stages of a pipeline run copies of this module, which would not call it. Put what "
                    "it does into the model's class or into loss=..., or set mesh.pp: 1"
                )
        if all(map(_SAME, self._members)):
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
        self._members = self._look()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for root in self._roots:
            yield from root.named_parameters()

    def _copied_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model, with their names, in whose place the stages have copies."""
        model, *stages = self._roots
        own = [dict(stage.named_modules()) for stage in stages]
        for name, module in model.named_modules() if stages else ():
            if any(name in modules and modules[name] is not module for modules in own):
                yield name, module

    def _look(self) -> list[_Members]:
        modules = {id(module): module for root in self._roots for module in root.modules()}
        return [
            _Members(members, tuple(members.values()))
            for module in modules.values()
            for members in (module._modules, module._parameters)
        ]


_WAY_OUT = (
    "Change the model before initialize(), or call engine.close(), change it and call initialize() again"
)
_SAME: Callable[[_Members], bool] = _Members.is_same.fget  # type: ignore[attr-defined]


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
