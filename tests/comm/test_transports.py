"""Both transports give the same sums; without ranks no byte moves."""

import weakref
from typing import Any

import pytest
import torch

from shardwise.comm.transports import NoTransport, sum_in_order
from tests.comm.test_collectives import exchange


@pytest.mark.parametrize("size", [2, 4])
def test_results_do_not_depend_on_the_transport(ranks: Any, size: int) -> None:
    """Reduce-scatter is exact in rank order on both; a 16-bit gradient is summed in the dtype of the shard."""
    answers = {transport: ranks(size).run(exchange, transport) for transport in ("torch", "shared_memory")}
    for transport, results in answers.items():
        for report, _ in results:
            assert all(report), f"{transport}: {report}"
    assert answers["torch"][0][1] == answers["shared_memory"][0][1]


def test_a_sum_of_16_bits_is_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert sum_in_order(rows, torch.zeros(1, dtype=torch.bfloat16)).item() == 258.0
    assert (rows[0] + rows[1] + rows[2]).item() == 256.0, "sums of bf16, each rounded, lose both ones"


def test_no_transport_leaves_tensors_as_they_are() -> None:
    x, shard = torch.ones(4), torch.zeros(2)
    transport = NoTransport()
    assert transport.all_reduce(x, 1.0, "a test") is None  # type: ignore[func-returns-value]
    held = weakref.ref(shard)
    gathering = transport.all_gather(x, shard, 1.0, "a test")
    del shard
    assert held() is not None, "as that of a collective in flight"
    gathering.wait()
    assert held() is None and x.tolist() == [1, 1, 1, 1]
