"""``PipelineModule``, ``LayerSpec`` and ``TiedLayerSpec``: DeepSpeed's way to say what ``Layers`` says.

    net = PipelineModule(
        layers=[LayerSpec(nn.Linear, 8, 8), nn.Tanh(), lambda x: x.flatten(1), nn.Linear(8, 2)],
        num_stages=2,
        loss_fn=nn.CrossEntropyLoss(),
    )

Where the ranks are more than the stages, pipelines stand side by side: rank = stage x (ranks / stages) + pipeline. A
layer's place is its name (``0.weight``), that of a tied layer too. A ``LayerSpec`` is built where it runs; where it
runs is settled by ``initialize``, so until then its weights are on meta, unless there is one stage. Its start weights
depend on its place and on the seed alone: rank 0's torch seed or, with ``seed_layers``, ``base_seed`` + place.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import default_group
from shardwise.deepspeed import recompute_calls
from shardwise.deepspeed.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from shardwise.parallel.pipeline.layers import Layers, LayerSpec, TiedSpec
from shardwise.plan.errors import UsageError

_OWN_CHECKPOINT = (recompute_calls.checkpoint, recompute_calls.non_reentrant_checkpoint)


class PipelineError(UsageError):
    """A call that a pipeline has no answer to."""


class SpecOfModule(LayerSpec):
    """``deepspeed.pipe.LayerSpec``: a module that is not built yet."""

    @property
    def typename(self) -> Callable[..., nn.Module]:
        """The module's class."""
        return self.cls

    @property
    def module_args(self) -> tuple[Any, ...]:
        """What it is made of, by place."""
        return self.args

    @property
    def module_kwargs(self) -> dict[str, Any]:
        """What it is made of, by name."""
        return self.kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The module, on torch's default device."""
        return super().build()


