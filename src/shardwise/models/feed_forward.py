"""Feed-forward parts of any model computed by tiles of tokens, without changes to the model's code.

    h = up(x)               is not computed: h stands for features that do not exist yet
    h = act(h)              is recorded, like every operation on each token by itself: +, *, chunk(-1), dropout, a norm
    y = down(h)             computes all of it, one tile of tokens at a time: y[tile] = down(act(up(x[tile])))

A part's forward runs as it is written, once for all tokens; code before its first matrix and after its last one
(norms, dropout, residual sums) gets whole tensors. An operation that is not known to treat each token by itself makes
the features whole, as without tiles, and the log reports this once. Dropout between the matrices draws the bits of a
tile's rows, so the masks equal those of the whole.

Collectives along "tp" run once around all tiles, as around the whole.

Cost: about ten microseconds per part and pass for recording; ``passes/tiled.py``.
Shapes: x [..., D]; C tokens of a tile.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.base.errors import UsageError
from shardwise.kernels.dropout import TileRows, keyed_dropout
from shardwise.kernels.gated import gated
from shardwise.kernels.head_loss import LossTile
from shardwise.parallel.expert.stacks import find_stacks
from shardwise.parallel.tensor.layers import ColumnLinear, RowLinear
from shardwise.parallel.tensor.layout import is_transposed
from shardwise.passes.replay import DrawReplay
from shardwise.passes.tiled import Place, tiled

_log = logging.getLogger(__name__)

_METHODS = ("feed_forward_chunk", "ff_chunk", "_ff_block")
"""Methods in which blocks compute their feed-forward part: of BERT, its relatives and ALBERT in transformers, and of
``nn.TransformerEncoderLayer``."""
_MOST_MATRICES = 3
"""Matrices, at most, of a part whose forward is the whole part: a module with four is usually an attention."""


class FeedForward(NamedTuple):
    """A feed-forward part of a model: a method that computes a matrix, functions of its features, and a matrix back."""

    module: nn.Module
    method: str
    matrices: tuple[nn.Module, ...]


def feed_forward_parts(model: nn.Module) -> dict[str, FeedForward]:
    """Return the feed-forward parts of a model by module name.

    A part is recognised by its structure; of nested candidates the innermost is the part. Experts of a stack are not
    parts.
    """
    found: dict[str, FeedForward] = {}
    stacks = find_stacks(model)
    for name, module in reversed(list(model.named_modules())):  # inner modules before the modules around them
        inside = f"{name}."
        if not name or any(each.startswith(inside) for each in found):
            continue
        if any(inside.startswith(f"{each}.") for each in (*stacks.stacks, *stacks.refused)):
            continue
        part = _part(module)
        if part is not None:
            found[name] = part
    return dict(reversed(found.items()))


def _part(module: nn.Module) -> FeedForward | None:
    kind = type(module)
    method = next((each for each in _METHODS if hasattr(kind, each)), "forward")
    matrices = tuple(each for each in module.modules() if _is_matrix(each))
    if method == "forward" and (len(matrices) > _MOST_MATRICES or _arguments(kind.forward) != 1):
        return None
    sizes = [_sizes(each) for each in matrices]
    pairs = ((up, down) for up in sizes for down in sizes if up[0] == down[1] != up[1])
    if any(up[1] in (down[0], 2 * down[0]) for up, down in pairs):
        return FeedForward(module, method, matrices)
    return None


def _arguments(forward: Any) -> int:
    return len(inspect.signature(inspect.unwrap(forward)).parameters) - 1


def _is_matrix(module: nn.Module) -> bool:
    if isinstance(module, ColumnLinear | RowLinear) or is_transposed(module):
        return True
    known = type(module).forward is nn.Linear.forward or type(module).__module__.startswith("transformers.")
    return isinstance(module, nn.Linear) and known


def _sizes(matrix: Any) -> tuple[int, int]:
    """Return the inputs and outputs of a rank's piece of the matrix."""
    rows, columns = matrix.weight.shape
    is_turned = matrix.transposed if isinstance(matrix, ColumnLinear | RowLinear) else is_transposed(matrix)
    return (rows, columns) if is_turned else (columns, rows)


