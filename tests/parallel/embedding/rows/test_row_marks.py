"""Which rows changed after a step, for every kind of optimizer."""

import torch

from shardwise.kernels.tables.row_rules import Adam, Sgd
from shardwise.parallel.embedding.rows.row_marks import RowMarks

ROWS = torch.arange(5)


def changed(marks: RowMarks, since: int) -> list[int]:
    return ROWS[marks.changed(ROWS, since)].tolist()


def marked(optimizer: Adam | Sgd) -> RowMarks:
    """Rows 1, 2 and 3 were touched in steps 10, 20 and 30."""
    marks = RowMarks(5, optimizer)
    for row in (1, 2, 3):
        marks.touch(torch.tensor([row]), 10 * row)
    return marks


def test_a_touched_row_has_changed() -> None:
    marks = marked(Sgd())
    assert [changed(marks, since) for since in (0, 9, 10, 29, 30)] == [[1, 2, 3], [1, 2, 3], [2, 3], [3], []]
    assert changed(marked(Adam()), 20) == [3]


def test_an_exact_adam_moves_rows_up_to_its_horizon() -> None:
    short = Adam(0.05, 0.9, exact=True)
    assert short.horizon == 17
    marks = marked(short)
    assert [changed(marks, since) for since in (26, 27, 36, 37, 47)] == [[1, 2, 3], [2, 3], [2, 3], [3], []]
    endless = Adam(0.9, 0.5, exact=True)
    assert endless.horizon is None and changed(marked(endless), 10**6) == [1, 2, 3]
    assert changed(marked(short._replace(weight_decay=0.1)), 10**6) == ROWS.tolist()