class TiedLayerSpec(SpecOfModule, TiedSpec):
    """A layer that shares its parameters, all of them, with the others of the same ``key``.

    ``forward_fn(module, x)`` replaces the layer's own pass at this place. ``tied_weight_attr`` names parameters that
    the module has to have; those beside them are shared too, as they are there where both lie on one stage.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Iterable[str] = ("weight",),
        **module_kwargs: Any,
    ):
        TiedSpec.__init__(self, key, typename, *module_args, forward=forward_fn, **module_kwargs)
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )

    @property
    def forward_fn(self) -> Callable[[nn.Module, Any], Any] | None:
        """Its own pass at this place."""
        return self.forward


class PipelineModule(Layers):
    """Layers in a row, cut into stages by ``initialize``. Without an engine: the whole row, on one process.

    layers          modules, specs, and functions of one argument; a Sequential too
    num_stages      ranks that a model is cut over; left out, ``topology`` says it
    topology        where the ranks stand: ``pipe`` slowest, then ``data``
    loss_fn         (output, labels) -> loss; left out, the last layer returns the loss
    seed_layers     start weights from ``base_seed`` + place, set by ``seed_fn`` (default: torch's)
    partition_method  ``parameters``, ``uniform``, or ``type:REGEX``: as many layers whose class matches each
    activation_checkpoint_interval  above 0, layers with parameters run again in the backward pass, layer by layer
    checkpointable_layers  names of classes: those layers alone
    dynamic_shape   shapes may change from batch to batch, whatever it says

    Errors: UsageError, on all ranks alike.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = recompute_calls.checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ):
        specs = list(layers)
        _check_layers(specs)
        if activation_checkpoint_func not in _OWN_CHECKPOINT:
            raise UsageError(
                "PipelineModule: activation_checkpoint_func: layers run again by torch's checkpoint alone; leave it "
                "out, or call yours inside of a layer"
            )
        self._seeds = (seed_layers, seed_fn, base_seed)
        self._is_cut = False
        super().__init__(specs, loss_fn, torch.initial_seed())
        self.num_stages = _stages(num_stages, topology)
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = checkpointable_layers
        self._topology = topology
        self._grid: PipelineParallelGrid | None = None
        self._check_names()
        if default_group.is_begun():
            self.check_ranks()
        if self.num_stages == 1:
            self.build_all()

    # Without an engine -----------------------------------------------------------------------------------------

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        """The last layer's result; its loss, where ``targets`` are given and there is a ``loss_fn``."""
        if not self._is_cut:
            self.build_all()
        return super().forward(inputs, targets)

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any] | None:
        """(output, labels) -> loss."""
        return self.loss

    def loss_of(self, output: Any, labels: Any) -> Any:
        """What ``loss_fn`` says or, without one, the output."""
        return output if self.loss is None else self.loss(output, labels)

    # Where it runs ---------------------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Where the ranks stand."""
        if self._topology is None:
            self._topology = PipeDataParallelTopology(
                self.num_stages, default_group.size() // self.num_stages
            )
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place, with torch's groups; all ranks make them together at the first call."""
        if self._grid is None:
            self.check_ranks()
            self._grid = PipelineParallelGrid(self.topology())
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Stages."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """See ``activation_checkpoint_interval``; before ``initialize``."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> None:
        """None: a loss is one number."""

    def check_ranks(self) -> None:
        """Errors: UsageError where the job's ranks are no pipelines of as many stages."""
        ranks = default_group.size()
        if ranks % self.num_stages:
            fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise UsageError(
                f"PipelineModule: num_stages {self.num_stages} does not divide the {ranks} ranks of the job; give one "
                f"of {', '.join(map(str, fits))}, or start a multiple of {self.num_stages} ranks"
            )
        topology = self.topology()
        own = [topology.get_coord(rank).pipe for rank in range(min(ranks, topology.world_size()))]
        if topology.world_size() != ranks or own != [
            rank // (ranks // self.num_stages) for rank in range(ranks)
        ]:
            raise UsageError(
                f"PipelineModule: topology {dict(zip(topology.axes, topology.dims, strict=True))} on {ranks} ranks; "
                f"expected pipe first, then data: PipeDataParallelTopology(num_pp={self.num_stages}, "
                f"num_dp={ranks // self.num_stages})"
            )

    def begin(self) -> dict[str, Any]:
        """``initialize`` takes it: all ranks draw from rank 0's seed. Returns our configuration's part. Collective."""
        self.check_ranks()
        seed = torch.tensor([self.seed % 2**62])
        if default_group.size() > 1:
            default_group.broadcast(seed, 0)
        self.seed = int(seed)
        self._is_cut = True
        return {"mesh": {"pp": self.num_stages}, "pipeline": {"partition": self.partition_method}}

    def unit_patterns(self) -> list[str]:
        """ZeRO gathers layer by layer."""
        return [name for name, layer in self.named_children() if next(layer.parameters(), None) is not None]

    def recomputed(self) -> list[str]:
        """Names of the layers that run again in the backward pass."""
        chosen = self.checkpointable_layers
        if chosen is None:
            return self.unit_patterns()
        return [name for name in self.unit_patterns() if type(self.get_submodule(name)).__name__ in chosen]

    def seed_at(self, place: int) -> None:
        """See ``Layers``."""
        by_layer, function, base = self._seeds
        if by_layer:
            (function or torch.manual_seed)(base + place)
        else:
            super().seed_at(place)

    def _check_names(self) -> None:
        tied = [(place, spec) for place, spec in enumerate(self._specs) if isinstance(spec, TiedLayerSpec)]
        for place, spec in tied:
            for name in spec.tied_weight_attr:
                found: Any = self.get_submodule(str(place))
                for step in name.split("."):
                    found = getattr(found, step, None)
                if not isinstance(found, Tensor):
                    raise UsageError(
                        f"PipelineModule: layer {place}, TiedLayerSpec({spec.key!r}): tied_weight_attr {name!r} is no "
                        f"parameter of {getattr(spec.cls, '__name__', spec.cls)}; name one that it has"
                    )


def _check_layers(specs: list[Any]) -> None:
    for place, spec in enumerate(specs):
        if isinstance(spec, Layers):
            raise UsageError(
                f"PipelineModule: layer {place} is a {type(spec).__name__}; give its layers one by one"
            )
        if not isinstance(spec, LayerSpec) and not callable(spec):
            raise UsageError(
                f"PipelineModule: layer {place} is a {type(spec).__name__}; expected a module, a LayerSpec, or a "
                "function of one argument"
            )


def _stages(given: int | None, topology: ProcessTopology | None) -> int:
    """Errors: UsageError."""
    if topology is None:
        if given is None:
            raise UsageError("PipelineModule: give num_stages, or a topology with an axis pipe")
        if not isinstance(given, int) or given < 1:
            raise UsageError(f"PipelineModule: num_stages {given!r}; expected a whole number of at least 1")
        return given
    stages = topology.get_dim("pipe")
    if not stages or topology.get_dim("model") > 1:
        raise UsageError(
            f"PipelineModule: topology {dict(zip(topology.axes, topology.dims, strict=True))}; expected axes pipe and "
            'data: layers stay whole, and "tensor_parallel": {"autotp_size": N} cuts them'
        )
    if given is not None and given != stages:
        raise UsageError(f"PipelineModule: num_stages {given} and a topology of {stages} stages; keep one")
    return stages
