"""Cut: the stages of a whole module, each of which runs the module's own forward pass.

The blocks (children of a ``ModuleList``, say) are dealt to stages; all else keeps its place in the order of
registration: it belongs to the stage of the next block, and behind the last block to the last stage. A stage is a
skeleton of the model in which foreign parts are stand-ins (stand_in.py):

    model     embed  block 0  block 1 | block 2  block 3  norm  head
    stage 0   embed  block 0  block 1 -> ends: its output travels
    stage 1   (NaN)  (......)  (received) -> block 2  block 3  norm  head

So the model needs no rewriting, its masks and positions are made on every stage from the batch, and names of parameters
are those of the whole model. What travels is the output of one block. A model that passes more than that from block to
block is found by ``check_cut`` and has to come as a list of layers (layers.py).

Tied parameters whose names lie on several stages are a Parameter on each.

Cost: a stand-in for a block costs a call; NaN fillers in front of the first block one elementwise pass at most.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.stand_in import (
    AbsentBlock,
    AbsentLeaf,
    Hollow,
    LastBlock,
    Relay,
    StageRoot,
    call_until_ended,
    shallow_copy,
    tensors_of,
)
from shardwise.plan.errors import PlanError
from shardwise.plan.policy import nearest

_ROWS = (nn.ModuleList, nn.Sequential, Layers)
_LIST = "or give the model as a list of layers (shardwise.parallel.pipeline.layers.Layers)"


class StageModule:
    """One stage: ``module`` is the skeleton, an ordinary module with the parameters of this stage alone.

    Hooks on ``module`` see an ordinary pass whose output is what the stage passes on.
    """

    def __init__(self, module: nn.Module, stage: int, stages: int, relay: Relay):
        self.module = module
        self.stage = stage
        self.stages = stages
        self._relay = relay

    @property
    def is_last(self) -> bool:
        """Whether the pass ends with what the model returns."""
        return self.stage == self.stages - 1

    def run(self, call: Callable[[nn.Module], Any], received: Any = None) -> Any:
        """Forward pass: ``call(module)`` is what a user would call on the whole model.

        Returns the output of the stage's last block; on the last stage the result of ``call``. ``received`` is what the
        stage before returned.
        """
        self._relay.load(received)
        try:
            ended, result = call_until_ended(lambda: call(self.module))
        finally:
            self._relay.clear()
        if self.stage > 0 and not self._relay.handed_over:
            raise PlanError(
                f"stage {self.stage}: the model's forward pass never came to the stage's first block"
            )
        if not self.is_last and not ended:
            raise PlanError(
                f"stage {self.stage}: the model's forward pass never came to the stage's last block"
            )
        return result


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that can be dealt to stages: layers of a list, else children of the heaviest container."""
    if isinstance(model, Layers | nn.Sequential):
        return tuple(name for name, _ in model.named_children())
    found: tuple[str, ...] = ()
    most = 0
    for name, module in model.named_modules():
        children = [child for child, _ in module.named_children()]
        weight = sum(parameter.numel() for parameter in module.parameters())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1 and weight > most:
            found, most = tuple(f"{name}.{child}" for child in children), weight
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no blocks that could be dealt to stages: no ModuleList or Sequential with at "
            "least two children that have parameters. Name the modules that begin each stage but the first "
            f"(pipeline.partition: [layer3, ...]), {_LIST}"
        )
    return found


