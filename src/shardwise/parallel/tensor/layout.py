"""The cut of each parameter along "tp", read from a table of styles by module name. Pure.

    style        parameters                       forward                                gradient before reduction
    column       rows (outputs) cut               enters the cut layers                  of this shard
    row          columns (inputs) cut, bias not   leaves them: a sum over the ranks      of this shard; bias as below
    vocabulary   embedding rows cut               leaves: a sum over the ranks           of this shard
    head         rows (vocabulary) cut            enters; cut logits go to the loss      of this shard
    channels     first dim cut, the module stays  as before, on this rank's channels     of this shard
    sequence     whole, used on cut tokens        as before                              Partial (Replicate uncut)
    partial      whole, used on cut heads         as before                              Partial
    replicate    whole, used alike everywhere     as before                              Replicate

A dropout has a row too: sequence if its input holds cut tokens, partial if its input holds cut features, replicate if
its input is whole.

A table is {pattern of module names: words}; ``*`` stands for one part of a name, the longest module name wins, then
the later row. Words after the style:

    8+2+2        the cut dim lies in blocks of so many indivisible, equal parts (heads; features of gate and up), each
                 block cut by itself; if tp is larger than a block's parts, neighbours hold the same part
    whole        the module works on whole sequences though others work on cut sequences
    region       everything inside enters once, at this module; column layers in it do not enter themselves
    enter leave  the sequence is cut before this module, joined after it
    again        the output of this row layer enters cut layers once more
    NAME         an attribute (number or tuple) of the module that counts heads or features, divided by tp
    NAME=8/2     ... that is a ratio of two such numbers
    NAME@8       an argument of the module's forward with something for each of 8 heads, in dim 0 (behind samples, if it
                 has these in it too) or, of four dims, in dim 1: forward gets this rank's heads

Columns come before rows because the pair y = W2 f(W1 x) then needs one sum after W2, since f acts on features that one
rank holds. Rows first would need a sum before f and a gather after W2.

Papers: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from torch import nn

from shardwise.base.errors import PlanError
from shardwise.base.names import matching
from shardwise.base.policy import nearest
from shardwise.kernels.dropout import EqualPart
from shardwise.plan.placement import Partial, Placement, Replicate, Shard, ShardBlock

CutKind = Literal["column", "row", "vocabulary", "head", "channels", "sequence", "partial", "replicate"]
KINDS: tuple[str, ...] = get_args(CutKind)
_FLAGS = ("whole", "region", "enter", "leave", "again")
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(=\d+/\d+)?")
_ARGUMENT = re.compile(r"([A-Za-z_]\w*)@(\d+)")
_CONV1D_MODULE = "transformers.pytorch_utils"
_LIKE_LINEAR = {("transformers.models.falcon.modeling_falcon", "FalconLinear.forward")}
"""Forwards that compute the same as nn.Linear's in other operations."""
_PARTS = re.compile(r"\d+(\+\d+)*")


@dataclass(frozen=True)
class CutStyle:
    """The words of one row of a table."""

    kind: CutKind | None = None
    parts: tuple[int, ...] = ()
    flags: frozenset[str] = frozenset()
    attributes: tuple[str, ...] = ()
    arguments: tuple[tuple[str, int], ...] = ()
    """(name, heads) of the arguments of forward that are cut by heads."""

    @property
    def sees_whole(self) -> bool:
        """True if the module works on whole sequences, even if other modules work on cut sequences."""
        return "whole" in self.flags


@dataclass(frozen=True)
class StyleTable:
    """Styles by pattern, and the properties of the model that allow further cuts."""

    rows: Mapping[str, str] = field(default_factory=dict)
    sequence: bool = True
    """True if the sequence may be cut between the cut layers."""
    note: str = ""
    """Reason for the user if the sequence may not be cut."""
    causal_loss: bool = False
    """True if the model's ``loss_function`` may be called with cut logits of a causal language model."""


class ParameterPlacement(NamedTuple):
    """Placement of one parameter on "tp"."""

    placement: Placement
    gradient: Placement
    """Placement of the gradient before reduction."""
    shape: tuple[int, ...]
    """Global shape, before the cut."""


