"""The cut layers: a pair of collectives around local matrix products.

    ColumnLinear   y_i = f(x) W_iᵀ + b_i         f: copy, or gather of a cut sequence
    RowLinear      y   = g(sum x_i W_iᵀ) + b     g: reduce, or scatter to a cut sequence
    VocabularyEmbedding, VocabularyHead          the same with rows of the vocabulary

Between a column and a row layer everything is local. Under sequence parallelism a column layer saves the shard of its
input and gathers the input again in its backward pass, while the product for the input's gradient runs. In the forward
pass the exchange may run beside the product too, in pieces (overlap.py).

In fp8 (``precision.linear``) the collective and the product are operations of their own, and the gathered input is kept
in fp8 for the backward pass.

The cut layers take the parameters of the layers that they replace, under the same names. They do not sum gradients of
parameters over "tp": the layout states which gradients are addends, and the engine sums those.

Papers: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
Cost:   the collectives named above, each P (tp-1)/tp elements a rank for P = B T D or B T F, an all-reduce twice that.
Shapes: B batch, T sequence, D inputs, F outputs, V vocabulary, tp ranks; weights [F/tp, D], [F, D/tp], [V/tp, D].
"""

import inspect
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from shardwise.base.errors import PlanError
from shardwise.comm import duals
from shardwise.comm.operators import ExchangeSite, exchange_operator
from shardwise.kernels.deferred import (
    Deferral,
    DefersProducts,
    deferral_of,
    deferred_linear,
    later,
    weight_product,
)
from shardwise.kernels.head_loss import Change, LossTile
from shardwise.kernels.operation import operation
from shardwise.parallel.tensor.loss import vocabulary_cross_entropy, vocabulary_head_loss
from shardwise.parallel.tensor.overlap import ProductSite, gathered_product, product_over_ranks
from shardwise.parallel.tensor.region import ParallelRegion, UnmadeLogits
from shardwise.precision.fp8 import CutProducts


class _CutLayer(nn.Module, DefersProducts):
    """Base class of the cut layers: the parameters of the replaced layer, and the region."""

    def __init__(self, replaced: nn.Module, name: str, region: ParallelRegion, sees_whole: bool) -> None:
        super().__init__()
        for key, parameter in replaced._parameters.items():
            self.register_parameter(key, parameter)
        self.train(replaced.training)
        self.name = name
        self.region = region
        self.site = ProductSite(region.group, name, region.overlap)
        self.sees_whole = sees_whole
        self.fp8: CutProducts | None = None
        """The product in fp8, set from outside; None for a product in the dtype of the activations."""
        self.used_by: tuple[nn.Module, ...] = ()
        """The surrounding module whose forward uses this layer's parameters too.

        In a tuple, so that ``nn.Module`` does not register it as a child."""

    @property
    def cut(self) -> bool:
        """True while the activations around this layer hold a cut sequence."""
        return not self.sees_whole and self.region.cut

    def _later(self, x: Tensor, transposed: bool = False) -> Deferral | None:
        """Return where the gradient of the weight waits for W, or None if it does not."""
        return deferral_of(self.products, self._parameters["weight"], x, _transpose if transposed else None)

    def extra_repr(self) -> str:
        """Return the weight's shape and the number of ranks for ``repr``."""
        weight = self._parameters["weight"]
        assert weight is not None, "a cut layer has a weight"
        return f"{list(weight.shape)}, 1 of {self.region.group.size}"


def _transpose(gradient: Tensor) -> Tensor:
    return gradient.mT


