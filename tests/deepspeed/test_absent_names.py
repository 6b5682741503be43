"""Parts of DeepSpeed that are absent: they may be imported, and are refused when they are used."""

import importlib

import pytest

from shardwise.base.errors import UsageError
from shardwise.deepspeed.absent_names import ABSENT, AREAS


@pytest.mark.parametrize("area", sorted(AREAS))
def test_an_absent_part_is_imported_and_refused_when_it_is_used(area: str) -> None:
    module = importlib.import_module(f"shardwise.deepspeed.{area}")
    found = module.Anything
    assert not isinstance(3, found)
    with pytest.raises(UsageError, match=r"Anything: a part of DeepSpeed that is not here"):
        found()
    with pytest.raises(AttributeError):
        module.__nothing__  # noqa: B018


def test_absent_names_of_modules_that_are_here() -> None:
    from shardwise.deepspeed.runtime.utils import register_output_backward_hooks
    from shardwise.deepspeed.runtime.zero.stage3 import IPGBucketZ3

    for found in (register_output_backward_hooks, IPGBucketZ3):
        with pytest.raises(UsageError, match=found.__name__):
            found()
    assert all(names for names in ABSENT.values())
    with pytest.raises(ImportError, match="did you mean"):
        exec("from shardwise.deepspeed.runtime.utils import see_memory_usag")
