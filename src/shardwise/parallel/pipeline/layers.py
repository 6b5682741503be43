"""Layers: a model as a list, for those that cannot be cut out of a module's own forward pass.

    Layers([
        TiedSpec("embedding", nn.Embedding, 256, 64),
        LayerSpec(Block, 64),
        LayerSpec(Block, 64),
        torch.tanh,
        TiedSpec("embedding", nn.Embedding, 256, 64, forward=lambda module, x: x @ module.weight.T),
    ], loss=nn.functional.cross_entropy)

With stages on several ranks the first one reads ``inputs`` and the last one ``targets``: a rank may bring None for what
its stages do not read, as in ``(inputs, None)``, ``(None, targets)``, or None for both.

The forward pass hands each layer's result to the next as one argument (a tensor or any pytree of tensors). A module or
a plain callable is taken as it is. A ``LayerSpec`` is built only on the rank where it lives, and stays on the meta
device elsewhere; its start weights depend on (seed, place in the list) alone, and so not on the cut.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.parallel.pipeline.stand_in import shallow_copy
from shardwise.plan.errors import PlanError, UsageError


class Brought(NamedTuple):
    """What a batch holds of the arguments of ``Layers.forward``; None where nothing."""

    inputs: Any
    targets: Any


def brought_in(batch: Any) -> Brought:
    """By name of a mapping, by place of a tuple or list; anything else is the inputs."""
    if isinstance(batch, Mapping):
        return Brought(batch.get("inputs"), batch.get("targets"))
    if isinstance(batch, tuple | list):
        return Brought(*[*batch, None, None][:2])
    return Brought(batch, None)


class LayerSpec:
    """A layer that is not built yet: ``cls(*args, **kwargs)``."""

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any):
        if not callable(cls):
            raise UsageError(
                f"LayerSpec: expected a module class or a function that makes a module, got {cls!r}"
            )
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """The layer, on torch's default device."""
        made = self.cls(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise UsageError(f"LayerSpec: {self.cls!r} made a {type(made).__name__}, expected a module")
        return made


class TiedSpec(LayerSpec):
    """A layer that shares all parameters with the others of the same ``key``.

    The first one of a key says how it is built; ``forward(module, x)`` replaces the layer's own pass at this place.
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


class Function(nn.Module):
    """A plain callable as a module."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        """The callable's result."""
        return self.function(x)


def class_name(layer: nn.Module) -> str:
    """Of a layer's class; of a plain function its own name."""
    made = layer.function if isinstance(layer, Function) else type(layer)
    return getattr(made, "__name__", type(made).__name__)


class Layers(nn.Module):
    """Layers in a row; names of parameters begin with the layer's place: ``0.weight``."""

    loss: Callable[[Any, Any], Any] | None
    """(output, targets) -> loss."""

    def __init__(self, layers: Sequence[Layer], loss: Callable[[Any, Any], Any] | None = None, seed: int = 0):
        super().__init__()
        if not layers:
            raise PlanError("Layers: the list is empty; give at least one layer")
        self.__dict__["loss"] = loss  # one that is a module is none of the layers
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
        """Whether some layers are built only where they live."""
        return any(isinstance(spec, LayerSpec) for spec in self._specs)

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        """The last layer's result; ``loss(result, targets)`` where both are given."""
        x = inputs
        for layer in self._modules.values():
            assert layer is not None, "every place of the list holds a layer"
            x = layer(x)
        return x if self.loss is None or targets is None else self.loss(x, targets)

    def build_all(self) -> None:
        """Every layer in its place, with its start weights; nothing where that is done."""
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            self._modules.update(self.build(self._modules))

    def build(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """The layers of these places on torch's default device, with their start weights; in the dtypes that the list
        was changed to since, and frozen where it is."""
        # A module that was given as it is may have made way for another one since: dropout, say.
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
                made[place] = spec if isinstance(spec, nn.Module) else Function(spec)
        return made

    def _drawn(self, place: int) -> nn.Module:
        spec = self._specs[place]
        assert isinstance(spec, LayerSpec), "only a LayerSpec is built"
        with torch.random.fork_rng():
            self.seed_at(place)
            return spec.build()

    def seed_at(self, place: int) -> None:
        """Seed torch for the start weights of the layer at ``place``."""
        torch.manual_seed((self.seed * 1_000_003 + place) % 2**63)


def _tied(module: nn.Module, spec: TiedSpec) -> nn.Module:
    """A module of its own at this place, so that its hooks run when it does; the parameters are the same."""
    twin: nn.Module = shallow_copy(module)
    if spec.forward is not None:
        twin.__dict__["forward"] = functools.partial(spec.forward, twin)
    return twin
