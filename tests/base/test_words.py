"""Words in sentences of ours."""

from shardwise.base.words import grouped


def test_notes_that_differ_in_their_first_word_alone_are_one() -> None:
    rows = [f"C{i} (up to 2,000 x 8): data_parallel" for i in range(1, 27)]
    assert grouped(["a note", *rows, "I1 (up to 9 x 8): table", "I2 (up to 9 x 8): table", "last"]) == [
        "a note",
        "C1 to C26, 26 tables, (up to 2,000 x 8): data_parallel",
        "I1, I2 (up to 9 x 8): table",
        "last",
    ]
