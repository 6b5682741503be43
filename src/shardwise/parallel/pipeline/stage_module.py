"""A stage as it runs: the model's own forward pass over a skeleton (cut.py), and what is looked for in it.

A model that passes more than one block's output from block to block, uses what is absent, or runs its blocks in another
order or more than once is refused: in the first pass of each *kind* (shapes and structure of the batch and of what is
received, training or not) absent values are marked, and blocks counted.

Cost: of a pass whose kind was seen before nothing is marked, counted or hooked: it costs a look at the shapes. A whole
number in the batch that is another in each step makes each pass the first of a kind: give it as a tensor.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.memory.absent import AbsentTrace, absent_in
from shardwise.memory.draws import PassDraws
from shardwise.parallel.pipeline.blocks import ROWS
from shardwise.parallel.pipeline.stand_in import AbsentBlock, AbsentLeaf, Foreign, Relay, call_until_ended
from shardwise.plan.errors import PlanError
from shardwise.plan.pytree import tensors_in
from shardwise.plan.ragged import Ragged

_KINDS = 1000
_OURS = (__name__, "shardwise.parallel.pipeline.cut")
"""Modules whose frames hold what stands in for absent parts, and are no use of it."""


class StageModule:
    """One stage: ``module`` is the skeleton, an ordinary module with the parameters of this stage alone.

    Hooks on ``module`` see an ordinary pass whose output is what the stage passes on. ``blocks``: the names of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        stages: int,
        relay: Relay,
        blocks: Sequence[str] = (),
        all_blocks: Sequence[str] = (),
    ):
        self.module = module
        self.stage = stage
        self.stages = stages
        self._relay = relay
        self._blocks = list(blocks)
        self.all_blocks = list(all_blocks)
        """Names of the blocks of all stages."""
        self.draws = PassDraws()
        """What passes draw from generators that are not keyed."""
        self._parts: list[tuple[str, nn.Module]] | None = None
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
        with self.draws.around(self._own_parts() if self.draws.isolates else ()):
            return self._run(call, received, kind)

    def _own_parts(self) -> list[tuple[str, nn.Module]]:
        """What stand-ins on other stages stand for: blocks, and modules outside of them that have weights."""
        if self._parts is None:
            self._parts = parts_of(self.module, self._blocks)
        return self._parts

    def _run(self, call: Callable[[nn.Module], Any], received: Any, kind: Hashable) -> Any:
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
            if self.stage > 0 and "appears to not have been used in the graph" in str(error):
                raise PlanError(
                    f"{where}a gradient with respect to something that this stage's graph does not contain is asked "
                    f"for ({error}). Inputs of the model are used on the first stage alone, so a penalty on the "
                    "gradient of the loss with respect to them (torch.autograd.grad(loss, inputs, "
                    "create_graph=True)) cannot be computed on a pipeline; set mesh.pp: 1 for it"
                ) from error
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
            where = str(frame.f_globals.get("__name__"))
            is_models = where not in _OURS and not where.startswith("torch._")
            for name, value in frame.f_locals.items() if is_models else ():
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
        self._rows = {name for name in names if isinstance(_parent(root, name), ROWS)}
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


def parts_of(root: nn.Module, blocks: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules of ``root`` that one stage alone runs, with their names: ``blocks``, and modules outside of
    them that hold weights and no other modules. Stand-ins are none of them."""
    inside = tuple(f"{name}." for name in blocks)
    found = [(name, root.get_submodule(name)) for name in blocks]
    for name, module in root.named_modules():
        is_leaf = next(module.children(), None) is None and bool(vars(module)["_parameters"])
        if name and is_leaf and not isinstance(module, Foreign) and not f"{name}.".startswith(inside):
            found.append((name, module))
    return found


def _parent(root: nn.Module, name: str) -> nn.Module:
    return root.get_submodule(name.rpartition(".")[0])
