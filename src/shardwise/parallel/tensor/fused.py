"""Rows of modules whose projections are fused, class by class: the order of the parts in the one matrix. Pure.

    class              output of the fused matrix, with H heads                cut into
    BLOOM, NeoX (ja)   for each head: query, key, value                        heads
    Falcon, BigCode    the same; or H queries, 1 key, 1 value;                 heads; H + 1 + 1, the last 2 everywhere;
                       or for each key head: its queries, key, value           key heads
    MPT                H queries, H keys, H values                             H + H + H
    CodeGen            four times: H/4 queries, H/4 values, H/4 keys           12 blocks of H/4, and its output in 4
    Mamba              channels, then their gates                              channels, twice

Biases for each head that a model computes once (ALiBi) are arguments of attention, which cuts them at its input. A
mixer's step, input and output matrices (x_proj's) are computed from all channels and used on each channel: they are
summed over the ranks and enter the cut layers again.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def row_of(name: str, module: nn.Module) -> dict[str, str] | None:
    """Return the table rows of a module and of the modules inside it.

    Args:
        name: Name of the module in the model.
        module: The module.

    Returns:
        Words by module name, or None if the module's class is not known.
    """
    reader = _READERS.get(type(module).__name__)
    known = reader is not None and type(module).__module__.startswith("transformers.models.")
    rows = reader(module) if reader is not None and known else None
    return None if rows is None else {f"{name}{leaf}": words for leaf, words in rows.items()}


def _bloom(module: Any) -> dict[str, str]:
    heads = module.num_heads
    return {
        "": f"num_heads alibi@{heads}",
        ".query_key_value": f"column {heads}",
        ".dense": f"row {heads}",
    }


def _falcon(module: Any) -> dict[str, str]:
    heads, parts, counts = module.num_heads, str(module.num_heads), "num_heads num_kv_heads"
    if module.new_decoder_architecture:
        parts = str(module.num_kv_heads)
    elif module.multi_query:
        parts, counts = f"{heads}+1+1", "num_heads"
    return {
        "": f"{counts} alibi@{heads} attention_mask@{heads}",
        ".query_key_value": f"column {parts}",
        ".dense": f"row {parts.partition('+')[0]}",
    }


def _big_code(module: Any) -> dict[str, str] | None:
    heads, parts, counts = module.num_heads, str(module.num_heads), "num_heads kv_heads"
    if module.is_cross_attention:
        return None
    if module.multi_query:
        parts, counts = f"{heads}+1+1", f"num_heads embed_dim num_key_value_groups={heads}/1"
    return {"": counts, ".c_attn": f"column {parts}", ".c_proj": f"row {heads}"}


def _neox_japanese(module: Any) -> dict[str, str]:
    heads = module.num_attention_heads
    return {
        "": "replicate num_attention_heads hidden_size",  # its own bias belongs to its output, which is whole
        ".query_key_value": f"column {heads}",
        ".dense": f"row {heads}",
    }


def _mpt(module: Any) -> dict[str, str]:
    heads = module.n_heads
    return {
        "": f"n_heads position_bias@{heads}",
        ".Wqkv": f"column {heads}+{heads}+{heads}",
        ".out_proj": f"row {heads}",
    }


def _codegen(module: Any) -> dict[str, str]:
    quarter = str(module.num_attention_heads // 4)
    return {
        "": "num_attention_heads embed_dim",  # transformers reads the first up to 5.23, the second since 5.24
        ".qkv_proj": f"column {'+'.join([quarter] * 12)}",
        ".out_proj": f"row {'+'.join([quarter] * 4)}",
    }


def _mamba(module: Any) -> dict[str, str]:
    channels = module.intermediate_size
    return {
        "": "channels intermediate_size",
        ".in_proj": f"column {channels}+{channels}",
        ".conv1d": "channels groups in_channels out_channels",
        ".x_proj": "row again",
        ".dt_proj": "channels out_features",
        ".out_proj": "row",
    }


_READERS: dict[str, Callable[[Any], dict[str, str] | None]] = {
    "BloomAttention": _bloom,
    "CodeGenAttention": _codegen,
    "FalconAttention": _falcon,
    "FalconMambaMixer": _mamba,
    "GPTBigCodeAttention": _big_code,
    "GPTNeoXJapaneseAttention": _neox_japanese,
    "MambaMixer": _mamba,
    "MptAttention": _mpt,
}
"""Readers by class of transformers; each class was compared with one process."""
