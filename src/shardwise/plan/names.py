"""Names of modules, chosen by patterns.

blocks.*.mlp    ``*`` stands for any letters of one part of a name: blocks.0.mlp, not blocks.0.experts.mlp
"""

import re
from collections.abc import Iterable, Sequence

from shardwise.plan.errors import ConfigError


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Those of ``names`` that ``pattern`` stands for, in their order."""
    expression = re.compile("[^.]*".join(re.escape(part) for part in pattern.split("*")))
    return [name for name in names if expression.fullmatch(name)]


def chosen_by(patterns: Sequence[str], names: Sequence[str], key: str, kind: str) -> list[str]:
    """Those of ``names`` that any of ``patterns`` stands for, in their order.

    ``key`` is where the configuration holds the patterns, ``kind`` what the names are of.
    Errors: ConfigError where a pattern matches nothing.
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
