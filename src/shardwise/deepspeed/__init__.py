"""DeepSpeed's names on Shardwise's engine: a script that was written for DeepSpeed changes one import.

    import shardwise.deepspeed as deepspeed

    engine, optimizer, loader, schedule = deepspeed.initialize(model=net, model_parameters=net.parameters(), ...)

``names.py`` contains the table of all names, and ``importer.py`` makes the dotted paths (``deepspeed.ops.adam`` ...)
from that table. The behavior behind a name is implemented in files with Shardwise's own names. ``shardwise launch
--as-deepspeed`` makes ``import deepspeed`` load this package in an unchanged script.
"""

from typing import Any

from shardwise.deepspeed.importer import attribute, install, names_in
from shardwise.deepspeed.names import FOLLOWED_VERSION

__version__ = FOLLOWED_VERSION
"""The DeepSpeed version whose names and keys this package follows."""
__version_major__, __version_minor__, __version_patch__ = map(int, FOLLOWED_VERSION.split("."))
__git_hash__ = __git_branch__ = "shardwise"

install(__name__)


def __getattr__(name: str) -> Any:
    return attribute(__name__, "", name)


def __dir__() -> list[str]:
    return sorted([*globals(), *names_in("")])
