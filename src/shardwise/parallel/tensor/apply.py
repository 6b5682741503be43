"""Makes a model parallel: cuts its parameters and replaces its layers by cut layers.

The model keeps its structure: names, Parameter objects, ties and hooks stay. A parameter on meta becomes a smaller
parameter on meta; a real parameter becomes this rank's piece of the values, which every rank then has.
"""

import inspect
import os.path
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.base.errors import PlanError
from shardwise.base.pytree import tensors_in
from shardwise.comm import duals
from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.comm.operators import ExchangeSite
from shardwise.kernels.cross_entropy import IGNORE
from shardwise.parallel.tensor.layers import (
    ColumnLinear,
    OwnLookup,
    RowLinear,
    SequenceEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from shardwise.parallel.tensor.layout import (
    CutStyle,
    ParameterPlacement,
    StyleTable,
    begins_cut_sequence,
    divided,
    has_known_forward,
    in_region,
    is_transposed,
    places,
    style_of,
    styles,
)
from shardwise.parallel.tensor.loss import vocabulary_cross_entropy
from shardwise.parallel.tensor.outputs import CutOutputs
from shardwise.parallel.tensor.region import ParallelRegion, UnmadeLogits
from shardwise.parallel.tensor.tables import has_causal_loss, is_linear, known_table, whole_table
from shardwise.passes.replay import DrawReplay
from shardwise.plan.placement import AxisCut, Shard, local_shape, pieces
from shardwise.tiers.alike import AlikeStorages


def table_of(model: nn.Module, rows: Mapping[str, str] | None = None, has_stacks: bool = False) -> StyleTable:
    """Return the model's table of styles.

    The first of these applies: the model's own ``tensor_table()``, the table of a known shape, the model's
    Hugging Face plan.

    Args:
        model: The model.
        rows: Rows that are added to the table and replace rows of the same pattern.
        has_stacks: True if the model has stacks of experts, which are cut otherwise; without any known table
            such a model stays whole apart from its experts.

    Returns:
        The table.

    Raises:
        PlanError: If nothing is known of the model and there are no ``rows``.
    """
    own: Callable[[], Mapping[str, str]] | None = getattr(model, "tensor_table", None)
    table = StyleTable(own()) if own is not None else known_table(model)
    if table is None and has_stacks:
        table = whole_table(model)
    if table is None and not rows:
        raise PlanError(
            f"tensor: nobody knows how to cut a {type(model).__name__}: it has no tensor_table() method, is of none of "
            "the known shapes (LLaMA, GPT-2, BERT, BART, OPT, BLOOM, Falcon, Mamba and their kin) and brings no plan "
            "of its own; give tensor.table, {pattern of module names: style}, as in {'layers.*.up': 'column', "
            "'layers.*.down': 'row'} (shardwise.parallel.tensor.layout lists the styles)"
        )
    table = table or StyleTable()
    table = replace(table, rows=dict(table.rows) | dict(rows or {}))
    return replace(table, sequence=table.sequence and begins_cut_sequence(model, table))


def make_parallel(
    model: nn.Module,
    table: StyleTable,
    group: Group,
    sequence: bool,
    region: ParallelRegion | None = None,
    replay: DrawReplay | None = None,
) -> dict[str, ParameterPlacement]:
    """Cut a model in place over the ranks of a group.

    Args:
        model: The model.
        table: The styles of its modules.
        group: The "tp" ranks.
        sequence: True to cut the sequence between the cut layers, if the table allows a cut.
        region: The region of the model; None makes a new one.
        replay: The replay of the region that is made; not used if ``region`` is given.

    Returns:
        The placement of every parameter, by each of its names.

    Raises:
        PlanError: If the table does not fit the model. Placements are checked before the model is changed.
    """
    placed = places(model, table, group.size, sequence)
    if group.size == 1:
        return placed
    _check_dropout(model)
    by_module = styles(model, table)
    region = region or ParallelRegion(group, sequence and table.sequence, replay)
    done: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) not in done:
            done.add(id(parameter))
            parameter.data = local_piece(parameter.data, placed[name], group.index, group.size)
    replaced: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        style = by_module.get(name)
        if style is None:
            continue
        if id(module) not in replaced:
            replaced[id(module)] = _parallel(name, module, style, region, in_region(name, by_module))
        if replaced[id(module)] is not module:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, replaced[id(module)])
    if region.alike is not None:
        _note_alike(model, by_module, region, region.alike)
    _make_outputs_whole(model, by_module, region)  # before the region's own hooks, which end the pass
    _watch(model, region, table.causal_loss and any(style.kind == "head" for style in by_module.values()))
    return placed


