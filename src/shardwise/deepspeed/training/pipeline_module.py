"""``PipelineModule``, ``DualPipeVModule``, ``LayerSpec`` and ``TiedLayerSpec``: DeepSpeed's interface to ``Layers``.

    net = PipelineModule(
        layers=[LayerSpec(nn.Linear, 8, 8), nn.Tanh(), lambda x: x.flatten(1), nn.Linear(8, 2)],
        num_stages=2,
        loss_fn=nn.CrossEntropyLoss(),
    )

If there are more ranks than stages, there are several pipelines: rank = stage x (ranks / stages) + pipeline. A
layer's name is its index in the list (``0.weight``), also for a tied layer. A ``LayerSpec`` is built only on the
stage that runs its layer. ``initialize`` assigns layers to stages, so until then the weights are on meta, unless
there is one stage. Initial weights depend only on the index and the seed: rank 0's torch seed or, with
``seed_layers``, ``base_seed`` + index.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.comm import default_group
from shardwise.deepspeed.training import recompute_calls
from shardwise.deepspeed.training.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from shardwise.parallel.pipeline.layers import Layers, LayerSpec, TiedSpec

_OWN_CHECKPOINT = (recompute_calls.checkpoint, recompute_calls.non_reentrant_checkpoint)


class PipelineError(UsageError):
    """An error for a call that a pipeline does not support."""


class SpecOfModule(LayerSpec):
    """A module that is not built yet; scripts use this class as ``deepspeed.pipe.LayerSpec``."""

    @property
    def typename(self) -> Callable[..., nn.Module]:
        """The module's class."""
        return self.cls

    @property
    def module_args(self) -> tuple[Any, ...]:
        """The positional arguments of the module's class."""
        return self.args

    @property
    def module_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the module's class."""
        return self.kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build the module on torch's default device and return it."""
        return super().build()


class TiedLayerSpec(SpecOfModule, TiedSpec):
    """A layer that shares all of its parameters with the other layers of the same ``key``.

    ``forward_fn(module, x)`` replaces the layer's own forward pass at this index. ``tied_weight_attr`` names
    parameters that the module must have; the module's other parameters are shared too, as in DeepSpeed if both layers
    are on one stage.
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
        """The function that replaces the layer's own forward pass at this index; None for no replacement."""
        return self.forward


class PipelineModule(Layers):
    """A list of layers that ``initialize`` cuts into stages; without an engine, one process runs the whole list.

    Args:
        layers: Modules, specs and functions of one argument; also an ``nn.Sequential``.
        num_stages: The number of stages over which the model is cut; None: the stages of ``topology``.
        topology: The arrangement of ranks: ``pipe`` is the slowest axis, then ``data``.
        loss_fn: (output, labels) -> loss; None: the last layer returns the loss.
        seed_layers: True to draw the initial weights of each layer from ``base_seed`` + index.
        seed_fn: The function that sets such a seed; None: ``torch.manual_seed``.
        base_seed: The seed of layer 0 if ``seed_layers`` is True.
        partition_method: ``parameters``, ``uniform``, or ``type:REGEX``, which puts equally many layers whose class
            matches on each stage.
        activation_checkpoint_interval: Above 0, layers with parameters are recomputed in the backward pass, layer by
            layer.
        activation_checkpoint_func: One of this package's own checkpoint functions.
        checkpointable_layers: Names of classes; only layers of these classes are recomputed.
        dynamic_shape: No effect: shapes may always change from batch to batch.

    Raises:
        UsageError: on all ranks, if an argument is invalid or does not fit the number of ranks.
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
        """Return the last layer's output, or the loss if ``targets`` are given and there is a ``loss_fn``."""
        if not self._is_cut:
            self.build_all()
        return super().forward(inputs, targets)

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any] | None:
        """The function (output, labels) -> loss; None if the last layer returns the loss."""
        return self.loss

    def loss_of(self, output: Any, labels: Any) -> Any:
        """Return the loss that ``loss_fn`` computes, or the output if there is no ``loss_fn``."""
        return output if self.loss is None else self.loss(output, labels)

    # Where it runs ---------------------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Return the arrangement of ranks in axes."""
        if self._topology is None:
            self._topology = PipeDataParallelTopology(
                self.num_stages, default_group.size() // self.num_stages
            )
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """Return the pipeline grid with this rank's coordinates and torch's groups. Collective at the first call."""
        if self._grid is None:
            self.check_ranks()
            self._grid = PipelineParallelGrid(self.topology())
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    @property
    def loss_stage_id(self) -> int:
        """The index among the ranks of a pipeline of the rank that computes the loss."""
        return self.num_stages - 1

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set ``activation_checkpoint_interval``; call this method before ``initialize``."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> None:
        """Return None: the loss is a single number without parts."""

    def check_ranks(self) -> None:
        """Raise UsageError if the ranks of the job do not form pipelines of ``num_stages`` stages."""
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
        """Prepare the module for ``initialize`` and return the keys of the configuration that it sets. Collective.

        All ranks take over rank 0's seed, so that they draw the same initial weights.
        """
        self.check_ranks()
        seed = torch.tensor([self.seed % 2**62])
        if default_group.size() > 1:
            default_group.broadcast(seed, 0)
        self.seed = int(seed)
        self._is_cut = True
        return {"mesh": {"pp": self.num_stages}, "pipeline": {"partition": self.partition_method}}

    def unit_patterns(self) -> list[str]:
        """Return the names of the layers with parameters, because ZeRO gathers layer by layer."""
        return [name for name, layer in self.named_children() if next(layer.parameters(), None) is not None]

    def recomputed(self) -> list[str]:
        """Return the names of the layers that are recomputed in the backward pass."""
        chosen = self.checkpointable_layers
        if chosen is None:
            return self.unit_patterns()
        return [name for name in self.unit_patterns() if type(self.get_submodule(name)).__name__ in chosen]

    def seed_at(self, place: int) -> None:
        """Set the random seed with which the layer at index ``place`` is initialized, as ``Layers.seed_at`` does."""
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


class DualPipeVModule(PipelineModule):
    """A list of layers that ``initialize`` cuts into two stages per rank, in a V, which run DeepSeek's DualPipeV.

    Rank r of a pipeline runs the stages r and 2 * ``num_stages`` - 1 - r, so that rank 0 reads the inputs and computes
    the loss. ``num_stages`` is the number of ranks. The arguments are those of ``PipelineModule``. Any number of
    microbatches and any ZeRO stage is possible, and shapes may change from batch to batch.
    """

    @property
    def loss_stage_id(self) -> int:
        """The index among the ranks of a pipeline of the rank that computes the loss: rank 0."""
        return 0

    def begin(self) -> dict[str, Any]:
        """Prepare the module for ``initialize`` and return the keys of the configuration that it sets. Collective."""
        said = super().begin()
        if self.num_stages > 1:
            said["pipeline"] = {**said["pipeline"], "schedule": "dualpipe_v"}
        return said


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
    """Return the number of stages.

    Raises:
        UsageError: if the number is missing, invalid or contradicted by the topology, or the topology cuts layers.
    """
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
