"""The error of a call that DeepSpeed answers with an AssertionError or a ValueError, for programs that catch it."""

from shardwise.plan.errors import UsageError


class UnmetError(UsageError, AssertionError, ValueError):
    """A UsageError where DeepSpeed raises AssertionError or ValueError."""
