"""Shrink a layout, a model and a batch to what runs in seconds and still shows the same mistakes.

    layout   an axis above 1 becomes its smallest divisor above 1: 2, or 3 for 9; data-parallel axes become 2. An axis
             that cuts unevenly becomes 4. A layout that was asked for stays if it has at most 8 ranks.
    layers   the fewest with every kind of block, and two per stage; one more where the stages had unequal numbers
    heads    as many query heads per key and value head as before; fewer key and value heads than "tp" stay fewer
    width    a few features per head; experts: a multiple of the ranks that they are dealt to
    sizes    the sequence and the vocabulary do not divide by any axis, so that ranks hold unequal parts
    training gradients are clipped, dropout is on, the step has several microbatches

Ties between weights, frozen and unused parameters stay. Every function is pure: it returns the smaller value beside a
dictionary of what changed, by name, with the old and the new value. A model of unknown code stays whole.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import MeshError
from shardwise.config.run import RunConfig
from shardwise.models.bert import BertPolicy
from shardwise.models.gpt import GptExperts, GptPolicy
from shardwise.models.images.policy import AlexNetPolicy, ResNetPolicy
from shardwise.models.policy import TargetPolicy
from shardwise.verify.layout import VerifiedLayout

MOST_RANKS = 8
"""Ranks of a layout that runs as it was asked for, at most."""
_UNEVEN = 4
"""Ranks on an axis that cuts unevenly: two ranks always hold the larger and the smaller part, four hold several."""
_CLIP = 0.05
"""A largest norm of gradients that the first steps of any model exceed."""
_DROPOUT = 0.1
_HEAD = 4
"""Features of a head; even, for rotary pairs."""
_CIFAR = 64
"""Side in pixels up to which a ResNet without ``stem`` has the small stem."""


class SizeChange(NamedTuple):
    """The value before and after the model was shrunk."""

    old: Any
    new: Any


Shrunk = dict[str, SizeChange]


class ShrunkConfig(NamedTuple):
    """A smaller configuration, and what changed by key."""

    config: RunConfig
    shrunk: Shrunk


class ShrunkModel(NamedTuple):
    """A function that makes a smaller model, and what changed by name; the function given, if nothing did."""

    make: Callable[[], nn.Module]
    shrunk: Shrunk


# Layout ------------------------------------------------------------------------------------------------------------


def uneven_axes(config: RunConfig, layout: VerifiedLayout) -> set[str]:
    """Return the axes of ``layout`` that cut the model of ``config`` into unequal parts."""
    model, mesh, found = config.model, layout.mesh, set()
    layers = getattr(model, "layers", None)
    if isinstance(layers, int) and layers % layout.stages:
        found.add("pp")
    heads = getattr(model, "kv_heads", None)
    if isinstance(heads, int) and 1 < heads < mesh.tp:
        found.add("tp")  # heads are cut, and each piece is copied
    return found


def shrink_layout(
    layout: VerifiedLayout, is_asked_for: bool = False, uneven: Collection[str] = ()
) -> tuple[VerifiedLayout, Shrunk]:
    """Return the smallest layout that has the same axes.

    Args:
        layout: The layout.
        is_asked_for: True if the user gave the layout for this run, and not as part of the configuration.
        uneven: Names of axes that cut unevenly.
    """
    if is_asked_for and layout.ranks <= MOST_RANKS:
        return layout, {}
    mesh = layout.mesh
    sizes = {axis: _divisor(mesh.size(axis)) for axis in ("pp", "cp", "tp", "ep", "etp")}
    sizes |= {axis: min(mesh.size(axis), 2) for axis in ("dp_replicate", "data_shard")}
    rings = {"cp"} if mesh.cp > 2 else set()
    for axis in sorted({*uneven, *rings}):
        larger = sizes | {axis: min(mesh.size(axis), _UNEVEN)}
        if math.prod(larger[each] for each in ("pp", "dp_replicate", "data_shard", "cp", "tp")) <= MOST_RANKS:
            sizes = larger
    smaller: dict[str, Any] = {**_with_room_for_experts(sizes, mesh.data_shard)}
    virtual = min(layout.virtual_stages, 2)
    found = replace(layout, mesh=replace(mesh, **smaller), virtual_stages=virtual)
    return found, {} if found == layout else {"layout": SizeChange(str(layout), str(found))}


def _divisor(size: int) -> int:
    """Return the smallest divisor of ``size`` above 1: what divides by ``size`` divides by the divisor too."""
    return next((n for n in range(2, math.isqrt(size) + 1) if not size % n), size)


def _with_room_for_experts(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """Return sizes of axes, with "data_shard" raised until experts can be dealt to the ranks of one copy of a stage."""
    experts = sizes["ep"] * sizes["etp"]
    beside = sizes["cp"] * sizes["tp"]
    others = {axis: size for axis, size in sizes.items() if axis != "data_shard"}
    for shard in range(sizes["data_shard"], most + 1):
        if not shard * beside % experts:
            return {**others, "dp_shard": shard * sizes["cp"]}
    raise MeshError(
        f"mesh: ep × etp = {experts} does not divide dp_shard × cp × tp for any dp_shard up to {most}; choose a "
        "layout of at most 8 ranks with --layout"
    )


# Our models --------------------------------------------------------------------------------------------------------


def shrink_config(
    config: RunConfig, layout: VerifiedLayout, before: VerifiedLayout | None = None
) -> ShrunkConfig:
    """Return a configuration with a small model, small batches, active clipping and dropout.

    Args:
        config: The configuration.
        layout: The layout that the smaller model runs on.
        before: The layout that the model is for; left out: ``layout``. It says which heads have copies and whether
            stages are unequal.
    """
    before = before or layout
    given = config.model_dump(mode="json", exclude_unset=True)
    changes: dict[str, Any] = {}
    if config.model is not None and not isinstance(config.model, TargetPolicy):
        own = _model_sizes(config.model, layout, before)
        changes |= {f"model.{key}": value for key, value in own.items()}
    if config.max_grad_norm is None or config.max_grad_norm > _CLIP:
        changes["max_grad_norm"] = _CLIP
    changes |= _batch_sizes(config, layout)
    if not isinstance(config.pipeline.partition, str):
        changes["pipeline.partition"] = "parameters"
    for name in ("logits", "mlp"):
        if isinstance(getattr(config.tiles, name), int):
            changes[f"tiles.{name}"] = 4
    shrunk = {}
    for key, value in changes.items():
        old = _value(config, key)
        if old != value:
            shrunk[key] = SizeChange(old, value)
            _put(given, key, value)
    return ShrunkConfig(RunConfig.parse(given, "the configuration made smaller"), shrunk)


def _batch_sizes(config: RunConfig, layout: VerifiedLayout) -> dict[str, Any]:
    """Return an odd number of microbatches, more than stages of a rank, and few samples."""
    accumulation = layout.mesh.pp + 1 if layout.mesh.pp > 1 else 2
    accumulation += 1 - accumulation % 2 if layout.mesh.pp > 1 else 0
    batch, micro = config.batch, 2
    changes: dict[str, Any] = {}
    if batch.accumulation is not None or batch.global_size is None or batch.micro_size is not None:
        changes["batch.accumulation"] = accumulation
    if batch.micro_size is not None or batch.global_size is not None:
        changes["batch.micro_size"] = micro
    if batch.global_size is not None:
        changes["batch.global_size"] = micro * accumulation * layout.mesh.size("data")
    return changes


def _model_sizes(model: Any, layout: VerifiedLayout, before: VerifiedLayout) -> dict[str, Any]:
    """Return the smaller sizes of one of our models, by field."""
    if isinstance(model, GptPolicy):
        return _gpt_sizes(model, layout, before)
    sizes: dict[str, Any] = {}
    if isinstance(model, BertPolicy):
        sizes = _text_sizes(model, layout, before)
        sizes["heads"] = min(model.heads, 2 * layout.mesh.tp)
        sizes["width"] = _HEAD * sizes["heads"]
    elif isinstance(model, ResNetPolicy):
        sizes = {"depth": min(model.depth, 18 if model.depth < 50 else 50), "width": min(model.width, 8)}
        sizes["size"] = min(model.size, 32)
        if model.stem is None and model.size > _CIFAR:
            sizes["stem"] = "imagenet"
    elif isinstance(model, AlexNetPolicy):
        sizes = {"size": 63, "width": min(model.width, 4), "hidden": min(model.hidden, 16)}
    else:
        for field in ("width", "cross_layers", "rank"):
            if isinstance(size := getattr(model, field, None), int):
                sizes[field] = min(size, 2 if field == "cross_layers" else 4)
        for field in ("bottom", "top", "hidden"):
            if layers := getattr(model, field, ()):
                sizes[field] = tuple(min(size, 8 - index % 4) for index, size in enumerate(layers))
    if getattr(model, "dropout", None) == 0:
        sizes["dropout"] = _DROPOUT
    return sizes


def _text_sizes(model: Any, layout: VerifiedLayout, before: VerifiedLayout, kinds: int = 1) -> dict[str, Any]:
    axes = [
        size for size in (layout.mesh.tp, layout.mesh.cp, layout.mesh.size("data"), layout.stages) if size > 1
    ]
    context = indivisible(9, axes)
    vocab = indivisible(35, axes)
    return {
        "layers": few_layers(model.layers, kinds, layout, before),
        "context": min(model.context, context),
        "vocab": vocab if model.vocab is None else min(model.vocab, vocab),
    }


def _gpt_sizes(model: GptPolicy, layout: VerifiedLayout, before: VerifiedLayout) -> dict[str, Any]:
    experts, kinds = model.experts, 1
    if experts is not None:
        first, every = min(experts.first, 1), min(experts.every, 2)
        kinds = first + every
    sizes = _text_sizes(model, layout, before, kinds)
    heads, kv_heads = few_heads(model.heads, model.kv_heads or model.heads, layout.mesh.tp, before.mesh.tp)
    sizes |= {"heads": heads, "width": _HEAD * heads, "hidden": 6 * layout.mesh.tp * max(layout.mesh.etp, 1)}
    if model.kv_heads is not None:
        sizes["kv_heads"] = kv_heads
    if model.head_size is not None and model.head_size * model.heads != model.width:
        sizes["head_size"] = _HEAD + 2
    elif model.head_size is not None:
        sizes["head_size"] = _HEAD
    if experts is not None:
        sizes["experts"] = _expert_sizes(experts, first, every, layout)
    if model.dropout == 0 and experts is None:  # the engine refuses dropout inside a layer of experts
        sizes["dropout"] = _DROPOUT
    return sizes


def _expert_sizes(experts: GptExperts, first: int, every: int, layout: VerifiedLayout) -> dict[str, Any]:
    """Return the block ``model.experts`` with few experts, of which a token takes as many as before."""
    router, mesh = experts.router, layout.mesh
    count = few_experts(experts.count, router.top_k, router.groups, mesh.ep)
    changed: dict[str, Any] = {
        "first": first,
        "every": every,
        "count": count,
        "shared": min(experts.shared, 1),
    }
    if experts.hidden is not None:
        changed["hidden"] = 6 * mesh.etp
    return {**experts.model_dump(mode="json", exclude_unset=True), **changed}


# Sizes -------------------------------------------------------------------------------------------------------------


def indivisible(least: int, by: Sequence[int]) -> int:
    """Return the smallest number from ``least`` on that no number above 1 in ``by`` divides."""
    return next(n for n in range(least, least + 10_000) if all(n % each or each == 1 for each in by))


def few_layers(layers: int, kinds: int, layout: VerifiedLayout, before: VerifiedLayout) -> int:
    """Return the number of layers that have every kind and two layers per stage; one more if stages were unequal."""
    least = max(2 * layout.stages, kinds)
    uneven = layout.stages > 1 and layers % before.stages != 0
    return min(layers, least + uneven)


def few_heads(heads: int, kv_heads: int, tp: int, tp_before: int) -> tuple[int, int]:
    """Return the numbers of query heads and of key and value heads for ``tp`` ranks.

    The ratio of the two numbers stays. A rank that held one key and value head holds one, a rank that held several
    holds two, and ranks that shared a head share one.
    """
    ratio = heads // kv_heads
    if kv_heads >= tp_before:
        few = tp * (1 if kv_heads == tp_before and tp > 1 else 2)
    else:
        few = max(1, kv_heads * tp // tp_before)
        while tp % few:
            few -= 1
    few = min(few, kv_heads)
    if few * ratio % tp:
        ratio *= tp
    return few * ratio, few


def few_experts(count: int, top_k: int, groups: int, ep: int) -> int:
    """Return a number of experts that deals two to each rank, more than a token takes, in whole groups."""
    step = math.lcm(ep, groups)
    least = max(2 * ep, top_k + 1, 2 * groups)
    return min(count, math.ceil(least / step) * step)


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config.model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    return found


def _put(given: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for part in outer:
        given = given.setdefault(part, {})
    given[last] = value


# Models of transformers --------------------------------------------------------------------------------------------

_HIDDEN_DROPOUT = (
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout_prob",
    "hidden_dropout",
    "residual_dropout",
    "dropout",
)
"""Names of dropout that is no part of attention, which the engine refuses where a model axis cuts it."""
_FIXED = {
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "rotary_dim": 4,
    "sliding_window": 4,
    "image_size": 32,
    "patch_size": 8,
}
"""Small values of sizes that other sizes do not follow from."""


def is_transformers_config(config: Any) -> bool:
    """Return True if ``config`` is a model configuration of transformers."""
    return all(hasattr(config, name) for name in ("attribute_map", "model_type", "to_dict"))


def shrink_transformers(
    config: Any, layout: VerifiedLayout, before: VerifiedLayout | None = None
) -> tuple[Any, Shrunk]:
    """Return a copy of a model configuration of transformers with small sizes, and what changed.

    Args:
        config: A ``PretrainedConfig``.
        layout: The layout that the smaller model runs on.
        before: The layout that the model is for; left out: ``layout``.
    """
    before, few, shrunk = before or layout, copy.deepcopy(config), {}

    def put(name: str, value: Any) -> None:
        old = getattr(config, name, None)
        if old is not None and old != value:
            setattr(few, name, value)
            shrunk[name] = SizeChange(old, value)

    def has(name: str) -> bool:
        value = getattr(config, name, None)
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    _put_layers(config, layout, before, put, has)
    heads = few_heads(
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        layout.mesh.tp,
        before.mesh.tp,
    )
    put("num_attention_heads", heads[0])
    put("num_key_value_heads", heads[1])
    size = 2 * _HEAD
    put("hidden_size", size * heads[0])
    mla = has("qk_rope_head_dim")
    put("head_dim", _FIXED["qk_rope_head_dim"] if mla else size)
    put("qk_head_dim", _FIXED["qk_rope_head_dim"] + _FIXED["qk_nope_head_dim"])
    for name in ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"):
        put(name, 6 * max(layout.mesh.tp, layout.mesh.etp))
    for name, value in _FIXED.items():
        if has(name):
            put(name, min(getattr(config, name), value))
    _put_experts(config, layout, put, has)
    axes = [size for size in (layout.mesh.tp, layout.mesh.cp) if size > 1]
    if has("vocab_size"):
        put("vocab_size", indivisible(35, axes))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(token := getattr(config, name, None), int) and token >= 35:
                put(name, token % 35)
    if not any(has(name) or getattr(config, name, None) for name in _HIDDEN_DROPOUT):
        for name in _HIDDEN_DROPOUT:
            put(name, _DROPOUT)
    return few, shrunk


def _put_layers(
    config: Any,
    layout: VerifiedLayout,
    before: VerifiedLayout,
    put: Callable[[str, Any], None],
    has: Callable[[str], bool],
) -> None:
    """Keep the first layer of each kind, and further layers until each stage has two."""
    layers = config.num_hidden_layers
    lists = {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == layers
    }
    if has("first_k_dense_replace"):
        put("first_k_dense_replace", 1)
    if has("decoder_sparse_step"):
        put("decoder_sparse_step", min(config.decoder_sparse_step, 2))
    if getattr(config, "mlp_only_layers", None):
        put("mlp_only_layers", [0])
    if has("num_nextn_predict_layers"):
        put("num_nextn_predict_layers", min(config.num_nextn_predict_layers, 1))
    kinds = [tuple(map(str, row)) for row in zip(*lists.values(), strict=True)] or [()] * layers
    chosen = {kinds.index(kind) for kind in kinds}
    wanted = few_layers(layers, max(len(chosen), 2), layout, before)
    rest = [index for index in range(layers) if index not in chosen]
    kept = sorted([*chosen, *rest[: max(wanted - len(chosen), 0)]])
    put("num_hidden_layers", len(kept))
    for name, value in lists.items():
        put(name, [value[index] for index in kept])


def _put_experts(
    config: Any, layout: VerifiedLayout, put: Callable[[str, Any], None], has: Callable[[str], bool]
) -> None:
    name = next((n for n in ("n_routed_experts", "num_local_experts", "num_experts") if has(n)), None)
    if name is None:
        return
    groups = min(config.n_group, 2) if has("n_group") else 1
    put("n_group", groups)
    put("topk_group", min(getattr(config, "topk_group", None) or 1, groups))
    top_k = min(getattr(config, "num_experts_per_tok", 1), 2)
    put("num_experts_per_tok", top_k)
    put(name, few_experts(getattr(config, name), top_k, groups, layout.mesh.ep))


def shrink_model(
    make: Callable[[], nn.Module], layout: VerifiedLayout, before: VerifiedLayout | None = None
) -> ShrunkModel:
    """Return a function that makes a smaller model than ``make``, if the model is one of transformers.

    Parameters that ``make`` froze are frozen in the smaller model. A model whose parameters are not those that its
    configuration describes (adapters were added, layers were exchanged) stays whole, as does any other model.
    """
    try:
        with torch.device("meta"):
            whole = make()
            config: Any = getattr(whole, "config", None)
            if not is_transformers_config(config) or not hasattr(config, "num_attention_heads"):
                return ShrunkModel(make, {})
            kind: Any = type(whole)
            few, shrunk = shrink_transformers(config, layout, before)
            small, again = kind(few), kind(copy.deepcopy(config))
    except Exception:  # classes of any code: what cannot be made smaller runs whole
        return ShrunkModel(make, {})
    before_flags, small_names = _trained(whole), _trained(small)
    names = [name for name, _ in whole.named_parameters()]
    is_as_described = names == [name for name, _ in again.named_parameters()]
    if not is_as_described or not small_names.keys() <= before_flags.keys():
        return ShrunkModel(make, {})
    flags = {
        name: [before[i * (len(before) - 1) // max(len(own) - 1, 1)] for i in range(len(own))]
        for name, own in small_names.items()
        for before in [before_flags[name]]
    }
    dtype, training = next(whole.parameters()).dtype, whole.training

    def make_small() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = kind(copy.deepcopy(few))
        model.to(dtype).train(training)
        waiting = {name: iter(each) for name, each in flags.items()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(next(waiting[_numbered(name)]))
        return model

    return ShrunkModel(make_small, shrunk)


def _trained(model: nn.Module) -> dict[str, list[bool]]:
    """Return whether each parameter is trained, in order, by the name that the layers of one kind share."""
    found: dict[str, list[bool]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(_numbered(name), []).append(parameter.requires_grad)
    return found


def _numbered(name: str) -> str:
    """Return the name of a parameter with each number replaced, so that layers of one kind share a name."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