# Features that are not made yet ------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALONE = _words(
    "relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign tanhshrink "
    "log_sigmoid sigmoid tanh erf exp sqrt rsqrt square abs neg add radd sub rsub mul rmul div truediv true_divide "
    "rdiv pow rpow clamp clamp_min clamp_max minimum maximum gt ge lt le "
    "where float half bfloat16 double to contiguous"
)
"""Names of torch's functions that treat every element by itself, without leading and trailing underscores."""
_OF_LAST_DIM = {
    "chunk": (2, 0),
    "split": (2, 0),
    "tensor_split": (2, 0),
    "glu": (1, -1),
    "softmax": (1, None),
}
"""Functions that treat every token by itself if ``dim`` is the last dim: index of ``dim`` in the arguments, default."""
_NORMS = _words("layer_norm rms_norm")
"""Norms that treat every token by itself if they normalize only the last dim."""
_OF_FORM = _words("shape ndim size dim numel __len__")
"""Attributes that are known although the features are not computed."""
_OF_NONE = _words("dtype device layout is_cuda is_cpu is_meta is_floating_point element_size")
"""Attributes that are equal for a tensor with no rows."""


class _RecordedOperation(NamedTuple):
    """A recorded operation that has not run.

    Its arguments are other such operations, places of parameters, or values that are the same for every tile.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    at: int | None = None
    """The index of the result, if the operation has several."""


class _ParameterPlace(NamedTuple):
    """A parameter among the arguments, by its place: the tensor itself is another one in the backward pass."""

    place: Place


class UnmadeFeatures(Tensor):
    """Features between two matrices of a part, recorded and not computed; the tensor itself is on the meta device."""

    _call: "_PartCall"
    _x: Tensor
    """The input from which the features are computed."""
    _like: Tensor
    """A tensor of the features' shape and dtype, on the meta device."""
    _noted: _RecordedOperation
    _made: Tensor | None

    @classmethod
    def of(cls, call: "_PartCall", x: Tensor, like: Tensor, noted: _RecordedOperation) -> "UnmadeFeatures":
        """Return features of the shape of ``like`` that the operation ``noted`` computes from ``x``."""
        new = like.as_subclass(cls)
        new._call, new._x, new._like, new._noted, new._made = call, x, like, noted, None
        return new

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle any function of torch that gets such features, and any attribute of theirs."""
        first = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, UnmadeFeatures))
        name = getattr(function, "__name__", str(function))
        if name == "__get__":
            name = function.__self__.__name__
        if name in _OF_FORM:
            with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
                return function(first._like, *args[1:], **kwargs or {})
        if name in _OF_NONE:
            return function(first._call.of_none(first._noted, first._x))
        if name == "requires_grad":
            return torch.is_grad_enabled()
        return first._call.note(function, name.strip("_"), args, kwargs or {})

    def whole(self, why: str | None) -> Tensor:
        """Compute the features of all tokens, as without tiles, and log the reason ``why`` if there is one."""
        if self._made is None:
            self._made = self._call.made(self._noted, self._x, why)
        return self._made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<features {list(self._like.shape)}, not made>"


class _PartCall:
    """One call of a part's method."""

    def __init__(self, part: "TiledMethod") -> None:
        self._part = part
        self._modes = torch.overrides._get_current_function_mode_stack()
        self._places: dict[int, Place] = {
            id(parameter): (owner, key)
            for owner in part.module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        }
        self._is_over = False
        self._is_making = False
        """True while matrices compute products in place of recording them."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Replace the forward of the part's matrices, so that the first starts a recording and the last ends it."""
        before = [(matrix, vars(matrix).get("forward")) for matrix in self._part.matrices]
        for matrix, _ in before:
            vars(matrix)["forward"] = self._standing_for(matrix, matrix.forward)
        try:
            yield
        finally:
            for matrix, forward in before:
                if forward is None:
                    del vars(matrix)["forward"]
                else:
                    vars(matrix)["forward"] = forward
            self._is_over = True

    def _standing_for(self, matrix: nn.Module, forward: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            if isinstance(x, UnmadeFeatures):
                return self._taken(x, matrix)
            if self._is_making or not isinstance(x, Tensor) or x.dim() < 2:
                return forward(x)
            lead = list(x.shape[:-1])
            if isinstance(matrix, ColumnLinear) and _joins(matrix):
                lead[1] *= matrix.region.group.size
            with _disable_current_modes():  # a fake-tensor mode would make a tensor of its own kind
                like = torch.empty(*lead, _sizes(matrix)[1], dtype=x.dtype, device="meta")
            return UnmadeFeatures.of(self, x, like, _RecordedOperation(_product, (matrix,), {}))

        return run

    # What is noted ---------------------------------------------------------------------------------------------

    def note(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of ``function`` on uncomputed features.

        The result is uncomputed too if the function treats every token by itself; else the features are computed
        whole.
        """
        leaves, form = pytree.tree_flatten((args, kwargs))
        unmade = [each for each in leaves if isinstance(each, UnmadeFeatures)]
        x = unmade[0]._x
        with _disable_current_modes():
            likes = [self._like(each) for each in leaves]
        together = all(each._x is x and each._call is self and each._made is None for each in unmade)
        together = together and all(self._is_alike(each) for each in leaves if isinstance(each, Tensor))
        if together and _treats_tokens_alone(function, name, *pytree.tree_unflatten(likes, form)):
            return self._noted(function, [self._held(each) for each in leaves], likes, form, x)
        whole = [each.whole(name) if isinstance(each, UnmadeFeatures) else each for each in leaves]
        args, kwargs = pytree.tree_unflatten(whole, form)
        with self._in_modes():
            return function(*args, **kwargs)

    def _noted(self, function: Any, held: list[Any], likes: list[Any], form: Any, x: Tensor) -> Any:
        args, kwargs = pytree.tree_unflatten(likes, form)
        with _disable_current_modes():
            like = _like_of(function, args, kwargs)
        args, kwargs = pytree.tree_unflatten(held, form)
        if isinstance(like, Tensor):
            return UnmadeFeatures.of(self, x, like, _RecordedOperation(function, args, kwargs))
        return tuple(
            UnmadeFeatures.of(self, x, each, _RecordedOperation(function, args, kwargs, i))
            for i, each in enumerate(like)
        )

    def _is_alike(self, value: Tensor) -> bool:
        """Return whether all tokens read the same elements of ``value``, and no gradient of ``value`` would be lost."""
        if isinstance(value, UnmadeFeatures):
            return True
        return value.dim() < 2 and (not value.requires_grad or id(value) in self._places)

    def _like(self, value: Any) -> Any:
        if isinstance(value, UnmadeFeatures):
            return value._like
        if not isinstance(value, Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def _held(self, value: Any) -> Any:
        if isinstance(value, UnmadeFeatures):
            return value._noted
        place = self._places.get(id(value))
        return value if place is None else _ParameterPlace(place)

    # What is made ----------------------------------------------------------------------------------------------

    def of_none(self, noted: _RecordedOperation, x: Tensor) -> Tensor:
        """Compute the features of a tensor with no rows, for its dtype and device."""
        matrices = [each for each in _used(noted) if not isinstance(each, _ParameterPlace)]
        with torch.no_grad(), self._in_modes(), self._making(), _local(matrices):
            return _made(noted, x.reshape(-1, x.shape[-1])[:0], None)

    def made(self, noted: _RecordedOperation, x: Tensor, why: str | None) -> Tensor:
        """Compute the features of all rows of ``x``.

        Raises:
            UsageError: after the part's forward, because the part's weights may be released by then.
        """
        if self._is_over:
            raise UsageError(
                f"tiles.mlp: what {self._part.name} computes between its matrices is not kept, but "
                f"{why or 'something'} is asked of it behind its forward; leave tiles.mlp out, or use it inside"
            )
        if why is not None:
            self._part.tell(why)
        with self._in_modes(), self._making():
            return _made(noted, x, None)

    @contextmanager
    def _making(self) -> Iterator[None]:
        before, self._is_making = self._is_making, True
        try:
            yield
        finally:
            self._is_making = before

    @contextmanager
    def _in_modes(self) -> Iterator[None]:
        """Enter the modes that were active around the part, which torch leaves while they handle a function."""
        running = torch.overrides._get_current_function_mode_stack()
        with ExitStack() as stack:
            for mode in self._modes:
                if mode not in running:
                    stack.enter_context(mode)
            yield

    def _taken(self, features: UnmadeFeatures, last: nn.Module) -> Tensor:
        """Return the product of ``last`` and the features, computed by tiles if possible."""
        part, noted, x = self._part, features._noted, features._x
        used = list(_used(noted))
        matrices = [each for each in used if not isinstance(each, _ParameterPlace)]
        around = _TileExchanges.of(matrices, last)
        if features._call is not self or features._made is not None or around is None:
            return self._run(last, features.whole("the next matrix"))
        columns = sum(_sizes(each)[1] for each in (*matrices, last))
        tokens = part.tile.of(features._like.shape[:-1].numel(), columns, x)
        if not tokens:
            return self._run(last, features.whole(None))
        places = [each.place for each in used if isinstance(each, _ParameterPlace)]
        places += [
            (each, key) for each in (*matrices, last) for key, p in each._parameters.items() if p is not None
        ]
        x = around.enter(x)
        lead = x.shape[:-1]

        def of_tile(rows: Tensor, start: int) -> Tensor:
            y: Tensor = last.forward(_made(noted, rows, TileRows(start, lead)))
            return y

        local = partial(_local, (*matrices, last))
        with self._making():
            return around.leave(tiled(list(dict.fromkeys(places)), of_tile, x, tokens, part.replay, local))

    def _run(self, matrix: nn.Module, x: Tensor) -> Tensor:
        with self._making():
            y: Tensor = matrix.forward(x)
            return y


def _product(x: Tensor, matrix: nn.Module) -> Tensor:
    y: Tensor = matrix.forward(x)
    return y


class _ComputedRows(NamedTuple):
    """The rows from which recorded operations are computed.

    A method computes the operations and not a nested function: a nested function that refers to itself is a reference
    cycle, which would keep the results alive until the next garbage collection.
    """

    x: Tensor
    tile: TileRows | None
    """The rows of the tile; None: all rows."""
    known: dict[int, Any]

    def of(self, value: Any) -> Any:
        """Return the result of a recorded operation, the tensor of a parameter's place, or any other value as it is."""
        if isinstance(value, _ParameterPlace):
            owner, key = value.place
            return owner._parameters[key]
        if not isinstance(value, _RecordedOperation):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = self._made(value)
        return self.known[id(value)]

    def _made(self, noted: _RecordedOperation) -> Any:
        if noted.function is _product:
            return _product(self.x, *noted.args)
        args, kwargs = pytree.tree_map(self.of, (noted.args, noted.kwargs), is_leaf=_waits)
        if noted.function is keyed_dropout and self.tile is not None:
            kwargs = kwargs | {"rows": self.tile}
        found = noted.function(*args, **kwargs)
        return found if noted.at is None else found[noted.at]


def _made(noted: _RecordedOperation, x: Tensor, tile: TileRows | None) -> Tensor:
    """Return the result of ``noted`` for ``x``, or for rows [C, D] of ``x``."""
    made: Tensor = _ComputedRows(x, tile, {}).of(noted)
    return made


def _waits(value: Any) -> bool:
    return isinstance(value, _RecordedOperation | _ParameterPlace)


def _used(noted: _RecordedOperation) -> Iterator[Any]:
    """Yield the matrices, and the places of other parameters, that an operation uses."""
    if noted.function is _product:
        yield noted.args[0]
        return
    for each in pytree.tree_leaves((noted.args, noted.kwargs), is_leaf=_waits):
        if isinstance(each, _ParameterPlace):
            yield each
        elif isinstance(each, _RecordedOperation):
            yield from _used(each)


def _like_of(function: Any, args: Any, kwargs: Any) -> Any:
    if function is keyed_dropout:
        return args[0]
    return args[0].chunk(2, -1)[0] if function is gated else function(*args, **kwargs)


def _treats_tokens_alone(function: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function computes each token by itself, given arguments of the right shapes."""
    if function is gated:
        return True
    if function is keyed_dropout:
        cut = args[3] if len(args) > 3 else kwargs.get("cut")
        return cut is None or cut.dim % args[0].dim() == args[0].dim() - 1
    if kwargs.get("inplace") or kwargs.get("out") is not None:
        return False
    if name == "dropout":
        p, training = inspect.signature(torch.nn.functional.dropout).bind(*args, **kwargs).args[1:3]
        return p == 0 or not training
    if name in _ALONE:
        return True
    if name in _OF_LAST_DIM:
        place, default = _OF_LAST_DIM[name]
        dim = args[place] if len(args) > place else kwargs.get("dim", default)
        return isinstance(dim, int) and dim % args[0].dim() == args[0].dim() - 1
    return name in _NORMS and len(args[1]) == 1


class _TileExchanges(NamedTuple):
    """The collectives around all tiles, if "tp" cuts the matrices."""

    columns: tuple[ColumnLinear, ...] = ()
    row: RowLinear | None = None

    @classmethod
    def of(cls, matrices: Sequence[nn.Module], last: nn.Module) -> "_TileExchanges | None":
        """Return the collectives; None if the operations between the matrices would not be local."""
        if not any(isinstance(each, ColumnLinear | RowLinear) for each in (*matrices, last)):
            return cls()
        columns = tuple(each for each in matrices if isinstance(each, ColumnLinear))
        if len(columns) < len(matrices) or not isinstance(last, RowLinear):
            return None
        return cls(columns, last)

    def enter(self, x: Tensor) -> Tensor:
        """Run the collective before the tiles."""
        return self.columns[0].enter(x) if self.columns else x

    def leave(self, y: Tensor) -> Tensor:
        """Run the collective after the tiles."""
        return y if self.row is None else self.row.leave(y)


def _joins(matrix: Any) -> bool:
    """Return whether the matrix gathers a cut sequence before its product."""
    return isinstance(matrix, ColumnLinear) and matrix.enters and matrix.cut


@contextmanager
def _local(matrices: Iterable[nn.Module]) -> Iterator[None]:
    """Run the matrices as plain products, without collectives."""
    layers: list[Any] = [each for each in matrices if isinstance(each, ColumnLinear | RowLinear)]
    for layer in layers:
        layer.is_local = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_local = False


class TiledMethod:
    """A replacement for the method of a part, which computes it by tiles."""

    def __init__(
        self, name: str, part: FeedForward, whole: Callable[..., Any], tile: LossTile, replay: DrawReplay
    ) -> None:
        self.name = name
        self.tile = tile
        self.replay = replay
        self.matrices = part.matrices
        self.module = part.module
        self.__signature__ = inspect.signature(whole)
        self._whole = whole
        self._is_told = False
        for each in part.matrices:
            if isinstance(each, ColumnLinear | RowLinear):
                each.used_by = (part.module,)

    @classmethod
    def put(cls, name: str, part: FeedForward, tile: LossTile, replay: DrawReplay) -> None:
        """Replace the method of ``part`` by one that computes by tiles."""
        module, method = part.module, part.method
        setattr(module, method, cls(name, part, getattr(module, method), tile, replay))

    @classmethod
    def undo(cls, module: nn.Module) -> None:
        """Remove a replacement that an earlier engine has put on ``module``."""
        held = [(method, each) for method, each in vars(module).items() if isinstance(each, cls)]
        for method, each in held:
            del vars(module)[method]
            if getattr(each._whole, "__func__", None) is not getattr(type(module), method):
                setattr(module, method, each._whole)

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part's method with its features recorded, and return its result with all features computed."""
        call = _PartCall(self)
        with call.noting():
            found = self._whole(*args, **kwargs)
            return pytree.tree_map(
                lambda each: each.whole("what it returns") if isinstance(each, UnmadeFeatures) else each,
                found,
            )

    def tell(self, what: str) -> None:
        """Log once why this part is computed without tiles."""
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "tiles.mlp: %s is computed whole: %s between its matrices is not known to treat every token alone",
                self.name,
                what,
            )
