"""global batch = micro batch · accumulation · ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.config.batch import BatchPolicy


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_any_two_numbers_give_the_third(micro: int, accumulation: int, dp: int) -> None:
    total = micro * accumulation * dp
    wanted = BatchPolicy(global_size=total, micro_size=micro, accumulation=accumulation)
    assert BatchPolicy(global_size=total, micro_size=micro).derived(dp) == wanted
    assert BatchPolicy(global_size=total, accumulation=accumulation).derived(dp) == wanted
    assert BatchPolicy(micro_size=micro, accumulation=accumulation).derived(dp) == wanted
    assert wanted.derived(dp) == wanted


def test_what_is_not_determined_stays_open() -> None:
    assert BatchPolicy().derived(4) == BatchPolicy(accumulation=1)
    assert BatchPolicy(global_size=8).derived(4) == BatchPolicy(global_size=8, micro_size=2, accumulation=1)


@pytest.mark.parametrize(
    ("policy", "dp", "message"),
    [
        (
            BatchPolicy(global_size=10),
            4,
            "global_size 10 does not divide into one share × 4 .*nearest that does is 8",
        ),
        (BatchPolicy(global_size=64, micro_size=5), 4, "micro_size 5 × 4 data-parallel ranks; .* is 60"),
        (BatchPolicy(global_size=64, accumulation=3), 4, "accumulation 3 × 4 .* is 60"),
        (BatchPolicy(global_size=1), 4, "nearest that does is 4"),
        (
            BatchPolicy(global_size=64, micro_size=4, accumulation=2),
            4,
            "needs accumulation 4, given 2; leave one of the three out",
        ),
    ],
)
def test_what_does_not_divide(policy: BatchPolicy, dp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy.derived(dp)


@given(st.integers(1, 200), st.one_of(st.none(), st.integers(1, 9)), st.integers(1, 9))
def test_the_nearest_number_works(total: int, micro: int | None, dp: int) -> None:
    try:
        BatchPolicy(global_size=total, micro_size=micro).derived(dp)
    except ConfigError as error:
        near = int(str(error).rsplit(" ", 1)[1])
        BatchPolicy(global_size=near, micro_size=micro).derived(dp)