class ColumnLinear(_CutLayer):
    """A linear layer with cut outputs.

    Args:
        replaced: The linear layer, whose parameters are cut already.
        name: Name of the layer in the model.
        region: The region of the model.
        sees_whole: True if the layer works on whole sequences, even if others work on cut sequences.
        transposed: True if the weight is stored as [inputs, outputs].
        enters: False if a surrounding module has entered the cut layers already.

    Shape:
        [B, T, D] -> [B, T, F/tp].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        replaced: nn.Module,
        name: str,
        region: ParallelRegion,
        sees_whole: bool = False,
        transposed: bool = False,
        enters: bool = True,
    ) -> None:
        super().__init__(replaced, name, region, sees_whole)
        self.transposed = transposed
        self.enters = enters
        self.is_local = False
        """True while a surrounding module runs the collective, so that the layer computes only the product."""
        self.out_features = self.weight.shape[1 if transposed else 0]

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs [B, T, F/tp]."""
        if self.fp8 is not None:
            y = self.fp8(self.enter(x), self.weight)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        weight = self.weight.mT if self.transposed else self.weight
        if self.is_local or not self.enters:
            return deferred_linear(x, self.weight, self.bias, self.products, self.transposed)
        x = self.region.inward(x, self.sees_whole)
        return column(x, weight, self.bias, self.site, self.cut, self._later(x, self.transposed))

    def enter(self, x: Tensor) -> Tensor:
        """Return the input [B, T, D] of a local product: the gathered or copied activation."""
        if not self.enters:
            return x
        x = self.region.inward(x, self.sees_whole)
        return (duals.gather if self.cut else duals.copy)(x, self.site)


