"""Layers: a model as a list, for models that cannot be cut out of a module's own forward pass.

    Layers([
        TiedSpec("embedding", nn.Embedding, 256, 64),
        LayerSpec(Block, 64),
        LayerSpec(Block, 64),
        torch.tanh,
        TiedSpec("embedding", nn.Embedding, 256, 64, forward=lambda module, x: x @ module.weight.T),
    ], loss=nn.functional.cross_entropy)

With stages on several ranks the first stage reads ``inputs`` and the last stage ``targets``: a rank may give None for
values that its stages do not read, as in ``(inputs, None)``, ``(None, targets)``, or None for both.

The forward pass gives each layer's result to the next layer as its only argument (a tensor or any pytree of tensors). A
module or a plain callable is used as it is. A ``LayerSpec`` is built only on the rank of its stage, and stays on the
meta device elsewhere; its start weights depend only on (seed, index in the list), and so not on the cut.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.base.errors import PlanError, UsageError
from shardwise.parallel.pipeline.stand_in import shallow_copy


class BatchArguments(NamedTuple):
    """The arguments of ``Layers.forward`` in a batch; None for a missing argument."""

    inputs: Any
    targets: Any


def brought_in(batch: Any) -> BatchArguments:
    """Return the inputs and targets of a batch.

    Args:
        batch: A mapping with "inputs" and "targets", a tuple or list in this order, or the inputs only.

    Returns:
        Inputs and targets, None if missing.
    """
    if isinstance(batch, Mapping):
        return BatchArguments(batch.get("inputs"), batch.get("targets"))
    if isinstance(batch, tuple | list):
        return BatchArguments(*[*batch, None, None][:2])
    return BatchArguments(batch, None)


class LayerSpec:
    """A layer that is built later: ``cls(*args, **kwargs)``.

    Args:
        cls: Module class, or a function that returns a module.
        *args: Positional arguments of ``cls``.
        **kwargs: Keyword arguments of ``cls``.

    Raises:
        UsageError: If ``cls`` is not callable.
    """

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any):
        if not callable(cls):
            raise UsageError(
                f"LayerSpec: expected a module class or a function that makes a module, got {cls!r}"
            )
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """Build the layer on torch's default device.

        Returns:
            The layer.

        Raises:
            UsageError: If ``cls`` returned something else than a module.
        """
        made = self.cls(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise UsageError(f"LayerSpec: {self.cls!r} made a {type(made).__name__}, expected a module")
        return made


class TiedSpec(LayerSpec):
    """A layer that shares all parameters with the other layers of the same ``key``.

    The first layer of a key determines how the layer is built.

    Args:
        key: Name of the group of layers that share parameters.
        cls: Module class, or a function that returns a module.
        *args: Positional arguments of ``cls``.
        forward: Function ``forward(module, x)`` that replaces the layer's own forward at this index of the
            list, or None.
        **kwargs: Keyword arguments of ``cls``.
    """

    def __init__(
        self,
        key: str,
        cls: Callable[..., nn.Module],
        *args: Any,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(cls, *args, **kwargs)
        self.key = key
        self.forward = forward


Layer = nn.Module | LayerSpec | Callable[[Any], Any]


class FunctionLayer(nn.Module):
    """A plain callable as a module.

    Args:
        function: The callable.
    """

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        """Return the callable's result."""
        return self.function(x)


def class_name(layer: nn.Module) -> str:
    """Return the name of a layer's class, or of the function if the layer is a plain function."""
    made = layer.function if isinstance(layer, FunctionLayer) else type(layer)
    return getattr(made, "__name__", type(made).__name__)


