"""Cut: the stages of a whole module, each of which runs the module's own forward pass.

The blocks (children of a ``ModuleList``, say) are dealt to stages; all else keeps its place in the order of use
(uses.py) or, where that is not known, of registration: it belongs to the stage of the next block, and behind the last
block to the last stage. A stage is a skeleton of the model in which foreign parts are stand-ins (stand_in.py):

    model     embed  block 0  block 1 | block 2  block 3  norm  head
    stage 0   embed  block 0  block 1 -> ends: its output travels
    stage 1   (absent) (....)  (received) -> block 2  block 3  norm  head

So the model needs no rewriting, its masks and positions are made on every stage from the batch, and names of parameters
are those of the whole model. What travels is the output of one block. A model that passes more than that from block to
block, uses what is absent, or runs its blocks in another order or more than once is refused: in the first pass of each
kind (shapes and structure of the batch and of what is received, training or not) absent values are marked, and blocks
counted; ``check_cut`` compares with the uncut model. It has to come as a list of layers (layers.py).

Tied parameters whose names lie on several stages are a Parameter on each.

Cost: a stand-in for a block costs a call; NaN fillers in front of the first block one elementwise pass at most. Of a
pass whose kind was seen before nothing is marked, counted or hooked: it costs a look at the shapes. A whole number in
the batch that is another in each step makes each pass the first of a kind: give it as a tensor.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.memory.absent import AbsentTrace, absent_in
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.stand_in import (
    AbsentBlock,
    AbsentLeaf,
    Foreign,
    LastBlock,
    Relay,
    StageRoot,
    absent_block,
    absent_leaf,
    call_until_ended,
    shallow_copy,
    tensors_of,
)
from shardwise.parallel.pipeline.uses import Uses
from shardwise.plan.errors import PlanError
from shardwise.plan.policy import nearest
from shardwise.plan.pytree import tensors_in
from shardwise.plan.ragged import Ragged

_ROWS = (nn.ModuleList, nn.Sequential, Layers)
_KINDS = 1000
_LIST = "or give the model as a list of layers (shardwise.parallel.pipeline.layers.Layers)"


class StageModule:
    """One stage: ``module`` is the skeleton, an ordinary module with the parameters of this stage alone.

    Hooks on ``module`` see an ordinary pass whose output is what the stage passes on. ``blocks``: the names of its own.
    """

    def __init__(self, module: nn.Module, stage: int, stages: int, relay: Relay, blocks: Sequence[str] = ()):
        self.module = module
        self.stage = stage
        self.stages = stages
        self._relay = relay
        self._blocks = list(blocks)
        self._seen: dict[Hashable, bool] = {}
        """Kinds of passes that were watched, the latest of them, and whether the model writes into outputs of blocks in
        place."""

    @property
    def is_last(self) -> bool:
        """Whether the pass ends with what the model returns."""
        return self.stage == self.stages - 1

    def run(self, call: Callable[[nn.Module], Any], received: Any = None, kind: Hashable = None) -> Any:
        """Forward pass: ``call(module)`` is what a user would call on the whole model.

        Returns the output of the stage's last block; on the last stage the result of ``call``. ``received`` is what the
        stage before returned. ``kind`` of the batch: the first pass of each is watched.
        Errors: PlanError where the model cannot be cut so; the first pass of a kind names what it uses that is absent.
        """
        kind = (kind, kind_of(received), torch.is_grad_enabled(), self.module.training)
        if kind in self._seen:
            self._relay.load(received, writes=self._seen[kind])
            try:
                ended, result = call_until_ended(lambda: call(self.module))
                self._check_end(ended)
            finally:
                self._relay.clear()
        else:
            if len(self._seen) >= _KINDS:  # numbers that count steps
                self._seen.clear()
            result, self._seen[kind] = self._watched(call, received)
        return result

    def _watched(self, call: Callable[[nn.Module], Any], received: Any) -> tuple[Any, bool]:
        """The first pass of a kind: absent values are marked, and this stage's blocks counted."""
        where = f"stage {self.stage} of {self.stages}: "
        names = {id(module): name or "the model" for name, module in self.module.named_modules()}
        watch = AbsentTrace(where, self._relay.advice, names)
        self._relay.load(received, watch)
        blocks = _Blocks(self.module, self._blocks, self._relay)
        try:
            with blocks:
                ended, result = call_until_ended(lambda: call(self.module))
            if watch.refusal is not None:  # caught by the model
                raise watch.refusal
            self._check_end(ended)
            blocks.check(self.is_last)
            found = absent_in(result)
            if found is not None:
                found.refuse(f"reaches {'the result' if self.is_last else 'what this stage sends on'}")
        except PlanError:
            raise
        except Exception as error:
            if watch.refusal is not None:
                raise watch.refusal from error
            culprit = self._culprit(error, watch)
            if culprit is None:
                raise
            raise PlanError(
                f"{where}the model's own forward pass fails with {type(error).__name__}: {error}. {culprit}. "
                f"{self._relay.advice}"
            ) from error
        else:
            return result, self._relay.wrote
        finally:
            self._relay.clear()

    def _check_end(self, ended: bool) -> None:
        if self.stage > 0 and not self._relay.handed_over:
            raise PlanError(
                f"stage {self.stage}: the model's forward pass never came to the stage's first block. "
                f"{self._relay.advice}"
            )
        if not self.is_last and not ended:
            raise PlanError(
                f"stage {self.stage}: the model's forward pass never came to the stage's last block. "
                f"{self._relay.advice}"
            )

    def _culprit(self, error: BaseException, watch: AbsentTrace) -> str | None:
        """What has to do with stand-ins in an error of the model's, in words; None where nothing has."""
        chain: list[BaseException] = []
        each: BaseException | None = error
        while each is not None and each not in chain:
            chain.append(each)
            each = each.__cause__ or each.__context__
        if watch.trouble is not None and any(watch.trouble[0] is each for each in chain):
            return f"It computes with {watch.trouble[1].rstrip(',')}"
        if not isinstance(error, _OF_A_CUT) or not type(error).__module__.startswith(("builtins", "torch")):
            return None
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            for name, value in frame.f_locals.items() if frame.f_globals.get("__name__") != __name__ else ():
                absent = absent_in(value)
                if absent is not None:
                    return f"It holds {absent.what}"
                if name != "self" and isinstance(value, AbsentBlock | AbsentLeaf):
                    return f"It holds {value.stands_for!r}, which lives on another stage"
            trace = trace.tb_next
        if self.stage > 0 and not self._relay.handed_over:
            return (
                "Parts of the model live on other stages, and what stands in for them here may be the cause"
            )
        return None