def blocks_around(model: nn.Module, starts: Sequence[str]) -> tuple[str, ...]:
    """The blocks that ``starts`` are among: all children of their parents, in order of registration."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in starts:
        if not name or name not in modules:
            close = nearest(name, [other for other in modules if other.count(".") == name.count(".")])
            raise PlanError(f"no module of {type(model).__name__} is called {name!r}{close}")
    parents = {name.rpartition(".")[0] for name in starts}
    found = []
    for name, module in modules.items():
        if not name or name.rpartition(".")[0] not in parents or any(_is_in(p, name) for p in parents):
            continue
        row = isinstance(modules[name.rpartition(".")[0]], _ROWS)
        if row or name in starts or next(module.parameters(), None) is not None:
            found.append(name)
    return tuple(found)


def owners(model: nn.Module, starts: Sequence[str]) -> dict[str, int]:
    """Stage of each parameter and buffer, by every name that it has."""
    stage_of = _stages_of_modules(model, starts)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: stage_of[name.rpartition(".")[0]] for name, _ in tensors}


def weigh(model: nn.Module, blocks: Sequence[str]) -> tuple[list[int], int, int]:
    """Parameters of each block, of what stands in front of them, and of what stands behind.

    What stands between two blocks counts with the later one. A tied parameter counts wherever it has a name, once.
    """
    at = {name: i for i, name in enumerate(blocks)}
    held: list[dict[int, int]] = [{} for _ in range(len(blocks) + 2)]
    place_of = _next_block(model, blocks)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((at[block] for block in _around(name) if block in at), None)
        following = place_of[name.rpartition(".")[0]]
        place = inside + 1 if inside is not None else following + 1 if following else 0
        held[place][id(parameter)] = parameter.numel()
    weights = [sum(each.values()) for each in held]
    return weights[1:-1], weights[0], weights[-1]


def cut(model: nn.Module, starts: Sequence[str], stages_here: Iterable[int]) -> dict[int, StageModule]:
    """The stages ``stages_here`` of ``model``; ``starts`` names the block that begins each stage but the first.

    The model itself is not changed, but its modules and parameters become those of the stages. A parameter that two of
    ``stages_here`` need is copied for the second.
    """
    stages = len(starts) + 1
    stage_of = _stages_of_modules(model, starts)
    taken: set[int] = set()
    result = {}
    for stage in sorted(stages_here):
        skeleton = _Skeleton(model, starts, stage, stage_of, taken)
        result[stage] = StageModule(skeleton.root, stage, stages, skeleton.relay)
    return result


def check_cut(model: nn.Module, call: Callable[[nn.Module], Any], starts: Sequence[str]) -> None:
    """Run ``call`` on the whole model and on the chain of its stages; PlanError names the first stage that differs.

    In evaluation mode and without gradients. On the meta device only shapes and dtypes are compared; the fillers' NaN
    still show in the first real pass. A model that draws random numbers in evaluation mode cannot be compared.
    """
    stages = len(starts) + 1
    if stages == 1:
        return
    with _evaluating(model), torch.no_grad():
        modules = cut(model, starts, range(stages))
        if isinstance(model, Layers):  # its layers exist only where they live
            model = cut(model, (), [0])[0].module.eval()
        wanted = _outputs(model, call, starts)
        received: Any = None
        for stage, module in modules.items():
            module.module.eval()
            try:
                received = module.run(call, received)
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"stage {stage} of {stages} cannot run the model's own forward pass: {type(error).__name__}: "
                    f"{error}. Cut elsewhere (pipeline.partition), {_LIST}"
                ) from error
            difference = _difference(received, wanted[stage])
            if difference:
                raise PlanError(
                    f"stage {stage} of {stages} ({_span(starts, stage)}) does not compute what the whole model does: "
                    f"{difference}. More than one block's output passes from block to block, or parts run in another "
                    f"order than they are registered in. Cut elsewhere (pipeline.partition), {_LIST}"
                )


class _Skeleton:
    """Builds one stage."""

    def __init__(
        self, model: nn.Module, starts: Sequence[str], stage: int, stage_of: dict[str, int], taken: set[int]
    ):
        self.relay = Relay(stage)
        self._stage = stage
        self._stage_of = stage_of
        self._blocks = blocks_around(model, starts)
        mine = [block for block in self._blocks if stage_of[block] == stage]
        self._last = mine[-1] if mine and stage < len(starts) else None
        self._before = [block for block in self._blocks if stage_of[block] < stage]
        self._rows = {name for name, module in model.named_modules() if isinstance(module, _ROWS)}
        self._taken = taken
        self._local: dict[int, tuple[nn.Module, str]] = {}
        self._same: dict[int, int] = {}
        """Identity of a parameter of this stage -> of the one that it stands for in the model."""
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
        """``module`` itself where nothing of it is foreign, else a copy with stand-ins."""
        if name in self._blocks and self._stage_of[name] != self._stage:
            comes = "before" if name in self._before else "after"
            comes = "just before" if self._before and name == self._before[-1] else comes
            return AbsentBlock(module, name, self.relay, comes, name.rpartition(".")[0] in self._rows)
        key = (id(module), self._stage_of[name], name == self._last)
        if key not in self._memo:
            self._memo[key] = self._copied(name, self._built.get(name, module))
        return self._memo[key]

    def _copied(self, name: str, module: nn.Module) -> nn.Module:
        is_here = self._stage_of[name] == self._stage
        own = {key: p for key, p in module._parameters.items() if p is not None}
        absent = {} if is_here else {key: self._stand_in(p) for key, p in own.items()}
        copied = {key: self._second(p) for key, p in own.items() if is_here and self._is_taken(p)}
        children = {
            key: self._rebuilt(f"{name}.{key}" if name else key, child)
            for key, child in module._modules.items()
            if child is not None
        }
        if absent and not children:
            return AbsentLeaf(module, self.relay, absent)
        is_changed = any(child is not module._modules[key] for key, child in children.items())
        if not (absent or copied or is_changed or name == self._last or not name):
            return module
        twin = shallow_copy(module, self._kind(name, bool(absent)))
        for key in absent:
            del twin._parameters[key]
        twin.__dict__["_absent"] = absent
        twin._parameters.update(copied)
        twin._modules.update(children)
        if not name and "forward" in twin.__dict__ and isinstance(twin, StageRoot):
            twin.__dict__["_own_forward"] = twin.__dict__.pop("forward")
        return twin  # type: ignore[no-any-return]

    def _kind(self, name: str, is_hollow: bool) -> type | None:
        if name == self._last:
            return LastBlock
        if not name and self._last is not None:
            return StageRoot
        return Hollow if is_hollow else None

    def _is_taken(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._same and id(parameter) in self._taken

    def _second(self, parameter: nn.Parameter) -> nn.Parameter:
        """This stage's own copy of a tied parameter that another stage of this rank holds."""
        if id(parameter) not in self._copies:
            twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            self._copies[id(parameter)] = twin
            self._same[id(twin)] = id(parameter)
        return self._copies[id(parameter)]

    def _stand_in(self, parameter: nn.Parameter) -> Callable[[], Tensor]:
        return functools.partial(self._read, id(parameter), torch.empty_like(parameter, device="meta"))

    def _read(self, key: int, outline: Tensor) -> Tensor:
        """An absent parameter: the one that is tied to it on this stage, or a filler."""
        if key in self._local:
            holder, name = self._local[key]
            tied: Tensor = getattr(holder, name)
            return tied
        home = next(self.root.parameters(), None)
        return self.relay.parameter(key, outline, torch.device("cpu") if home is None else home.device)


