"""Folders of saved steps: all saves and loads of an engine that use one folder share one writer."""

from pathlib import Path

from shardwise.base.errors import CheckpointError
from shardwise.base.policy import nearest
from shardwise.checkpoint import CheckpointPolicy, Checkpoints, SingleRank
from shardwise.checkpoint.peers import CheckpointCoordinator
from shardwise.checkpoint.steps import steps_at
from shardwise.comm.world import World

_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def check_folder(path: Path) -> None:
    """Check that a path may be a folder with saved steps.

    Raises:
        CheckpointError: if the path does not exist, if it is a file, or if the steps lie in a folder inside.
    """
    inside = steps_at(path) if path.is_dir() else None
    if inside not in (None, path):
        raise CheckpointError(
            f"load: {path} is the folder of a run and holds no step itself; load({str(inside)!r}) takes its newest one"
        )
    if path.is_dir():
        return
    if not path.exists():
        near = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise CheckpointError(
            f"load: there is no folder {path}{nearest(path.name, near) if near else ''}. Give the folder that "
            "engine.save was given, or one step of it; for a run that goes on from its own folder as soon as there is "
            "one: load(folder, required=False)"
        )
    raise CheckpointError(f"load: {path} is a file; expected a folder of steps, or a step. {_instead(path)}")


def _instead(file: Path) -> str:
    """Return the call that loads a file which ``engine.load`` does not load."""
    step = next((each for each in file.absolute().parents if (each / "manifest.json").is_file()), None)
    if step is not None:
        return f"It belongs to the step {step}: load({str(step)!r})"
    if file.suffix == ".safetensors":
        read = f"safetensors.torch.load_file({str(file)!r})"
    elif file.suffix in _OF_TORCH:
        read = f"torch.load({str(file)!r}, map_location='cpu', weights_only=True)"
    else:
        read = "the tensors by name"
    return f"Weights in a file: engine.load_state_dict({read}), or init_from: {file} in the configuration"


class StepFolders:
    """The folders of saved steps that one engine uses.

    Args:
        world: the ranks.
        policy: the configuration of checkpoints.
        number: number of this engine among those of its world, the same on all ranks.
    """

    def __init__(self, world: World, policy: CheckpointPolicy, number: int) -> None:
        self._world = world
        self._policy = policy
        self._number = number
        self._open: dict[Path, Checkpoints] = {}
        self._exchanges = 0
        self._alone = SingleRank()

    def at(self, folder: Path) -> Checkpoints:
        """Return the one ``Checkpoints`` object of a folder."""
        key = folder.absolute()
        if key not in self._open:
            peers = self._world if self._world.size > 1 else SingleRank()
            self._open[key] = Checkpoints(key, peers, self._policy)
        return self._open[key]

    @property
    def copy_bytes(self) -> int:
        """Bytes of host memory that saves copy the state to."""
        return sum(checkpoints.copy_bytes for checkpoints in self._open.values())

    def coordinator(self, purpose: str) -> CheckpointCoordinator:
        """Return the phases of one piece of work that all ranks do together; ``purpose`` names it in errors."""
        peers = self._world if self._world.size > 1 else self._alone
        return CheckpointCoordinator(peers, purpose, self._policy.timeout_s)

    def exchange(self, what: str, text: str) -> list[str]:
        """Return the ``text`` of every rank, in rank order, through the store and not through a collective."""
        if self._world.size == 1:
            return [text]
        self._exchanges += 1
        # The engine's number is in the key because several engines of a world share its store.
        key = f"engine/{self._number}/{what}/"
        self._world.post(f"{key}{self._exchanges}", text)
        texts = self._world.collect(
            f"{key}{self._exchanges}", self._policy.timeout_s, f"the exchange of {what}"
        )
        if self._world.rank == 0 and self._exchanges > 1:
            # A rank posts a text only after it has read those of the exchange before, so those can be removed.
            self._world.forget(f"{key}{self._exchanges - 1}")
        return texts

    def wait(self) -> None:
        """Wait until saves that run in the background are committed; raise the error of one that failed."""
        for checkpoints in self._open.values():
            checkpoints.wait()

    def join(self) -> None:
        """Wait until saves that run in the background have ended, committed or failed."""
        for checkpoints in self._open.values():
            checkpoints.join()
