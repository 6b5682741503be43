"""Parameters that report reads of ``p.data``."""

import copy

import torch
from torch import nn

from shardwise.memory.watched import WatchedParameter, unwatch_data, watch_data


class Own(nn.Parameter):
    """A parameter of a class of its own."""


def watched(*parameters: nn.Parameter) -> list[object]:
    seen: list[object] = []
    watch_data(parameters, lambda parameter: seen.append(parameter), {})
    return seen


def test_a_read_of_data_is_reported_and_other_uses_are_not() -> None:
    p = nn.Parameter(torch.ones(2))
    seen = watched(p)
    with torch.no_grad():
        p.mul_(2)
    (p * p).sum().backward()
    assert seen == [] and isinstance(p, WatchedParameter) and isinstance(p, nn.Parameter)
    p.data[0] = 5
    assert len(seen) == 1 and seen[0] is p and p.tolist() == [5, 2]
    p.data = torch.zeros(2)
    assert len(seen) == 1 and p.tolist() == [0, 0]


def test_a_parameter_is_what_it_was_when_it_is_no_longer_watched() -> None:
    p, own = nn.Parameter(torch.ones(1)), Own(torch.ones(1))
    seen = watched(p, own)
    watch_data([p], lambda parameter: seen.append("again"), {})
    assert type(own).__name__ == "Own" and type(own) is not Own
    unwatch_data([p, own, p])
    assert type(p) is nn.Parameter and type(own) is Own
    assert own.data.tolist() == p.data.tolist() == [1] and seen == []


def test_a_copy_is_not_watched() -> None:
    p = nn.Parameter(torch.ones(1))
    seen = watched(p)
    copied = copy.deepcopy(p)
    before = len(seen)
    assert type(copied) is nn.Parameter and copied.data.tolist() == [1] and len(seen) == before


def test_classes_are_made_once() -> None:
    classes: dict[type, type] = {}
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    watch_data([one], id, classes)
    watch_data([two, one], id, classes)
    assert type(one) is type(two) is classes[nn.Parameter] and len(classes) == 1