def _stages_of_modules(model: nn.Module, starts: Sequence[str]) -> dict[str, int]:
    """Stage of each module by name; a container that spans several has that of its first block."""
    blocks = blocks_around(model, starts)
    at = {name: i for i, name in enumerate(blocks)}
    order = [at[name] for name in starts]
    for earlier, later, first, second in zip(order, order[1:], starts, starts[1:], strict=False):
        if earlier >= later:
            raise PlanError(
                f"stages begin in the order of the blocks, but {second!r} does not come after {first!r}; "
                f"the order here is {', '.join(sorted(starts, key=lambda name: at[name]))}"
            )
    if order and order[0] == 0:
        hint = f"; the first that can begin stage 1 is {blocks[1]!r}" if len(blocks) > 1 else ""
        raise PlanError(f"no block is left for stage 0 when stage 1 begins at {starts[0]!r}{hint}")
    of_block = [sum(start <= i for start in order) for i in range(len(blocks))]
    last = len(starts)
    following = _next_block(model, blocks)
    stage_of = {}
    for name in following:
        inside = next((at[block] for block in (*_around(name), name) if block in at), None)
        place = inside if inside is not None else following[name]
        stage_of[name] = of_block[place] if place < len(blocks) else last
        if inside is None and not following[name]:
            stage_of[name] = 0
    return stage_of


def _next_block(model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """By module name: index of the first block that is registered at it or behind it, len(blocks) behind them all."""
    at = {name: i for i, name in enumerate(blocks)}
    seen = 0
    result = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        result[name] = seen
        if name in at:
            result[name], seen = at[name], at[name] + 1
    return result


def _around(name: str) -> Iterator[str]:
    """Names of the modules around a parameter or module, from the innermost."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _span(starts: Sequence[str], stage: int) -> str:
    first = f"from {starts[stage - 1]}" if stage else "from the beginning"
    return f"{first} to before {starts[stage]}" if stage < len(starts) else f"{first} to the end"


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _outputs(model: nn.Module, call: Callable[[nn.Module], Any], starts: Sequence[str]) -> list[Any]:
    """What leaves each stage in the whole model; the last is the result."""
    blocks = blocks_around(model, starts)
    ends = [blocks[blocks.index(start) - 1] for start in starts]
    found: dict[str, Any] = {}
    handles = [
        model.get_submodule(end).register_forward_hook(
            lambda module, args, output, end=end: found.update({end: _copied(output)})
        )
        for end in ends
    ]
    try:
        result = call(model)
    finally:
        for handle in handles:
            handle.remove()
    for end, start in zip(ends, starts, strict=True):
        if end not in found:
            raise PlanError(f"block {end!r} in front of {start!r} is never called, so no stage can end there")
    return [*(found[end] for end in ends), result]


def _copied(value: Any) -> Any:
    """As it is now: what follows may write in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _difference(got: Any, wanted: Any) -> str:
    """How two outputs differ, in words; nothing where they do not."""
    ours, theirs = list(tensors_of(got)), list(tensors_of(wanted))
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors come out where the whole model has {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{_kind(one)} comes out where the whole model has {_kind(other)}"
        if one.is_meta or other.is_meta:
            continue
        tolerance = 1e-9 if one.dtype in (torch.float64, torch.complex128) else 1e-4
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=False):
            distance = (
                (one.double() - other.double()).abs().max() if not one.is_complex() else torch.tensor(0.0)
            )
            return f"values differ by up to {float(distance):.3g}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"
