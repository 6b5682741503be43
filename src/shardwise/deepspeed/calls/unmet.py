"""The error of a call for which DeepSpeed raises AssertionError or ValueError, for programs that catch either."""

from shardwise.base.errors import UsageError


class UnmetError(UsageError, AssertionError, ValueError):
    """A UsageError for calls on which DeepSpeed raises AssertionError or ValueError."""
