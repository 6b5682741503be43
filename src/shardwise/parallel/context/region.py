"""Region: the cut of the running pass, which the model's input, positions, dropout and attention share.

A hook on the model's root cuts the tensors of a call along their tokens before any module runs: tokens, targets and
whatever else has one number for each token. ``documents`` of a packed batch, and ``position_ids`` of transformers that
begin anew, are taken out of the call; the exchange of keys follows from them. Every layer that works on single tokens
then works on this rank's tokens, and needs no change. Attention asks the region for its exchange of keys.

    call                                      pass
    with targets                              cut; the loss is the mean over this rank's own targets
    without targets                           cut; outputs are joined over the ranks (outputs.py)
    with a cache, positions, padding or       whole on every rank, as generation needs it
      other masks, without gradients
    ``engine.run``                            whole on every rank

The loss needs no collective. A rank that shares its sequences with others is a data-parallel rank with other tokens:
its loss counts by the number of its own targets (engine/parts/weighing.py), so that the sum over all ranks is the mean
over all targets of the batch.

Cost:   one index of each tensor of the batch.
Shapes: B sequences, T tokens, t tokens of this rank.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError, UsageError
from shardwise.base.ragged import Ragged
from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.kernels.attention import causal_attention
from shardwise.kernels.attention_view import AttentionView, PackedDocuments, Starts, packed_documents
from shardwise.parallel.context.attention import AttentionSite, context_attention
from shardwise.parallel.context.choice import KeysBy
from shardwise.parallel.context.keys import plan_exchange
from shardwise.parallel.context.layout import ContextLayout, TokenRange, cut_in_groups
from shardwise.parallel.context.outputs import TokenOutputs, join_tokens, own_tokens
from shardwise.parallel.context.packing import documents_of_positions
from shardwise.parallel.context.ring import plan_ring
from shardwise.passes.replay import DrawReplay

TOKENS, _TARGETS = ("tokens", "input_ids"), ("targets", "labels")
"""Arguments with the tokens, and with the targets, of a call."""
_DOCUMENTS, _POSITIONS = "documents", "position_ids"
_IGNORE = -100
_LEAST_SHARE = 1e-12
"""Share of a rank without targets in a divisor, which may not be 0."""
_FILL: dict[str, float | None] = {"targets": _IGNORE, "labels": _IGNORE, "tokens": None, "input_ids": None}
"""Value of padding; 0 for tensors that are not named, and for None the last token of the sequence, so that no row of an
embedding table is read that the batch does not read."""
_NOT_CUT = ("cache", "past_key_values", "position_ids", "positions", "shift_labels")
"""Arguments that a cut computes itself, or that hold tokens of which the cut knows nothing."""
_SINGLE = ("use_cache", "logits_to_keep", "output_attentions")
"""Arguments with which an output is not one row for each token."""
_cut_cached = lru_cache(maxsize=64)(cut_in_groups)
"""``cut_in_groups`` for arguments that came before: every pass of one length is cut alike."""


class ContextRanks(NamedTuple):
    """The ranks that share a sequence, and the way in which they exchange heads and keys."""

    all: Group
    heads: Group
    """Neighbours that exchange heads for tokens; one rank if none do."""
    tokens: Group
    """The ranks between which keys travel, one of each group of such neighbours."""
    keys: KeysBy = "planned"


class SequenceCut(NamedTuple):
    """The cut of one pass."""

    layout: ContextLayout
    """Cut over all ranks that share a sequence."""
    whole: ContextLayout
    """Cut over the groups between which keys travel."""
    starts: Starts
    """First token of each document, for each sequence."""

    def positions(self, places: Tensor) -> Tensor:
        """Return the positions in their documents of the tokens at ``places`` [t]: [t], or [B, t] for packed ones."""
        if all(len(each) == 1 for each in self.starts):
            return places
        return PackedDocuments(self.starts, self.layout.length).positions().index_select(1, places)


@dataclass
class FunctionCalls:
    """The calls of attention functions in the running pass of a model of another kind."""

    positions: tuple[str, ...]
    """Arguments of the model that get the positions of this rank's tokens."""
    count: int = 0
    """Calls so far."""

    def check(self, model: nn.Module) -> None:
        """Raise UsageError if a cut pass has ended without a call; a stage of a pipeline may have none."""
        if not self.count and not hasattr(model, "stage_has_ended"):
            raise UsageError(
                f"mesh.cp: the forward of {type(model).__name__} calls no F.scaled_dot_product_attention, so its "
                "tokens would not see those of other ranks: it has no attention, or one of its own; set mesh.cp: 1"
            )


