"""Blocks: the parts that a model can be cut into, and the block that everything else in the model belongs to.

    model     embed  block 0  block 1 | block 2  block 3  norm  head
    place       0       0        1         2        3      4     4       stage 1 begins at block 2

A module that is no block keeps its place in the order of use (uses.py) or, if that order is unknown, of registration:
it belongs to the next block, or to the last stage if it follows the last block. The model is only read.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from shardwise.base.errors import PlanError
from shardwise.base.policy import nearest
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.uses import ModuleUses

ROWS = (nn.ModuleList, nn.Sequential, Layers)
"""Containers whose children are blocks by their position."""
LIST = "or give the model as a list of layers (shardwise.parallel.pipeline.layers.Layers)"
"""End of an error: the remedy that always works."""


def find_blocks(
    model: nn.Module, uses: ModuleUses | None = None, sizes: Mapping[int, int] | None = None
) -> tuple[str, ...]:
    """Return the names of the modules that can be distributed over stages.

    These are the layers of a list, or else the children of the heaviest container. If ``uses`` shows that these
    children take more than each other's output, the heaviest other container whose children do not is taken,
    provided that it has at least a quarter of the weight.

    Args:
        model: The model.
        uses: Order in which the model uses its modules, or None.
        sizes: Elements of parameters by identity, for parameters that are cut before they are distributed.

    Returns:
        Names of the blocks, in order.

    Raises:
        PlanError: If the model has no such container.
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
            f"(pipeline.partition: [layer3, ...]), {LIST}"
        )
    rows.sort(key=lambda row: -row[0])
    most, found = rows[0]
    if uses is not None and not uses.runs_in_a_row(found):
        others = (row for weight, row in rows[1:] if 4 * weight >= most and not _is_in(row[0], found[0]))
        found = next((row for row in others if uses.runs_in_a_row(row)), found)
    return found


def blocks_around(model: nn.Module, starts: Sequence[str]) -> tuple[str, ...]:
    """Return the blocks that ``starts`` belong to: all children of their parents, in order of registration.

    Args:
        model: The model.
        starts: Name of the block that begins each stage but the first.

    Returns:
        Names of the blocks.

    Raises:
        PlanError: If a name is unknown.
    """
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
        row = isinstance(modules[name.rpartition(".")[0]], ROWS)
        if row or name in starts or next(module.parameters(), None) is not None:
            found.append(name)
    return tuple(found)


def _elements(parameter: nn.Parameter, sizes: Mapping[int, int] | None) -> int:
    return parameter.numel() if sizes is None else sizes.get(id(parameter), parameter.numel())


def positions(model: nn.Module, blocks: Sequence[str], uses: ModuleUses | None = None) -> dict[str, int]:
    """Return the block that every module, parameter and buffer belongs to, by each of its names.

    Args:
        model: The model.
        blocks: Names of the blocks, in order.
        uses: Order in which the model uses its modules, or None.

    Returns:
        Index of the block around the part, or of the next block; ``len(blocks)`` behind the last block.
    """
    place_of = _places(model, blocks, uses)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {**place_of, **{name: place_of[name.rpartition(".")[0]] for name, _ in tensors}}


def weigh(
    model: nn.Module,
    blocks: Sequence[str],
    uses: ModuleUses | None = None,
    sizes: Mapping[int, int] | None = None,
) -> tuple[list[int], int, int]:
    """Return the parameters of each block, of the modules in front of the blocks, and of the modules behind them.

    Modules between two blocks count with the later block. A tied parameter counts once for every place in which
    it has a name.

    Args:
        model: The model.
        blocks: Names of the blocks, in order.
        uses: Order in which the model uses its modules, or None.
        sizes: Elements of parameters by identity, for parameters that are cut before they are distributed.

    Returns:
        Numbers of elements: by block, in front, behind.
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


def stages_of_modules(
    model: nn.Module, starts: Sequence[str], uses: ModuleUses | None = None
) -> dict[str, int]:
    """Return the stage of each module by name; a container that spans several stages has the stage of its first block.

    Args:
        model: The model.
        starts: Name of the block that begins each stage but the first.
        uses: Order in which the model uses its modules, or None.

    Returns:
        Numbers of stages.

    Raises:
        PlanError: If a name is unknown, out of order, or leaves no block for stage 0.
    """
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


def _places(model: nn.Module, blocks: Sequence[str], uses: ModuleUses | None) -> dict[str, int]:
    """Return the index of the block that each module lies in or, outside of blocks, of the next block."""
    at = {name: i for i, name in enumerate(blocks)}
    return {
        name: next((at[block] for block in (*_around(name), name) if block in at), following)
        for name, following in _next_block(model, blocks, uses).items()
    }


def _next_block(model: nn.Module, blocks: Sequence[str], uses: ModuleUses | None) -> dict[str, int]:
    """Return the index of the first block at or behind each module, and ``len(blocks)`` behind the last.

    The order is the order of use if known, else of registration.
    """
    at = {name: i for i, name in enumerate(blocks)}
    seen = 0
    result = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        result[name] = seen
        if name in at:
            result[name], seen = at[name], at[name] + 1
    return result if uses is None else result | uses.places(blocks)


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a parameter or module, from the innermost."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")
