"""A running stage: the model's own forward pass over a skeleton (cut.py), and the checks of that pass.

A model is refused if it passes more than one block's output from block to block, uses absent values, or runs its blocks
in another order or more than once. The checks run in the first pass of each *kind* (shapes and structure of the batch
and of the received value, training or not): absent values are marked, and blocks are counted.

Cost: in a pass of a known kind nothing is marked, counted or hooked; only the shapes are read. A whole number in the
batch that differs in each step makes each pass the first of a kind: give such a number as a tensor.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.base.pytree import tensors_in
from shardwise.base.ragged import Ragged
from shardwise.parallel.pipeline.blocks import ROWS
from shardwise.parallel.pipeline.stand_in import (
    AbsentBlock,
    AbsentLeaf,
    AbsentModule,
    StandInState,
    call_until_ended,
)
from shardwise.passes.absent import AbsentTrace, absent_in
from shardwise.passes.draws import PassDraws

_KINDS = 1000
_OURS = (__name__, "shardwise.parallel.pipeline.cut")
"""Modules whose frames hold stand-ins without using them."""


class StageModule:
    """One stage of a model.

    Hooks on ``module`` see an ordinary pass whose output is the value that the stage sends on.

    Args:
        module: The skeleton, an ordinary module with only the parameters of this stage.
        stage: Number of the stage.
        stages: Number of stages.
        relay: The value and the fillers that the stand-ins share.
        blocks: Names of the stage's own blocks.
        all_blocks: Names of the blocks of all stages.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        stages: int,
        relay: StandInState,
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
        """Random numbers that passes draw from generators that are not keyed."""
        self._parts: list[tuple[str, nn.Module]] | None = None
        self._seen: dict[Hashable, bool] = {}
        """Kinds of passes that were watched, each with whether the model writes into outputs of blocks in place."""

    @property
    def is_last(self) -> bool:
        """True if the pass ends with the model's return value."""
        return self.stage == self.stages - 1

    def run(self, call: Callable[[nn.Module], Any], received: Any = None, kind: Hashable = None) -> Any:
        """Run the forward pass of the stage.

        Args:
            call: Function that calls its argument as a user would call the whole model.
            received: Return value of the stage before, or None on the first stage.
            kind: Kind of the batch; the first pass of each kind is watched.

        Returns:
            The output of the stage's last block; on the last stage the result of ``call``.

        Raises:
            PlanError: If the model cannot be cut in this way. In the first pass of a kind the error names the
                absent value that the model uses.
        """
        with self.draws.around(self._own_parts() if self.draws.isolates else ()):
            return self._run(call, received, kind)

    def _own_parts(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks of this stage, and the modules outside of blocks that have weights."""
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
            if len(self._seen) >= _KINDS:  # a number that counts steps would fill the memory
                self._seen.clear()
            result, self._seen[kind] = self._watched(call, received)
        return result

    def _watched(self, call: Callable[[nn.Module], Any], received: Any) -> tuple[Any, bool]:
        """Run the first pass of a kind with marked absent values and counted blocks."""
        where = f"stage {self.stage} of {self.stages}: "
        names = {id(module): name or "the model" for name, module in self.module.named_modules()}
        watch = AbsentTrace(where, self._relay.advice, names)
        self._relay.load(received, watch)
        blocks = _BlockRecords(self.module, self._blocks, self._relay)
        try:
            with blocks:
                ended, result = call_until_ended(lambda: call(self.module))
            if watch.refusal is not None:  # the model has caught the error
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
        """Return a text about the stand-in that an error of the model involves, or None if there is none."""
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
"""Errors that a model may raise because a value is not what the model expects."""


class _BlockRecords(contextlib.AbstractContextManager["_BlockRecords"]):
    """Records of a stage's own blocks during one pass: the blocks that ran, and what they set or added to lists."""

    def __init__(self, root: nn.Module, names: Sequence[str], relay: StandInState):
        self._relay = relay
        self._blocks = {name: root.get_submodule(name) for name in names}
        self._rows = {name for name in names if isinstance(_parent(root, name), ROWS)}
        self._ran: set[str] = set()
        self._before: dict[str, dict[str, Any]] = {}
        self._sizes: dict[str, list[tuple[Any, int]]] = {}
        self._grown: list[tuple[Any, str]] = []
        self._set: dict[str, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "_BlockRecords":
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
        """Check that no foreign block would have added something, and that all blocks of this stage ran.

        Args:
            is_last: True on the last stage, where blocks may be left out.

        Raises:
            PlanError: If a check fails.
        """
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
    """Return everything in a value that the course of a pass may depend on.

    Args:
        value: The value.

    Returns:
        Shapes, dtypes, structure, strings, whole numbers, and whether a fraction is zero.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Ragged):  # the number of keys is left out, because it differs from batch to batch
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
    """Return the modules of ``root`` that only this stage runs, with their names.

    Args:
        root: The skeleton of the stage.
        blocks: Names of the stage's own blocks.

    Returns:
        The blocks, and the modules outside of blocks that have weights and no children. Stand-ins are left out.
    """
    inside = tuple(f"{name}." for name in blocks)
    found = [(name, root.get_submodule(name)) for name in blocks]
    for name, module in root.named_modules():
        is_leaf = next(module.children(), None) is None and bool(vars(module)["_parameters"])
        if name and is_leaf and not isinstance(module, AbsentModule) and not f"{name}.".startswith(inside):
            found.append((name, module))
    return found


def _parent(root: nn.Module, name: str) -> nn.Module:
    return root.get_submodule(name.rpartition(".")[0])
