"""Words in sentences of ours."""

import pytest

from shardwise.base.words import bytes_text, grouped


def test_notes_that_differ_in_their_first_word_alone_are_one() -> None:
    rows = [f"C{i} (up to 2,000 x 8): data_parallel" for i in range(1, 27)]
    assert grouped(["a note", *rows, "I1 (up to 9 x 8): table", "I2 (up to 9 x 8): table", "last"]) == [
        "a note",
        "C1 to C26, 26 tables, (up to 2,000 x 8): data_parallel",
        "I1, I2 (up to 9 x 8): table",
        "last",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (300 * 2**20, "300 MiB"), (1.5 * 2**30, "1.5 GiB")]
)
def test_bytes(value: float, text: str) -> None:
    assert bytes_text(value) == text
