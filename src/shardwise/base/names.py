"""Choose names of modules by patterns.

blocks.*.mlp    ``*`` stands for any letters of one part of a name: blocks.0.mlp, not blocks.0.experts.mlp
"""

import re
from collections.abc import Iterable, Sequence

from shardwise.base.errors import ConfigError


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the ``names`` that match ``pattern``, in their order."""
    expression = re.compile("[^.]*".join(re.escape(part) for part in pattern.split("*")))
    return [name for name in names if expression.fullmatch(name)]


def chosen_by(patterns: Sequence[str], names: Sequence[str], key: str, kind: str) -> list[str]:
    """Return the ``names`` that match any of ``patterns``, in their order.

    Args:
        patterns: Patterns with ``*`` for one part of a name.
        names: Names to choose from.
        key: Configuration key that holds the patterns, for the error.
        kind: Noun for the named things, for the error.

    Raises:
        ConfigError: if a pattern matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        hits = matching(names, pattern)
        if not hits:
            raise ConfigError(
                f"{key}: pattern {pattern!r} matches no {kind}; the model's are {', '.join(names[:12])}"
                f"{' ...' if len(names) > 12 else ''} (* stands for one part of a name)"
            )
        found.update(hits)
    return [name for name in names if name in found]
