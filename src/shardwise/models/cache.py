"""A cache of keys and values of earlier tokens, so that one more token costs the computation of one token.

The buffers of a layer are allocated at the layer's first use, with the dtype and device of its keys: a cache needs no
description of the model, and contains only the layers that a rank runs.

Cost: 2·L·B·N·C·K elements.
Shapes: L layers, B batch, N key and value heads, C capacity in tokens, K head size.
"""

from collections import defaultdict

from torch import Tensor


class LayerCache:
    """The cached keys and values of one layer."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, N, T, K] and return all so far, as views [B, N, S, K]."""
        if self._keys is None or self._values is None:
            b, n, _, size = keys.shape
            self._keys = keys.new_empty(b, n, self._capacity, size)
            self._values = values.new_empty(b, n, self._capacity, size)
        start, stop = self._length, self._length + keys.shape[2]
        self._keys[:, :, start:stop] = keys
        self._values[:, :, start:stop] = values
        self._length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def clear(self) -> None:
        """Remove the tokens and keep the buffers."""
        self._length = 0


class KeyValueCache:
    """The cached keys and values of all layers, for one batch of sequences."""

    def __init__(self, capacity: int) -> None:
        self.length = 0
        """The number of tokens that every layer has cached."""
        self._layers: defaultdict[int, LayerCache] = defaultdict(lambda: LayerCache(capacity))

    def layer(self, index: int) -> LayerCache:
        """Return the cache of the layer ``index``."""
        return self._layers[index]

    def clear(self) -> None:
        """Remove the tokens of all layers and keep the buffers."""
        self.length = 0
        for layer in self._layers.values():
            layer.clear()