class RowLinear(_CutLayer):
    """A linear layer with cut inputs, whose output is the sum over the ranks.

    Args:
        replaced: The linear layer, whose parameters are cut already.
        name: Name of the layer in the model.
        region: The region of the model.
        sees_whole: True if the layer works on whole sequences, even if others work on cut sequences.
        transposed: True if the weight is stored as [inputs, outputs].

    Shape:
        [B, T, D/tp] -> [B, T, F], or [B, T/tp, F] with a cut sequence.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        replaced: nn.Module,
        name: str,
        region: ParallelRegion,
        sees_whole: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__(replaced, name, region, sees_whole)
        self.transposed = transposed
        self.is_local = False
        """True while a surrounding module runs the collective, so that the layer computes only this rank's addend."""
        self.out_features = self.weight.shape[1 if transposed else 0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks [B, T, F], cut along T with a cut sequence."""
        if self.fp8 is not None:
            return self.leave(self.fp8(x, self.weight))
        weight = self.weight.mT if self.transposed else self.weight
        if self.is_local:
            return deferred_linear(x, self.weight, None, self.products, self.transposed)
        y = _product(_RowProduct, x, weight, None, self.site, self.cut, self._later(x, self.transposed))
        return self._end(y)

    def leave(self, addend: Tensor) -> Tensor:
        """Return the layer's output from this rank's local product: summed or scattered, with the bias."""
        return self._end((duals.scatter if self.cut else duals.reduce)(addend, self.site))

    def _end(self, y: Tensor) -> Tensor:
        y = self.region.outward(y, self.sees_whole)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyEmbedding(_CutLayer):
    """Rows [first, last) of an embedding's vocabulary.

    Args:
        replaced: The embedding, whose weight is cut already.
        name: Name of the layer in the model.
        region: The region of the model.
        rows: The rank's rows of the vocabulary.
        vocabulary: Size of the whole vocabulary.
        sees_whole: True if the output is a whole sequence, even if others are cut.

    Shape:
        Tokens [B, T] -> [B, T, D], or [B, T/tp, D] with a cut sequence.
    """

    weight: nn.Parameter

    def __init__(
        self,
        replaced: nn.Embedding,
        name: str,
        region: ParallelRegion,
        rows: slice,
        vocabulary: int,
        sees_whole: bool = False,
    ) -> None:
        super().__init__(replaced, name, region, sees_whole)
        self.rows = rows
        self.vocabulary = vocabulary
        self.embedding_dim = replaced.embedding_dim
        self.padding_idx = None
        if replaced.padding_idx is not None and rows.start <= replaced.padding_idx < rows.stop:
            self.padding_idx = replaced.padding_idx - rows.start

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of the tokens, summed over the ranks or scattered to a cut sequence."""
        rows = own_rows(tokens, self.weight, self.rows, self.vocabulary, self.padding_idx)
        duals.note_move(self.site, "own rows", self.weight, rows, 0)
        if self.cut:
            return duals.scatter(rows, self.site)
        return self.region.outward(duals.reduce(rows, self.site), self.sees_whole)


def own_rows(tokens: Tensor, weight: Tensor, rows: slice, vocabulary: int, padding_idx: int | None) -> Tensor:
    """Return this rank's addend of an embedding lookup: its rows, and zeros for tokens of other ranks.

    Args:
        tokens: Token ids of the whole vocabulary.
        weight: This rank's rows.
        rows: The range of the vocabulary that ``weight`` holds.
        vocabulary: Size of the whole vocabulary.
        padding_idx: Index in ``weight`` of the row without gradient, or None.

    Returns:
        One vector per token. On a device the vector of a token outside the vocabulary is NaN, which the step reports.

    Raises:
        IndexError: If a token on a CPU is outside the vocabulary.
    """
    foreign = (tokens < rows.start) | (tokens >= rows.stop)
    # A token outside the vocabulary must fail as it does uncut, and on every rank.
    unknown = (tokens < 0) | (tokens >= vocabulary)
    local = (tokens - rows.start).masked_fill_(foreign, 0)
    if tokens.device.type == "cpu":
        local.masked_fill_(unknown, -1)
        return F.embedding(local, weight, padding_idx).masked_fill(foreign[..., None], 0)
    # An assertion inside a kernel would end the device's context, and torch would report it somewhere else.
    found = F.embedding(local, weight, padding_idx).masked_fill(foreign[..., None], 0)
    return found.masked_fill_(unknown[..., None], math.nan)


class OwnLookup(TorchFunctionMode):
    """Cuts the lookup inside an embedding whose class adds computation of its own, for example a factor.

    The module keeps its place, hooks, buffers and attributes. While its forward runs, ``F.embedding`` of its
    weight returns the sum of all ranks' rows, whole and equal on all ranks, so that the rest of the forward
    computes what it computes uncut. Any other use of the weight is refused, because a rank holds only some of
    its rows.

    Args:
        module: The embedding, whose weight is cut already.
        name: Name of the embedding in the model.
        region: The region of the model.
        rows: The rank's rows of the vocabulary.
    """

    def __init__(self, module: nn.Embedding, name: str, region: ParallelRegion, rows: slice) -> None:
        super().__init__()
        self.module, self.name, self.rows = module, name, rows
        self.site = ExchangeSite(region.group, name)
        self.vocabulary = module.num_embeddings
        self._running = 0
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._running += 1
        self.__enter__()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:  # a stand-in on another stage calls the hooks of a pass that it did not run
            self._running -= 1
            self.__exit__(None, None, None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, weight = kwargs or {}, self.module.weight
        if function is F.embedding and len(args) > 1 and args[1] is weight:
            padding = self.module.padding_idx
            inside = padding is not None and self.rows.start <= padding < self.rows.stop
            here = padding - self.rows.start if padding is not None and inside else None
            found = own_rows(args[0], weight, self.rows, self.vocabulary, here)
            duals.note_move(self.site, "own rows", weight, found, 0)
            return duals.reduce(found, self.site)
        if any(each is weight for each in (*args, *kwargs.values())) and not is_harmless(function):
            raise PlanError(
                f"tensor: {self.name} is a {type(self.module).__name__}, whose forward uses its weight in "
                f"{getattr(function, '__name__', function)}, but a rank holds some of its rows alone; keep it "
                f"whole with tensor.table: {{{self.name!r}: 'replicate'}}"
            )
        return function(*args, **kwargs)


_HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "is_cuda", "is_meta", "requires_grad", "layout", "is_leaf", "grad_fn")
}
_HARMLESS |= {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.dim}


def is_harmless(function: Any) -> bool:
    """Return True for a function that reads only properties of a tensor that a cut does not change."""
    return function in _HARMLESS


class SequenceEmbedding(_CutLayer):
    """A whole embedding (for example of positions) that is looked up for this rank's tokens.

    Args:
        replaced: The embedding.
        name: Name of the layer in the model.
        region: The region of the model.

    Shape:
        Ids [..., T] -> [..., T/tp, D].
    """

    weight: nn.Parameter

    def __init__(self, replaced: nn.Embedding, name: str, region: ParallelRegion) -> None:
        super().__init__(replaced, name, region, sees_whole=False)
        self.embedding_dim = replaced.embedding_dim
        self.padding_idx = replaced.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of this rank's tokens, or of all tokens if the sequence is not cut."""
        if self.cut:
            ids = duals.piece_of(ids, self.site, dim=-1)
        return F.embedding(ids, self.weight, self.padding_idx)


