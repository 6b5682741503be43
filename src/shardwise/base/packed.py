"""Packed messages: several fields of one row as consecutive bytes, which one exchange sends.

| field 0 | field 1 | ... | padding |      a row, a multiple of 16 bytes, so that the next row begins aligned
"""

_ALIGNED_BYTES = 16


def message_bytes(*fields: int) -> int:
    """Return the bytes of a message whose fields have these sizes in bytes."""
    return -(-sum(fields) // _ALIGNED_BYTES) * _ALIGNED_BYTES
