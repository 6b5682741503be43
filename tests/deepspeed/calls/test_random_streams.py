"""Named streams of random numbers."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shardwise.base.errors import UsageError
from shardwise.comm import default_group
from shardwise.deepspeed.calls.random_streams import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    set_random_seed,
)


@pytest.fixture(autouse=True)
def _generators_stay() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    get_cuda_rng_tracker().reset()


def drawn() -> list[float]:
    return torch.rand(3).tolist()


def test_one_seed_for_all_generators() -> None:
    found = []
    for _ in range(2):
        set_random_seed((1 << 32) + 3)
        found.append((random.random(), np.random.rand(), drawn()))
    assert found[0] == found[1]
    np.random.seed(3)
    assert np.random.rand() == found[0][1]


def test_a_stream_goes_on_where_it_was_and_the_shared_numbers_do_not_move() -> None:
    torch.manual_seed(0)
    plain = drawn()
    torch.manual_seed(5)
    of_the_stream = drawn(), drawn()
    torch.manual_seed(0)
    streams = CudaRNGStatesTracker()
    streams.add("mine", 5)
    with streams.fork("mine"):
        first = drawn()
    assert drawn() == plain
    with pytest.raises(ValueError, match="inside"), streams.fork("mine"):
        second = drawn()
        raise ValueError("inside")
    assert (first, second) == of_the_stream


def test_states_are_kept_and_set_again() -> None:
    streams = CudaRNGStatesTracker()
    streams.add("mine", 5)
    kept = streams.get_states()
    with streams.fork("mine"):
        first = drawn()
    streams.set_states(kept)
    with streams.fork("mine"):
        assert drawn() == first


def test_streams_that_there_are_and_that_there_are_not() -> None:
    streams = CudaRNGStatesTracker()
    streams.add("mine", 5)
    for name, seed in (("mine", 6), ("other", 5)):
        with pytest.raises(UsageError, match="there is a stream"):
            streams.add(name, seed)
    with pytest.raises(UsageError, match="there is no stream 'other'"), streams.fork("other"):
        pass
    streams.reset()
    streams.add("mine", 5)


def test_ranks_share_a_seed_and_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = [], []
    for rank in (0, 1):
        monkeypatch.setattr(default_group, "rank", lambda rank=rank: rank)
        model_parallel_cuda_manual_seed(7)
        shared.append(drawn())
        with get_cuda_rng_tracker().fork():
            own.append(drawn())
    assert shared[0] == shared[1] and own[0] != own[1] and own[0] != shared[0]
