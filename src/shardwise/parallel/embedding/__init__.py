"""Embedding tables spread over ranks: by copy, by table, by row, by column; static, or growing as keys come.

policy   what the user may set            layout   homes of keys, rows and columns; pure
cost     bytes and memory; pure           planner  chooses a placement for each table and says why; pure
fuse     features of a batch, joined      ways     how keys travel, and vectors and gradients with them
store    the rows of one rank             collection   the module
"""
