"""Sharded data parallelism: ZeRO 0 to 3 and HSDP as one mechanism.

policy  what the user may set          layout    the table of placements; pure
cost    bytes and elements; pure       modules   Units found in a model
bucket  flat buffers on this rank      executor  the hooks that run the Actions
"""
