"""Tables of models that are not ours, found by the shape of their modules. Pure except for reading the model.

    shape     modules                                                                      models
    llama     embed_tokens, layers.*.{self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj}   LLaMA, Mistral, Qwen ...
    gpt2      wte, wpe, h.*.{attn.{c_attn,c_proj}, mlp.{c_fc,c_proj}}, ln_f                GPT-2
    bert      embeddings, encoder.layer.*.{attention, intermediate, output}                BERT, RoBERTa ...
    known     attention with q_proj, k_proj, v_proj, of classes that are listed             BART, OPT, GPT-J ...
    fused     attention with one projection, state-space mixers, of classes in fused.py     BLOOM, MPT, Falcon ...
    a plan    any, by the model's ``tp_plan`` (transformers)                               Starcoder2, Phi, OLMo ...

These models compute masks and positions from the length of their embeddings. So the sequence is cut before their first
block and not in the embedding, and attention and feed-forward enter once for their separate projections. A plan does
not describe the modules between the cut layers, so with a plan the sequence stays whole.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.parallel.tensor.fused import row_of
from shardwise.parallel.tensor.layout import StyleTable, is_transposed, parse, style_of

_LLAMA_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LLAMA_MLP = ("gate_proj", "up_proj", "down_proj")
_CAUSAL_LOSS = "ForCausalLMLoss"


def known_table(model: nn.Module) -> StyleTable | None:
    """Return the table of a model of a known shape, or of a model with a plan.

    Args:
        model: The model.

    Returns:
        The table, or None if nothing is known of the model.
    """
    readers: tuple[Callable[[nn.Module], StyleTable | None], ...] = (
        _llama,
        _gpt2,
        _bert,
        _planned,
        _projections,
    )
    return next((table for reader in readers if (table := reader(model)) is not None), None)


def whole_table(model: nn.Module) -> StyleTable:
    """Return a table that keeps everything but the experts whole on every rank, for an otherwise unknown model."""
    note = "attention of this class is not known, so all but the experts is whole on every rank"
    return StyleTable(_with_rest(model, {}), sequence=False, note=note)


# LLaMA -------------------------------------------------------------------------------------------------------------


def _llama(model: nn.Module) -> StyleTable | None:
    prefix, root = _holder(model, "embed_tokens", "layers", "norm")
    if root is None:
        return None
    rows = {f"{prefix}embed_tokens": "vocabulary whole", f"{prefix}norm": "sequence"}
    for name, layer in _blocks(root, f"{prefix}layers"):
        found = _llama_layer(name, layer)
        if found is None:
            return None
        rows |= found
    _enter(rows, f"{prefix}layers.0")
    head = is_linear(model, "lm_head")
    if not head or _has_more(model, root):
        rows[f"{prefix}norm"] += " leave"
    if head:
        rows["lm_head"] = "head whole" if _has_more(model, root) else "head"
    return StyleTable(_with_rest(model, rows), causal_loss=head and has_causal_loss(model))


def _has_more(model: nn.Module, root: nn.Module) -> bool:
    """Return True if modules with parameters may work between the last norm and the head, on tokens."""
    inside = {id(parameter) for parameter in root.parameters()}
    return any(
        id(parameter) not in inside and not name.startswith("lm_head.")
        for name, parameter in model.named_parameters()
    )


def _llama_layer(name: str, layer: nn.Module) -> dict[str, str] | None:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not (_has_linears(attention, _LLAMA_ATTENTION) and _has_linears(mlp, _LLAMA_MLP)):
        return None
    assert attention is not None, "it has linears"
    size = getattr(attention, "head_dim", None)
    if not isinstance(size, int):
        return None
    heads, kv_heads = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    groups = f" num_key_value_groups={heads}/{kv_heads}" if hasattr(attention, "num_key_value_groups") else ""
    rows = {
        f"{name}.self_attn": f"region{groups}",
        f"{name}.self_attn.q_proj": f"column {heads}",
        f"{name}.self_attn.k_proj": f"column {kv_heads}",
        f"{name}.self_attn.v_proj": f"column {kv_heads}",
        f"{name}.self_attn.o_proj": f"row {heads}",
        f"{name}.mlp": "region",
        f"{name}.mlp.gate_proj": "column",
        f"{name}.mlp.up_proj": "column",
        f"{name}.mlp.down_proj": "row",
    }
    for child_name, child in _with_parameters(attention):
        if child_name not in _LLAMA_ATTENTION:
            if any(parameter.shape != (size,) for parameter in child.parameters()):
                return None  # A norm over all heads needs the heads of the other ranks.
            rows[f"{name}.self_attn.{child_name}"] = "partial"
    if any(child_name not in _LLAMA_MLP for child_name, _ in _with_parameters(mlp)):
        return None
    for child_name, child in _with_parameters(layer):
        if child_name not in ("self_attn", "mlp"):
            if any(parameter.dim() != 1 for parameter in child.parameters()):
                return None
            rows[f"{name}.{child_name}"] = "sequence"
    return rows


# GPT-2 -------------------------------------------------------------------------------------------------------------


def _gpt2(model: nn.Module) -> StyleTable | None:
    prefix, root = _holder(model, "wte", "wpe", "h", "ln_f")
    if root is None:
        return None
    rows = {
        f"{prefix}wte": "vocabulary whole",
        f"{prefix}wpe": "replicate",
        f"{prefix}ln_f": "sequence leave",
    }
    for name, block in _blocks(root, f"{prefix}h"):
        attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
        known = {"ln_1", "attn", "ln_2", "mlp"}
        if {child for child, _ in _with_parameters(block)} != known or attention is None or mlp is None:
            return None
        if {child for child, _ in _with_parameters(attention)} != {"c_attn", "c_proj"}:
            return None
        if not is_transposed(attention.c_attn):
            return None  # The same shape, but with another layout of key heads (GPTBigCode).
        heads = attention.num_heads
        rows |= {
            f"{name}.ln_1": "sequence",
            f"{name}.attn": "num_heads split_size",
            f"{name}.attn.c_attn": f"column {heads}+{heads}+{heads}",
            f"{name}.attn.c_proj": f"row {heads}",
            f"{name}.ln_2": "sequence",
            f"{name}.mlp.c_fc": "column",
            f"{name}.mlp.c_proj": "row",
            f"{name}.attn.resid_dropout": "sequence",
            f"{name}.mlp.dropout": "sequence",
        }
    _enter(rows, f"{prefix}h.0")
    head = is_linear(model, "lm_head")
    if head:
        rows["lm_head"] = "head whole"
    return StyleTable(_with_rest(model, rows), causal_loss=head and has_causal_loss(model))


# BERT --------------------------------------------------------------------------------------------------------------


def _bert(model: nn.Module) -> StyleTable | None:
    prefix, root = _holder(model, "embeddings.word_embeddings", "encoder.layer")
    if root is None:
        return None
    rows = {f"{prefix}embeddings.word_embeddings": "vocabulary whole"}
    last = ""
    for name, layer in _blocks(root, f"{prefix}encoder.layer"):
        modules = dict(layer.named_modules())
        attention = modules.get("attention.self")
        linears = [f"attention.self.{key}" for key in ("query", "key", "value")]
        linears += ["attention.output.dense", "intermediate.dense", "output.dense"]
        if attention is None or not all(isinstance(modules.get(key), nn.Linear) for key in linears):
            return None
        if getattr(layer, "attention_type", "original_full") != "original_full":
            return None  # BigBird's block-sparse attention reads the number of heads from the configuration.
        if not (hasattr(attention, "num_attention_heads") and hasattr(attention, "all_head_size")):
            return None  # Longformer has other attribute names, and extra weights for global tokens.
        heads = attention.num_attention_heads
        rows |= {
            f"{name}.attention.self": "region num_attention_heads all_head_size",
            **{f"{name}.{key}": f"column {heads}" for key in linears[:3]},
            f"{name}.attention.output.dense": f"row {heads}",
            f"{name}.intermediate.dense": "column",
            f"{name}.output.dense": "row",
        }
        drops = ("attention.output.dropout", "output.dropout")
        rows |= {f"{name}.{key}": "sequence" for key in drops if key in modules}
        norms = [key for key, module in modules.items() if key not in linears and module._parameters]
        if any(parameter.dim() != 1 for key in norms for parameter in modules[key].parameters(recurse=False)):
            return None
        rows |= {f"{name}.{key}": "sequence" for key in norms}
        last = name
    _enter(rows, f"{prefix}encoder.layer.0")
    rows[last] = f"{rows.get(last, '')} leave".strip()
    return StyleTable(_with_rest(model, rows))


# Plans -------------------------------------------------------------------------------------------------------------


def _planned(model: nn.Module) -> StyleTable | None:
    """Return a table from the model's own plan.

    Modules are cut if all their layers in the plan are plain column and row layers.
    """
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict) or not plan:
        return None
    modules = dict(model.named_modules())
    by_owner: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for name, module in modules.items():
        word = next((word for pattern, word in plan.items() if fnmatchcase(name, pattern)), None)
        if word == "embedding_rowwise" and isinstance(module, nn.Embedding):
            rows[name] = "vocabulary whole"
        elif name == "lm_head" and word is not None and isinstance(module, nn.Linear):
            rows[name] = "head whole"
        elif word is not None:
            by_owner.setdefault(name.rpartition(".")[0], {})[name] = word
    left = []
    for owner, words in by_owner.items():
        found = _planned_owner(owner, modules, words)
        if found is None:
            left.append(owner)
        else:
            rows |= found
    if len(left) == len(by_owner):
        return None
    note = "the model's own plan does not say what lies between its cut layers, so the sequence stays whole there"
    if left:
        note += f"; whole on every rank, because their part of it asks for more than columns and rows: {left[0]} ..."
    head = rows.get("lm_head", "") != ""
    return StyleTable(
        _with_rest(model, rows), sequence=False, note=note, causal_loss=head and has_causal_loss(model)
    )


def _planned_owner(owner: str, modules: dict[str, nn.Module], words: dict[str, str]) -> dict[str, str] | None:
    module = modules[owner]
    known = _known_attention(owner, module)
    if known is not None:
        return (
            known  # a plan does not say how many heads a fused matrix holds, nor which dropout is behind it
        )
    words = {name: word for name, word in words.items() if word not in _WHOLE_WORDS}
    linears = {name: modules[name] for name in words}
    if set(words.values()) != {"colwise", "rowwise"} or not all(map(_linear, linears.values())):
        return None
    size = next((getattr(module, key) for key in ("head_dim", "head_size") if hasattr(module, key)), None)
    config = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    rows = {owner: "region"}
    for name, word in words.items():
        rows[name] = "row" if word == "rowwise" else "column"
        if size is None:
            continue
        outputs = linears[name].get_parameter("weight").shape[0]
        parts = outputs // size
        if word == "colwise":
            rows[name] += f" {heads if heads and parts % heads == 0 else parts}"
    kv_heads = getattr(config, "num_key_value_heads", None)
    if hasattr(module, "num_key_value_groups") and heads and kv_heads:
        rows[owner] += f" num_key_value_groups={heads}/{kv_heads}"
    for name, child in module.named_modules(prefix=owner):
        if name not in words and child._parameters:
            if size is None or any(
                parameter.shape != (size,) for parameter in child.parameters(recurse=False)
            ):
                return None
            rows[name] = "partial"
    return rows


_WHOLE_WORDS = ("replicated_with_grad_allreduce", "replicate", "replicated")
"""Words of a plan for modules that are whole on every rank: norms over the features of one head."""


# Projections -------------------------------------------------------------------------------------------------------

_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
_LEAVING = ("out_proj", "o_proj", "dense")
_FEED_FORWARD = (("fc1", "fc2"), ("fc_in", "fc_out"))
_FEED_FORWARD_ALONE = (("dense_h_to_4h", "dense_4h_to_h"), ("up_proj", "down_proj"), ("c_fc", "c_proj"))
"""Pairs of layers that count as feed-forward only in modules without other layers."""
_COUNTS = ("num_heads", "num_attention_heads", "embed_dim")
"""Attributes of an attention module that count its heads, or the features of all heads together."""
_BEHIND = "resid_dropout"
"""Name of a dropout in attention behind its last projection."""


def _projections(model: nn.Module) -> StyleTable | None:
    """Return a table for known classes of attention and for feed-forward pairs; other parts of the model stay whole.

    Each projection enters the cut layers separately, because the keys of a decoder come from its encoder.
    """
    rows: dict[str, str] = {}
    for name, module in model.named_modules():
        own = _known_attention(name, module)
        if own is None and type(module).__name__ in (*_PROJECTING, *_GROUPED):
            return None
        rows |= own or {}
    if not rows:
        return None
    for name, module in model.named_modules():
        for first, second in _FEED_FORWARD:
            if all(isinstance(getattr(module, key, None), nn.Linear) for key in (first, second)):
                rows |= {f"{name}.{first}": "column", f"{name}.{second}": "row"}
        for pair in _FEED_FORWARD_ALONE:
            if {child for child, _ in _with_parameters(module)} == {*pair} and _has_linears(module, pair):
                rows |= {f"{name}.{pair[0]}": "column", f"{name}.{pair[1]}": "row"}
    note = "what lies between the cut layers is not known for this family, so the sequence stays whole there"
    return StyleTable(_with_rest(model, rows), sequence=False, note=note)


def _known_attention(name: str, module: nn.Module) -> dict[str, str] | None:
    """Return the rows of a module of a listed class, or None for other classes and for unknown forms of a class."""
    rows, kind = row_of(name, module), type(module).__name__
    if rows is None and kind in (*_PROJECTING, *_GROUPED):
        rows = (_grouped_rows if kind in _GROUPED else _projecting_rows)(name, module)
    if rows and isinstance(getattr(module, _BEHIND, None), nn.Dropout):
        rows[f"{name}.{_BEHIND}"] = "replicate"
    return rows


def _projecting_rows(name: str, module: nn.Module) -> dict[str, str] | None:
    leaving = next((key for key in _LEAVING if isinstance(getattr(module, key, None), nn.Linear)), None)
    heads = next((getattr(module, key) for key in _COUNTS[:2] if hasattr(module, key)), None)
    children = {child for child, _ in _with_parameters(module)}
    if leaving is None or not heads or children != {*_QUERY_KEY_VALUE, leaving}:
        return None
    return {
        name: " ".join(key for key in _COUNTS if isinstance(getattr(module, key, None), int)),
        **{f"{name}.{key}": f"column {heads}" for key in _QUERY_KEY_VALUE},
        f"{name}.{leaving}": f"row {heads}",
    }


def _grouped_rows(name: str, module: Any) -> dict[str, str] | None:
    """Return the rows of an attention module whose heads share keys.

    Norms of one head's features, and a sink or a gate for each head, are included.
    """
    size = getattr(module, "head_dim", None)
    leaving = next((key for key in _LEAVING if isinstance(getattr(module, key, None), nn.Linear)), None)
    if not isinstance(size, int) or leaving is None or not _has_linears(module, _QUERY_KEY_VALUE):
        return None
    heads, kv_heads = module.q_proj.out_features // size, module.k_proj.out_features // size
    rows = {
        name: "region",
        f"{name}.q_proj": f"column {heads}",
        f"{name}.k_proj": f"column {kv_heads}",
        f"{name}.v_proj": f"column {kv_heads}",
        f"{name}.{leaving}": f"row {heads}",
    }
    if hasattr(module, "num_key_value_groups"):
        rows[name] += f" num_key_value_groups={heads}/{kv_heads}"
    if {key for key, _ in module.named_parameters(recurse=False)} == {_SINKS}:
        rows[name] = f"channels {rows[name]}"
    for child_name, child in _with_parameters(module):
        shapes = [tuple(parameter.shape) for parameter in child.parameters()]
        if f"{name}.{child_name}" in rows:
            continue
        if isinstance(child, nn.Linear) and shapes == [(heads * size, module.q_proj.in_features)]:
            rows[f"{name}.{child_name}"] = f"column {heads}"  # a gate on each head's output
        elif all(shape == (size,) for shape in shapes):
            rows[f"{name}.{child_name}"] = "partial"
        else:
            return None
    return rows


_SINKS = "sinks"
"""Name of a parameter with a number for each head."""
_GROUPED = (
    "AfmoeAttention",
    "GptOssAttention",
    "GraniteMoeAttention",
    "GraniteMoeHybridAttention",
    "GraniteMoeSWAAttention",
    "GraniteMoeSharedAttention",
    "HunYuanMoEV1Attention",
    "JambaAttention",
    "Lfm2MoeAttention",
    "MiniMaxM3VLAttention",
    "NemotronHAttention",
    "PhimoeAttention",
)
"""Classes of transformers whose heads share keys; each class was compared with one process."""
_PROJECTING = (
    "BartAttention",
    "BigBirdPegasusDecoderAttention",
    "BioGptAttention",
    "BlenderbotAttention",
    "BlenderbotSmallAttention",
    "GPTJAttention",
    "GPTNeoSelfAttention",
    "M2M100Attention",
    "MBartAttention",
    "MarianAttention",
    "MvpAttention",
    "NllbMoeAttention",
    "OPTAttention",
    "PLBartAttention",
    "PegasusAttention",
    "WhisperAttention",
    "XGLMAttention",
)
"""Classes of transformers with separate projections; each class was compared with one process."""


# Shapes ------------------------------------------------------------------------------------------------------------


def _holder(model: nn.Module, *children: str) -> tuple[str, nn.Module | None]:
    """Return the name, with a dot, of the outermost module with all of ``children``, and the module."""
    for name, module in model.named_modules():
        inside = dict(module.named_modules())
        if all(child in inside for child in children):
            return (f"{name}." if name else ""), module
    return "", None


def _blocks(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (full name, block) of the list at ``name``, which may start with names outside ``root``."""
    inside = dict(root.named_modules())
    own = next(key for key in inside if key and (name == key or name.endswith("." + key)))
    for index, block in inside[own].named_children():
        yield f"{name}.{index}", block


