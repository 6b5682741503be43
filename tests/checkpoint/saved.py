"""Saves of small steps."""

from pathlib import Path

from shardwise.checkpoint import Checkpoints
from shardwise.checkpoint.policy import CheckpointPolicy

from .crew import (
    TINY,
    ThreadPeers,
    crew,
    items_of,
    make_state,
    succeed,
)

QUICK = CheckpointPolicy(timeout_s=20)


def save_with(root: Path, ranks: int, step: int, seed: int, asynchronous: bool = True) -> None:
    state = make_state(step)

    def work(peers: ThreadPeers) -> None:
        checkpoints = Checkpoints(root, peers, QUICK, sizes=TINY)
        items = items_of(state, peers.rank, ranks, seed)
        checkpoints.save(step, items, {"step": step}, asynchronous=asynchronous)
        for item in items:  # the next step overwrites what was given
            for piece in item.pieces:
                if asynchronous:
                    piece.tensor.zero_()
        checkpoints.wait()

    succeed(crew(ranks, work))
