"""Products of linear layers in fp8, with torchao's numbers: the layers, the scales and the three products.

    y = x Wᵀ + b       x, W in e4m3       s(t) = largest number of the format / max |t|, in fp32
    dx = dy W          dy in e5m2         t₈ = round(s(t) · t)
    dW = dyᵀ x                            a₈ b₈ᵀ / (s(a) · s(b)), summed in fp32, rounded to the compute dtype

``max`` runs over the whole tensor (recipe "tensorwise") and is computed anew for each tensor. The scale of a weight is
that of the whole weight on every layout, because the largest of the maxima of pieces is the maximum of the whole: the
rounded numbers do not depend on how a weight is cut. x and dy are those of the rank's own tokens; where tp cuts their
features, the maximum runs over the ranks of tp. The recipe "rowwise" has one scale for each row, and no tp.

A layer that neither tp nor a gather in fp8 touches runs torchao's own function. The others run ``_CutProduct``, which
casts by the same functions with scales that ranks agree on, and whose products are those of torchao's tensors.

torchao is imported by the first layer that needs it, and ``import shardwise`` never imports it.

Papers: Micikevicius et al. 2022, arXiv:2209.05433 (the formats).
Cost:   one pass over x, W and dy for their maxima and one for their casts, in each product that needs them; with tp one
        exchange of two numbers for a layer's forward pass, one number for the backward pass of a column layer.
Shapes: x [..., K], W [N, K], b [N], dy [..., N].
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.comm.collectives import Group
from shardwise.comm.duals import uncompiled
from shardwise.precision.policy import PrecisionPolicy

MULTIPLE = 16
"""Sizes of a product in fp8 are multiples of this number, because matrix units require it."""
_CAPABILITY = (8, 9)
"""The first compute capability of a CUDA device with products in fp8."""
_COMPUTE = (torch.bfloat16, torch.float32)


# Layers ------------------------------------------------------------------------------------------------------------


def fp8_layers(model: nn.Module, units: Iterable[str], policy: PrecisionPolicy) -> tuple[str, ...]:
    """Return the names of the linear layers that compute in fp8, in order of registration.

    These are the plain ``nn.Linear`` inside ``units`` whose inputs and outputs are multiples of 16 and whose weight no
    other module holds, except those that ``fp8_skip`` or ``keep_fp32`` names. The choice depends on the whole model
    alone, so that it is the same on every layout.

    Args:
        model: The whole model.
        units: Names of the Units without the root.
        policy: Keys under ``precision:``.

    Returns:
        The names; nothing if ``precision.linear`` is not set.

    Raises:
        ConfigError: if no layer is left, or a weight has a dtype that cannot be multiplied in fp8.
    """
    if policy.linear is None:
        return ()
    inside = tuple(f"{unit}." for unit in units if unit)
    held: dict[int, int] = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        for parameter in model.get_submodule(name)._parameters.values():
            held[id(parameter)] = held.get(id(parameter), 0) + 1
    found = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or not f"{name}.".startswith(inside):
            continue
        fits = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
        is_named = policy.keeps(f"{name}.weight") or any(fnmatchcase(name, each) for each in policy.fp8_skip)
        if not fits or is_named or held[id(module.weight)] > 1:
            continue
        dtype = policy.dtypes(f"{name}.weight", module.weight.dtype).compute
        if dtype not in _COMPUTE:
            raise ConfigError(
                f"precision.linear: fp8: {name} has a weight of {dtype}, and weights of bf16 or fp32 are multiplied in "
                "fp8; set precision.compute: bf16, or name the layer in precision.fp8_skip"
            )
        found.append(name)
    if not found:
        raise ConfigError(
            "precision.linear: fp8: the model has no plain nn.Linear inside a Unit below the root whose inputs and "
            f"outputs are multiples of {MULTIPLE} and that precision.fp8_skip does not name; name modules in "
            "zero.units, or leave precision.linear out"
        )
    return tuple(found)


def check_pieces(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Check that the pieces of weights that a rank multiplies have sizes in multiples of 16.

    Args:
        shapes: Name of each layer that computes in fp8, and the shape of its weight on a rank.

    Raises:
        PlanError: if not.
    """
    for name, shape in shapes:
        if any(size % MULTIPLE for size in shape):
            raise PlanError(
                f"precision.linear: fp8: mesh.tp cuts the weight of {name} into pieces of {list(shape)}, and fp8 needs "
                f"multiples of {MULTIPLE}; use a smaller mesh.tp, or name the layer in precision.fp8_skip"
            )


