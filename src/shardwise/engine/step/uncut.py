"""A copy of the model as it is before it is cut, for the check of the first step (check.py).

Parameters of the copy are on meta. A user's hooks, and functions that were put on modules (``module.forward = ...``),
run on the copy with what they close over exchanged: modules of the model for those of the copy, lists, dictionaries
and sets for copies of their own, so that a hook that counts or collects sees each batch once. Random generators that
modules hold are copied, too.
"""

import copy
import functools
from collections import deque
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.user_hooks import is_users, user_hooks
from shardwise.parallel.pipeline.layers import Layers
from shardwise.passes.generators import copied, own_generators

_BESIDE = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
_CONTAINERS = (list, dict, set, deque)


class UncutModel(NamedTuple):
    """The model before it is cut, without weights, on the rank that compares; or why there is none."""

    model: nn.Module | None
    reason: str = ""
    exchanged: "ClosureCopier | None" = None
    """What is exchanged in functions that are to run on the copy."""


def keep_uncut(model: nn.Module) -> UncutModel:
    """Return a copy of ``model`` whose parameters are on meta."""
    if isinstance(model, Layers):
        return UncutModel(None, "its layers are built where they are held")
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(generator): copied(generator) for generator in own_generators(model).values()}
    for module in model.modules():  # exchanged below, when the copies of the modules are known
        memo |= {id(hook): hook for _, _, hook in user_hooks(module)}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        return UncutModel(None, f"it cannot be copied ({type(error).__name__}: {error})")
    exchanged = ClosureCopier(memo)
    for inner in twin.modules():
        for key, value in list(vars(inner).items()):
            if isinstance(value, FunctionType) and is_users(value):
                vars(inner)[key] = exchanged.function(value)
    return UncutModel(twin, "", exchanged)