def parse(where: str, words: str) -> CutStyle:
    """Return the style that a row's words describe.

    Args:
        where: The row's pattern, for errors.
        words: The words.

    Returns:
        The style.

    Raises:
        PlanError: If a word cannot be read or does not fit the style.
    """
    kind: str | None = None
    parts: tuple[int, ...] = ()
    flags, attributes, arguments = set(), [], []
    for word in words.split():
        if word in KINDS and kind is None:
            kind = word
        elif _PARTS.fullmatch(word) and not parts:
            parts = tuple(int(number) for number in word.split("+"))
        elif word in _FLAGS:
            flags.add(word)
        elif _ATTRIBUTE.fullmatch(word) and word not in KINDS:
            attributes.append(word)
        elif (argument := _ARGUMENT.fullmatch(word)) and int(argument[2]):
            arguments.append((argument[1], int(argument[2])))
        else:
            raise PlanError(
                f"tensor.table: {where!r}: {words!r}: cannot read {word!r}; expected one of {', '.join(KINDS)}, then "
                f"parts as in 8+2+2, {', '.join(_FLAGS)}, names of attributes that count heads, or arguments of "
                "forward that hold heads, as in bias@8"
            )
    if parts and (kind not in ("column", "row") or min(parts) < 1):
        raise PlanError(f"tensor.table: {where!r}: {words!r}: parts are positive and belong to column or row")
    if "again" in flags and kind != "row":
        raise PlanError(f"tensor.table: {where!r}: {words!r}: again belongs to row")
    return CutStyle(kind, parts, frozenset(flags), tuple(attributes), tuple(arguments))  # type: ignore[arg-type]


def styles(model: nn.Module, table: StyleTable) -> dict[str, CutStyle]:
    """Return the styles of the modules that a row names, by module name.

    Args:
        model: The model.
        table: The table.

    Returns:
        The styles.

    Raises:
        PlanError: If a pattern matches no module, or an attribute does not exist.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, CutStyle] = {}
    for pattern, words in table.rows.items():
        style = parse(pattern, words)
        names = matching(modules, pattern)
        if not names:
            known = [re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules if name]
            raise PlanError(
                f"tensor.table: pattern {pattern!r} matches no module of {type(model).__name__}"
                f"{nearest(pattern, known)}"
            )
        for name in names:
            for attribute in style.attributes:
                if not hasattr(modules[name], attribute.partition("=")[0]):
                    raise PlanError(
                        f"tensor.table: {pattern!r}: {attribute!r} is neither a style nor an attribute of {name} "
                        f"({type(modules[name]).__name__}){nearest(attribute, KINDS)}"
                    )
            found[name] = style
    return found


def begins_cut_sequence(model: nn.Module, table: StyleTable) -> bool:
    """Return True if a row of the table begins a cut of the sequence: ``enter``, or an embedding that gives cut tokens.

    If no row does, column layers would gather equal copies of whole sequences, which doubles their gradients.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    return any(
        "enter" in style.flags
        or (style.kind == "vocabulary" and not style.sees_whole)
        or (style.kind == "sequence" and not style.sees_whole and isinstance(modules[name], nn.Embedding))
        for name, style in styles(model, table).items()
    )


def places(model: nn.Module, table: StyleTable, ranks: int, sequence: bool) -> dict[str, ParameterPlacement]:
    """Return the placement of every parameter of an uncut model, under each of its names.

    Args:
        model: The model.
        table: The styles of its modules.
        ranks: Size of the "tp" axis.
        sequence: True to cut the sequence, if the table allows a cut.

    Returns:
        The placements.

    Raises:
        PlanError: If a parameter has no row, if parts do not divide over the ranks, or if the names of a tied
            parameter have different placements.
    """
    sequence = sequence and table.sequence
    by_module = styles(model, table)
    modules = dict(model.named_modules(remove_duplicate=False))
    if ranks > 1:
        _check_statistics(modules, by_module, sequence)
    placed: dict[int, tuple[str, ParameterPlacement]] = {}
    waiting: dict[int, str] = {}
    names: list[tuple[str, nn.Parameter]] = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in names:
        owner, _, leaf = name.rpartition(".")
        style = style_of(owner, by_module)
        if style is None:
            waiting[id(parameter)] = name
            continue
        if ranks == 1:
            place = ParameterPlacement(Replicate(), Replicate(), tuple(parameter.shape))
        else:
            place = _place(name, leaf, parameter, modules[owner], style, ranks, sequence)
        known = placed.setdefault(id(parameter), (name, place))
        if known[1] != place:
            raise PlanError(
                f"tensor.table: {known[0]} and {name} are one tied parameter, but their rows place it as "
                f"{known[1][:2]} and as {place[:2]}"
            )
    for key, name in waiting.items():
        if key not in placed:
            owner, _, _ = name.rpartition(".")
            raise PlanError(
                f"tensor: parameter {name!r} of a {type(modules[owner]).__name__} has no row in the table, so nobody "
                f"knows how it lies on tp={ranks} ranks; add {{{owner!r}: STYLE}} to tensor.table, STYLE one of "
                f"{', '.join(KINDS)}"
            )
    return {name: placed[id(parameter)][1] for name, parameter in names}


