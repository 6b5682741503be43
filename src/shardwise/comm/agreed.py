"""Headers that both ends of a connection know without a transfer, by name and likeness.

    first time       header, tensors        both ends keep the header under (name, likeness)
    afterwards       tensors                the sender compares its header with the kept one, and refuses another
    end of a walk    a hash of all that went each way is compared

A likeness is a number that both ends compute from what they have in common (the shapes of the microbatch). The header
itself contains whether it is kept, so that both ends do the same.
"""

import json
import zlib

from shardwise.base.errors import PlanError

_KEPT = 4096
"""Headers kept for one direction. Both ends keep them in the same order, and so drop the same headers."""


class MessageHeaders:
    """Headers of the messages in one direction."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], bytes] = {}
        self.hash = 0
        """Hash of all messages, in their order."""

    def find(self, what: str, like: int | None) -> bytes | None:
        """Return the header of the next message if it is known, and count the message as sent; else None.

        Args:
            what: Name of the message.
            like: Likeness of the message; None: unknown.
        """
        header = None if like is None else self._kept.get((what, like))
        if header is not None:
            self._count(like, header)
        return header

    def is_known(self, what: str, like: int | None, header: bytes) -> bool:
        """Return whether the sender's next message may go without its header, and keep the header from now on.

        Args:
            what: Name of the message.
            like: Likeness of the message; None: unknown.
            header: Header of the message.

        Raises:
            PlanError: if another header is known.
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
        """Record that ``header`` was sent with its message.

        Args:
            what: Name of the message.
            like: Likeness of the message; None: unknown.
            header: Header of the message.
        """
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
