"""Starting ranks and ending them: all of them, whatever happens to one.

    shardwise launch --ranks 2 script.py        a script, on ranks of its own            local.py
    shardwise.launch(function, ranks=2)         a function, from a script or a notebook  function.py

The package itself can be called, because the second is the first thing that a notebook needs of it.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that starts a function."""

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """See ``shardwise.launch.function.launch``."""
        from shardwise.launch.function import launch  # the command line needs none of it

        return launch(function, *arguments, **options)


sys.modules[__name__].__class__ = _Callable
