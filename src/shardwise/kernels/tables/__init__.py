"""Operations of an embedding table on its rows, each as a compiled loop beside a plain-torch reference.

    keys.py            a 64-bit mix of keys, and the logical bucket that owns a key
    joined.py          keys of several features, checked, numbered and joined
    unique.py          distinct keys in the order of their first occurrence; stable grouping by owner
    hash_index.py      keys to rows: find, insert, remove, scores, the rows to evict
    pair_map.py        the map from keys to rows, which grows a few slots at a time
    rows_ahead.py      the rows with the lowest scores, found ahead of need
    row_snapshot.py    lines of rows as they were when a save began (index_snapshot.py: keys and scores; kept_rows.py)
    slab.py            memory of a table that grows without moving
    start_rows.py      the weights that a row begins with, from (seed, table, key)
    pooling.py         rows to one vector a bag; gradients of bags back to one gradient a row
    row_rules.py       optimizers of rows as data: formulas, numbers, state
    row_optimizers.py  their step on the rows that a batch touched
    row_replay.py      the steps that a row of an exact Adam missed
    blocks.py          eight neighbouring columns of a row as one value of a loop
    compiled.py        compilation of the loops, and the folder of the machine code

A row of a table is one line of a slab: its ``width`` weights, then the state of its optimizer. Every call runs on the
thread that made it and lets other threads run. Calls share nothing but what the caller passes, so one table belongs to
one thread at a time. Without numba, on other devices and in other dtypes than fp32 and fp64 the references run.

The order of every sum is fixed, so the loops give the references' bits. A loop that gets an index outside its table
raises; it never reads beside the table.
"""
