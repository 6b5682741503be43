"""What both ends of a wire know of its messages without being told: their headers, by name and likeness.

    first time       header, tensors        both ends keep the header under (name, likeness)
    afterwards       tensors                the sender compares its header with the kept one, and refuses another
    end of a walk    a hash of all that went each way is compared

A likeness is a number that both ends compute from what they have in common (the shapes of the microbatch). Whether a
header is kept stands in it, so that both ends do the same.
"""

import json
import zlib

from shardwise.plan.errors import PlanError

_KEPT = 4096
"""Headers of one direction. Both ends keep them in one order, and so drop the same ones."""


class Headers:
    """Of one direction."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], bytes] = {}
        self.hash = 0
        """Of all that went, in its order."""

    def find(self, what: str, like: int | None) -> bytes | None:
        """The header of the next message, where it is known; it counts as gone."""
        header = None if like is None else self._kept.get((what, like))
        if header is not None:
            self._count(like, header)
        return header

    def is_known(self, what: str, like: int | None, header: bytes) -> bool:
        """Of the next message, which the sender has: whether it may go without. It is kept from now on.

        Errors: PlanError where another one is known.
        """
        known = self.find(what, like)
        if known is None:
            self.agree(what, like, header)
            return False
        if known != header:
            raise PlanError(
                f"{what} is {_kinds(header)}, and was {_kinds(known)} for a microbatch of the same shapes. Between "
                "devices the shapes of what stages exchange must follow from those of the batch; where they do not, "
                "set pipeline.shapes: described"
            )
        return True

    def agree(self, what: str, like: int | None, header: bytes) -> None:
        """It went with its message."""
        self._count(like, header)
        if like is None or not json.loads(header)[3]:
            return
        self._kept[what, like] = header
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]

    def _count(self, like: int | None, header: bytes) -> None:
        if like is not None:
            self.hash = zlib.crc32(header + str(like).encode(), self.hash)


def _kinds(header: bytes) -> str:
    _, text, kinds, _ = json.loads(header)
    return ", ".join(f"{dtype}{shape}" for dtype, shape, _ in kinds) + (f" as {text}" if text else "")
