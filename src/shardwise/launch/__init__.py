"""Start ranks and end all of them, whatever happens to one.

    shardwise launch --ranks 2 script.py        a script, on ranks of its own            local.py
    shardwise.launch(function, ranks=2)         a function, from a script or a notebook  function.py

The package itself can be called, because the second form is the first that a notebook needs.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module that starts a function when it is called."""

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call ``function`` on several ranks of this host; see ``shardwise.launch.function.launch``."""
        # Imported here, because the command line does not need it.
        from shardwise.launch.function import launch

        return launch(function, *arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
