"""Pinned memory, and pageable memory where a host pins no more."""

import logging
from typing import Any

import pytest
import torch

from shardwise.memory import pinned
from shardwise.memory.pinned import pinned_copy, pinned_empty


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each request for memory: whether it was for pinned memory, which this host refuses."""
    requests: list[bool] = []

    def refusing(make: Any) -> Any:
        def made(*arguments: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            requests.append(pin_memory)
            if pin_memory:
                raise RuntimeError("cudaHostAlloc failed\nand a trace")
            return make(*arguments, **more)

        return made

    pinned._tell.cache_clear()
    monkeypatch.setattr(torch, "empty", refusing(torch.empty))
    monkeypatch.setattr(torch, "empty_like", refusing(torch.empty_like))
    return requests


def test_a_host_that_refuses_gives_pageable_memory_and_one_warning(
    asked: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert pinned_empty((2, 3), torch.float16).shape == (2, 3)
    x = torch.arange(3.0)
    copy = pinned_copy(x)
    x += 1
    assert copy.tolist() == [0, 1, 2] and asked == [True, False, True, False]
    assert len(caplog.messages) == 1
    assert "pins no more memory (cudaHostAlloc failed): pageable memory" in caplog.messages[0]


def test_pageable_memory_is_not_asked_for_twice(asked: list[bool]) -> None:
    assert pinned_empty(4, torch.int8, pins=False).dtype == torch.int8 and asked == [False]


def test_another_failure_of_pageable_memory_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("no memory at all")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(RuntimeError, match="no memory at all"):
        pinned_empty(4, torch.int8, pins=False)
