"""The table of rows that the everyday suite leaves to the soak names rows that exist."""

import pytest

from tests.everyday import unknown


def test_every_entry_names_a_row(request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("keyword") or request.config.getoption("markexpr")
    if asked or request.config.args != request.config.getini("testpaths"):
        pytest.skip("the table is compared with all tests, and some were asked for by name")
    assert not unknown(request.session.items)