def check_device(policy: PrecisionPolicy, device: torch.device) -> None:
    """Check that ``device`` multiplies in fp8, or that the products are emulated.

    Raises:
        ConfigError: if not, or if torchao cannot be imported.
    """
    if policy.linear is None:
        return
    Float8Products(policy)
    if policy.fp8_emulate:
        return
    instead = "take a device that has them, or leave precision.linear out (precision.fp8_emulate: true is for tests)"
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "ROCm" if device.type == "cuda" else device.type
        raise ConfigError(
            f"precision.linear: fp8: this rank computes on {kind}, and products in fp8 run on CUDA devices of compute "
            f"capability 8.9 and above; {instead}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        raise ConfigError(
            f"precision.linear: fp8: this rank computes on a device of compute capability {capability[0]}."
            f"{capability[1]}, and products in fp8 need 8.9 or above (L40, H100, B200); {instead}"
        )


# Products ----------------------------------------------------------------------------------------------------------


class Float8Source(Protocol):
    """The weight of a layer that was gathered in fp8."""

    @property
    def changes(self) -> int:
        """Number of changes of the weight's values so far."""
        ...

    def current(self) -> tuple[Tensor, Tensor]:
        """Return the numbers [N, K] in e4m3 and their scale []."""
        ...


class Float8Products:
    """torchao's products of linear layers for one policy, and the casts to fp8 before them.

    Args:
        policy: Keys under ``precision:``.

    Raises:
        ConfigError: if torchao cannot be imported.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        with _quiet_import():
            try:
                from torchao.float8 import Float8LinearConfig, convert_to_float8_training
                from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
                from torchao.float8.float8_training_tensor import (
                    Float8TrainingTensor,
                    GemmInputRole,
                    hp_tensor_and_scale_to_float8,
                )
                from torchao.float8.float8_utils import amax_to_scale
            except ImportError as error:
                raise ConfigError(
                    f"precision.linear: fp8: torchao cannot be imported ({error}); install it with "
                    "pip install --no-deps torchao"
                ) from None
        config = replace(Float8LinearConfig.from_recipe_name(policy.fp8_recipe), emulate=policy.fp8_emulate)
        with torch.device("meta"):
            # A stand-in goes through torchao's entry, which also prepares torch.compile for fp8.
            made: Any = convert_to_float8_training(nn.Linear(MULTIPLE, MULTIPLE), config=config)
        self.config = made.config
        self.of_products = made.linear_mm_config
        self.roles = GemmInputRole
        self.number_format: torch.dtype = config.cast_config_weight.target_dtype
        """The format of inputs and weights."""
        self.gradient_format: torch.dtype = config.cast_config_grad_output.target_dtype
        self.scale_of: Callable[[Tensor, torch.dtype], Tensor] = amax_to_scale
        self._cast = hp_tensor_and_scale_to_float8
        self._hold = Float8TrainingTensor
        self._multiply = matmul_with_hp_or_float8_args.apply

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b as torchao's ``Float8Linear`` does.

        Args:
            x: Input [..., K].
            weight: Whole weight [N, K].
            bias: Bias [N], or None.
        """
        y: Tensor = self._multiply(_cast_by_autocast(x), weight.t(), self.of_products, self.config)
        return y if bias is None else y + bias.to(y.dtype)

    def cast(self, tensor: Tensor, role: Any, scale: Tensor) -> Any:
        """Return ``tensor`` in the format of ``role``, as a tensor of torchao."""
        dtype = self.gradient_format if role is self.roles.GRAD_OUTPUT else self.number_format
        return self._cast(tensor, scale, dtype, self.of_products, role)

    def held(self, numbers: Tensor, scale: Tensor, dtype: torch.dtype, role: Any) -> Any:
        """Return numbers in fp8 with their scale as a tensor of torchao, whose products are of ``dtype``."""
        return self._hold(numbers, scale, dtype, self.of_products, role)


@uncompiled
def cut_product(
    x: Tensor,
    weight: Tensor,
    products: Float8Products,
    source: Float8Source | None,
    group: Group,
    cuts: Literal["outputs", "inputs", ""],
    what: str,
) -> Tensor:
    """Return x Wᵀ with scales of the whole weight, and of whole activations where their features are cut.

    Args:
        x: Input [..., K].
        weight: This rank's piece of the weight [N, K], which is not read if there is a ``source``.
        products: torchao's products.
        source: The piece gathered in fp8; None if ``weight`` is in memory.
        group: The ranks of tp.
        cuts: "outputs" for a column layer, "inputs" for a row layer, "" for a layer that tp does not cut.
        what: Name of the layer in errors and traces.
    """
    y: Tensor = _CutProduct.apply(_cast_by_autocast(x), weight, products, source, group, cuts, what)
    return y


