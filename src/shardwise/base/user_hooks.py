"""Find the hooks on modules that are a user's own, not those of torch's utilities, of transformers or of this package.

A model of transformers records its hidden states and attentions by hooks that it registers on its layers in its first
call. A copy of the model registers its own, and would record each tensor twice with the first model's hooks.
"""

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold hooks by number."""
_NOT_USERS = (
    "torch.nn.utils",
    "torch.ao.",
    "torch._dynamo",
    "transformers.utils.output_capturing",  # collects hidden states and attentions; each model gets its own
    "shardwise.",
)


def is_users(hook: Any) -> bool:
    """Return True if ``hook`` was made neither by torch's utilities, nor by transformers, nor by this package."""
    made = hook.func if isinstance(hook, functools.partial) else hook
    made = getattr(made, "__func__", made)
    # ``functools.wraps`` gives a function the ``__module__`` of the wrapped function, but not its ``__globals__``.
    around = None if isinstance(made, type) else getattr(made, "__globals__", None)
    where = getattr(made, "__module__", None) if around is None else around.get("__name__")
    return not str(where or "").startswith(_NOT_USERS)


def user_hooks(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Yield (attribute, number, hook) of each hook of a user's on ``module``."""
    for kind in HOOKS:
        for number, hook in list(vars(module).get(kind, {}).items()):
            if is_users(hook):
                yield kind, number, hook


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of ``module`` runs hooks: a user's, this package's or torch's, or hooks of all modules."""
    own = vars(module)
    return any(own.get(kind) for kind in HOOKS) or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
