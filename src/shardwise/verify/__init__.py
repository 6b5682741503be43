"""The proof that a layout computes what one process computes.

The package itself can be called: ``shardwise.verify(make, config, example, layout="tp=2")``.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.verify.verdict import Verdict


class _CallableVerify(ModuleType):
    """A module that verifies a layout when it is called."""

    def __call__(self, make: Callable[[], Any], config: Any, example: Any, **options: Any) -> "Verdict":
        """Compare a model on a layout with one process; see ``shardwise.verify.run.verify``."""
        # Imported here, because the modules of this package are imported one by one.
        from shardwise.verify.run import verify

        return verify(make, config, example, **options)


sys.modules[__name__].__class__ = _CallableVerify
