"""Keys and values of the tokens already seen, so that one more token costs one token.

The buffers of a layer are made at its first use, of the dtype and on the device of what it computes: a cache needs
no description of the model, and works whichever of its layers a rank runs.

Cost: 2·L·B·N·C·K elements.
Shapes: L layers, B batch, N key and value heads, C capacity in tokens, K head size.
"""

from collections import defaultdict

from torch import Tensor


class LayerCache:
    """One layer's part."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, N, T, K] and return all so far: views [B, N, S, K]."""
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
        """Forget the tokens, keep the buffers."""
        self._length = 0


class Cache:
    """All layers' keys and values of one batch of sequences."""

    def __init__(self, capacity: int) -> None:
        self.length = 0
        """Tokens that every layer has seen."""
        self._layers: defaultdict[int, LayerCache] = defaultdict(lambda: LayerCache(capacity))

    def layer(self, index: int) -> LayerCache:
        """The part of layer ``index``."""
        return self._layers[index]

    def clear(self) -> None:
        """Forget the tokens, keep the buffers."""
        self.length = 0
        for layer in self._layers.values():
            layer.clear()
