"""Apply: the one list of what is done to a user's module, in the order in which the changes happen.

``CHANGES`` is the list as data: each row has the change, the reason for its place in the order, the files that make the
change, and the moment at which the change is undone. docs/design.md prints the list.

    phase       when                                              who runs the rows
    GIVEN       the model is as the user made it                  engine/construction/build.py
    WHOLE       its optimizers are known, no Plan is made yet     engine/construction/build.py
    DESCRIBED   the Plan is being made                            the functions that describe the model
    CUT         the Plan is made; the model is still whole        compose/module_steps.py
    STAGE       once for each stage of this rank                  engine/construction/stages.py
    STAGES      all stages of this rank are ready                 engine/construction/build.py
    ENGINE      the engine exists                                 engine/model/held.py
    PASS        during a pass, for the time of the pass           the classes that watch the pass
    CALL        the user calls a method of the engine             the method

``apply_steps`` runs the rows of the phases in ``WALKED``: the caller passes one function for each row of a phase, by
name, and the rows set the order. So a step that is not in the list cannot run, a row without a step is an error, and
moving a row moves its step. The other rows attach hooks for the time of one pass, or on a call of the user, where no
fixed order exists. tests/engine/construction/test_module_changes.py compares every module before and after each step,
inside passes, and after ``close()``, and fails if a change belongs to no row; it also fails if a file that changes
modules is named by no row.

The list leaves out the values of weights and buffers, which training changes.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

Step = Callable[[], object]
"""Function that makes one change to a module."""


class Phase(Enum):
    """Moment at which changes happen."""

    GIVEN = "as the model is given"
    WHOLE = "before the model is described"
    DESCRIBED = "while the model is described"
    CUT = "when the Plan is made"
    STAGE = "on each stage of this rank"
    STAGES = "when the stages are ready"
    ENGINE = "when the engine exists"
    PASS = "for the time of a pass"
    CALL = "on a call of the user"


WALKED = (Phase.GIVEN, Phase.WHOLE, Phase.CUT, Phase.STAGE, Phase.STAGES, Phase.ENGINE)
"""Phases whose rows ``apply_steps`` runs."""


class Effect(Enum):
    """Kind of difference between a module before a change and after it."""

    HOOK = "a hook on a module"
    STATE_HOOK = "a hook on state dicts"
    PARAMETER_HOOK = "a hook on a parameter"
    METHOD = "a function in place of a method"
    ATTRIBUTE = "a plain attribute"
    CHILD = "another child module"
    PARAMETER = "another Parameter, or another class of one"
    MEMORY = "other memory, dtype or device of a tensor"


class Undone(Enum):
    """Moment at which a change is undone."""

    BY_CLOSE = "close()"
    IF_WHOLE = "close(), unless tp, pp, ep or etp cuts the model"
    AT_ONCE = "the end of the pass or call"
    NEVER = "never"


class ModuleChange(NamedTuple):
    """One row of the list."""

    name: str
    phase: Phase
    what: str
    why: str
    """Reason for the place in the order: what breaks elsewhere."""
    where: tuple[str, ...]
    """Files that make the change, below the package."""
    effects: frozenset[Effect]
    undone: Undone


def _row(
    phase: Phase, name: str, what: str, why: str, where: str, undone: Undone, *effects: Effect
) -> ModuleChange:
    return ModuleChange(name, phase, what, why, tuple(where.split()), frozenset(effects), undone)


CHANGES = (
    _row(
        Phase.GIVEN,
        "pieces",
        "parameters of a model that was made by `sharded_init` become ordinary Parameters",
        "first: every later reader of a piece would gather it; without tp, pp and ep the Parameters stay empty until "
        "row `dealt`",
        "engine/construction/sharded_init.py",
        Undone.NEVER,
        Effect.PARAMETER,
        Effect.MEMORY,
    ),
    _row(
        Phase.WHOLE,
        "layers",
        "layers of `Layers` that only exist as specs are built, unless pp builds them on their stages",
        "after the user's optimizer is read, whose parameters are those of the specs; before the description, which "
        "reads real layers",
        "parallel/pipeline/layers.py",
        Undone.NEVER,
        Effect.CHILD,
    ),
    _row(
        Phase.DESCRIBED,
        "order of use",
        "hooks record one pass on fake tensors, and on the example the outputs of the blocks",
        "before any cut: the order decides where stages begin",
        "parallel/pipeline/uses.py parallel/pipeline/check_cut.py",
        Undone.AT_ONCE,
        Effect.HOOK,
    ),
    _row(
        Phase.DESCRIBED,
        "old graphs",
        "parameters that will be cut are empty for a moment, which shows graphs that still hold their shapes",
        "before the cut, which would make the first backward pass of such a graph fail",
        "engine/step/old_graphs.py",
        Undone.AT_ONCE,
        Effect.MEMORY,
    ),
    _row(
        Phase.CUT,
        "batch norm",
        "`forward` of batch norms computes statistics over all data-parallel ranks",
        "first of the cuts: it wraps forwards of the model's own modules, some of which are copied or replaced later",
        "parallel/zero/batch_norm.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
    ),
    _row(
        Phase.CUT,
        "start",
        "rank 0's weights and buffers become those of all ranks, and buffers move to the device",
        "while every rank still has the whole model: slices of unlike weights would fit no model",
        "engine/state/start_weights.py engine/construction/stages.py",
        Undone.NEVER,
        Effect.MEMORY,
    ),
    _row(
        Phase.CUT,
        "dropout",
        "children `nn.Dropout` are replaced by dropout with keyed masks",
        "before slices, which refuse dropout that is not keyed; its keys are names of the whole model",
        "models/dropout.py",
        Undone.IF_WHOLE,
        Effect.CHILD,
    ),
    _row(
        Phase.CUT,
        "context",
        "attention functions exchange keys along cp, and a hook on the root cuts the tokens of a call",
        "before slices, whose hook on the root reads the tokens that this one has cut",
        "parallel/context/region.py parallel/context/foreign.py",
        Undone.IF_WHOLE,
        Effect.ATTRIBUTE,
        Effect.HOOK,
    ),
    _row(
        Phase.CUT,
        "slices",
        "matrices are cut along tp: layers are replaced, hooks move activations between layouts, numbers of heads are "
        "divided",
        "before stages: the patterns of a table match names of the whole model",
        "parallel/tensor/apply.py parallel/tensor/layers.py parallel/tensor/outputs.py parallel/tensor/region.py",
        Undone.NEVER,
        Effect.CHILD,
        Effect.HOOK,
        Effect.ATTRIBUTE,
        Effect.MEMORY,
    ),
    _row(
        Phase.CUT,
        "heads",
        "head and loss of a foreign model that is not cut along tp are joined, if logits are computed by tiles",
        "after slices, which join them otherwise",
        "models/tiles.py parallel/tensor/apply.py",
        Undone.IF_WHOLE,
        Effect.CHILD,
        Effect.HOOK,
        Effect.ATTRIBUTE,
    ),
    _row(
        Phase.CUT,
        "mixtures",
        "mixtures of experts get the run's seed, counters and ranks",
        "after slices: by then it is known how tokens lie on tp; by names of the whole model",
        "parallel/expert/apply.py",
        Undone.IF_WHOLE,
        Effect.ATTRIBUTE,
    ),
    _row(
        Phase.CUT,
        "experts",
        "stacks of experts are cut along ep and etp, and their `forward` exchanges rows",
        "after mixtures, whose settings the exchange reads",
        "parallel/expert/apply.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
        Effect.MEMORY,
    ),
    _row(
        Phase.CUT,
        "stages",
        "the stages of this rank are made along pp, with copies of the modules around blocks; layers that are built "
        "only now get the rows `dropout`, `mixtures` and `experts`",
        "after all rows that read names of the whole model",
        "parallel/pipeline/cut.py parallel/pipeline/stand_in.py parallel/pipeline/stage_module.py "
        "parallel/pipeline/layers.py models/dropout.py parallel/expert/apply.py",
        Undone.NEVER,
        Effect.CHILD,
    ),
    _row(
        Phase.CUT,
        "tiles",
        "heads and feed-forward parts compute tiles of tokens",
        "after slices, which put modules of their own in the places of heads and projections, and after stages, "
        "because tiles depend on whether a pass waits for another one",
        "models/tiles.py models/feed_forward.py passes/tiled.py",
        Undone.IF_WHOLE,
        Effect.ATTRIBUTE,
        Effect.METHOD,
    ),
    _row(
        Phase.CUT,
        "tables",
        "collections of embedding tables get this rank's rows",
        "after stages: a collection lies on the stage that uses it; before weights, which leave rows alone",
        "engine/parts/tables.py parallel/embedding/collection.py",
        Undone.NEVER,
        Effect.ATTRIBUTE,
    ),
    _row(
        Phase.STAGE,
        "buffers",
        "buffers move to the device, in their dtypes",
        "here again: buffers of layers that were built only on their stage are new",
        "engine/construction/stages.py",
        Undone.BY_CLOSE,
        Effect.MEMORY,
    ),
    _row(
        Phase.STAGE,
        "weights",
        "parameters become views of flat buffers; a released one refuses to be read, and `p.data` of a trained one is "
        "watched",
        "before all later rows, which refer to the real parameters of the stage",
        "engine/construction/stages.py parallel/zero/weight.py parallel/zero/views.py memory/watched.py "
        "passes/absent.py",
        Undone.BY_CLOSE,
        Effect.MEMORY,
        Effect.PARAMETER,
    ),
    _row(
        Phase.STAGE,
        "fp8",
        "`forward` of linear layers multiplies in fp8; of layers that tp cuts, an attribute does",
        "after weights, whose slots may hold numbers in fp8; inside of compiled blocks, which trace it",
        "compose/module_steps.py precision/fp8.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
        Effect.ATTRIBUTE,
    ),
    _row(
        Phase.STAGE,
        "products",
        "`forward` of linear layers lets the gradient of the weight wait for W, if the schedule has W; of layers that "
        "tp cuts, of heads and of experts an attribute does",
        "after fp8, whose layers do not wait; inside of recomputation, which runs these forwards again",
        "compose/module_steps.py kernels/deferred.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
        Effect.ATTRIBUTE,
    ),
    _row(
        Phase.STAGE,
        "compile",
        "`forward` of each block is compiled",
        "inside of recomputation: a compiler cannot trace the contexts of a checkpoint",
        "engine/construction/stages.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
    ),
    _row(
        Phase.STAGE,
        "operations",
        "`forward` of modules whose operations have dtypes of their own takes wide inputs",
        "inside of recomputation, which runs these forwards again in the same dtypes",
        "precision/operations.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
    ),
    _row(
        Phase.STAGE,
        "recompute",
        "`forward` or `attention` of blocks computes its activations again in the backward pass",
        "inside of hooks: the weights of a Unit are gathered around both of its passes",
        "compose/module_steps.py passes/recompute.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
    ),
    _row(
        Phase.STAGE,
        "activations",
        "`forward` of blocks moves what it saves for the backward pass to the host",
        "outside of recomputation, which leaves only the input of a block to be moved",
        "compose/module_steps.py tiers/activations.py",
        Undone.IF_WHOLE,
        Effect.METHOD,
    ),
    _row(
        Phase.STAGE,
        "hooks",
        "hooks before and after the forward of each Unit, and hooks on trained parameters that take their gradients "
        "over",
        "outside of all wrapped forwards: no forward may run before its weights are gathered; in front of the user's "
        "own pre-hooks, which may read weights",
        "parallel/zero/hooks.py",
        Undone.BY_CLOSE,
        Effect.HOOK,
        Effect.PARAMETER_HOOK,
    ),
    _row(
        Phase.STAGE,
        "methods",
        "methods of Units that `zero.forward_methods` names gather weights as forward does",
        "after hooks, which they call",
        "parallel/zero/hooks.py",
        Undone.BY_CLOSE,
        Effect.METHOD,
    ),
    _row(
        Phase.STAGE,
        "casts",
        "hooks at the root cast floating inputs and, on the last stage, outputs",
        "after hooks: those of Units get inputs as the user passed them, and the module's own code gets cast inputs",
        "engine/parts/inputs.py",
        Undone.BY_CLOSE,
        Effect.HOOK,
    ),
    _row(
        Phase.STAGE,
        "graphs",
        "a hook at the root begins a new step of CUDA graphs",
        "last of a stage: immediately before its code runs",
        "engine/construction/stages.py",
        Undone.BY_CLOSE,
        Effect.HOOK,
    ),
    _row(
        Phase.STAGES,
        "dealt",
        "the values of row `pieces` go to the buckets of the ranks that own them",
        "after weights, which make the buckets",
        "engine/construction/sharded_init.py",
        Undone.NEVER,
    ),
    _row(
        Phase.STAGES,
        "other stages",
        "parameters of other stages, which the whole model still holds, are freed and refuse to be read",
        "when all stages of this rank have their weights; a stage that came later would find its own emptied",
        "engine/construction/build.py passes/absent.py",
        Undone.NEVER,
        Effect.MEMORY,
        Effect.PARAMETER,
    ),
    _row(
        Phase.ENGINE,
        "state dicts",
        "hooks on state dicts refuse what would save or load a part for the whole, and copies that would not train",
        "when the model is cut: the hooks go on the modules that it consists of by now",
        "engine/model/model_calls.py",
        Undone.BY_CLOSE,
        Effect.STATE_HOOK,
    ),
    _row(
        Phase.ENGINE,
        "conversions",
        "`_apply` of the model and of its stages refuses `.to()`, `.half()` and the like",
        "when the weights are in their buffers: from then on a conversion would take them out",
        "engine/model/model_calls.py",
        Undone.BY_CLOSE,
        Effect.METHOD,
    ),
    _row(
        Phase.ENGINE,
        "owner",
        "a hook at the root names the engine that owns the model, and refuses passes while weights are away",
        "last of the build and in front of all other hooks: none may read weights that are away",
        "engine/model/held.py",
        Undone.IF_WHOLE,
        Effect.HOOK,
    ),
    _row(
        Phase.PASS,
        "own use",
        "in the first passes slices refuse to be read by modules that do not own them",
        "in front of the hooks of Units, so that those may read the slices",
        "parallel/tensor/own_use.py passes/absent.py",
        Undone.AT_ONCE,
        Effect.HOOK,
        Effect.PARAMETER,
    ),
    _row(
        Phase.PASS,
        "profile",
        "in the step of `module_profile` hooks on every module count its costs",
        "behind all other hooks: gathers are not the cost of a module",
        "observe/module_profile.py",
        Undone.AT_ONCE,
        Effect.HOOK,
    ),
    _row(
        Phase.PASS,
        "block seconds",
        "under `pipeline.partition: measured`, hooks on the blocks mark their passes in the second step",
        "behind the hooks of Units: gathers are not the time of a block",
        "engine/step/measured_step.py",
        Undone.AT_ONCE,
        Effect.HOOK,
    ),
    _row(
        Phase.PASS,
        "random numbers",
        "under pp, hooks give parts that only one stage runs random numbers of their own",
        "in front of all hooks of the parts, which may draw",
        "passes/draws.py",
        Undone.AT_ONCE,
        Effect.HOOK,
    ),
    _row(
        Phase.PASS,
        "blocks that ran",
        "under pp, hooks on the blocks of a stage record which blocks ran and what they set",
        "behind the hooks of Units, which are no part of a block",
        "parallel/pipeline/stage_module.py parallel/pipeline/stand_in.py",
        Undone.AT_ONCE,
        Effect.HOOK,
        Effect.ATTRIBUTE,
    ),
    _row(
        Phase.PASS,
        "not finite",
        "after a step with a NaN, hooks on every module find the first one in a repeated pass",
        "behind all other hooks, to see what leaves the module",
        "engine/step/nonfinite.py",
        Undone.AT_ONCE,
        Effect.HOOK,
    ),
    _row(
        Phase.CALL,
        "plain backward",
        "after `adopt_backward()`, a hook at the root finds backward passes that the script runs itself",
        "behind all other hooks, on the outputs that the script gets",
        "engine/step/plain_backward.py",
        Undone.BY_CLOSE,
        Effect.HOOK,
    ),
    _row(
        Phase.CALL,
        "copies",
        "attributes and buffers that the user sets on a module are set on its copies in the stages",
        "before the next pass, which runs the copies",
        "engine/model/known_modules.py",
        Undone.NEVER,
        Effect.ATTRIBUTE,
        Effect.MEMORY,
    ),
    _row(
        Phase.CALL,
        "weights elsewhere",
        "`full_parameters`, `evaluated_weights` and `offload_states` let parameters show other memory",
        "between passes only",
        "parallel/zero/weight.py parallel/zero/views.py engine/state/away.py engine/state/averaging.py",
        Undone.AT_ONCE,
        Effect.MEMORY,
        Effect.PARAMETER,
    ),
)
"""All that is done to a user's module, in order."""


def changes_in(phase: Phase) -> Iterator[ModuleChange]:
    """Yield the rows of a phase in their order."""
    return (change for change in CHANGES if change.phase is phase)


def apply_steps(phase: Phase, steps: Mapping[str, Step]) -> None:
    """Run the step of each row of a phase, in the order of the rows.

    Args:
        phase: The phase, one of ``WALKED``.
        steps: One function for each row of the phase, by the row's name.
    """
    assert phase in WALKED, f"{phase.name}: no fixed order exists in this phase"
    rows = [change.name for change in changes_in(phase)]
    unlisted, missing = steps.keys() - set(rows), set(rows) - steps.keys()
    assert not unlisted, f"{phase.name}: steps without a row in compose/apply.py: {sorted(unlisted)}"
    assert not missing, f"{phase.name}: rows of compose/apply.py without a step: {sorted(missing)}"
    for name in rows:
        steps[name]()