def dropout_cuts(
    model: nn.Module, table: StyleTable, index: int, ranks: int, sequence: bool
) -> dict[str, EqualPart]:
    """Return the part of each dropout's input that rank ``index`` holds, by module name.

    Args:
        model: The model.
        table: The styles of its modules.
        index: Index of the rank on the "tp" axis.
        ranks: Size of the "tp" axis.
        sequence: True to cut the sequence, if the table allows a cut.

    Returns:
        The parts; dropouts with a whole input are left out.

    Raises:
        PlanError: If a dropout has no row; with a wrong guess, ranks would drop the same features of other
            tokens.
    """
    by_module = styles(model, table)
    found: dict[str, EqualPart] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Dropout) or module.p == 0 or ranks == 1:
            continue
        style = style_of(name, by_module)
        if style is None:
            raise PlanError(
                f"tensor: dropout {name!r} (p={module.p}) has no row in the table, so nobody knows which part of the "
                f"mask a rank needs; add {{{name!r}: STYLE}} to tensor.table: sequence (its input holds cut tokens), "
                "partial (cut features) or replicate (all), or set its p to 0"
            )
        if style.kind == "sequence" and sequence and table.sequence and not style.sees_whole:
            found[name] = EqualPart(1, ranks, index)
        elif style.kind == "partial":
            found[name] = EqualPart(-1, ranks, index)
    return found


def owners(model: nn.Module, table: StyleTable, placed: Mapping[str, ParameterPlacement]) -> dict[str, str]:
    """Return the only module in whose forward pass a parameter may be used, by each name of the parameter.

    The result covers the parameters that are cut or whose gradient is an addend.

    Args:
        model: The model.
        table: The styles of its modules.
        placed: The placements of the parameters.

    Returns:
        Module names: the parameter's own module, or the surrounding module that has the row; for channels the
        outermost such module.
    """
    by_module = styles(model, table)
    found: dict[str, str] = {}
    for name, place in placed.items():
        if not isinstance(place.placement, Shard) and not isinstance(place.gradient, Partial):
            continue
        owner = name.rpartition(".")[0]
        styled = next((key for key in _around(owner) if key in by_module and by_module[key].kind), owner)
        kind = by_module[styled].kind if styled in by_module else None
        if kind in ("sequence", "partial"):
            owner = styled
        while kind == "channels" and _kind(owner.rpartition(".")[0], by_module) == kind:
            owner = owner.rpartition(".")[0]
        found[name] = owner
    return found


def _kind(name: str, by_module: Mapping[str, CutStyle]) -> CutKind | None:
    return by_module[name].kind if name in by_module else None


def style_of(name: str, by_module: Mapping[str, CutStyle]) -> CutStyle | None:
    """Return the style for parameters of the innermost module around ``name``, itself included.

    Args:
        name: Name of a module.
        by_module: Styles by module name.

    Returns:
        The style, or None if there is none. A style that cuts holds only for its own module, not for modules
        inside.
    """
    for around in _around(name):
        style = by_module.get(around)
        if style is not None and style.kind is not None:
            # A style that cuts applies to its module only; any other style applies to all modules inside too.
            return style if around == name or style.kind in ("sequence", "partial", "replicate") else None
    return None


def in_region(name: str, by_module: Mapping[str, CutStyle]) -> bool:
    """Return True if a module around ``name`` (or the module itself) enters the cut layers for it."""
    return any("region" in by_module[around].flags for around in _around(name) if around in by_module)


