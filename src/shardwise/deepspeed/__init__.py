"""DeepSpeed's names on our engine: a script that was written for DeepSpeed changes one import.

    import shardwise.deepspeed as deepspeed

    engine, optimizer, loader, schedule = deepspeed.initialize(model=net, model_parameters=net.parameters(), ...)

``names.py`` has the table of all names, ``importer.py`` makes the dotted paths out of it (``deepspeed.ops.adam`` ...);
what a name does stands in files of our own words. ``shardwise launch --as-deepspeed`` lets ``import deepspeed`` find
them in an unchanged script.
"""

from typing import Any

from shardwise.deepspeed.importer import attribute, install, names_in
from shardwise.deepspeed.names import FOLLOWED_VERSION

__version__ = FOLLOWED_VERSION
"""The version of DeepSpeed whose names and keys these are."""
__version_major__, __version_minor__, __version_patch__ = map(int, FOLLOWED_VERSION.split("."))
__git_hash__ = __git_branch__ = "shardwise"

install(__name__)


def __getattr__(name: str) -> Any:
    return attribute(__name__, "", name)


def __dir__() -> list[str]:
    return sorted([*globals(), *names_in("")])
