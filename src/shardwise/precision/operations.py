"""The dtype of each operation: products in 16 bits, sums and exponentials in fp32, all else in its inputs' dtype.

    product    linear, matmul, convolutions, attention, recurrent cells      floating inputs cast to 16 bits
    fp32       softmax, norms, losses, sums, exponentials, decompositions    16-bit inputs cast to fp32
    widest     functions that need equal dtypes (``scatter_add``, ...)       all cast to the widest among them
    in place   ``addmm_``, ``index_add_``, ...                               all cast to the dtype of the written tensor
    any other  relu, gelu, +, *, cat, views, ...                             torch's own promotion

fp64 stays fp64, and a result whose ``dtype`` or ``out`` the caller names keeps that dtype. The lists are the same on
every device. torch's autocast is not used, because it differs between devices (on the CPU it leaves softmax in 16
bits), keeps 16-bit copies of weights that ZeRO has released since, and does not apply to this package's own kernels.
Inside modules all of whose parameters ``keep_fp32`` names, products are computed in fp32 too.

The implementation is a torch function mode, which is entered around each pass (``engine/parts/pass_context.py``) and
around each recomputation (``passes/replay.py``), only in runs that set ``precision.operations``. Backward passes keep
the dtypes of their forward passes. The mode sees the functions that a model and a loss function call in Python. A
function that torch composes in C++ is one operation (a scaled dot product attention, an LSTM);
``F.multi_head_attention_forward`` is its parts. A function of this package is one operation if it declares its kind
(``kernels/operation.py``).

Paper: Micikevicius et al. 2017, arXiv:1710.03740.
Cost:  a few microseconds per operation. A product casts its weights each time it runs, so that no copy outlives a
gathered weight: ``linear`` keeps the fp32 weight and casts it again in its backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.kernels.operation import KIND
from shardwise.precision.policy import DTYPES, SIXTEEN_BITS, PrecisionPolicy, SixteenBits

_NAMESPACES = (torch, torch.Tensor, F, torch.special, torch._C._nn)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PRODUCTS = _words(
    "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm addbmm baddbmm addmv inner einsum tensordot "
    "chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution "
    "scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
IN_FP32 = _words(
    "softmax log_softmax softmin gumbel_softmax logsumexp logcumsumexp "
    "layer_norm group_norm batch_norm instance_norm rms_norm local_response_norm normalize norm renorm "
    "native_layer_norm native_group_norm native_batch_norm _weight_norm "
    "cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "sum nansum mean nanmean prod cumsum cumprod var std var_mean std_mean trace dist cdist pdist pairwise_distance "
    "cosine_similarity cov corrcoef quantile nanquantile avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d "
    "exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy pow __pow__ __rpow__ float_power square "
    "sinh cosh tan acos asin acosh atanh erfinv lgamma digamma reciprocal rsqrt softplus rrelu "
    "stft istft cholesky cholesky_solve cholesky_inverse inverse det logdet slogdet pinverse svd qr lu lu_solve "
    "triangular_solve matrix_exp matrix_power ormqr geqrf svd_lowrank pca_lowrank lobpcg"
)
"""Functions in fp32, in addition to every ``*_loss``, all of ``torch.fft``, and all of ``torch.linalg`` but its
products."""
WIDEST = _words(
    "dot vdot addr addcmul addcdiv lerp cross prelu grid_sample embedding_bag complex polar bucketize searchsorted "
    "allclose isclose heaviside index_put index_add index_copy put scatter scatter_add scatter_reduce masked_scatter"
)
IN_PLACE = _words(
    "addmm_ addbmm_ baddbmm_ addmv_ addr_ addcmul_ addcdiv_ lerp_ index_put_ index_add_ index_copy_ put_ scatter_ "
    "scatter_add_ scatter_reduce_ masked_scatter_ __setitem__"
)
_LINALG_PRODUCTS = ("matmul", "multi_dot")

Rule = Callable[["DtypeByOperation", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class OperationDtypes:
    """The operation dtypes of one engine: makes the contexts of its passes and tracks modules in fp32."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self._policy = policy
        self.kept = 0
        """The number of running modules that stay in fp32; they may be nested."""

    def __call__(self) -> AbstractContextManager[Any]:
        """Return the context of a pass, or of a part of a pass that is recomputed."""
        narrow = self._policy.operations
        return nullcontext() if narrow is None else DtypeByOperation(narrow, self)

    def apply_to(self, root: nn.Module) -> None:
        """Wrap ``forward`` of the modules that need it; a hook would not run if a module is recomputed.

        Recurrent modules get inputs with the dtype of their weights, because they check the dtype before they call
        torch. Modules all of whose parameters ``keep_fp32`` names compute products in fp32 too.

        Args:
            root: The model.
        """
        if self._policy.operations is None:
            return
        for module in root.modules():
            if isinstance(module, nn.RNNBase):
                module.forward = _with_wide_inputs(module.forward)  # type: ignore[method-assign]
        if not self._policy.keep_fp32:
            return
        for name, module in root.named_modules():  # also nested ones, which may be recomputed by themselves
            prefix = f"{name}." if name else ""
            held = [prefix + each for each, _ in module.named_parameters()]
            if held and all(map(self._policy.keeps, held)):
                module.forward = self._in_fp32(module.forward)  # type: ignore[method-assign]

    def _in_fp32(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.kept += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self.kept -= 1

        return run


def _with_wide_inputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*_widened(args), **_widened(kwargs))

    return run


