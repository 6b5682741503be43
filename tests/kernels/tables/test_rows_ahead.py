"""The rows with the lowest scores, found ahead, against a sort of all rows, while scores rise and rows come and go."""

import numpy as np

from shardwise.kernels.tables.rows_ahead import LIVE, RowColumns, RowsAhead

ROWS = 600


def lowest_of(columns: RowColumns, count: int) -> set[int]:
    live = np.flatnonzero(columns.state == LIVE)
    order = np.lexsort((columns.keys[live], columns.scores[live]))
    return set(live[order[:count]].tolist())


def test_the_lowest_rows_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(0)
    columns = RowColumns(
        rng.integers(0, 40, ROWS), rng.permutation(ROWS).astype(np.int64), np.full(ROWS, LIVE, np.uint8)
    )
    ahead, answered = RowsAhead(columns, ROWS), 0
    for step in range(40, 240):
        if not ahead.is_passing and ahead.known < 60:
            ahead.begin_lowest(ROWS, 120)
        ahead.scan(50)
        risen = rng.choice(ROWS, 30, replace=False)
        columns.scores[risen] = step
        found = ahead.lowest(20)
        if found is None:
            continue
        answered += 1
        gone = lowest_of(columns, 20)
        assert gone <= set(found.tolist())
        reused = np.array(sorted(gone))
        # Their keys go, and new keys get their rows.
        columns.keys[reused] = rng.permutation(10**6)[: reused.size] + ROWS
        columns.scores[reused] = step
        ahead.note(reused)
    assert answered > 30
