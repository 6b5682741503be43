"""Random numbers under DeepSpeed's names: one seed for all generators, and named streams.

set_random_seed(1)
with get_cuda_rng_tracker().fork():       # numbers of this rank only; the shared numbers continue afterwards
    ...
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shardwise.base.errors import UsageError
from shardwise.comm import default_group

_MODEL_PARALLEL = "model-parallel-rng"
_APART = 2718
"""The offset of the first rank's own seed from the seed that all ranks share."""


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


class CudaRNGStatesTracker:
    """Named streams of random numbers, each a saved state of the device's generator."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Remove all streams."""
        self.states_.clear()
        self.seeds_.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the state of every random stream, keyed by stream name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Set the state of every random stream, keyed by stream name."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts with ``seed``.

        Raises:
            UsageError: if there is a stream with this name or this seed.
        """
        if name in self.states_ or seed in self.seeds_:
            raise UsageError(
                f"CudaRNGStatesTracker.add: there is a stream {name!r} or of the seed {seed} already"
            )
        before = _state()
        _seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = _state()
        _restore(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Return a context in which random numbers come from the stream ``name``.

        Raises:
            UsageError: if there is no such stream.
        """
        if name not in self.states_:
            raise UsageError(
                f"CudaRNGStatesTracker.fork: there is no stream {name!r}; add(name, seed) makes one"
            )
        before = _state()
        _restore(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _restore(before)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the named streams of this process."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device equally on all ranks, and add a stream with a different seed on each rank."""
    _TRACKER.reset()
    _seed(seed)
    _TRACKER.add(_MODEL_PARALLEL, seed + _APART + default_group.rank())


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _restore(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)
