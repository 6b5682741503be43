"""Leaf modules of stage 3: modules whose weights are gathered together because data decides which submodules run.

A Shardwise Unit is always gathered as a whole, so a module inside a repeated block needs no mark. The functions only
record which modules were marked, for scripts that read the marks.
"""

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from shardwise.plan.errors import UsageError

_MARKED: "WeakSet[nn.Module]" = WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of these classes, and return them.

    Args:
        model: The model.
        leaf_module_classes: Classes, or names of classes.
        raise_if_not_found: False to accept that no module matches.

    Raises:
        UsageError: if no module matches and ``raise_if_not_found`` is True.
    """
    classes = list(leaf_module_classes)
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    return _mark(found, f"of the classes {classes}", raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules with these names, and return them.

    Raises:
        UsageError: if no module matches and ``raise_if_not_found`` is True.
    """
    wanted = set(module_names)
    found = [module for name, module in model.named_modules() if name in wanted]
    return _mark(found, f"named {sorted(wanted)}", raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules whose names end in one of these suffixes, and return them.

    Raises:
        UsageError: if no module matches and ``raise_if_not_found`` is True.
    """
    suffixes = tuple(module_name_suffixes)
    found = [module for name, module in model.named_modules() if name.endswith(suffixes)]
    return _mark(found, f"whose names end in {suffixes}", raise_if_not_found)


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Mark ``module``, or remove its mark if ``flag`` is False."""
    (_MARKED.add if flag else _MARKED.discard)(module)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of all modules of these classes, and return the modules.

    Raises:
        UsageError: if no module matches and ``raise_if_not_found`` is True.
    """
    found = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        _MARKED.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of ``model``."""
    return [module for module in model.modules() if module in _MARKED]


def z3_leaf_module(module: nn.Module) -> bool:
    """Return whether ``module`` is marked."""
    return module in _MARKED


def _is_of(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        cls = type(module)
        return wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return isinstance(module, wanted)


def _mark(found: list[nn.Module], what: str, raises: bool) -> list[nn.Module]:
    if not found and raises:
        raise UsageError(f"leaf modules: the model has none {what}")
    for module in found:
        _MARKED.add(module)
    return found
