"""Patterns in a configuration that are to name parameters, held against those of the model before any work is done.

    optimizer.groups    the first group that matches has the parameter; one that gets none changes nothing
    precision.keep_fp32

A pattern without effect is a typing error, or was written for another model: the run would not be what its
configuration says.
"""

from fnmatch import fnmatchcase

from torch import nn

from shardwise.config.run import RunConfig
from shardwise.plan.errors import ConfigError


def check_named(model: nn.Module, settings: RunConfig) -> None:
    """Errors: ConfigError for a pattern that names no parameter."""
    names = [name for name, _ in model.named_parameters()]
    known = f"the model's are {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    owners = {settings.optimizer.group_of(name) for name in names}
    for place, group in enumerate(settings.optimizer.groups):
        if place + 1 in owners:
            continue
        taken = any(group.matches(name) for name in names)
        why = "only parameters of groups before it; put it in front" if taken else f"no parameter; {known}"
        raise ConfigError(f"optimizer.groups: group {place} matches {why} (match: {group.match!r})")
    for pattern in settings.precision.keep_fp32:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"precision.keep_fp32: pattern {pattern!r} matches no parameter; {known}")