class DtypeByOperation(TorchFunctionMode):
    """A torch function mode that chooses the dtype of each operation of a pass.

    Backward passes inside the mode are not affected: torch calls them as a single operation.
    """

    def __init__(self, narrow: SixteenBits, of: OperationDtypes | None = None) -> None:
        super().__init__()
        self.narrow = DTYPES[narrow]
        self._of = of
        self._rules = _rules()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self._rules.get(func) or _OWN.get(getattr(func, KIND, None))
        if rule is None:
            return func(*args, **kwargs)
        if self._of is not None and self._of.kept and rule in _OF_PRODUCTS:
            rule = _in_fp32
        return rule(self, func, args, kwargs)


def running_dtypes_again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts that give a recomputation the current operation dtypes, for torch's checkpoint."""
    modes = torch.overrides._get_current_function_mode_stack()
    running = [mode for mode in modes if isinstance(mode, DtypeByOperation)]
    return nullcontext(), running[-1] if running else nullcontext()


# Rules -------------------------------------------------------------------------------------------------------------


def _product(mode: DtypeByOperation, func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    return func(*_narrowed(args, mode.narrow), **_narrowed(kwargs, mode.narrow))


def _linear(mode: DtypeByOperation, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = _linear_arguments(*args, **kwargs)
    keeps = isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 and x.dtype != torch.float64
    if keeps and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return _LinearByDtype.apply(_narrow(x, mode.narrow), weight, _narrowed(bias, mode.narrow))
    return _product(mode, func, (x, weight, bias), {})


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias


def _attention(mode: DtypeByOperation, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an attention as a product, with an additive mask cast to the 16-bit dtype.

    The smallest number of fp32 in the mask becomes the smallest number of the 16-bit dtype: a plain cast would make
    it -infinity, and a row of only such numbers would become NaN.
    """
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if isinstance(mask, Tensor) and mask.dtype == torch.float32:
        least = torch.finfo(mode.narrow).min
        mask = torch.where(mask == -torch.inf, mask, mask.clamp(min=least)).to(mode.narrow)
        args, kwargs = (
            ((*args[:3], mask, *args[4:]), kwargs) if len(args) > 3 else (args, {**kwargs, "attn_mask": mask})
        )
    return _product(mode, func, args, kwargs)


def _in_fp32(mode: DtypeByOperation, func: Any, args: Any, kwargs: Any) -> Any:
    says = any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values()))
    if says or kwargs.get("out") is not None:
        return func(*args, **kwargs)
    return func(*_widened(args), **_widened(kwargs))


def _widest(mode: DtypeByOperation, func: Any, args: Any, kwargs: Any) -> Any:
    dtypes = {each.dtype for each in _floating((args, kwargs))}
    if len(dtypes) < 2:
        return func(*args, **kwargs)
    widest = torch.float32 if dtypes <= {torch.float32, *SIXTEEN_BITS} else torch.float64
    return func(*_in(args, widest), **_in(kwargs, widest))


def _in_place(mode: DtypeByOperation, func: Any, args: Any, kwargs: Any) -> Any:
    written = args[0]
    if not isinstance(written, Tensor) or not written.is_floating_point():
        return func(*args, **kwargs)
    return func(written, *_in(args[1:], written.dtype), **_in(kwargs, written.dtype))


def _parts(mode: DtypeByOperation, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that torch composes in Python, so that each of its operations gets its own dtype."""
    with mode:
        return _open(func)(*args, **kwargs)


@cache
def _open(function: Any) -> Any:
    """Return a copy of ``function`` without the check that would pass the call to the mode again."""
    around = {name: _never for name in function.__globals__ if name.startswith("has_torch_function")}
    made = FunctionType(function.__code__, {**function.__globals__, **around}, function.__name__)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def _never(*_: Any) -> bool:
    return False


_OF_PRODUCTS = (_product, _linear, _attention)
_OWN: dict[Any, Rule] = {"product": _product, "fp32": _in_fp32}


@cache
def _rules() -> dict[Any, Rule]:
    """Return the rule of each function and method of torch."""
    found: dict[Any, Rule] = {}
    losses = [name for space in _NAMESPACES for name in dir(space) if name.endswith("_loss")]
    for names, rule in (
        ([*IN_FP32, *losses], _in_fp32),
        (WIDEST, _widest),
        (IN_PLACE, _in_place),
        (PRODUCTS, _product),
    ):
        for name in names:
            found |= {each: rule for each in functions_named(name)}
    for space in (torch.linalg, torch.fft):
        for name in dir(space):
            if callable(getattr(space, name)) and not name.startswith("_") and name[0].islower():
                found[getattr(space, name)] = _product if name in _LINALG_PRODUCTS else _in_fp32
    found[F.linear] = _linear
    found[F.scaled_dot_product_attention] = _attention
    found[F.multi_head_attention_forward] = _parts
    return found


def functions_named(name: str) -> Iterator[Any]:
    """Yield the functions and methods of torch with this name."""
    for space in _NAMESPACES:
        made = getattr(space, name, None)
        if callable(made):
            yield made


# Casts -------------------------------------------------------------------------------------------------------------


def _narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype == torch.float32 or tensor.dtype in SIXTEEN_BITS else tensor


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    return _mapped(value, lambda tensor: _narrow(tensor, dtype))


def _widened(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.float() if tensor.dtype in SIXTEEN_BITS else tensor)


def _in(value: Any, dtype: torch.dtype) -> Any:
    return _mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _mapped(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return cast(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, cast) for each in value)
    if type(value) is dict:
        return {key: _mapped(each, cast) for key, each in value.items()}
    return value


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _floating(each)


class _LinearByDtype(torch.autograd.Function):
    """A linear function x W'ᵀ + b, where W' is the weight in the dtype of x: [..., D], [F, D], [F] -> [..., F].

    torch's own linear would keep W' until the backward pass: half of the bytes of the weights, whole on every rank at
    any ZeRO stage.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W'ᵀ + b and save the weight in its own dtype."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of input, weight and bias; the weight is cast again."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows, inputs = (each.flatten(0, -2) if each.dim() > 1 else each[None] for each in (grad, x))
        return (
            grad.matmul(weight.to(x.dtype)) if needs_x else None,
            rows.mT.mm(inputs).to(weight.dtype) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
