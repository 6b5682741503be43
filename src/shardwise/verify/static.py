"""Static part: the placement of every gradient, derived from a pass on shapes and compared with the registry.

No process is started. The model is cut for a rank of each kind of stage, as ``foresee`` cuts it, and runs forward and
backward on tensors without numbers, while each operation hands on how its tensors lie on the ranks of "tp"
(simulate/placements.py). Then

    derived placement of a gradient  =  registered ``grad_placement``

must hold for every parameter. If a gradient is an addend and the registry has it as whole, the sum over the ranks is
missing; if it is whole and the registry has it as an addend, the sum counts it once for each rank.

Cost: one pass of operations on shapes for each kind of stage, whatever the number of ranks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.pytree import tensors_in
from shardwise.comm.duals import SEQUENCE
from shardwise.comm.transports import NoTransport, Transport
from shardwise.compose import module_steps
from shardwise.compose.describe import describe_cut
from shardwise.compose.plan import make_plan
from shardwise.config.run import RunConfig
from shardwise.engine.fit.foresee import JobFacts, StageOnShapes, read, visit_stages
from shardwise.engine.parts.inputs import Loss
from shardwise.kernels.choice import kernels_of
from shardwise.kernels.dropout import EqualPart
from shardwise.plan.placement import AxisCut, Partial, Placement, Replicate, Shard, local_shape, runs
from shardwise.plan.registry import Registry, TensorInfo, TensorKind
from shardwise.simulate.placement_rules import Lie
from shardwise.simulate.placements import (
    ActivationForm,
    PlacementMode,
    PlacementProblem,
    PlacementTransport,
    UnknownOperation,
    derive,
    gradient_suits,
    lie_of,
    placement_of,
)
from shardwise.verify.reductions import reduction_problems


@dataclass(frozen=True)
class StaticPart:
    """Result of the static part, for people and as JSON."""

    operations: int = 0
    """Number of operations whose operands were checked."""
    unknown_results: int = 0
    """Number of operations whose result is unknown, those that follow an unknown operation included."""
    gradients: int = 0
    """Number of gradients that were compared with the registry."""
    reduced: int = 0
    """Number of gradients whose sums over ranks were run on numbered elements (verify/reductions.py)."""
    unknown: tuple[UnknownOperation, ...] = ()
    """Operations that no rule covers, and gradients whose placement could not be derived."""
    problems: tuple[PlacementProblem, ...] = ()
    activations: Registry | None = field(default=None, compare=False)
    """Inputs and outputs of modules and their gradients, with their placements; None if nothing was checked.

    Kinds ``activation`` and ``activation gradient``; the name is that of the module, the label is ``input`` or
    ``output``. A tensor whose placement is unknown has no entry."""

    def placement_of_output(self, module: str, gradient: bool = False) -> TensorInfo | None:
        """Return the registered output of a module, or its gradient, as it lies on the ranks along "tp".

        Args:
            module: Name of a module of the user's model; its first call in a microbatch counts, and of several outputs
                the first.
            gradient: True for the gradient that reaches the output.

        Returns:
            The tensor of one microbatch: its whole shape, and with ``.on("tp")`` its placement: Replicate (equal on
            all ranks), Shard (slices of a dim, perhaps in blocks), Partial (the sum over the ranks is the tensor) or
            PerRank (values of each rank's own). None if the placement is unknown, or the module was not called.
        """
        if self.activations is None:
            return None
        return self.activations.find("activation gradient" if gradient else "activation", module, "output")

    def as_json(self) -> dict[str, Any]:
        """Return the part as JSON has it."""
        return {
            "checked": {
                "operations": self.operations,
                "gradients": self.gradients,
                "sums": self.reduced,
            },
            "unknown": [each._asdict() for each in self.unknown],
            "problems": [each._asdict() for each in self.problems],
        }


def static_problems(
    make: Callable[[], nn.Module],
    config: "str | Path | Mapping[str, Any] | RunConfig",
    ranks: int,
    example: Any,
    loss: Loss | None = None,
) -> StaticPart:
    """Return what is wrong with placements on the axis "tp" and with sums of gradients, without a process.

    Args:
        make: Function that builds the model anew each time, on meta or not.
        config: The configuration, as ``initialize`` takes it.
        ranks: Number of ranks of the job.
        example: A microbatch, or tensors of its shapes.
        loss: The loss function, as ``initialize`` takes it.

    Returns:
        What was checked, what is unknown and what is wrong. With one rank nothing is checked, and with one rank on "tp"
        only the sums of gradients are.

    Raises:
        ShardwiseError: as ``initialize``, for everything that does not depend on weights or messages.
    """
    known = read(make, config, ranks, torch.device("cpu"), None, loss)
    if known.mesh.world_size == 1:
        return StaticPart()
    plan = make_plan(known.spec, known.mesh, known.policies)
    registry = plan.registry
    reduced, wrong, left_out = reduction_problems(plan)
    check = _StageCheck(
        {name: info for info in registry.of_kind("parameter") for name in (info.name, *info.aliases)},
        {name: info for info in registry.of_kind("gradient") for name in (info.name, *info.aliases)},
        Registry(known.mesh),
    )
    if known.mesh.tp > 1:
        visit_stages(known, make, example, loss, check.transport_of, check)
        check.check_dropouts(known, make)
    found = check.result()
    if known.mesh.ep * known.mesh.etp > 1:
        found = _without_experts(found, known.spec.experts)
    unknown = [UnknownOperation(f"sum of the gradient of {name}", "", "") for name in left_out]
    return replace(
        found, reduced=reduced, problems=(*found.problems, *wrong), unknown=(*found.unknown, *unknown)
    )


def _without_experts(part: StaticPart, layers: Collection[str]) -> StaticPart:
    """Return the part with what was found inside of experts as unknown.

    Ranks along "ep" and "etp" are in part those along "tp", so rows that arrive from them lie in no way that one axis
    has.

    Args:
        part: The derived placements.
        layers: Names of the layers that have experts.
    """
    inside = [
        each
        for each in part.problems
        if any(
            each.module == f"{layer}.experts" or each.module.startswith(f"{layer}.experts.")
            for layer in layers
        )
    ]
    rest = tuple(each for each in part.problems if each not in inside)
    unknown = tuple(UnknownOperation(each.name, each.module, each.line) for each in inside)
    return replace(part, problems=rest, unknown=(*part.unknown, *unknown))


def activation_placements(part: StaticPart) -> dict[tuple[str, str], TensorInfo]:
    """Return the inputs, outputs and output gradients whose placement is known, by name of the module and label.

    Args:
        part: The derived placements.

    Returns:
        The tensors under ``input``, ``output`` and ``gradient``, which is that of the output's gradient.
    """
    found = {}
    for info in part.activations or ():
        if info.kind == "activation" or info.label == "output":
            found[info.name, info.label if info.kind == "activation" else "gradient"] = info
    return found


def put_together(info: TensorInfo, pieces: Sequence[Tensor], axis: str = "tp") -> Tensor | None:
    """Return the whole tensor from the pieces of the ranks on an axis; None for values of each rank's own.

    Args:
        info: The registered tensor.
        pieces: What the ranks on the axis hold, in their order.
        axis: The axis.

    Returns:
        The whole tensor: the first of equal copies, the sum of addends, or the slices in their places. None if the
        ranks hold values of their own, or if a piece does not have the shape that its placement gives it.
    """
    where = info.on(axis)
    if isinstance(where, Replicate):
        return pieces[0] if all(each.shape == pieces[0].shape for each in pieces) else None
    if isinstance(where, Partial):
        return torch.stack(list(pieces)).sum(0) if len({each.shape for each in pieces}) == 1 else None
    if not isinstance(where, Shard):
        return None
    whole = pieces[0].new_empty(info.shape)
    flat = whole.view(-1)
    for index, piece in enumerate(pieces):
        cut = AxisCut(where, index, len(pieces))
        if tuple(piece.shape) != local_shape(info.shape, [cut]):
            return None
        given = piece.reshape(-1)
        for run in runs(info.shape, [cut]):
            flat[run.full : run.full + run.elements] = given[run.local : run.local + run.elements]
    return whole


class _StageCheck:
    """Checks one stage after another, and keeps what was found.

    Args:
        parameters: Registered parameters by each of their names.
        gradients: Registered gradients by each of their names.
        activations: Registry that receives the inputs and outputs of modules.
    """

    def __init__(
        self,
        parameters: Mapping[str, TensorInfo],
        gradients: Mapping[str, TensorInfo],
        activations: Registry,
    ) -> None:
        self._activations = activations
        self._ranks = activations.mesh.tp
        self._parameters = parameters
        self._gradients = gradients
        self._mode: PlacementMode | None = None
        self._operations = self._compared = self._unknown_results = 0
        self._unknown: list[UnknownOperation] = []
        self._problems: list[PlacementProblem] = []

    def transport_of(self, axis: str) -> Transport:
        """Return the transport of an axis in the pass."""
        return PlacementTransport(lambda: self._mode, axis == "tp") if axis != "pp" else NoTransport()

    def __call__(self, on_shapes: StageOnShapes) -> list[Tensor]:
        """Run the forward and the backward pass of a stage, and return tensors like those for the next stage."""
        arriving = [] if self._mode is None else [self._mode.get(each) for each in on_shapes.arrives]
        module = on_shapes.module
        mode = self._mode = PlacementMode(module)
        for tensor, lie in zip(on_shapes.arrives, arriving, strict=True):
            mode.set(tensor, lie)
        trained: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            info = self._parameters.get(name)
            if info is not None:
                mode.set(parameter, lie_of(info.on("tp"), parameter.shape, self._ranks))
                if parameter.requires_grad and name in self._gradients:
                    trained[name] = parameter
        ends: list[Tensor] = []

        def forward() -> list[Tensor]:
            ends.extend(on_shapes.forward())
            return ends

        # Attention in blocks views one head of keys on a rank in shapes that do not show which dim is cut.
        with kernels_of("meta"):
            found = derive(mode, trained, forward, on_shapes.returns_addends)
        for name, lie in found.items():
            self._compare(name, lie, mode)
        self._operations += mode.operations
        self._unknown += mode.unknown
        self._unknown_results += mode.unknown_results
        self._problems += mode.problems
        self._register(mode, on_shapes.stage)
        leaving = [torch.empty_like(each, requires_grad=each.requires_grad) for each in tensors_in(ends)]
        for like, end in zip(leaving, ends, strict=True):
            mode.set(like, mode.get(end))
        return leaving

    def _register(self, mode: PlacementMode, stage: int) -> None:
        """Register the inputs and outputs of the stage's modules, and their gradients."""
        kinds: tuple[tuple[TensorKind, Mapping[tuple[str, str], ActivationForm]], ...] = (
            ("activation", mode.modules.outputs),
            ("activation gradient", mode.modules.gradients),
        )
        for kind, forms in kinds:
            for (module, label), form in forms.items():
                shape, placement = placement_of(form, self._ranks)
                if placement is None or self._activations.find(kind, module, label) is not None:
                    continue
                self._activations.add(
                    TensorInfo(
                        module, shape, form.dtype, kind, {"tp": placement}, label=label, stages=(stage,)
                    )
                )

    def _compare(self, name: str, found: Lie, mode: PlacementMode) -> None:
        """Compare the derived placement of a gradient with the registered one."""
        wanted = self._wanted(name)
        module = name.rpartition(".")[0]
        line = mode.line_of(module)
        self._compared += 1
        suits = None if wanted is None else gradient_suits(found, wanted, self._ranks)
        if suits is None:
            self._unknown.append(UnknownOperation(f"gradient of {name}", module, line))
        elif not suits:
            said = f"gradient {type(wanted).__name__}"
            mode.problems.append(PlacementProblem(name, module, line, said, f"gradient {found}"))

    def _wanted(self, name: str) -> Placement | None:
        """Return the registered placement of a gradient on the ranks along "tp"; None if their experts differ.

        Experts are spread over axes of their own. Ranks along "tp" that hold the same experts route different tokens,
        so that their gradients are what the axis "edp" sums.
        """
        info, mesh = self._gradients[name], self._activations.mesh
        if "tp" in mesh.model_axes(info.axes):
            return info.gradient_on("tp")
        return info.gradient_on("edp") if {*mesh.ranks("tp", 0)} <= {*mesh.ranks("edp", 0)} else None

    def check_dropouts(self, known: JobFacts, make: Callable[[], nn.Module]) -> None:
        """Compare the part of the mask that each dropout takes with the placement of its input, on every rank."""
        model = make()
        described = describe_cut(
            model, known.mesh, known.settings.zero, known.settings.tensor, known.settings.pipeline
        )
        if described.table is None:
            return
        cuts = [
            module_steps.dropout_cuts(model, described.table, index, self._ranks, described.cuts_sequence)
            for index in range(self._ranks)
        ]
        for name, module in model.named_modules():
            info = self._activations.find("activation", name, "input")
            if isinstance(module, nn.Dropout) and module.p and info is not None:
                self._compare_masks(info, [each.get(name) for each in cuts])

    def _compare_masks(self, info: TensorInfo, parts: Sequence[EqualPart | None]) -> None:
        """Compare the parts of a dropout's mask, by rank, with the placement of its input."""
        where = info.on("tp")
        for index, part in enumerate(parts):
            if isinstance(where, Shard):
                wanted: EqualPart | None = EqualPart(where.dim, self._ranks, index)
            elif isinstance(where, Replicate):
                wanted = None
            else:
                return
            given = part and part._replace(dim=part.dim % len(info.shape))
            if wanted is None and given is not None and given.dim == SEQUENCE and not self._cuts_sequence:
                wanted = EqualPart(SEQUENCE, self._ranks, index)  # this pass is whole, others are not
            if given != wanted:
                said, found = (
                    "the mask of the whole"
                    if each is None
                    else f"part {each.part} of {each.parts} of dim {each.dim}"
                    for each in (wanted, given)
                )
                self._problems.append(
                    PlacementProblem(f"the mask of {info.name} on rank {index}", info.name, "", said, found)
                )

    @property
    def _cuts_sequence(self) -> bool:
        return any(each.on("tp") == Shard(SEQUENCE) for each in self._activations)

    def result(self) -> StaticPart:
        """Return what was found in all stages."""
        return StaticPart(
            self._operations,
            self._unknown_results,
            self._compared,
            unknown=tuple(self._unknown),
            problems=tuple(self._problems),
            activations=self._activations,
        )
