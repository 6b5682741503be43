"""Sharded data parallelism: ZeRO 0 to 3 and HSDP as one mechanism.

policy  the keys that users set        layout    the table of placements; pure
cost    bytes sent; pure               modules   the Units of a model
bucket  flat buffers on this rank      hooks     the module hooks that run the Actions
"""