class ContextRegion:
    """State of the running pass of a model whose sequences are cut.

    Args:
        ranks: The ranks that share a sequence.
        parts: Equal parts into which tensor parallelism cuts a rank's tokens further.
        replay: State that a block computed again restores.
        withhold: Makes a stand-in for an output, whose use raises the error with a given text.
    """

    is_cutting = False
    """True while a pass of any model runs whose sequences are cut."""

    def __init__(
        self,
        ranks: ContextRanks,
        parts: int,
        replay: DrawReplay,
        withhold: Callable[[str], Any] | None = None,
    ) -> None:
        self._ranks = ranks
        self.group = ranks.all
        self.outputs = TokenOutputs(ranks.all, withhold)
        """What a pass returns of the outputs of its tokens."""
        self._parts = parts
        self._replay = replay
        self._now: SequenceCut | None = None
        self._model: nn.Module | None = None
        self.shifts = False
        """True if the model shifts its labels inside the loss, so that a cut has to shift them before."""
        self.functions: FunctionCalls | None = None
        """Calls of attention functions of a model of another kind than ours and transformers'; None for these."""
        self.has_router_loss = False
        """True if the model returns logits of routers, which are no tensors of single tokens."""

    @property
    def cut(self) -> SequenceCut | None:
        """The cut of the running pass, or of the pass that a block computed again belongs to; None if it is whole."""
        return self._replay.keep("cut of the sequence", lambda: self._now)

    @property
    def is_running(self) -> bool:
        """True between the start and the end of a cut pass of the model."""
        return self._now is not None

    def join_rows(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return rows of the tokens of all ranks in the order of the sequences: [B·t, E] of each -> [B·T, E].

        Args:
            rows: Tensors with a row for each of this rank's tokens, padding included, which is left out of the result.

        Raises:
            UsageError: if there is another number of rows.
        """
        assert self._now is not None, "a cut pass is running"
        layout, sequences = self._now.layout, len(self._now.starts)
        for each in rows:
            if each.dim() != 2 or len(each) != sequences * layout.tokens:
                raise UsageError(
                    f"mesh.cp: the logits of a router have the shape {list(each.shape)}; expected a row for each of "
                    f"this rank's {sequences} x {layout.tokens} tokens, of which the loss of routers counts those of "
                    "all ranks; set output_router_logits to False, or mesh.cp: 1"
                )
        widths = [each.shape[1] for each in rows]
        together = torch.cat([each.view(sequences, layout.tokens, -1) for each in rows], 2)
        whole = join_tokens(together, layout, self.group).flatten(0, 1)
        return whole.split(widths, 1)

    def site(self, name: str, window: int | None = None) -> AttentionSite | None:
        """Return the exchange of one attention layer; None in a pass that is not cut.

        Args:
            name: Name of the layer.
            window: Number of keys that a token sees at most, or None.
        """
        cut = self.cut
        if cut is None:
            return None
        heads, tokens = self._ranks.heads, self._ranks.tokens
        plan = plan_ring if self._ranks.keys == "ring" else plan_exchange
        return AttentionSite(tokens, plan(cut.whole, tokens.index, cut.starts, window), name, heads)

    def tokens(self) -> tuple[TokenRange, ...] | None:
        """Return the ranges of tokens that this rank has in the running pass; None in a pass that is not cut."""
        cut = self.cut
        return None if cut is None else cut.layout.ranges[self.group.index]

    def places(self) -> Tensor | None:
        """Return the positions of this rank's tokens [t] in the running forward pass, -1 for padding; None if whole."""
        if self._now is None:
            return None
        layout = self._now.layout
        places = layout.places(self.group.index)
        return torch.where(places < layout.length, places, -1)

    def share_of(self, targets: Tensor, batch: Any = None) -> float:
        """Return the share of the targets [B, T], those of -100 left out, that this rank's part of ``batch`` has."""
        given = batch if isinstance(batch, Mapping) else {}
        return self._share(targets, self._cut(targets.shape, given).layout)

    def keeps_apart(self, batch: Any) -> bool:
        """Return whether ``batch`` has documents that positions of a model of transformers tell apart."""
        positions = batch.get(_POSITIONS) if self.shifts and isinstance(batch, Mapping) else None
        return isinstance(positions, Tensor) and bool((positions[..., 1:] == 0).any())

    def _share(self, targets: Tensor, layout: ContextLayout) -> float:
        places = layout.places(self.group.index)
        counted = (shifted(targets) if self.shifts else targets) != _IGNORE
        own = counted[:, places[places < targets.shape[1]].to(targets.device)]
        return float(own.sum()) / max(float(counted.sum()), 1.0)

    def _cut(self, shape: Sequence[int], given: Mapping[str, Any]) -> SequenceCut:
        sequences, length = shape
        starts: Starts = ((0,),) * sequences
        if self.functions is None and given.get(_DOCUMENTS) is not None:
            starts = packed_documents(given[_DOCUMENTS], shape).starts
        elif self.shifts and given.get(_POSITIONS) is not None:
            starts = documents_of_positions(given[_POSITIONS], shape, given.get("attention_mask")).starts
        groups, members = self._ranks.tokens.size, self._ranks.heads.size
        whole, layout = _cut_cached(length, groups, members, self._parts, starts)
        return SequenceCut(layout, whole, starts)

    def watch(self, model: nn.Module) -> None:
        """Register the hooks on the root that cut a call's tensors and end the pass."""
        signature = inspect.signature(model.forward)
        self._model = model

        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = dict(signature.bind_partial(*args, **kwargs).arguments)
            given |= given.pop("kwargs", {})
            self._now = self._cut_of(given)
            self.outputs.begin(None if self._now is None else self._now.layout, _has_targets(given))
            if self.functions is not None:
                self.functions.count = 0
            ContextRegion.is_cutting = self._now is not None
            return None if self._now is None else ((), self._pieces(given, self._now))

        def end(module: nn.Module, args: Any, output: Any) -> Any:
            cut, self._now, ContextRegion.is_cutting = self._now, None, False
            if cut is None or output is None or getattr(module, "stage_has_ended", False):
                return output
            if self.functions is not None:
                self.functions.check(module)
            return self.outputs.of(output)

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)

    def _cut_of(self, given: Mapping[str, Any]) -> SequenceCut | None:
        trains = torch.is_grad_enabled()
        is_plain = _is_plain(given) and not self.has_router_loss
        if self._replay.stays_whole or not (trains or _has_targets(given) or is_plain):
            return None
        tokens = next((given[name] for name in TOKENS if isinstance(given.get(name), Tensor)), None)
        if tokens is None and not trains:
            return None
        if tokens is None or tokens.dim() != 2:
            raise UsageError(
                "mesh.cp cuts sequences of tokens [B, T], and this call of the model has none; give "
                f"{' or '.join(TOKENS)}, or set mesh.cp: 1"
            )
        asked = [name for name in _uncut(given) if not self._cuts_given(name, given)]
        if asked:
            raise UsageError(
                f"mesh.cp: a call was given {', '.join(asked)}, which the cut of the sequences computes itself or "
                "cannot cut; leave it out, or set mesh.cp: 1"
            )
        _refuse_features(given, tokens)
        check = getattr(self._model, "check_tokens", None)
        if check is not None:  # the model itself sees the length of this rank's part alone
            check(tokens.shape[1])
        return self._cut(tokens.shape, given)

    def _cuts_given(self, name: str, given: Mapping[str, Any]) -> bool:
        """Return True if an argument has positions that are cut, of a model of another kind [B, T] as they are."""
        if self.shifts:
            return name == _POSITIONS
        positions = () if self.functions is None else self.functions.positions
        return name in positions and isinstance(given[name], Tensor) and given[name].dim() == 2

    def _pieces(self, given: Mapping[str, Any], cut: SequenceCut) -> dict[str, Any]:
        layout = cut.layout
        places = layout.places(self.group.index)

        def piece(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != layout.length:
                return value
            return own_tokens(value, layout, self.group.index, _FILL.get(name, 0))

        here = places.clamp(max=layout.length - 1)
        if self.functions is not None:
            pieces = {name: piece(name, value) for name, value in given.items()}
            asked = [name for name in self.functions.positions if given.get(name) is None]
            rows = len(next(given[name] for name in TOKENS if given.get(name) is not None))
            shapes = {"positions": here, "position_ids": here.expand(rows, -1)}
            # A model that learns its positions from one of its arguments gets them by that one.
            return pieces | {
                name: shapes[name] for name in asked if len(asked) == len(self.functions.positions)
            }
        positions = cut.positions(here)
        if not self.shifts:
            cut_off = {name: piece(name, value) for name, value in given.items() if name != _DOCUMENTS}
            return cut_off | {"positions": positions}
        _refuse_padding(given.get("attention_mask"))
        left_out = ("attention_mask", _POSITIONS)
        given = {name: value for name, value in given.items() if name not in left_out}
        number = given.get("num_items_in_batch")
        if (
            number is not None and given.get("labels") is not None
        ):  # the divisor of the loss, of which this rank's targets are a share
            given["num_items_in_batch"] = number * max(self._share(given["labels"], layout), _LEAST_SHARE)
        given["use_cache"] = False  # a cache would hold the keys of this rank's tokens alone
        if given.get("labels") is not None:
            given["labels"] = shifted(given["labels"])
        pieces = {name: piece(name, value) for name, value in given.items()}
        if pieces.get("labels") is not None:
            pieces["shift_labels"] = pieces["labels"]
        return pieces | {_POSITIONS: positions.to(given["input_ids"].device).view(-1, layout.tokens)}


def _refuse_features(given: Mapping[str, Any], tokens: Tensor) -> None:
    """Raise UsageError if a batch has features of embedding tables with a list of keys for each token."""
    for name, value in given.items():
        features = value if isinstance(value, Mapping) else {}
        for feature, each in features.items():
            if isinstance(each, Ragged) and each.samples != len(tokens):
                raise UsageError(
                    f"mesh.cp: feature {feature!r} in {name} has {each.samples} lists of keys for {len(tokens)} "
                    "sequences, so the lists of this rank's tokens are not known; make features of single tokens from "
                    "the tokens inside the model's forward, or set mesh.cp: 1"
                )


def _uncut(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a call that a cut computes itself or cannot cut.

    Shifted labels without labels are those of a loss outside the model, which gets whole logits.
    """
    named = [name for name in _NOT_CUT if given.get(name) is not None]
    return [name for name in named if name != "shift_labels" or _has_targets(given)]


def _has_targets(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in _TARGETS)


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Return True if a call without gradients can be cut: it has no cache, no positions and no padding."""
    asked = _uncut(given) or any(map(given.get, _SINGLE))
    return not asked and _is_full(given.get("attention_mask"))


def _is_full(attention_mask: Any) -> bool:
    """Return True if a mask has one number for each token, none of which is 0, or if there is none."""
    if attention_mask is None:
        return True
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and bool(attention_mask.all())


def shifted(labels: Tensor) -> Tensor:
    """Return labels [B, T] in the places of the tokens that predict them."""
    return nn.functional.pad(labels, (0, 1), value=_IGNORE)[:, 1:]


def _refuse_padding(attention_mask: Any) -> None:
    """Raise UsageError if a batch has padding, which the cut would take for tokens, or a mask of another kind."""
    if not _is_full(attention_mask):
        raise UsageError(
            "mesh.cp: the batch has an attention_mask with zeros, or with more than one number a token. No token sees "
            "padding behind it, so leave the mask out and give padding labels of -100; padding in front of tokens and "
            "masks of other kinds are not served along cp"
        )


class ContextAttention:
    """The attention function of one layer: over all ranks in a cut pass, of this rank alone in a whole one.

    Args:
        region: The state of the running pass.
        name: Name of the layer.
    """

    def __init__(self, region: ContextRegion, name: str) -> None:
        self._region = region
        self._name = name

    @uncompiled
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, view: AttentionView | None = None) -> Tensor:
        """Return the attention of queries [B, H, t, K] to keys and values [B, N, t, K] of all ranks: [B, H, t, K]."""
        site = self._region.site(self._name, None if view is None else view.window)
        if site is None:
            return causal_attention(q, k, v, view)
        return context_attention(q, k, v, None if view is None else view.sink, site)


def cut_attention(model: nn.Module, region: ContextRegion, is_layer: Callable[[nn.Module], bool]) -> None:
    """Give every attention layer the attention over all ranks.

    Args:
        model: The whole model.
        region: The state of its passes.
        is_layer: Function that returns True for a layer whose attribute ``attention`` is an attention function.

    Raises:
        PlanError: if a layer has another attention function than the causal one, or if the model takes no positions.
    """
    if "positions" not in inspect.signature(model.forward).parameters:
        raise PlanError(
            f"mesh.cp: the forward of {type(model).__name__} has no argument 'positions', so it would take the tokens "
            "of a part for the first ones; set mesh.cp: 1"
        )
    for name, module in [each for each in model.named_modules() if is_layer(each[1])]:
        if module.attention is not causal_attention:
            raise PlanError(
                f"mesh.cp: {name} has an attention function of its own, which no exchange of keys along cp computes; "
                "set mesh.cp: 1"
            )
        module.attention = ContextAttention(region, name)  # type: ignore[assignment]
