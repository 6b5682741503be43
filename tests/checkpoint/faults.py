"""File systems that fail, cut short, forget or kill at the call that a test names."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.files import FileSystem


class CountingFiles(FileSystem):
    """Numbers the changes to the disk; subclasses act at one of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path]] = []

    def before(self, operation: str, path: Path) -> None:
        self.calls.append((operation, path))
        self.act(len(self.calls) - 1, operation, path)

    def act(self, number: int, operation: str, path: Path) -> None:
        pass


class FailingFiles(CountingFiles):
    """Raises ``code`` at the calls that ``when`` chooses."""

    def __init__(self, when: Callable[[int, str, Path], bool], code: int = errno.EIO) -> None:
        super().__init__()
        self._when, self._code = when, code
        self.fired = 0

    def act(self, number: int, operation: str, path: Path) -> None:
        if self._when(number, operation, path):
            self.fired += 1
            raise OSError(self._code, os.strerror(self._code), str(path))


class ShortFiles(FileSystem):
    """Takes at most 100 bytes at a time."""

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data[:100], offset)


class KillingFiles(CountingFiles):
    """Kills this process ahead of the n-th change; where that is a write, half of it may still reach the file.

    With ``only``, the n-th change of that operation.
    """

    def __init__(self, at: int | None, torn: bool, only: str = "") -> None:
        super().__init__()
        self._at, self._torn, self._only = at, torn, only
        self._seen = 0
        self._tear = False

    def act(self, number: int, operation: str, path: Path) -> None:
        if self._only and operation != self._only:
            return
        self._seen += 1
        if self._at == self._seen - 1:
            if operation == "write" and self._torn:
                self._tear = True
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._tear:
            os.pwrite(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwrite(descriptor, data, offset)
