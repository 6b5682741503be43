"""The tree of errors: which builtin classes catch them, and what a mismatch keeps."""

import inspect

import pytest

from shardwise.base import errors
from shardwise.base.errors import (
    ConfigError,
    DamagedError,
    DamagedStateError,
    DeadlineError,
    MismatchError,
    OutOfMemoryError,
    ShardwiseError,
    SourceError,
    TierError,
)


def test_every_error_is_in_the_drawn_tree() -> None:
    classes = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    }
    assert all(issubclass(kind, ShardwiseError) for kind in classes.values())
    assert errors.__doc__ and all(name in errors.__doc__ for name in classes)


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (ConfigError, (ValueError,)),
        (SourceError, (ConfigError, ValueError)),
        (OutOfMemoryError, (MemoryError, RuntimeError)),
        (DeadlineError, (errors.CommError,)),
        (DamagedStateError, (TierError, DamagedError, errors.CheckpointError)),
    ],
)
def test_code_that_catches_builtin_classes_catches_ours(
    error: type[ShardwiseError], others: tuple[type[Exception], ...]
) -> None:
    for other in others:
        with pytest.raises(other):
            raise error("text")


def test_a_mismatch_keeps_names_apart_from_its_text() -> None:
    error = MismatchError("2 tensors differ", "Pass strict=False", ["a", "b"], ["c"])
    assert str(error) == "2 tensors differ. Pass strict=False"
    assert (error.what, error.missing, error.unexpected) == ("2 tensors differ", ("a", "b"), ("c",))
    assert str(MismatchError("they differ")) == "they differ"
