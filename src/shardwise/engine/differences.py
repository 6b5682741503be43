"""What a step and a model do not have in common, and what of it the user allows.

    missing      patterns of names of the model that the step may lack, or hold in another shape: these weights, buffers
                 and tables stay as they are and their optimizer state starts fresh
    unexpected   patterns of names of the step that the model may lack: they are passed over

``*`` stands for anything, dots included. Everything else must be there, in its shape; a table whose last rows alone are
new loads its first ones. A pattern that no name answers to is an error: it was meant for one.
"""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from shardwise.plan.errors import MismatchError, UsageError
from shardwise.plan.policy import nearest

_SHOWN = 5
"""Differences that an error names."""


class Differences:
    """Those of one step and one model."""

    def __init__(self, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
        self.missing, self.unexpected = _patterns("missing", missing), _patterns("unexpected", unexpected)
        self.kept: dict[str, str] = {}
        """What of the model stays as it is, by name, and how the step differs there."""
        self.grown: list[str] = []
        """Tables whose last rows are not in the step."""
        self.passed_over: list[str] = []
        """What of the step is not read."""
        self._wrong: list[str] = []
        self._lacking: list[str] = []
        self._unknown: list[str] = []

    def may_lack(self, *names: str) -> bool:
        """Of something of the model with these names."""
        return any(_matches(name, self.missing) for name in names)

    def lacks(self, kind: str, name: str, how: str, *aliases: str) -> bool:
        """``name`` of the model, also called ``aliases``, differs in the step by ``how``: may it stay as it is?"""
        if self.may_lack(name, *aliases):
            self.kept[name] = how
            return True
        self._lacking.append(name)
        self._wrong.append(f"{kind} {name!r} {how}")
        return False

    def holds(self, kind: str, name: str, shape: Sequence[int]) -> None:
        """``name`` of the step is not in the model."""
        if _matches(name, self.unexpected):
            self.passed_over.append(name)
        else:
            self._unknown.append(name)
            self._wrong.append(f"{kind} {name!r} {tuple(shape)} is not in this model")

    def fault(self, what: str) -> None:
        """A difference that no pattern allows."""
        self._wrong.append(what)

    def check_patterns(self, ours: Collection[str], theirs: Collection[str], where: str) -> None:
        """Errors: MismatchError where a pattern matches no name."""
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
        """Errors: MismatchError names what differs, and the arguments that would allow it."""
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
        """What was allowed, for the log: a line each way."""
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