def _make_outputs_whole(model: nn.Module, by_module: Mapping[str, CutStyle], region: ParallelRegion) -> None:
    """Make every module around all cut layers return whole tensors."""
    cut = [
        name.split(".")
        for name, style in by_module.items()
        if style.kind not in (None, "replicate") or style.flags & {"enter", "leave", "region"}
    ]
    if not cut:
        return
    heads_in_order = all(len(style.parts) <= 3 for style in by_module.values())
    prefix = list(os.path.commonprefix(cut))
    for length in range(len(prefix), -1, -1):
        name = ".".join(prefix[:length])
        CutOutputs(model.get_submodule(name), name, region, heads_in_order)


def _watch(model: nn.Module, region: ParallelRegion, knows_loss: bool) -> None:
    if knows_loss:
        causal: Any = model
        causal.loss_function = _causal_loss(region, causal.loss_function)
    region.watch(model, knows_loss)


def with_known_loss(model: nn.Module) -> nn.Module | None:
    """Return the only module in ``model`` (or the model itself) whose head's output goes to a known loss.

    Args:
        model: The model.

    Returns:
        The module, or None if there is none or several.
    """
    found = [each for each in model.modules() if _has_head(each) and has_causal_loss(each)]
    return found[0] if len(found) == 1 else None


def _has_head(module: nn.Module) -> bool:
    return is_linear(module, "lm_head") or isinstance(getattr(module, "lm_head", None), VocabularyHead)


def hold_head(model: nn.Module) -> None:
    """Replace the head of an uncut model by one that can compute the loss by tiles, as the head of a cut model does.

    Args:
        model: A module that ``with_known_loss`` returned.
    """
    owner: Any = model
    if isinstance(owner.lm_head, VocabularyHead):
        return  # an earlier engine has replaced the head
    head, region = owner.lm_head, ParallelRegion(Group.alone("tp"), False)
    rows = slice(0, head.out_features)
    owner.lm_head = _with_hooks_of(
        head, VocabularyHead(head, "lm_head", region, rows, rows.stop, sees_whole=True)
    )
    _watch(model, region, True)


@torch.no_grad()
def local_piece(full: Tensor, place: ParameterPlacement, index: int, ranks: int) -> Tensor:
    """Return a copy of a rank's piece of a parameter, padded with zeros if the ranks do not divide the parameter.

    Args:
        full: The whole parameter.
        place: The placement of the parameter.
        index: Index of the rank on the "tp" axis.
        ranks: Size of the "tp" axis.

    Returns:
        The piece, or ``full`` itself if the parameter is not cut.
    """
    if not isinstance(place.placement, Shard):
        return full
    where, dim = place.placement, place.placement.dim
    shape = local_shape(place.shape, [AxisCut(where, index, ranks)])
    if full.is_meta:
        return full.new_empty(shape)
    local, place_in_it = full.new_zeros(shape), 0
    for piece in pieces(where, full.shape[dim], index, ranks):
        length = piece.stop - piece.start
        local.narrow(dim, place_in_it, length).copy_(full.narrow(dim, piece.start, length))
        place_in_it += length
    return local


# Modules -----------------------------------------------------------------------------------------------------------


def _parallel(
    name: str, module: nn.Module, style: CutStyle, region: ParallelRegion, inside: bool
) -> nn.Module:
    """Return the replacement of ``module``: a cut layer, or the module itself with changed attributes and hooks."""
    ranks = region.group.size
    for attribute in style.attributes:
        _divide(name, module, attribute, ranks)
    new = _with_hooks_of(module, _layer(name, module, style, region, inside))
    for argument, heads in style.arguments:
        _cut_argument(name, new, argument, heads, region.group)
    if "again" in style.flags:
        site = ExchangeSite(region.group, name)
        new.register_forward_hook(lambda module, args, output: duals.copy(output, site))
    if "region" in style.flags:
        _on_input(new, _entering(name, region, style.sees_whole))
    if region.sequence and "enter" in style.flags:
        _on_input(new, _beginning(name, region))
    if region.sequence and "leave" in style.flags:
        new.register_forward_hook(_leaving(name, region))
    return new


