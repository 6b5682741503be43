"""Parameters whose numbers are absent, or on their way."""

import pytest
import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.passes.absent import expect, give, withhold


def test_what_is_on_its_way_arrives_before_it_is_withheld() -> None:
    """A pass that looks for uses of slices withheld weights whose gather ran beside it; when that was over they were
    expected still, and every use of them asked for ever."""
    parameter, arrived = nn.Parameter(torch.ones(2)), []

    def arrive() -> None:
        arrived.append("once")
        give([parameter])

    expect([parameter], arrive, {})
    withhold([parameter], lambda _: "a weight\nlook elsewhere", {})
    with pytest.raises(UsageError, match="look elsewhere"):
        parameter + 1
    give([parameter])
    assert type(parameter) is nn.Parameter and arrived == ["once"]
    assert (parameter + 1).tolist() == [2.0, 2.0]