def divided(number: int, ranks: int) -> int:
    """Return the parts of ``number`` that one rank holds, which is 1 if there are fewer parts than ranks."""
    return max(number // ranks, 1)


def is_transposed(module: nn.Module) -> bool:
    """Return True for a linear layer that stores [inputs, outputs], as GPT-2's in transformers."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == _CONV1D_MODULE for kind in type(module).__mro__
    )


def has_known_forward(module: nn.Module) -> bool:
    """Return True if a linear layer or embedding computes exactly what its class of torch (or transformers) does."""
    if "forward" in vars(module):  # the forward was replaced on the instance
        return False
    forward = type(module).forward
    if type(module).__module__.startswith("shardwise.models."):
        return True  # ours; the cut head takes targets as ours does
    if is_transposed(module):
        kind = next(kind for kind in type(module).__mro__ if kind.__module__ == _CONV1D_MODULE)
        return forward is kind.__dict__.get("forward")
    if (forward.__module__, forward.__qualname__) in _LIKE_LINEAR:
        return True
    return forward in (nn.Linear.forward, nn.Embedding.forward)


def _around(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _place(
    name: str,
    leaf: str,
    parameter: nn.Parameter,
    module: nn.Module,
    style: CutStyle,
    ranks: int,
    sequence: bool,
) -> ParameterPlacement:
    shape = tuple(parameter.shape)
    cut = sequence and not style.sees_whole
    whole: ParameterPlacement = ParameterPlacement(Replicate(), Replicate(), shape)
    addend: ParameterPlacement = ParameterPlacement(Replicate(), Partial(), shape)
    if style.kind == "replicate":
        return whole
    if style.kind == "partial":
        return addend
    if style.kind == "sequence":
        return addend if cut else whole
    if style.kind == "channels":
        _blocks(name, shape[0] if shape else 1, (), ranks, replicas=False)
        return _shard(Shard(0), shape)
    _check_module(name, leaf, module, style)
    if style.kind in ("vocabulary", "head"):
        return _shard(Shard(0), shape)
    if style.kind == "row":
        if leaf == "bias":
            return addend if cut else whole
        dim = 0 if is_transposed(module) else 1
        blocks = _blocks(name, shape[dim], style.parts, ranks, replicas=False)
        return _shard(Shard(dim, blocks if len(blocks) > 1 else ()), shape)
    dim = 1 if leaf == "weight" and is_transposed(module) else 0
    blocks = _blocks(name, shape[dim], style.parts, ranks, replicas=True)
    return _shard(Shard(dim, blocks), shape)


def _check_statistics(
    modules: Mapping[str, nn.Module], by_module: Mapping[str, CutStyle], sequence: bool
) -> None:
    """Check that every norm over the samples gets whole inputs.

    Its statistics would otherwise be those of this rank's tokens or features.
    """
    for name, module in modules.items():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        style = style_of(name, by_module)
        parts = style is not None and style.kind == "sequence" and sequence and not style.sees_whole
        if parts or (style is not None and style.kind in ("channels", "partial")):
            assert style is not None, "it has a kind"
            raise PlanError(
                f"tensor.table: {name}: style {style.kind} gives a {type(module).__name__} a part of its input, and "
                f"its statistics would be those of the part; keep it whole with {{{name!r}: 'replicate'}} where its "
                "input is whole, or set tensor.sequence_parallel: false"
            )


def _shard(placement: Shard, shape: tuple[int, ...]) -> ParameterPlacement:
    return ParameterPlacement(placement, placement, shape)


def _check_module(name: str, leaf: str, module: nn.Module, style: CutStyle) -> None:
    wanted = nn.Embedding if style.kind == "vocabulary" else nn.Linear
    if not isinstance(module, wanted) and not (wanted is nn.Linear and is_transposed(module)):
        raise PlanError(
            f"tensor.table: {name}: style {style.kind} is for a {wanted.__name__}, this is a {type(module).__name__}"
        )
    if not has_known_forward(module) and not isinstance(module, nn.Embedding):
        owner = name.rpartition(".")[0]
        whose = "was replaced on the instance" if "forward" in vars(module) else "is its own"
        raise PlanError(
            f"tensor: {owner} is a {type(module).__name__} whose forward {whose}, so cutting its weight as a "
            f"{wanted.__name__}'s could compute something else; keep it whole with "
            f"tensor.table: {{{owner!r}: 'replicate'}} (and what it feeds), or put the addition into a module around a "
            f"plain {wanted.__name__}"
        )
    if leaf not in ("weight", "bias") or any(key not in ("weight", "bias") for key in module._parameters):
        raise PlanError(
            f"tensor: {name}: expected the parameters weight and bias alone (a weight under a parametrization cannot "
            "be cut); remove it before"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise PlanError(f"tensor: {name}: an embedding with max_norm or scale_grad_by_freq cannot be cut")


def _blocks(
    name: str, size: int, parts: tuple[int, ...], ranks: int, replicas: bool
) -> tuple[ShardBlock, ...]:
    """Return the blocks of a dim of ``size`` that lies in ``parts``, or () for a single block of elements."""
    if not parts:
        if size % ranks:
            below, above = size // ranks * ranks, -(-size // ranks) * ranks
            raise PlanError(
                f"tensor: {name}: {size} features do not divide over tp={ranks}; the nearest numbers that do are "
                f"{f'{below} and ' if below else ''}{above}"
            )
        return ()
    if size % sum(parts):
        raise PlanError(
            f"tensor.table: {name}: {size} features do not lie in {'+'.join(map(str, parts))} equal parts"
        )
    for number in parts:
        if number % ranks and (not replicas or ranks % number):
            near = [
                n
                for n in range(1, max(number, ranks) + 1)
                if number % n == 0 or (replicas and n % number == 0)
            ]
            best = min(near, key=lambda n: (abs(n - ranks), n))
            raise PlanError(
                f"tensor: {name}: {number} heads (or other indivisible parts) do not divide over tp={ranks}; the "
                f"nearest tp that works is {best}, the nearest numbers of parts are "
                f"{' and '.join(str(n) for n in (number // ranks * ranks, -(-number // ranks) * ranks) if n)}"
            )
    part = size // sum(parts)
    return tuple(ShardBlock(part * number, number) for number in parts)
