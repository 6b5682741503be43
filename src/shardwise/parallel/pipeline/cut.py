"""Cut: the stages of a whole module, each of which runs the module's own forward pass.

The blocks (children of a ``ModuleList``, for example) are distributed over stages, and all other modules follow them
(blocks.py). A stage is a skeleton of the model in which foreign parts are stand-ins (stand_in.py):

    model     embed  block 0  block 1 | block 2  block 3  norm  head
    stage 0   embed  block 0  block 1 -> ends: its output is sent
    stage 1   (absent) (....)  (received) -> block 2  block 3  norm  head

So the model needs no rewriting, its masks and positions are computed on every stage from the batch, and parameters keep
the names of the whole model. Only the output of one block is sent. A model that passes more than that from block to
block is refused as it runs (stage_module.py); ``check_cut`` compares the stages with the uncut model. Such a model must
be given as a list of layers (layers.py).

A tied parameter whose names lie on several stages is a separate Parameter on each stage.

Cost: a stand-in for a block costs a call; NaN fillers in front of the first block one elementwise pass at most.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.memory.streams import to_device
from shardwise.parallel.pipeline.blocks import LIST, ROWS, blocks_around, stages_of_modules
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.stage_module import StageModule
from shardwise.parallel.pipeline.stand_in import (
    AbsentModule,
    LastBlock,
    StageRoot,
    StandInState,
    absent_block,
    absent_leaf,
    shallow_copy,
)
from shardwise.parallel.pipeline.uses import ModuleUses


def cut(
    model: nn.Module, starts: Sequence[str], stages_here: Iterable[int], uses: ModuleUses | None = None
) -> dict[int, StageModule]:
    """Cut stages out of a model.

    The model itself is not changed, but its modules and parameters become those of the stages. A parameter that
    two of ``stages_here`` need is copied for the second.

    Args:
        model: The model.
        starts: Name of the block that begins each stage but the first.
        stages_here: Numbers of the stages to make.
        uses: Order in which the model uses its modules, or None for the order of registration.

    Returns:
        The stages by number.

    Raises:
        PlanError: If ``starts`` does not fit the model.
    """
    stages = len(starts) + 1
    stage_of = stages_of_modules(model, starts, uses)
    taken: set[int] = set()
    result = {}
    for stage in sorted(stages_here):
        skeleton = _StageBuilder(model, starts, stage, stage_of, taken)
        result[stage] = StageModule(
            skeleton.root, stage, stages, skeleton.relay, skeleton.blocks, skeleton.all_blocks
        )
    return result


class _StageBuilder:
    """Builder of one stage."""

    def __init__(
        self, model: nn.Module, starts: Sequence[str], stage: int, stage_of: dict[str, int], taken: set[int]
    ):
        self.relay = StandInState(
            stage, f"The model cannot be cut so: cut elsewhere (pipeline.partition), {LIST}"
        )
        self._stage = stage
        self._stage_of = stage_of
        self.all_blocks = blocks_around(model, starts)
        self.blocks = mine = [block for block in self.all_blocks if stage_of[block] == stage]
        """Names of the stage's own blocks."""
        self._last = mine[-1] if mine and stage < len(starts) else None
        self._before = [block for block in self.all_blocks if stage_of[block] < stage]
        self._rows = {name for name, module in model.named_modules() if isinstance(module, ROWS)}
        self._taken = taken
        self._local: dict[int, tuple[nn.Module, str]] = {}
        self._same: dict[int, int] = {}
        """Identity of the model's parameter, by identity of the stage's parameter that replaces it."""
        self._copies: dict[int, nn.Parameter] = {}
        self._memo: dict[tuple[int, int, bool], nn.Module] = {}
        self._built = self._build_layers(model, mine or [name for name, _ in model.named_children()])
        self.root = self._rebuilt("", model)
        for module in self.root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    key = self._same.get(id(parameter), id(parameter))
                    self._local.setdefault(key, (module, name))
                    taken.add(key)

    def _build_layers(self, model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
        if not isinstance(model, Layers):
            return {}
        built = model.build(names)
        for name, module in built.items():
            for inner, parameter in module.named_parameters(remove_duplicate=False):
                meant = model.get_submodule(name).get_parameter(inner)
                if meant is not parameter:
                    self._same[id(parameter)] = id(meant)
        return built

    def _rebuilt(self, name: str, module: nn.Module) -> nn.Module:
        """Return ``module`` itself if it has no foreign part, else a copy with stand-ins."""
        if name in self.all_blocks and self._stage_of[name] != self._stage:
            comes = "before" if name in self._before else "after"
            comes = "just before" if self._before and name == self._before[-1] else comes
            in_row = name.rpartition(".")[0] in self._rows
            return absent_block(module, name, self.relay, comes, in_row, self._stand_in)
        key = (id(module), self._stage_of[name], name == self._last)
        if key not in self._memo:
            self._memo[key] = self._copied(name, self._built.get(name, module))
        return self._memo[key]

    def _copied(self, name: str, module: nn.Module) -> nn.Module:
        is_here = self._stage_of[name] == self._stage
        own = {key: p for key, p in module._parameters.items() if p is not None}
        around = f"{name}." if name else ""
        absent = {} if is_here else {key: self._stand_in(p, around + key) for key, p in own.items()}
        copied = {key: self._second(p) for key, p in own.items() if is_here and self._is_taken(p)}
        children = {
            key: self._rebuilt(around + key, child)
            for key, child in module._modules.items()
            if child is not None
        }
        if not is_here and not children and hasattr(module, "elsewhere"):
            return self._vectors_elsewhere(name, module)
        counts = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if not is_here and not children and (absent or counts):
            return absent_leaf(module, name, self.relay, absent, self._home)
        is_changed = any(child is not module._modules[key] for key, child in children.items())
        if not (absent or copied or is_changed or name == self._last or not name):
            return module
        twin = shallow_copy(module, self._kind(name, bool(absent)))
        for key in absent:
            del twin._parameters[key]
        twin.__dict__.update(_absent=absent, _relay=self.relay)
        twin._parameters.update(copied)
        twin._modules.update(children)
        if isinstance(twin, StageRoot):
            twin.leave_out_hooks()
            if "forward" in twin.__dict__:
                twin.__dict__["_own_forward"] = twin.__dict__.pop("forward")
        return twin  # type: ignore[no-any-return]

    def _vectors_elsewhere(self, name: str, tables: Any) -> nn.Module:
        """Return the stand-in for tables of another stage."""
        what, relay = f"vectors of {name!r}, which lives on another stage,", self.relay

        def place() -> torch.device:
            return relay.device or self._home()

        def fill(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return relay.output(shape, dtype, place(), what)

        made: nn.Module = tables.elsewhere(name, fill, lambda tensor: to_device(tensor, place()))
        return made

    def _kind(self, name: str, is_hollow: bool) -> type | None:
        if name == self._last:
            return LastBlock
        if not name and self._last is not None:
            return StageRoot
        return AbsentModule if is_hollow else None

    def _is_taken(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._same and id(parameter) in self._taken

    def _second(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this stage's own copy of a tied parameter that another stage of this rank holds."""
        if id(parameter) not in self._copies:
            twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            self._copies[id(parameter)] = twin
            self._same[id(twin)] = id(parameter)
        return self._copies[id(parameter)]

    def _stand_in(self, parameter: nn.Parameter, name: str) -> Callable[[], Tensor]:
        return functools.partial(self._read, id(parameter), torch.empty_like(parameter, device="meta"), name)

    def _read(self, key: int, outline: Tensor, name: str) -> Tensor:
        """Return the value of an absent parameter: the tied parameter on this stage, or a filler."""
        if key in self._local:
            holder, own = self._local[key]
            tied: Tensor = getattr(holder, own)
            return tied
        return self.relay.parameter(key, outline, self._home(), name)

    def _home(self) -> torch.device:
        """Return the device of this stage's parameters."""
        held = next(
            (
                p
                for module in self.root.modules()
                for p in vars(module)["_parameters"].values()
                if p is not None
            ),
            None,
        )
        return torch.device("cpu") if held is None else held.device