class VocabularyHead(_CutLayer):
    """Rows of the output matrix of a language model.

    Args:
        replaced: The head, whose parameters are cut already.
        name: Name of the layer in the model.
        region: The region of the model.
        rows: The rank's rows of the vocabulary.
        vocabulary: Size of the whole vocabulary.
        sees_whole: True if the head's input is a whole sequence, even if others are cut.

    Shape:
        [B, T, D] -> whole logits [B, T, V]; this rank's logits [B, T, V/tp] while ``region.logits_cut``; a
        scalar loss if ``targets`` [B, T] are given.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        replaced: nn.Module,
        name: str,
        region: ParallelRegion,
        rows: slice,
        vocabulary: int,
        sees_whole: bool = False,
    ) -> None:
        super().__init__(replaced, name, region, sees_whole)
        self.rows = rows
        self.vocabulary = vocabulary
        self.gives_loss = "targets" in inspect.signature(replaced.forward).parameters
        """True if the replaced layer can be called with targets."""
        self.tile: LossTile | None = None
        """Size of tiles if the loss is to be computed by tiles, else None; set from outside."""

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        count: Tensor | None = None,
        change: Change | None = None,
    ) -> Tensor | UnmadeLogits:
        """Return logits, or the mean loss over ``targets``.

        By tiles the head without targets returns ``UnmadeLogits``; the loss then calls the head again with
        targets.

        Args:
            x: Input [B, T, D], cut along T with a cut sequence.
            targets: Token ids [B, T] of the whole vocabulary, or None for logits.
            count: Divisor of the summed loss, or None for the number of counted targets.
            change: Function that the model applied to its logits before the loss, or None.

        Returns:
            Logits, the loss, or ``UnmadeLogits``.
        """
        site, held = self.site, self.rows.stop - self.rows.start
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        padding = len(weight) - held
        if padding:  # The last ranks' shards are padded with rows that belong to no token.
            weight, bias = weight[:held], None if bias is None else bias[:held]
        if self.tile is not None and (targets is not None or self.region.loss_follows):
            # Computed from the padded length, so that all ranks decide alike.
            tokens = self.tile.of(x.shape[:-1].numel() * (site.size if self.cut else 1), len(self.weight), x)
            if tokens and targets is None:
                return UnmadeLogits(x, self, self.region.model)
            if tokens and targets is not None:
                x = self.region.inward(x, self.sees_whole)
                x = (duals.gather if self.cut else duals.copy)(x, site)
                place = (self.rows.start, self.vocabulary, site)
                return vocabulary_head_loss(
                    x, weight, bias, targets, *place, tokens, self.tile.at_once, count, change
                )
        x = self.region.inward(x, self.sees_whole)
        whole_rows = partial(F.pad, pad=(0, 0, 0, padding)) if padding else None
        waits = deferral_of(self.products, self._parameters["weight"], x, whole_rows)
        logits = column(x, weight, bias, site, self.cut, waits)  # [B, T, V/tp]
        if targets is not None:
            return vocabulary_cross_entropy(logits, targets, self.rows.start, self.vocabulary, site)
        if self.region.logits_cut:
            return logits
        if padding:
            logits = F.pad(logits, (0, padding))
        return duals.join(logits, site, dim=logits.dim() - 1)[..., : self.vocabulary]


# Products ----------------------------------------------------------------------------------------------------------


def column(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: ProductSite,
    cut: bool,
    waits: Deferral | None = None,
) -> Tensor:
    """Return f(x) Wᵀ + b, where f is ``gather`` for a cut sequence and ``copy`` otherwise.

    Args:
        x: Input [B, T, D], or [B, T/tp, D] if ``cut``.
        weight: This rank's rows [F/tp, D].
        bias: This rank's part of the bias, or None.
        site: The "tp" ranks and the name of the layer.
        cut: True for a cut sequence.
        waits: Where the gradient of the weight waits for W; None: it is computed with that of the input.

    Returns:
        Outputs [B, T, F/tp].
    """
    return _product(_ColumnProduct, x, weight, bias, site, cut, waits)


@operation("product")
def _product(function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):  # Autocast does not act inside a custom autograd.Function.
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    result: Tensor = function.apply(x, weight, bias, *rest)
    return result


def _shape_of_product(size: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    batch, tokens, *inner, _ = x.shape
    return x.new_empty(batch, tokens * size, *inner, weight.shape[0])


@exchange_operator("gathered_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _shape_of_product)
def _gathered_product(site: ProductSite, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of the gathered sequence: [B, T/tp, D] -> [B, T, F/tp]."""
    return gathered_product(site, x, weight, bias)


