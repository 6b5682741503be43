"""Calls add up to what ``Traffic`` counts of them."""

import torch

from shardwise.plan.exchange_calls import ExchangeCall, collective
from shardwise.simulate.exchanges import ExchangeRecord, message, rows_of, totals, united


def test_a_record_has_the_counts_of_traffic_and_the_size_of_each_call() -> None:
    record = ExchangeRecord()
    record.add("all_gather", "activations", 12, 4, ranks=4, axis="tp")
    mark = record.mark()
    for elements in (8, 8, 16):
        record.add("all_reduce", "control", elements, 8, ranks=2)
    later = record.since(mark)
    assert later == (
        ExchangeCall("all_reduce", "control", "dp", 8, 8, 2),
        ExchangeCall("all_reduce", "control", "dp", 16, 8, 1),
    )
    first = collective("all_gather", "activations", "tp", 12, 4, 4)
    assert totals((*first, *later)) == record.counts


def test_one_rank_sends_nothing() -> None:
    assert collective("all_reduce", "control", "dp", 8, 8, 1) == ()


def test_a_message_is_one_call_for_each_size_of_elements() -> None:
    tensors = [torch.empty(3), torch.empty(2, 2), torch.empty(1, dtype=torch.float64)]
    assert message("gradients", tensors) == (
        ExchangeCall("send", "gradients", "pp", 7, 4),
        ExchangeCall("send", "gradients", "pp", 1, 8),
    )


def test_rows_are_sums_of_equal_calls() -> None:
    call = ExchangeCall("send", "activations", "pp", 5, 2, 3)
    assert united([call, call._replace(calls=1)]) == (call._replace(calls=4),)
    assert rows_of([call, call._replace(elements=1, calls=1)]) == [
        {"operation": "send", "purpose": "activations", "axis": "pp", "calls": 4, "elements": 16, "bytes": 32}
    ]
