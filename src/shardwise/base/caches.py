"""Caches of transformers, which hold keys, values and states of past tokens, recognized without importing transformers.

The name of the argument does not determine a cache: it is ``cache`` since transformers 5.24, ``past_key_values``,
``layer_past`` or ``cache_params`` in older releases, and GPT-2 passes the cache by position. The class does.
"""

from typing import Any


def is_transformers_cache(value: Any) -> bool:
    """Return True for a cache object of transformers, and for an object of a class derived from one.

    Args:
        value: Any value.
    """
    return any(
        kind.__name__.endswith("Cache") and kind.__module__.startswith("transformers.")
        for kind in type(value).__mro__
    )


def holds_past(cache: Any, layer: int) -> bool:
    """Return True if a cache holds keys, values or states of past tokens for one layer of the model.

    Args:
        cache: A cache object of transformers.
        layer: Index of the layer in the model.

    Returns:
        False also for classes of older releases that do not keep one object for each layer.
    """
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if not isinstance(layers, list) or layer >= len(layers):
        return False
    length = getattr(layers[layer], "get_seq_length", None)
    if length is not None and int(length()) > 0:
        return True
    states = getattr(layers[layer], "has_previous_state", False)
    return any(states.values()) if isinstance(states, dict) else bool(states)
