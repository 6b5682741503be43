"""The importer: makes modules for the dotted paths in the table of names.py, without a file for each path.

    import shardwise.deepspeed as deepspeed
    from shardwise.deepspeed.runtime.lr_schedules import WarmupLR    # a module made from the table's rows
    deepspeed.ops.adam.FusedAdam                                     # the same, by attributes

``install(root)`` puts a finder for the paths below ``root`` in front of Python's own finders.
``answer_as("deepspeed")`` replaces the package that ``launch --as-deepspeed`` puts on the path of its job with this
package. A module of the table has no code: each name is looked up at its first use, so an import loads only what that
name needs.

Parts of DeepSpeed that are not implemented (absent_names.py) may be imported too, so that such an import does not end
a program.

A path or a name that is in neither table raises ModuleNotFoundError or AttributeError, and the message suggests a
similar name. A name that is known but not supported imports as a class that raises an error when it is used.
"""

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, NoReturn

from shardwise.base.errors import UsageError
from shardwise.deepspeed.absent_names import ABSENT, AREAS, WHY, is_absent
from shardwise.deepspeed.names import NAMES, OTHERS, ConstantName, UnsupportedName

_OURS = "shardwise.deepspeed"
_TOLD = ("__version", "__git")
_PAGE = "docs/deepspeed.md lists what is known"


@cache
def paths() -> frozenset[str]:
    """Return every dotted path of the table and every prefix of a path; "" is the package itself."""
    found = {""}
    for path in NAMES:
        steps = path.split(".")
        found.update(".".join(steps[:count]) for count in range(1, len(steps) + 1))
    return frozenset(found)


def names_in(path: str) -> list[str]:
    """Return the names and submodules of the module at ``path``."""
    inside = f"{path}." if path else ""
    below = {each[len(inside) :].partition(".")[0] for each in paths() if each and each.startswith(inside)}
    return sorted({*NAMES.get(path, {}), *below})


def attribute(root: str, path: str, name: str) -> Any:
    """Return the attribute ``name`` of the module at ``path`` below ``root``.

    Args:
        root: The name of the package: ``shardwise.deepspeed`` or ``deepspeed``.
        path: The dotted path below the package; "" for the package itself.
        name: The name of the attribute.

    Raises:
        AttributeError: if the module has no such name; the message suggests a similar name.
    """
    home = NAMES.get(path, {}).get(name)
    if isinstance(home, UnsupportedName):
        return refusal(name, home.why)
    if isinstance(home, ConstantName):
        return home.value
    if home is not None:
        return _at(home)
    below = f"{path}.{name}" if path else name
    if below in paths() or below in AREAS:
        return importlib.import_module(f"{root}.{below}")
    if path in OTHERS and not name.startswith("__"):
        found = getattr(_at(OTHERS[path]), name, None)
        if found is not None:
            return found
    if name in ABSENT.get(path, ()) or (is_absent(path) and not name.startswith("__")):
        return refusal(f"{path}.{name}".lstrip("."), WHY)
    raise AttributeError(f"{_title(path)} has no {name!r} here{_near(name, names_in(path))}; {_PAGE}")


def _at(home: str) -> Any:
    """Return the object at ``module:attribute``, in this package or in torch; without an attribute, the module."""
    module, _, name = home.partition(":")
    found = importlib.import_module(module if module.startswith("torch") else f"shardwise.{module}")
    return getattr(found, name) if name else found


@cache
def refusal(name: str, why: str) -> type:
    """Return a class that may be imported, and raises UsageError with ``why`` when it is instantiated."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(f"deepspeed {name}: {why}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": why, "__module__": _OURS})


def _title(path: str) -> str:
    return f"deepspeed.{path}" if path else "deepspeed"


def _near(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}"
    elsewhere = sorted(_title(path) for path, rows in NAMES.items() if name in rows)
    return f"; it is in {elsewhere[0]}" if elsewhere else ""


class TableModule(ModuleType):
    """A module made from the table rows of one path."""

    def __getattr__(self, name: str) -> Any:
        root, path = _cut(self.__name__)
        return attribute(root, path, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets each module as an attribute of its parent; a table name that is spelled the same has to win.
        if not (isinstance(value, TableModule) and name in NAMES.get(_cut(self.__name__)[1], {})):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted([*vars(self), *names_in(_cut(self.__name__)[1])])


def _cut(name: str) -> tuple[str, str]:
    """Return (root, path) of a module's full name."""
    if name == _OURS or name.startswith(f"{_OURS}."):
        return _OURS, name[len(_OURS) + 1 :]
    root, _, path = name.partition(".")
    return root, path


class TableImporter(MetaPathFinder, Loader):
    """A finder and loader of the modules below ``root``."""

    def __init__(self, root: str):
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module below ``root``; None for other modules and for files of this package.

        Raises:
            ModuleNotFoundError: if neither the table nor this package's files contain the module.
        """
        if not name.startswith(f"{self.root}."):
            return None
        inner = name[len(self.root) + 1 :]
        if inner in paths():
            return spec_from_loader(name, self, is_package=True)
        if self.root == _OURS and PathFinder.find_spec(name, path) is not None:
            return None
        if is_absent(inner):
            return spec_from_loader(name, self, is_package=True)
        parent, _, last = inner.rpartition(".")
        if parent not in paths():
            raise ModuleNotFoundError(
                f"there is no {_title(inner)} here{_near(inner, sorted(paths()))}; {_PAGE}"
            )
        raise ModuleNotFoundError(
            f"{_title(parent)} has no {last!r} here{_near(last, names_in(parent))}; {_PAGE}"
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module, which looks up its names at their first use."""
        return TableModule(spec.name, "DeepSpeed's names; see shardwise.deepspeed")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a module of the table has no code."""


def install(root: str) -> None:
    """Make imports below ``root`` use the table; a second call does nothing."""
    if not any(isinstance(finder, TableImporter) and finder.root == root for finder in sys.meta_path):
        sys.meta_path.insert(0, TableImporter(root))


def answer_as(root: str) -> None:
    """Replace the imported module ``root`` (``deepspeed``) and all modules below it with this package, in this process.

    If torch has no CUDA, calls of scripts that name CUDA then use the CPU (calls/cpu_for_cuda.py).
    """
    own, module = importlib.import_module(_OURS), sys.modules[root]
    module.__class__ = TableModule
    vars(module).update({name: value for name, value in vars(own).items() if name.startswith(_TOLD)})
    install(root)
    importlib.import_module(f"{_OURS}.calls.cpu_for_cuda").begin()