def _with_hooks_of(module: nn.Module, new: nn.Module) -> nn.Module:
    if new is not module:
        new._forward_hooks, new._forward_pre_hooks = module._forward_hooks, module._forward_pre_hooks
        new._forward_hooks_with_kwargs = module._forward_hooks_with_kwargs
        new._forward_pre_hooks_with_kwargs = module._forward_pre_hooks_with_kwargs
        new._forward_hooks_always_called = module._forward_hooks_always_called
        new._backward_hooks, new._backward_pre_hooks = module._backward_hooks, module._backward_pre_hooks
        new._is_full_backward_hook = module._is_full_backward_hook
    return new


def _layer(name: str, module: nn.Module, style: CutStyle, region: ParallelRegion, inside: bool) -> nn.Module:
    whole, transposed = style.sees_whole, is_transposed(module)
    if style.kind == "column":
        return ColumnLinear(module, name, region, whole, transposed, enters=not inside)
    if style.kind == "row":
        return RowLinear(module, name, region, whole, transposed)
    if style.kind == "vocabulary":
        assert isinstance(module, nn.Embedding), "the layout has checked it"
        rows = _rows(module.num_embeddings, region.group)
        if not has_known_forward(module):
            OwnLookup(module, name, region, rows)
            if not whole:
                begin = _beginning(name, region)
                module.register_forward_hook(lambda module, args, output: begin(output))
            return module
        return VocabularyEmbedding(module, name, region, rows, module.num_embeddings, whole)
    if style.kind == "head":
        assert isinstance(module, nn.Linear), "the layout has checked it"
        rows = _rows(module.out_features, region.group)
        return VocabularyHead(module, name, region, rows, module.out_features, whole)
    if style.kind == "sequence" and isinstance(module, nn.Embedding) and not whole:
        if not has_known_forward(module):
            raise PlanError(
                f"tensor.table: {name}: style sequence cannot cut the ids of a {type(module).__name__}, whose "
                f"forward is its own; keep its sequence whole with {{{name!r}: 'sequence whole'}}, or set "
                "tensor.sequence_parallel: false"
            )
        return SequenceEmbedding(module, name, region)
    return module


def _rows(vocabulary: int, group: Group) -> slice:
    (piece,) = pieces(Shard(0), vocabulary, group.index, group.size)
    return slice(piece.start, piece.stop)


