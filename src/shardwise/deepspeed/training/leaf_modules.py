"""Leaf modules of stage 3: modules whose weights are gathered together because data decides which submodules run.

A Shardwise Unit is always gathered as a whole, so a module inside a repeated block needs no mark. The functions only
record which modules were marked, for scripts that read the marks.
"""

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from shardwise.deepspeed.calls.unmet import UnmetError

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
        UnmetError: if no module matches and ``raise_if_not_found`` is True.
    """
    classes = list(leaf_module_classes)
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    if not found and raise_if_not_found:
        raise UnmetError(f"leaf modules: the model has no module of the classes {classes}")
    return _mark(found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names; return them, and the names that no module has.

    Raises:
        UnmetError: if no module has one of the names, unless ``raise_if_not_found`` is false.
    """
    modules = dict(model.named_modules())
    wanted = list(module_names)
    missing = [name for name in wanted if name not in modules]
    _refuse_missing(missing, raise_if_not_found)
    return _mark([modules[name] for name in wanted if name in modules]), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; return them, and the suffixes that no name has.

    Raises:
        UnmetError: if no name ends in one of the suffixes, unless ``raise_if_not_found`` is false.
    """
    suffixes = list(module_name_suffixes)
    names = [name for name, _ in model.named_modules()]
    missing = [suffix for suffix in suffixes if not any(name.endswith(suffix) for name in names)]
    _refuse_missing(missing, raise_if_not_found)
    return _mark([each for name, each in model.named_modules() if name.endswith(tuple(suffixes))]), missing


def mark_configured(
    model: nn.Module, classes: Iterable[str], names: Iterable[str], suffixes: Iterable[str]
) -> None:
    """Mark the modules that ``zero_optimization.leaf_module`` of a configuration names; a name may be of no module."""
    set_z3_leaf_modules(model, classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)


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


def _refuse_missing(missing: list[str], raises: bool) -> None:
    if missing and raises:
        raise UnmetError(
            f"leaf modules: the model has no module for {missing}; named_modules() lists the names"
        )


def _mark(found: list[nn.Module]) -> list[nn.Module]:
    for module in found:
        _MARKED.add(module)
    return found
