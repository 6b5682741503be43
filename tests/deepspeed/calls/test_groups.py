"""Groups of ranks under DeepSpeed's names."""

import pytest

from shardwise.base.errors import UsageError


def test_ranks_of_experts() -> None:
    from shardwise.deepspeed.utils.groups import _get_expert_parallel_ranks

    together, alike = _get_expert_parallel_ranks(8, 2, 2)
    assert together == [[0, 2], [4, 6], [1, 3], [5, 7]] and alike == [[0, 4], [2, 6], [1, 5], [3, 7]]
    together, _ = _get_expert_parallel_ranks(4, 1, 2, use_data_before_expert_parallel_=True)
    assert together == [[0, 2], [1, 3]]
    with pytest.raises(UsageError, match="do not divide"):
        _get_expert_parallel_ranks(6, 2, 2)
