"""Folders of saved steps: one writer for each, which all saves and loads of an engine go through."""

from pathlib import Path

from shardwise.checkpoint import CheckpointPolicy, Checkpoints, Solo
from shardwise.comm.world import World


class Folders:
    """Of one engine. ``number``: which engine of its world it is, the same on all ranks."""

    def __init__(self, world: World, policy: CheckpointPolicy, number: int) -> None:
        self._world = world
        self._policy = policy
        self._number = number
        self._open: dict[Path, Checkpoints] = {}
        self._exchanges = 0

    def at(self, folder: Path) -> Checkpoints:
        """The one ``Checkpoints`` of a folder."""
        key = folder.absolute()
        if key not in self._open:
            peers = self._world if self._world.size > 1 else Solo()
            self._open[key] = Checkpoints(key, peers, self._policy)
        return self._open[key]

    @property
    def copy_bytes(self) -> int:
        """Of host memory that saves are copied to."""
        return sum(checkpoints.copy_bytes for checkpoints in self._open.values())

    def exchange(self, what: str, text: str) -> list[str]:
        """Each rank's ``text``, in their order, over the store: no collective of the training is disturbed."""
        if self._world.size == 1:
            return [text]
        self._exchanges += 1
        # Several engines of a world share its store.
        key = f"engine/{self._number}/{what}/"
        self._world.post(f"{key}{self._exchanges}", text)
        texts = self._world.collect(f"{key}{self._exchanges}", self._policy.timeout_s)
        if self._world.rank == 0 and self._exchanges > 1:
            self._world.forget(f"{key}{self._exchanges - 1}")  # whoever posted these has read those before
        return texts

    def wait(self) -> None:
        """Return when saves that run behind training are committed; raises what went wrong with one."""
        for checkpoints in self._open.values():
            checkpoints.wait()
