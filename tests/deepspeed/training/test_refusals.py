"""Methods of DeepSpeed's engine that are not here: each says what to do instead."""

import re

import pytest

from shardwise.deepspeed.training.pipeline_engine import PipelineEngine
from shardwise.deepspeed.training.refusals import INSTEAD
from tests.deepspeed.training.script import configuration, made


def test_methods_that_are_not_here_say_what_to_do() -> None:
    engine, *_ = made(config=configuration(0))
    for name, instead in INSTEAD.items():
        assert not hasattr(engine, name) and not hasattr(PipelineEngine, name), name
        with pytest.raises(AttributeError, match=re.escape(f"engine.{name}: not here: {instead}")):
            getattr(engine, name)
    engine.destroy()