class Layers(nn.Module):
    """Layers in a row, as a model; names of parameters begin with the layer's index: ``0.weight``.

    Args:
        layers: Modules, specs or callables, in order.
        loss: Function (output, targets) that returns the loss, or None.
        seed: Seed of the start weights.

    Raises:
        PlanError: If the list is empty or the loss has parameters.
    """

    loss: Callable[[Any, Any], Any] | None
    """Function (output, targets) that returns the loss, or None."""

    def __init__(self, layers: Sequence[Layer], loss: Callable[[Any, Any], Any] | None = None, seed: int = 0):
        super().__init__()
        if not layers:
            raise PlanError("Layers: the list is empty; give at least one layer")
        self.__dict__["loss"] = loss  # not registered as a child, which would make a loss module a layer
        if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
            raise PlanError(
                f"Layers: the loss, a {type(loss).__name__}, has parameters; make it part of the last layer"
            )
        self.seed = seed
        self._specs = list(layers)
        with torch.device("meta"):
            made = self._make(range(len(layers)))
        for place, module in made.items():
            self.add_module(str(place), module)

    @property
    def has_specs(self) -> bool:
        """True if some layers are built only on the rank of their stage."""
        return any(isinstance(spec, LayerSpec) for spec in self._specs)

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        """Run all layers.

        Args:
            inputs: Argument of the first layer.
            targets: Second argument of the loss, or None.

        Returns:
            The last layer's result, or ``loss(result, targets)`` if both are given.
        """
        x = inputs
        for layer in self._modules.values():
            assert layer is not None, "every place of the list holds a layer"
            x = layer(x)
        return x if self.loss is None or targets is None else self.loss(x, targets)

    def build_all(self) -> None:
        """Build every layer in its place, with its start weights; do nothing if all layers are built."""
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            self._modules.update(self.build(self._modules))

    def build(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Build layers on torch's default device with their start weights.

        The layers get the dtypes and the ``requires_grad`` that the list has now.

        Args:
            names: Indices of the layers, as names of children.

        Returns:
            The layers by name.
        """
        # A module that was given as it is may have been replaced since (dropout, for example): use the present child.
        made = {
            str(place): self.get_submodule(str(place))
            if isinstance(self._specs[place], nn.Module)
            else module
            for place, module in self._make(sorted(map(int, names))).items()
        }
        for name, module in made.items():
            outline = dict(self.get_submodule(name).named_parameters())
            for inner, parameter in module.named_parameters():
                parameter.data = parameter.data.to(outline[inner].dtype)
                parameter.requires_grad_(outline[inner].requires_grad)
            of_buffers = dict(self.get_submodule(name).named_buffers())
            for inner, buffer in module.named_buffers():
                buffer.data = buffer.data.to(of_buffers[inner].dtype)
        return made

    def _make(self, places: Iterable[int]) -> dict[int, nn.Module]:
        made: dict[int, nn.Module] = {}
        first: dict[str, nn.Module] = {}
        for place in places:
            spec = self._specs[place]
            if isinstance(spec, TiedSpec):
                module = first.get(spec.key)
                if module is None:
                    origin = next(
                        i for i, s in enumerate(self._specs) if isinstance(s, TiedSpec) and s.key == spec.key
                    )
                    module = first[spec.key] = self._drawn(origin)
                made[place] = _tied(module, spec)
            elif isinstance(spec, LayerSpec):
                made[place] = self._drawn(place)
            else:
                made[place] = spec if isinstance(spec, nn.Module) else FunctionLayer(spec)
        return made

    def _drawn(self, place: int) -> nn.Module:
        spec = self._specs[place]
        assert isinstance(spec, LayerSpec), "only a LayerSpec is built"
        with torch.random.fork_rng():
            self.seed_at(place)
            return spec.build()

    def seed_at(self, place: int) -> None:
        """Seed torch for the start weights of the layer at index ``place``."""
        torch.manual_seed((self.seed * 1_000_003 + place) % 2**63)


def _tied(module: nn.Module, spec: TiedSpec) -> nn.Module:
    """Return a separate module with the same parameters.

    The hooks of the copy run only when the copy runs.
    """
    twin: nn.Module = shallow_copy(module)
    if spec.forward is not None:
        twin.__dict__["forward"] = functools.partial(spec.forward, twin)
    return twin