def _enter(rows: dict[str, str], first: str) -> None:
    rows[first] = f"{rows.get(first, '')} enter".strip()


def _with_rest(model: nn.Module, rows: dict[str, str]) -> dict[str, str]:
    """Return ``rows`` with a row for every module that they leave out: heads tied to the embedding, or whole modules.

    Dropouts outside the blocks get a row too, because their inputs are whole; dropouts inside attention get
    none.
    """
    by_module = {name: parse(name, words) for name, words in rows.items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    cut = {
        id(getattr(modules[name], "weight", None))
        for name, style in by_module.items()
        if style.kind == "vocabulary"
    }
    rest: dict[str, str] = {}
    for name, module in modules.items():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if isinstance(module, nn.Dropout) and not _inside(name, rows):
            rest[name] = "replicate"
        if not own or style_of(name, by_module) is not None:
            continue
        tied = any(id(parameter) in cut for parameter in own)
        rest[name] = "head whole" if tied and isinstance(module, nn.Linear) else "replicate"
    # A module whose only parameter is also a head's bias needs no row: the head's row covers the bias.
    biases = {
        id(modules[name]._parameters.get("bias")) for name, words in rest.items() if words == "head whole"
    }
    for name, words in list(rest.items()):
        own = [parameter for parameter in modules[name]._parameters.values() if parameter is not None]
        if words == "replicate" and own and all(id(parameter) in biases for parameter in own):
            del rest[name]
    return rows | rest


def _inside(name: str, rows: Mapping[str, str]) -> bool:
    """Return True if a module, or a module around it, has a row without ``enter`` and ``leave``."""
    around = name
    while around:
        if around in rows and "enter" not in rows[around] and "leave" not in rows[around]:
            return True
        around = around.rpartition(".")[0]
    return False


def _with_parameters(module: Any) -> Iterator[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module.named_children() if any(True for _ in child.parameters()))


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not is_transposed(module)


def _has_linears(module: nn.Module | None, names: tuple[str, ...]) -> bool:
    return module is not None and all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def is_linear(model: nn.Module, name: str) -> bool:
    """Return True if the model has a linear layer called ``name``."""
    return isinstance(getattr(model, name, None), nn.Linear)


def has_causal_loss(model: nn.Module) -> bool:
    """Return True if the model's forward passes its logits to transformers' causal loss.

    A forward that computes a loss of its own from the logits (Granite Speech) needs whole logits.

    Args:
        model: The model.

    Returns:
        True if its forward calls ``loss_function``, and that function is the causal loss.
    """
    calls = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    is_called = calls is not None and "loss_function" in calls.co_names
    return is_called and getattr(getattr(model, "loss_function", None), "__name__", "") == _CAUSAL_LOSS
