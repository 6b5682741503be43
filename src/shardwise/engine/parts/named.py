"""Patterns in a configuration that must name something of the model, checked before any work is done.

    optimizer.groups         parameters; the first group that matches has one, and one that gets none changes nothing
    precision.keep_fp32      parameters and buffers, or classes of modules that hold some
    precision.narrow_reduce  parameters, or classes of modules that hold some; one pattern that matches is enough
    zero.forward_methods     methods of Units

A pattern without effect is a typing error, or was written for another model: the run would not be what its
configuration states. A group that only keeps parameters from Muon's matrices may match none.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.base.names import matching
from shardwise.config.run import RunConfig
from shardwise.plan.mesh import Mesh
from shardwise.precision.resolve import names_of


def check_named(model: nn.Module, settings: RunConfig) -> None:
    """Check that every pattern of the configuration names a parameter or buffer of the model.

    Raises:
        ConfigError: for a pattern that names none.
    """
    names = [name for name, _ in model.named_parameters()]
    known = f"the model's are {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    owners = {settings.optimizer.group_of(name) for name in names}
    for place, group in enumerate(settings.optimizer.groups):
        if place + 1 in owners or (group.matrices is False and len(group.model_fields_set) == 2):
            continue
        taken = any(group.matches(name) for name in names)
        why = "only parameters of groups before it; put it in front" if taken else f"no parameter; {known}"
        raise ConfigError(f"optimizer.groups: group {place} matches {why} (match: {group.match!r})")
    buffers = [name for name, _ in model.named_buffers()]
    for key, held in (("keep_fp32", [*names, *buffers]), ("narrow_reduce", names)):
        patterns = getattr(settings.precision, key)
        idle = [pattern for pattern in patterns if not _names_some(pattern, model, held)]
        if idle and (key == "keep_fp32" or idle == patterns):
            raise ConfigError(f"precision.{key}: pattern {idle[0]!r} matches no parameter; {known}")


def _names_some(pattern: str, model: nn.Module, held: Sequence[str]) -> bool:
    by_class = set(names_of(pattern, model)).intersection(held)
    return bool(by_class) or any(fnmatchcase(name, pattern) for name in held)


def methods_of(units: Mapping[str, nn.Module], settings: RunConfig, mesh: Mesh) -> list[tuple[str, str]]:
    """Return (Unit, method) for every method that ``zero.forward_methods`` names.

    The list is empty if weights are whole and on the device anyway.

    Args:
        units: The modules of the Units, by name.
        settings: The resolved configuration.
        mesh: The mesh of the ranks.

    Raises:
        ConfigError: if a pattern names no method, or with mesh.pp above 1.
    """
    zero = settings.zero
    is_cut = zero.stage == 3 and (mesh.pp == 1 or mesh.size("dp") > 1)
    if not zero.forward_methods or not (is_cut or settings.offload.parameters != "device"):
        return []
    if mesh.pp > 1:
        raise ConfigError(
            "zero.forward_methods: with mesh.pp above 1 only forward is cut into stages; leave the key out"
        )
    found = []
    for pattern in zero.forward_methods:
        owner, _, method = pattern.rpartition(".")
        names = matching(units, owner)
        if not names:
            raise ConfigError(
                f"zero.forward_methods: {pattern!r} names no method of a Unit; expected UNIT.METHOD. "
                f"The Units are {', '.join(name or '(root)' for name in list(units)[:8])}; zero.units names others"
            )
        for name in names:
            if not callable(getattr(units[name], method, None)):
                raise ConfigError(
                    f"zero.forward_methods: {pattern!r}: a {type(units[name]).__name__} has no method {method!r}"
                )
            found.append((name, method))
    return found
