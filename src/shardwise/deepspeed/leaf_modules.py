"""Leaf modules of stage 3: modules whose weights are gathered as one, for forwards that data decides.

A Unit of ours is gathered as one whatever its data do, so a module inside a repeated block needs no mark; the functions
keep which were marked, for scripts that ask.
"""

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from shardwise.plan.errors import UsageError

_MARKED: "WeakSet[nn.Module]" = WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes. Errors: UsageError where there is none."""
    classes = list(leaf_module_classes)
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    return _mark(found, f"of the classes {classes}", raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these names."""
    wanted = set(module_names)
    found = [module for name, module in model.named_modules() if name in wanted]
    return _mark(found, f"named {sorted(wanted)}", raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules whose names end so."""
    suffixes = tuple(module_name_suffixes)
    found = [module for name, module in model.named_modules() if name.endswith(suffixes)]
    return _mark(found, f"whose names end in {suffixes}", raise_if_not_found)


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Mark one, or take its mark away."""
    (_MARKED.add if flag else _MARKED.discard)(module)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of these classes away."""
    found = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        _MARKED.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of ``model``."""
    return [module for module in model.modules() if module in _MARKED]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether it is marked."""
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
