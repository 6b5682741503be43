"""The rows of tables on one rank.

store          the rows of one group of tables: reading, updating, evicting
row_lines      the memory of rows: weights and optimizer state, in one dtype or two
row_gradients  gradients of rows, kept until the step
row_marks      the step in which each row last changed
dynamic        the index of a table that grows and shrinks
evict          which rows are evicted
keyed_rows     rows outside their store, by key
saved_rows     reads rows out of the tables and loads rows into them
"""
