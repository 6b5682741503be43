"""``initialize`` makes torch's default group, also for one process: it ends with the test."""

from collections.abc import Iterator

import pytest

from shardwise.comm import default_group


@pytest.fixture(autouse=True)
def _no_default_group() -> Iterator[None]:
    yield
    default_group.end()
