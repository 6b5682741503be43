"""``device_process``: a process in which the pretended device is registered, once for all tests of this folder.

A registration lasts as long as its process, and torch then has an accelerator in it; so the tests' own has none.
"""

from collections.abc import Iterator

import pytest

from tests.accelerator.pretend import IS_POSSIBLE
from tests.ranks import RankPool


@pytest.fixture(scope="package")
def device_process() -> Iterator[RankPool]:
    if not IS_POSSIBLE:
        pytest.skip("torch before 2.13 knows no devices in Python")
    pool = RankPool(1)
    yield pool
    pool.close()
