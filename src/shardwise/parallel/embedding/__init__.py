"""Embedding tables spread over ranks: by copy, by table, by row, by column; static, or growing as keys come.

policy   what the user may set            layout      homes of keys, rows and columns; pure
cost     bytes and memory; pure           planner     chooses a placement for each table and says why; pure
group    tables that move together; pure  fuse        their features in a batch, joined
store    the rows of one rank             dynamic     the index of a table that grows and shrinks
rules    the kernels' optimizers          rows        rows outside their store
evict    which rows go                    row_gradients  those of rows, until the step
ways     how keys travel, and vectors and gradients with them
batch    one batch on its way             ahead       batches prepared before the model asks for them
placed   the acts of a step               saved_rows  rows out and in
saved    a table as a checkpoint has it   collection  the module

What an engine does with each of ``collections_of(model)``; its weights are no parameters, so ZeRO does not see them:

    build     place(group, keys_group, batch=, memory_bytes=)         collective
    step      placed.deliver() after the last backward pass; square_sum() joins the sum of squares of the dense
              gradients, summed over the ranks; then step(lr_factor, divisor), or drop() where it is skipped
    save      saved.progress() once; saved.rows_to_write(table) of every rank
    load      saved.load_progress() on every rank, then load_rows(table, rows) with any pieces that cover the table
    threads   prepare(features) may run in one thread of its own, over ``keys_group``; find_features(batch, ...) finds
              what a whole batch has to prepare
"""