class ClosureCopier:
    """Builds functions for the copy of a model: modules and containers that they close over are replaced by copies.

    Args:
        memo: The replacement of each object, by the identity of the object.
    """

    def __init__(self, memo: dict[int, Any]):
        self._memo = memo
        self._open: set[int] = set()
        """Functions that are being rebuilt."""
        self._held: list[Any] = []
        """Objects whose identities are keys of the memo; an object that is collected would free its identity."""

    def stands_for(self, module: nn.Module, twin: nn.Module) -> None:
        """Exchange ``module``, another one of the engine's, for ``twin`` from now on."""
        self._memo[id(module)] = twin
        self._held.append(module)

    def function(self, function: Any, takes_containers: bool = True) -> Any:
        """Return ``function`` for the copy of the model.

        Args:
            function: A function, method, partial or callable object.
            takes_containers: True to give the function copies of the lists, dictionaries and sets that it closes over.
        """
        if id(function) in self._memo and self._memo[id(function)] is not function:
            return self._memo[id(function)]
        if isinstance(function, functools.partial):
            exchange = functools.partial(self._value, takes_containers=takes_containers)
            keywords = {name: exchange(value) for name, value in function.keywords.items()}
            return functools.partial(
                self.function(function.func, takes_containers), *map(exchange, function.args), **keywords
            )
        if isinstance(function, MethodType):
            holder = function.__self__
            if takes_containers and id(holder) not in self._memo and not isinstance(holder, nn.Module | type):
                self._keep(holder, self._object(holder))
            return MethodType(function.__func__, self._memo.get(id(holder), holder))
        if not isinstance(function, FunctionType) or not is_users(function):
            is_object = (
                callable(function) and hasattr(function, "__dict__") and not isinstance(function, type)
            )
            if (
                takes_containers
                and is_object
                and is_users(type(function))
                and not isinstance(function, nn.Module)
            ):
                return self._keep(function, self._object(function))
            return self._memo.get(id(function), function)
        return self._rebuilt(function, takes_containers)

    def _rebuilt(self, function: FunctionType, takes_containers: bool) -> Any:
        if id(function) in self._open:  # functions that call one another by way of their globals
            return function
        self._open.add(id(function))
        try:
            return self._built_anew(function, takes_containers)
        finally:
            self._open.discard(id(function))

    def _built_anew(self, function: FunctionType, takes_containers: bool) -> FunctionType:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        names = {name for name in _names(function.__code__) if name in function.__globals__}
        values = {name: self._value(function.__globals__[name], takes_containers) for name in names}
        changed = {name: value for name, value in values.items() if value is not function.__globals__[name]}
        around = function.__globals__ | changed if changed else function.__globals__
        made = FunctionType(
            function.__code__, around, function.__name__, function.__defaults__, cells or None
        )
        made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
        made.__module__ = function.__module__
        made.__dict__.update(function.__dict__)
        self._keep(function, made)
        if function.__defaults__:
            made.__defaults__ = tuple(self._value(each, takes_containers) for each in function.__defaults__)
        if function.__kwdefaults__:
            given = function.__kwdefaults__.items()
            made.__kwdefaults__ = {name: self._value(each, takes_containers) for name, each in given}
        for cell, new in zip(function.__closure__ or (), cells, strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            new.cell_contents = self._value(held, takes_containers)
        return made

    def _value(self, value: Any, takes_containers: bool) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, FunctionType | MethodType | functools.partial):
            return self.function(value, takes_containers)
        if takes_containers and isinstance(value, _CONTAINERS):
            return self._container(value)
        return value

    def _container(self, value: Any) -> Any:
        made = self._keep(value, copy.copy(value))
        if isinstance(value, list | deque):
            made.clear()
            made.extend(self._memo.get(id(each), each) for each in value)
        elif isinstance(value, dict):
            for key, each in value.items():
                made[key] = self._memo.get(id(each), each)
        return made

    def _object(self, value: Any) -> Any:
        """Return a shallow copy of a user's object, with containers of its own."""
        try:
            made = copy.copy(value)
        except Exception:
            return value
        for key, held in list(vars(made).items()) if hasattr(made, "__dict__") else ():
            vars(made)[key] = self._value(held, takes_containers=True)
        return made

    def _keep(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        self._held.append(value)
        return made


def _names(code: CodeType) -> set[str]:
    """Return the names that a function, and the functions inside it, look up in its globals."""
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names(inner)
    return found


def give_hooks(uncut: UncutModel, roots: Mapping[str, nn.Module]) -> None:
    """Give the copy of the model the user's hooks that the modules of the engine have now.

    Args:
        uncut: The copy.
        roots: The model and its stages by name; if two roots have a module of one name, hooks of both are given.
    """
    assert uncut.model is not None and uncut.exchanged is not None, "there is a copy"
    twins = dict(uncut.model.named_modules())
    for root in roots.values():
        uncut.exchanged.stands_for(root, uncut.model)
    for name, twin in twins.items():
        _clear(twin)
        numbers: set[tuple[str, int]] = set()
        for root in roots.values():
            module = _submodule(root, name)
            if module is None:
                continue
            for kind, number, hook in user_hooks(module):
                if (kind, number) in numbers:
                    continue
                numbers.add((kind, number))
                vars(twin)[kind][number] = uncut.exchanged.function(hook)
                for beside in _BESIDE.get(kind, ()):
                    if number in vars(module)[beside]:
                        vars(twin)[beside][number] = True
                if kind == "_backward_hooks":
                    twin._is_full_backward_hook = module._is_full_backward_hook


def _clear(module: nn.Module) -> None:
    for kind, number, _ in list(user_hooks(module)):
        del vars(module)[kind][number]
        for beside in _BESIDE.get(kind, ()):
            vars(module)[beside].pop(number, None)


def _submodule(root: nn.Module, name: str) -> nn.Module | None:
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None


def hooked(root: nn.Module) -> list[str]:
    """Return the names of the modules that have hooks of a user's, or a function of a user's for their ``forward``."""
    return [
        name
        for name, module in root.named_modules()
        if next(user_hooks(module), None) is not None or _is_patched(module)
    ]


def _is_patched(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, FunctionType) and is_users(forward)
