"""The gradient of a bucket: accumulated, reduced, finished, dropped."""

import pytest
import torch

from shardwise.parallel.zero.gradient import GradientState
from tests.parallel.zero.buckets import CUT, bucket


def test_a_gradient_is_accumulated_reduced_finished_and_dropped() -> None:
    here = bucket(CUT)
    here.weight.attach()
    gradient, seen = here.gradient, []
    for microbatch in range(2):
        here.weight.start_unshard()
        here.weight.finish_unshard()
        here.parameters[1].grad = torch.full((5,), 2.0)
        assert gradient.accumulate(1, here.parameters[1])
        seen.append(gradient.state)
        gradient.reduce()
        seen.append(gradient.state)
        here.weight.reshard()
        assert gradient.owned[16:21].tolist() == [2.0 * (microbatch + 1)] * 5
        assert not gradient.owned[:16].any(), (
            "what got no gradient counts as zero, the slot's old values do not"
        )
    gradient.finish_reduce()
    seen.append(gradient.state)
    assert gradient.used == [False, True]
    gradient.drop_gradients()
    seen.append(gradient.state)
    added, reduced = GradientState.ACCUMULATING, GradientState.REDUCED
    assert seen == [added, reduced, added, reduced, GradientState.FINISHED, GradientState.EMPTY]
    assert gradient.used == [False, False]


def test_a_gradient_that_is_finished_takes_no_more() -> None:
    here = bucket(CUT)
    here.weight.attach()
    here.gradient.reduce()
    here.gradient.finish_reduce()
    with pytest.raises(AssertionError, match="finished does not become accumulating"):
        here.gradient.reduce()
