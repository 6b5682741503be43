"""Ordered: the largest value that fits, among values that need more memory the larger they are.

The value is doubled until it does not fit, then the gap is halved. With no tolerance the value next to the result was
looked at and does not fit, so the result is proved even if memory does not grow with every step between.

Cost: two looks for each doubling.
"""

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def largest(
    look: Callable[[int], Found], fits: Callable[[Found], bool], most: int, tolerance: float = 0.0
) -> tuple[int, Found]:
    """Return the largest value from 1 on that fits, with what ``look`` found for it.

    Args:
        look: Function that returns what is known about a value.
        fits: Function that returns True if what was found fits.
        most: Largest value that is tried.
        tolerance: Share of the result by which the smallest value that does not fit may lie above it.

    Returns:
        0 and what was found for 1, if 1 does not fit.
    """
    best = look(1)
    if not fits(best):
        return 0, best
    value, too_large = 1, 2
    while too_large <= most and fits(found := look(too_large)):
        value, too_large, best = too_large, 2 * too_large, found
    too_large = min(too_large, most + 1)
    while too_large - value > max(1, int(value * tolerance)):
        middle = (value + too_large) // 2
        found = look(middle)
        if fits(found):
            value, best = middle, found
        else:
            too_large = middle
    return value, best
