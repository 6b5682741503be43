"""Hooks of a user's own, told from those of torch's utilities and of this package."""

import functools
from typing import Any

import torch
from torch import nn

from shardwise.base.user_hooks import has_hooks, is_users, user_hooks
from shardwise.kernels.gated import gated


def mine(*arguments: Any) -> None:
    """A hook of this file."""


class Owner:
    def method(self, *arguments: Any) -> None:
        """A hook that is a method."""


def test_who_made_a_hook_is_read_through_its_wrappers() -> None:
    assert is_users(mine) and is_users(Owner().method) and is_users(functools.partial(mine, 1))
    assert not is_users(gated) and not is_users(functools.partial(gated))
    around_ours = functools.wraps(gated)(lambda *arguments: None)  # its __module__ is that of gated
    assert is_users(around_ours)


def test_the_type_of_functions_has_no_globals_of_its_own() -> None:
    """Its ``__globals__`` is a descriptor. A user's function that calls one of this package's once failed here."""
    assert is_users(type(is_users))


def test_hooks_of_every_kind_are_found_and_those_of_torch_are_not() -> None:
    module = torch.nn.utils.spectral_norm(nn.Linear(2, 2))
    assert [*user_hooks(module)] == []
    forward = module.register_forward_hook(mine)
    before = module.register_forward_pre_hook(mine)
    backward = module.register_full_backward_hook(mine)
    assert {(kind, number) for kind, number, hook in user_hooks(module)} == {
        ("_forward_hooks", forward.id),
        ("_forward_pre_hooks", before.id),
        ("_backward_hooks", backward.id),
    }


def test_a_module_has_hooks_of_its_own_or_those_of_all_modules() -> None:
    module = nn.Linear(2, 2)
    assert not has_hooks(module)
    for register in (module.register_forward_hook, nn.modules.module.register_module_forward_hook):
        handle = register(mine)
        assert has_hooks(module)
        handle.remove()
        assert not has_hooks(module)