class _CutProduct(torch.autograd.Function):
    """The three products of a layer; see ``cut_product``.

    The backward pass gets a weight that was gathered in fp8 from its source, because the memory of the forward pass may
    hold another Unit by then: a missed gather is an error of the source. The input is kept in fp8, from which the
    gradient of the weight is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        products: Float8Products,
        source: Float8Source | None,
        group: Group,
        cuts: str,
        what: str,
    ) -> Tensor:
        ctx.products, ctx.source, ctx.group, ctx.cuts, ctx.what = products, source, group, cuts, what
        ctx.dtype, ctx.changes = x.dtype, None if source is None else source.changes
        rows = x.reshape(-1, x.shape[-1])
        largest = torch.stack([_largest(rows), *([_largest(weight)] if source is None else [])])
        # The input of a column layer is the same on all ranks, and a gathered weight has its scale already.
        if cuts == "inputs" or (cuts and source is None):
            largest = _largest_of(largest, group, what)
        scales = products.scale_of(largest, products.number_format)
        kept = products.cast(rows, products.roles.INPUT, scales[0])
        if source is None:
            ctx.save_for_backward(kept._data, scales[0], weight, scales[1])
        else:
            ctx.save_for_backward(kept._data, scales[0])
        y = torch.mm(kept, _weight_of(ctx, weight, None if source else scales[1]).t())
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        numbers, scale, *held = ctx.saved_tensors
        products, roles = ctx.products, ctx.products.roles
        rows = grad.reshape(-1, grad.shape[-1])
        largest = _largest(rows)
        if ctx.cuts == "outputs":
            largest = _largest_of(largest, ctx.group, ctx.what)
        d_y = products.cast(rows, roles.GRAD_OUTPUT, products.scale_of(largest, products.gradient_format))
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = torch.mm(d_y, _weight_of(ctx, *held) if held else _weight_of(ctx))
            d_x = d_x.reshape(*grad.shape[:-1], d_x.shape[-1])
        if ctx.needs_input_grad[1]:
            d_weight = torch.mm(d_y.t(), products.held(numbers, scale, ctx.dtype, roles.INPUT))
        return d_x, d_weight, None, None, None, None, None


def _weight_of(ctx: Any, weight: Tensor | None = None, scale: Tensor | None = None) -> Any:
    """Return the weight in fp8: as it was gathered, or cast anew."""
    products = ctx.products
    if ctx.source is not None:
        if ctx.source.changes != ctx.changes:
            raise UsageError(
                f"{ctx.what}: its weight has changed between the forward pass and the backward pass, which needs the "
                "weight of the forward pass; call backward before the weights change"
            )
        return products.held(*ctx.source.current(), ctx.dtype, products.roles.WEIGHT)
    return products.cast(weight, products.roles.WEIGHT, scale)


def _largest(tensor: Tensor) -> Tensor:
    return tensor.detach().abs().amax().float()


def _largest_of(values: Tensor, group: Group, what: str) -> Tensor:
    """Return the largest of the ranks' values, element by element; NaN if any is NaN."""
    if group.size == 1:
        return values
    found = values.new_empty(group.size, *values.shape)
    group.all_gather(found.view(-1), values.view(-1), what, "control").wait()
    return found.amax(0)


def largest_over(values: Tensor, groups: Sequence[Group], what: str) -> Tensor:
    """Return the largest of the values of all ranks of several groups, element by element. Collective."""
    for group in groups:
        values = _largest_of(values, group, what)
    return values


def _cast_by_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def fp8_forward(
    layer: nn.Linear, products: Float8Products, source: Float8Source | None, name: str, x: Tensor
) -> Tensor:
    """Return the output of a layer that tp does not cut; takes the place of the layer's ``forward``.

    Args:
        layer: The layer.
        products: torchao's products.
        source: The weight gathered in fp8; None if the layer's own weight is in memory.
        name: Name of the layer.
        x: Input [..., K].
    """
    check_rows(x, name)
    if source is None:
        return products.linear(x, layer.weight, layer.bias)
    y = cut_product(x, layer.weight, products, source, Group.alone("tp"), "", name)
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


class CutProducts:
    """The product of one layer that tp cuts.

    Args:
        products: torchao's products.
        source: The piece gathered in fp8; None if the layer's own weight is in memory.
        group: The ranks of tp.
        cuts: "outputs" for a column layer, "inputs" for a row layer.
        name: Name of the layer.
    """

    def __init__(
        self,
        products: Float8Products,
        source: Float8Source | None,
        group: Group,
        cuts: Literal["outputs", "inputs"],
        name: str,
    ) -> None:
        self._fixed = products, source, group, cuts, name
        self._name = name

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's columns of x Wᵀ, or its addend: [..., N]."""
        check_rows(x, self._name)
        return cut_product(x, weight, *self._fixed)


def check_rows(x: Tensor, name: str) -> None:
    """Check that the tokens of a pass with gradients are a multiple of 16, as the gradient of a weight requires.

    Raises:
        UsageError: if not.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    if rows % MULTIPLE and torch.is_grad_enabled():
        raise UsageError(
            f"precision.linear: fp8: {name} got {list(x.shape)}, which is {rows} tokens, and the gradient of its "
            f"weight is a product over them, which fp8 computes for multiples of {MULTIPLE}; choose batch.micro_size "
            "and the length of sequences so, or name the layer in precision.fp8_skip"
        )


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Silence what torchao logs when it is imported first: libraries for other devices that are not there."""
    if "torchao" in sys.modules:
        yield
        return
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
