"""Fixtures of all tests. ``ranks(n)`` is a pool of n rank processes that starts once and serves the whole session."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.engine.plain import TRUTHS
from tests.everyday import is_moved, place_in_run
from tests.ranks import RankPool

# The same examples in every run, and none that fails because the machine was busy.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests compare bits: sums must not depend on how many threads are free."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _truths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the plain loop does is computed once, and not by every rank of every pool (tests/engine/plain.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRUTHS, str(tmp_path_factory.mktemp("truths")))
        yield


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n).run(function, *args)`` calls ``function(world, *args)`` on n gloo ranks and returns their results.

    ``function`` lives at module level of a test module. An exception on any rank is raised here with its traceback.
    """
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools or not pools[size].is_alive:
            pools[size] = RankPool(size, late=request.config.getoption("--late"))
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


def out_of_sight() -> None:
    """Take what lives out of the garbage collector's sight.

    Tests and the engines that they close collect often. Each collection would walk the millions of objects of eighteen
    thousand tests, of the modules that tests have imported and of what these keep, in this process and in every fork.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Begin with all that was collected."""
    out_of_sight()


@pytest.fixture(scope="module", autouse=True)
def _out_of_sight() -> None:
    """Add what the module before this one has left: what it keeps for itself is garbage to nobody."""
    out_of_sight()


def pytest_sessionfinish() -> None:
    """Let the interpreter's exit collect everything; extension modules report what stays as leaked."""
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--late``: collectives of the ranks end at the last moment, and are watched until then (tests/comm/late.py)."""
    parser.addoption("--late", action="store_true", help="collectives of the ranks end at the last moment")


def pytest_configure(config: pytest.Config) -> None:
    """Ranks that are threads of this process are late too."""
    if config.getoption("--late"):
        from tests.comm import late

        stack = ExitStack()
        stack.enter_context(late.installed())
        config.add_cleanup(stack.close)


_WITHOUT_LATE = ("test_foresee.py", "test_outside.py")
"""Tests that compare measured memory, of which late collectives hold copies, or that run on tensors without data."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: Any, items: list[pytest.Item]) -> None:
    """``soak`` runs only when asked for by name; ``gpu`` only where there is one. The longest files come first.

    This hook comes first, so that ``-m soak`` selects the rows of tests/everyday.py too.
    """
    items.sort(key=place_in_run)
    wanted = config.getoption("-m") or ""
    for item in items:
        if is_moved(item):
            item.add_marker(pytest.mark.soak)
        # Not the keywords: these contain the name of the folder of the checkout, too.
        if item.get_closest_marker("soak") and "soak" not in wanted:
            item.add_marker(pytest.mark.skip(reason="make soak"))
        if config.getoption("--late") and item.path.name in _WITHOUT_LATE:
            item.add_marker(
                pytest.mark.skip(reason="late collectives hold copies, and compare what tensors hold")
            )
        if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
