"""Embedding tables spread over ranks by copy, by table, by row or by column; static tables, and tables that grow.

policy   what the user may set            layout      homes of keys, rows and columns; pure
cost     bytes and memory; pure           planner     chooses a placement for each table and gives the reason; pure
group    tables that move together; pure  fuse        joins the features of a group in one batch
rows     a folder: the rows of one rank   rules       the kernels' optimizers
ways     how keys, vectors and gradients travel between ranks
batch    one batch in flight              ahead       batches prepared before the model asks for their vectors
placed   the operations of a step         saved       the form of a table in a checkpoint
collection  the module

The weights of ``collections_of(model)`` are no parameters, so ZeRO does not see them. An engine does this with each
collection:

    build     place(group, keys_group, batch=, memory_bytes=)         collective
    step      placed.deliver() after the last backward pass; square_sum() joins the sum of squares of the dense
              gradients, and numbers() travel with it, summed over the ranks; then settle(sums), and
              step(lr_factor, divisor), or drop() if the step is skipped
    save      saved.progress() once; saved.rows_to_write(table) on every rank
    load      saved.load_progress() on every rank, then load_rows(table, rows) with any pieces that cover the table
    threads   prepare(features) may run in a separate thread, over ``keys_group``; find_features(batch, ...) finds
              all the features that must be prepared for a batch
"""