# Batches -----------------------------------------------------------------------------------------------------------


def shrink_batch(batch: Any, samples: int, tokens: int | None = None, vocab: int | None = None) -> Any:
    """Return a batch with fewer samples, shorter sequences and token ids of a smaller vocabulary.

    Args:
        batch: Tensors in any nesting, with the samples along dim 0.
        samples: Samples to keep; a batch with fewer stays as it is.
        tokens: Tokens of a sequence to keep, where the longest dim 1 of an integer tensor is the sequence; None: all.
        vocab: Size of the vocabulary, into which token ids of integer tensors are folded; None: ids stay. Negative
            numbers, which mark labels to ignore, stay.
    """
    whole: list[Tensor] = []
    tree_map_only(Tensor, whole.append, batch)
    integers = [each for each in whole if _is_integer(each) and each.dim() >= 2]
    length = max((each.shape[1] for each in integers), default=0)

    def smaller(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        tensor = tensor[:samples]
        if tokens is not None and length > tokens:
            for dim in range(1, tensor.dim()):
                if tensor.shape[dim] == length:
                    tensor = tensor.narrow(dim, 0, tokens)
        if vocab is not None and _is_integer(tensor) and tensor.dim() >= 2:
            tensor = torch.where(tensor >= vocab, tensor % vocab, tensor)
        return tensor.contiguous()

    return tree_map_only(Tensor, smaller, batch)


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