_OF_A_CUT = (
    TypeError,
    AttributeError,
    RuntimeError,
    IndexError,
    KeyError,
    ValueError,
    AssertionError,
    NotImplementedError,
)
"""Errors that a model falls into where a value is not what it expects."""


class _Blocks(contextlib.AbstractContextManager["_Blocks"]):
    """Looks at a stage's own blocks during one pass: which ran, which attributes they set, what they added to lists."""

    def __init__(self, root: nn.Module, names: Sequence[str], relay: Relay):
        self._relay = relay
        self._blocks = {name: root.get_submodule(name) for name in names}
        self._rows = {name for name in names if isinstance(_parent(root, name), _ROWS)}
        self._ran: set[str] = set()
        self._before: dict[str, dict[str, Any]] = {}
        self._sizes: dict[str, list[tuple[Any, int]]] = {}
        self._grown: list[tuple[Any, str]] = []
        self._set: dict[str, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "_Blocks":
        for name, block in self._blocks.items():
            self._handles += [
                block.register_forward_pre_hook(functools.partial(self._begins, name), with_kwargs=True),
                block.register_forward_hook(functools.partial(self._ends, name)),
            ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._before[name] = dict(vars(block))
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, list | dict | set)]
        self._sizes[name] = [(each, len(each)) for each in given]

    def _ends(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        self._ran.add(name)
        before = self._before.get(name, {})
        for key, value in vars(block).items():
            if not key.startswith("_") and before.get(key) is not value:
                self._set.setdefault(key, name)
        self._grown += [(each, name) for each, size in self._sizes.get(name, ()) if len(each) != size]

    def check(self, is_last: bool) -> None:
        """Errors: PlanError where a foreign block would have added something, or one of this stage was left out."""
        relay = self._relay
        for key, foreign in relay.read.items():
            if key in self._set:
                raise relay.refuse(
                    f"{key!r} of block {foreign!r}, which lives on another stage, is read, and blocks set it as they "
                    f"run (as {self._set[key]!r} does)"
                )
        for each, name in self._grown:
            if id(each) in relay.taken:
                raise relay.refuse(
                    f"block {name!r} adds to a {type(each).__name__} that block {relay.taken[id(each)][1]!r} of "
                    "another stage is given too, which adds nothing to it here"
                )
        left_out = [name for name in self._blocks if name in self._rows and name not in self._ran]
        if left_out and not is_last:
            raise relay.refuse(
                f"block {left_out[0]!r} was not called before the stage's last block; the model leaves blocks out "
                "(layer drop), or does not run them in the order in which they are registered"
            )


def kind_of(value: Any) -> Hashable:
    """What the course of a pass may depend on in what it is given: shapes, dtypes, structure, words, whole numbers, and
    whether a fraction is zero."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Ragged):  # how many keys the samples have differs from batch to batch
        return Ragged, value.samples, value.values.dtype, value.weights is not None
    if isinstance(value, Mapping):
        return tuple((str(key), kind_of(each)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(kind_of(each) for each in value)
    if isinstance(value, int | str | None):
        return value
    if isinstance(value, float):
        return float, value == 0
    return type(value), tuple(kind_of(each) for each in tensors_in(value))


def find_blocks(
    model: nn.Module, uses: Uses | None = None, sizes: Mapping[int, int] | None = None
) -> tuple[str, ...]:
    """Names of the modules that can be dealt to stages: layers of a list, else children of the heaviest container.

    ``sizes``: elements of parameters by identity, where they are cut before they are dealt. Where ``uses`` shows that
    the children are given more than one another's output, those of the heaviest container that has
    at least a quarter of its weight and whose children are not.
    """
    if isinstance(model, Layers | nn.Sequential):
        return tuple(name for name, _ in model.named_children())
    rows: list[tuple[int, tuple[str, ...]]] = []
    for name, module in model.named_modules():
        children = [child for child, _ in module.named_children()]
        weight = sum(_elements(parameter, sizes) for parameter in module.parameters())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1 and weight:
            rows.append((weight, tuple(f"{name}.{child}" for child in children)))
    if not rows:
        raise PlanError(
            f"{type(model).__name__} has no blocks that could be dealt to stages: no ModuleList or Sequential with at "
            "least two children that have parameters. Name the modules that begin each stage but the first "
            f"(pipeline.partition: [layer3, ...]), {_LIST}"
        )
    rows.sort(key=lambda row: -row[0])
    most, found = rows[0]
    if uses is not None and not uses.runs_in_a_row(found):
        others = (row for weight, row in rows[1:] if 4 * weight >= most and not _is_in(row[0], found[0]))
        found = next((row for row in others if uses.runs_in_a_row(row)), found)
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


def owners(model: nn.Module, starts: Sequence[str], uses: Uses | None = None) -> dict[str, int]:
    """Stage of each parameter and buffer, by every name that it has."""
    stage_of = stages_of_modules(model, starts, uses)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: stage_of[name.rpartition(".")[0]] for name, _ in tensors}


def _elements(parameter: nn.Parameter, sizes: Mapping[int, int] | None) -> int:
    return parameter.numel() if sizes is None else sizes.get(id(parameter), parameter.numel())


def positions(model: nn.Module, blocks: Sequence[str], uses: Uses | None = None) -> dict[str, int]:
    """By every name of a module, parameter or buffer: the block that it lies in or, outside of them, the next one;
    ``len(blocks)`` behind them all."""
    place_of = _places(model, blocks, uses)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {**place_of, **{name: place_of[name.rpartition(".")[0]] for name, _ in tensors}}


def weigh(
    model: nn.Module,
    blocks: Sequence[str],
    uses: Uses | None = None,
    sizes: Mapping[int, int] | None = None,
) -> tuple[list[int], int, int]:
    """Parameters of each block, of what stands in front of them, and of what stands behind; ``sizes`` as above.

    What stands between two blocks counts with the later one. A tied parameter counts wherever it has a name, once.
    """
    at = {name: i for i, name in enumerate(blocks)}
    held: list[dict[int, int]] = [{} for _ in range(len(blocks) + 2)]
    place_of = _next_block(model, blocks, uses)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((at[block] for block in _around(name) if block in at), None)
        following = place_of[name.rpartition(".")[0]]
        place = inside + 1 if inside is not None else following + 1 if following else 0
        held[place][id(parameter)] = _elements(parameter, sizes)
    weights = [sum(each.values()) for each in held]
    return weights[1:-1], weights[0], weights[-1]


def cut(
    model: nn.Module, starts: Sequence[str], stages_here: Iterable[int], uses: Uses | None = None
) -> dict[int, StageModule]:
    """The stages ``stages_here`` of ``model``; ``starts`` names the block that begins each stage but the first.

    The model itself is not changed, but its modules and parameters become those of the stages. A parameter that two of
    ``stages_here`` need is copied for the second.
    """
    stages = len(starts) + 1
    stage_of = stages_of_modules(model, starts, uses)
    taken: set[int] = set()
    result = {}
    for stage in sorted(stages_here):
        skeleton = _Skeleton(model, starts, stage, stage_of, taken)
        result[stage] = StageModule(skeleton.root, stage, stages, skeleton.relay, skeleton.blocks)
    return result


def check_cut(
    model: nn.Module, call: Callable[[nn.Module], Any], starts: Sequence[str], uses: Uses | None = None
) -> None:
    """Run ``call`` on the whole model and on the chain of its stages; PlanError names the first stage that differs.

    In evaluation mode and without gradients. On the meta device only shapes and dtypes are compared; the fillers' NaN
    still show in the first real pass. A model that draws random numbers in evaluation mode cannot be compared.
    """
    stages = len(starts) + 1
    if stages == 1:
        return
    with _evaluating(model), torch.no_grad():
        modules = cut(model, starts, range(stages), uses)
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
        self.relay = Relay(stage, f"The model cannot be cut so: cut elsewhere (pipeline.partition), {_LIST}")
        self._stage = stage
        self._stage_of = stage_of
        self._blocks = blocks_around(model, starts)
        self.blocks = mine = [block for block in self._blocks if stage_of[block] == stage]
        """Names of this stage's own."""
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
            what = f"vectors of {name!r}, which lives on another stage,"
            return module.elsewhere(name, functools.partial(self.relay.output, what=what))  # type: ignore[operator]
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
        if not name and "forward" in twin.__dict__ and isinstance(twin, StageRoot):
            twin.__dict__["_own_forward"] = twin.__dict__.pop("forward")
        return twin  # type: ignore[no-any-return]

    def _kind(self, name: str, is_hollow: bool) -> type | None:
        if name == self._last:
            return LastBlock
        if not name and self._last is not None:
            return StageRoot
        return Foreign if is_hollow else None

    def _is_taken(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._same and id(parameter) in self._taken

    def _second(self, parameter: nn.Parameter) -> nn.Parameter:
        """This stage's own copy of a tied parameter that another stage of this rank holds."""
        if id(parameter) not in self._copies:
            twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            self._copies[id(parameter)] = twin
            self._same[id(twin)] = id(parameter)
        return self._copies[id(parameter)]

    def _stand_in(self, parameter: nn.Parameter, name: str) -> Callable[[], Tensor]:
        return functools.partial(self._read, id(parameter), torch.empty_like(parameter, device="meta"), name)

    def _read(self, key: int, outline: Tensor, name: str) -> Tensor:
        """An absent parameter: the one that is tied to it on this stage, or a filler."""
        if key in self._local:
            holder, own = self._local[key]
            tied: Tensor = getattr(holder, own)
            return tied
        return self.relay.parameter(key, outline, self._home(), name)

    def _home(self) -> torch.device:
        """Where this stage's parameters are."""
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


def _parent(root: nn.Module, name: str) -> nn.Module:
    return root.get_submodule(name.rpartition(".")[0])


def stages_of_modules(model: nn.Module, starts: Sequence[str], uses: Uses | None) -> dict[str, int]:
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
    of_place = [*(sum(start <= i for start in order) for i in range(len(blocks))), len(starts)]
    return {name: of_place[place] for name, place in _places(model, blocks, uses).items()}


def _places(model: nn.Module, blocks: Sequence[str], uses: Uses | None) -> dict[str, int]:
    """By module name: index of the block that it lies in or, outside of them, of the next one."""
    at = {name: i for i, name in enumerate(blocks)}
    return {
        name: next((at[block] for block in (*_around(name), name) if block in at), following)
        for name, following in _next_block(model, blocks, uses).items()
    }


def _next_block(model: nn.Module, blocks: Sequence[str], uses: Uses | None) -> dict[str, int]:
    """By module name: index of the first block that is at it or behind it, len(blocks) behind them all; in the order of
    use where that is known, else of registration."""
    at = {name: i for i, name in enumerate(blocks)}
    seen = 0
    result = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        result[name] = seen
        if name in at:
            result[name], seen = at[name], at[name] + 1
    return result if uses is None else result | uses.places(blocks)


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
