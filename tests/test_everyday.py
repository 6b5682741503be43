"""The table of rows that the everyday suite leaves to the soak names rows that exist."""

from pathlib import Path

import pytest

from tests.everyday import BEGUN_FIRST, unknown


def test_every_entry_names_a_row(request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("keyword") or request.config.getoption("markexpr")
    if asked or request.config.args != request.config.getini("testpaths"):
        pytest.skip("the table is compared with all tests, and some were asked for by name")
    assert not unknown(request.session.items)


def test_the_files_that_begin_first_are_there() -> None:
    missing = [file for file in BEGUN_FIRST if not (Path(__file__).parent / file).is_file()]
    assert not missing and len(set(BEGUN_FIRST)) == len(BEGUN_FIRST), missing
