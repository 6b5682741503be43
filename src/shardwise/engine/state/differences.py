"""Differences between a saved step and a model, and those that the user allows.

    missing      patterns of names of the model that the step may lack, or hold in another shape: these weights, buffers
                 and tables stay as they are and their optimizer state starts fresh
    unexpected   patterns of names of the step that the model may lack: they are passed over

``*`` matches anything, dots included. Every other name must be in the step, in the model's shape. Of a table that only
has more rows than in the step, the first rows are loaded. A pattern that matches no name is an error.
"""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from shardwise.base.errors import MismatchError, UsageError
from shardwise.base.policy import nearest

_SHOWN = 5
"""Number of differences that an error message names."""


class StepDifferences:
    """The differences between one saved step and one model.

    Args:
        missing: patterns of names of the model that the step may lack.
        unexpected: patterns of names of the step that the model may lack.
    """

    def __init__(self, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
        self.missing, self.unexpected = _patterns("missing", missing), _patterns("unexpected", unexpected)
        self.kept: dict[str, str] = {}
        """Tensors and tables of the model that stay as they are: how the step differs, by name."""
        self.grown: list[str] = []
        """Names of tables whose last rows are not in the step."""
        self.passed_over: list[str] = []
        """Names in the step that are not read."""
        self._wrong: list[str] = []
        self._lacking: list[str] = []
        self._unknown: list[str] = []

    def may_lack(self, *names: str) -> bool:
        """Return True if the step may lack a tensor of the model that has one of these names."""
        return any(_matches(name, self.missing) for name in names)

    def lacks(self, kind: str, name: str, how: str, *aliases: str) -> bool:
        """Record that a tensor of the model differs in the step, and return True if it may stay as it is.

        Args:
            kind: kind of the tensor, for messages.
            name: name in the model.
            how: how the step differs, in words.
            aliases: further names of the same tensor.
        """
        if self.may_lack(name, *aliases):
            self.kept[name] = how
            return True
        self._lacking.append(name)
        self._wrong.append(f"{kind} {name!r} {how}")
        return False

    def holds(self, kind: str, name: str, shape: Sequence[int]) -> None:
        """Record that ``name`` of the step is not in the model."""
        if _matches(name, self.unexpected):
            self.passed_over.append(name)
        else:
            self._unknown.append(name)
            self._wrong.append(f"{kind} {name!r} {tuple(shape)} is not in this model")

    def fault(self, what: str) -> None:
        """Record a difference that no pattern allows."""
        self._wrong.append(what)

    def check_patterns(self, ours: Collection[str], theirs: Collection[str], where: str) -> None:
        """Check that every pattern matches a name.

        Args:
            ours: names of the model.
            theirs: names of the step.
            where: the step in words, for messages.

        Raises:
            MismatchError: if a pattern matches no name.
        """
        for key, patterns, known, whose in (
            ("missing", self.missing, ours, "of the model"),
            ("unexpected", self.unexpected, theirs, f"in {where}"),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in known):
                    raise MismatchError(
                        f"{key}: pattern {pattern!r} matches no name {whose}{_near(pattern, known)}"
                    )

    def check(self, where: str) -> None:
        """Raise an error if differences were recorded that are not allowed.

        Raises:
            MismatchError: if there are any; the message names them, and the arguments that would allow them.
        """
        if not self._wrong:
            return
        more = f"; and {len(self._wrong) - _SHOWN} more" if len(self._wrong) > _SHOWN else ""
        allow = [
            f"{key}={names[:_SHOWN]}"
            for key, names in (("missing", self._lacking), ("unexpected", self._unknown))
            if names
        ]
        way = "Load it into the model that wrote it, or start without it"
        if allow:
            way += (
                f"; with {', '.join(allow)} what is missing stays as it is and what is unexpected is passed over"
                f"{' (patterns with * for more)' if more else ''}"
            )
        raise MismatchError(
            f"{where}: a checkpoint of another model: {'; '.join(self._wrong[:_SHOWN])}{more}",
            way,
            self._lacking,
            self._unknown,
        )

    def lines(self) -> list[str]:
        """Return log lines about the differences that were allowed, one line for each kind."""
        said = []
        if self.kept:
            each = ", ".join(f"{name} ({how})" for name, how in self.kept.items())
            said.append(f"not loaded, stays as it starts with fresh optimizer state: {each}")
        if self.grown:
            said.append(f"not loaded, starts fresh: {', '.join(self.grown)}")
        if self.passed_over:
            said.append(f"passed over, not in this model: {', '.join(self.passed_over)}")
        return said


def _patterns(key: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"{key}: expected a list of patterns, given {given!r}; write {key}=[{given!r}]")
    return tuple(given)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _near(pattern: str, known: Collection[str]) -> str:
    names = sorted(known)
    if len(names) > 12:
        near = nearest(pattern, names)
        return near if "did you mean" in near else f"; there are {', '.join(names[:12])} ..."
    return nearest(pattern, names)