def _divide(name: str, module: nn.Module, attribute: str, ranks: int) -> None:
    key, _, ratio = attribute.partition("=")
    if ratio:
        above, below = (divided(int(number), ranks) for number in ratio.split("/"))
        setattr(module, key, above // below)
        return
    value = getattr(module, key)
    if isinstance(value, tuple) and all(isinstance(number, int) for number in value):
        setattr(module, key, tuple(divided(number, ranks) for number in value))
    elif isinstance(value, int):
        setattr(module, key, divided(value, ranks))
    else:
        raise PlanError(f"tensor.table: {name}.{key} is {value!r}; expected a number, or a tuple of numbers")


def _cut_argument(name: str, module: nn.Module, argument: str, heads: int, group: Group) -> None:
    """Pass only this rank's heads of ``argument`` to ``module.forward``.

    An argument that is not a tensor, or has one value for all heads, is passed unchanged.
    """
    signature, held = inspect.signature(module.forward), heads // group.size
    site = ExchangeSite(group, name)

    def own(value: Tensor) -> Tensor:
        dim = 1 if value.dim() == 4 else 0
        if dim == 1 and value.shape[dim] == 1:
            return value  # one value for all heads
        if value.shape[dim] % heads:
            raise PlanError(
                f"tensor.table: {name}: argument {argument!r} is {list(value.shape)}; expected {heads} heads in dim "
                f"{dim}"
            )
        if value.requires_grad:
            value = duals.copy(value, site)
        apart = value.unflatten(dim, (-1, heads)).narrow(dim + 1, group.index * held, held)
        return apart.flatten(dim, dim + 1)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        if isinstance(given.arguments.get(argument), Tensor):
            given.arguments[argument] = own(given.arguments[argument])
        return given.args, given.kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _entering(name: str, region: ParallelRegion, sees_whole: bool) -> Callable[[Tensor], Tensor]:
    site = ExchangeSite(region.group, name)

    def enter(x: Tensor) -> Tensor:
        if not sees_whole and region.cut:
            return duals.gather(x, site)
        return duals.copy(region.inward(x, sees_whole), site)

    return enter


def _beginning(name: str, region: ParallelRegion) -> Callable[[Tensor], Tensor]:
    site = ExchangeSite(region.group, name)

    def begin(x: Tensor) -> Tensor:
        return duals.cut(x, site) if region.cut else region.outward(x, sees_whole=False)

    return begin


def _note_alike(
    model: nn.Module, by_module: Mapping[str, CutStyle], region: ParallelRegion, alike: AlikeStorages
) -> None:
    """Report to ``alike`` the activations that are equal on all ranks because of the cut.

    These are whole-sequence inputs of cut layers, and the inputs and outputs of the modules with whole
    parameters between them. The saved tensors of such modules are reported too.
    """

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        if isinstance(first, Tensor) and not (isinstance(module, ColumnLinear) and module.cut):
            alike.note(first)

    def is_whole(sees_whole: bool) -> bool:
        return sees_whole or not region.cut

    def begins(sees_whole: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = list(tensors_in((args, kwargs)))
        if len(given) == 1 and is_whole(sees_whole):
            alike.note(given[0])
            alike.enter()

    def ends(sees_whole: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(list(tensors_in((args, kwargs)))) == 1 and is_whole(sees_whole):
            alike.leave()
            if isinstance(output, Tensor):
                alike.note(output)

    for name, module in model.named_modules():
        style = style_of(name, by_module)
        enters = isinstance(module, ColumnLinear) and module.enters
        if enters or (name in by_module and "region" in by_module[name].flags):
            module.register_forward_pre_hook(uncompiled(entered), with_kwargs=True)
        elif style is not None and style.kind == "sequence" and next(module.children(), None) is None:
            before, behind = partial(begins, style.sees_whole), partial(ends, style.sees_whole)
            module.register_forward_pre_hook(uncompiled(before), with_kwargs=True)
            module.register_forward_hook(uncompiled(behind), with_kwargs=True)


def _on_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to the first argument of ``module``, its activation."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _leaving(name: str, region: ParallelRegion) -> Callable[..., Any]:
    site = ExchangeSite(region.group, name)

    def end(x: Tensor) -> Tensor:
        return duals.join(x, site) if region.cut else region.inward(x, sees_whole=False)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (end(output[0]), *output[1:])
        return end(output)

    return after


# Models of transformers --------------------------------------------------------------------------------------------


def _causal_loss(region: ParallelRegion, uncut: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return transformers' loss of a causal language model for cut logits or logits by tiles.

    With whole logits the loss calls ``uncut``.
    """
    site = ExchangeSite(region.group, "the loss")

    @wraps(uncut)
    def loss(
        logits: Tensor | UnmadeLogits,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORE,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not (isinstance(logits, UnmadeLogits) or region.logits_cut):
            return uncut(
                logits,
                labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            assert labels is not None, "the model was called with labels"
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.masked_fill(shift_labels == ignore_index, IGNORE)
        if isinstance(logits, UnmadeLogits):
            return logits.loss(targets, num_items_in_batch)
        first = _rows(vocab_size, region.group).start
        return vocabulary_cross_entropy(logits, targets, first, vocab_size, site, num_items_in_batch)

    return loss


def _check_dropout(model: nn.Module) -> None:
    """Check that the model has no dropout on attention weights.

    The heads are cut, so such a dropout would draw other numbers than on one process.
    """
    given = getattr(model, "config", None)
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(given, key, 0):
            raise PlanError(
                f"tensor: config.{key} is {getattr(given, key)}: dropout inside attention depends on which heads "
                f"a rank holds, so numbers would depend on tp; set {key}=0.0 (dropout elsewhere stays)"
            )
