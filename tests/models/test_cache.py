"""Keys and values of earlier tokens."""

import torch
from torch import Tensor

from shardwise.models.cache import KeyValueCache, LayerCache


def piece(start: int, length: int) -> tuple[Tensor, Tensor]:
    keys = torch.arange(start, start + length, dtype=torch.float16).view(1, 1, length, 1).expand(2, 3, -1, 4)
    return keys, -keys


def test_pieces_come_back_as_one_whole() -> None:
    layer = LayerCache(capacity=6)
    for start, length in ((0, 3), (3, 1), (4, 2)):
        keys, values = layer.extend(*piece(start, length))
        whole = piece(0, start + length)
        assert torch.equal(keys, whole[0]) and torch.equal(values, whole[1]) and keys.dtype == torch.float16


def test_buffers_are_made_once_and_stay_when_tokens_go() -> None:
    cache = KeyValueCache(capacity=4)
    first, _ = cache.layer(1).extend(*piece(0, 2))
    other, _ = cache.layer(2).extend(*piece(0, 2))
    cache.length = 2
    cache.clear()
    again, _ = cache.layer(1).extend(*piece(5, 1))
    assert cache.length == 0 and again.shape[2] == 1 and again[0, 0, 0, 0] == 5
    assert again.data_ptr() == first.data_ptr() != other.data_ptr()