def _shape_of_sum(size: int, x: Tensor, weight: Tensor, cut: bool) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    if cut:
        shape[duals.SEQUENCE] //= size
    return x.new_empty(shape)


@exchange_operator("product_over_ranks(Tensor x, Tensor weight, bool cut) -> Tensor", _shape_of_sum)
def _product_over_ranks(site: ProductSite, x: Tensor, weight: Tensor, cut: bool) -> Tensor:
    """Return the sum over the ranks of the products: [..., D/tp] -> [..., F], or [B, T/tp, F] if ``cut``."""
    return product_over_ranks(site, x, weight, cut)


def _shapes_of_gradients(
    size: int, grad: Tensor, x: Tensor, weight: Tensor, cut: bool, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    return (
        grad.new_empty(x.shape) if needs_x else None,
        grad.new_empty(weight.shape) if needs_weight else None,
    )


@exchange_operator(
    "column_gradients(Tensor grad, Tensor x, Tensor weight, bool cut, bool needs_x, bool needs_weight)"
    " -> (Tensor, Tensor)",
    _shapes_of_gradients,
)
def _column_gradients(
    site: ExchangeSite,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    cut: bool,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``x`` and ``weight``, or None for one that is not needed.

    The exchanges run beside the products.
    """
    group, what = site.group, site.what
    gathered = duals.start_gather(x, group, what) if cut and needs_weight else None
    d_x = d_weight = None
    if needs_x:
        d_full = grad.matmul(weight)
        start = duals.start_scatter if cut else duals.start_sum
        d_x = start(d_full.contiguous(), group, what)
    if needs_weight:
        full = x if gathered is None else gathered()
        d_weight = grad.flatten(0, -2).mT.mm(full.flatten(0, -2))
    return None if d_x is None else d_x(), d_weight


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        site: ProductSite,
        cut: bool,
        waits: Deferral | None,
    ) -> Tensor:
        ctx.site, ctx.cut, ctx.gives, ctx.waits = site, cut, "HEADS", waits
        ctx.save_for_backward(x, weight)
        return _gathered_product(site, x, weight, bias) if cut else F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        site, cut, waits = ctx.site, ctx.cut, needs_weight and ctx.waits is not None and ctx.waits.is_open
        d_x, d_weight = _column_gradients(site, grad, x, weight, cut, needs_x, needs_weight and not waits)
        if waits:
            later(ctx.waits, lambda: _gathered_weight_product(site, grad, x, cut), grad, x)
        d_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        gives_weight = needs_weight and not waits
        return d_x if needs_x else None, d_weight if gives_weight else None, d_bias, None, None, None


def _gathered_weight_product(site: ProductSite, grad: Tensor, x: Tensor, cut: bool) -> Tensor:
    """Return the gradient of a column layer's weight; a cut input is gathered again."""
    return weight_product(grad, duals.start_gather(x, site.group, site.what)() if cut else x)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: None,
        site: ProductSite,
        cut: bool,
        waits: Deferral | None,
    ) -> Tensor:
        ctx.site, ctx.cut, ctx.gives, ctx.waits = site, cut, "TOKENS" if cut else "WHOLE", waits
        ctx.save_for_backward(x, weight)
        return _product_over_ranks(site, x, weight, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        if ctx.cut:
            grad = duals.gathered(ctx.site, grad, duals.SEQUENCE)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        d_x = grad.matmul(weight) if needs_x else None
        d_weight = later(ctx.waits, lambda: weight_product(grad, x), grad, x) if needs_weight else None
        return d_x, d_weight, None, None, None, None
