"""The rates of a rank's hardware, by which seconds of a step and of a placement are computed from bytes and operations.

``simulate/rates.py`` measures them for the price of a step. The planner of embedding tables takes ``ASSUMED_RATES``,
because all ranks must come to the same placement before anything is measured.
"""

from typing import NamedTuple


class RankRates(NamedTuple):
    """Rates of one rank, with the load that its neighbours put on the host."""

    flops_s: float
    """Floating-point operations per second, in products in the compute dtype."""
    host_bytes_s: float
    """Bytes read and written per second in host memory."""
    device_bytes_s: float
    """Bytes read and written per second in the device's memory; on CPU ranks the same as ``host_bytes_s``."""
    link_bytes_s: float
    """Bytes per second between host and device, in one direction."""
    disk_bytes_s: float
    """Bytes read or written per second on a disk."""
    exchange_bytes_s: float
    """Bytes per second that a rank sends to others while it receives as many."""
    row_bytes_s: float = 4e9
    """Bytes of scattered rows of embedding tables that are read and written per second."""
    message_s: float = 1e-4
    """Seconds of delay of one message to all ranks."""


ASSUMED_RATES = RankRates(
    flops_s=100e9,
    host_bytes_s=6e9,
    device_bytes_s=6e9,
    link_bytes_s=6e9,
    disk_bytes_s=1e9,
    exchange_bytes_s=1.5e9,
)
"""Rates of two CPU ranks on one host, whose exchange takes four passes over memory. A faster exchange changes all
placements of a table alike.
"""
