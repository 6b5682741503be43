"""Held: the hooks of an engine on its model, and their removal when the engine is closed.

An engine has a hook on the root that identifies the engine, hooks on calls that scripts make by habit (model_calls.py),
and a hold on the user's optimizer.

If a cell of a notebook runs twice, ``initialize`` is given a model whose parameters are views of an engine already. The
earlier engine is closed then, which makes the weights whole again if this rank holds all of them. A model that was cut
along tp, pp, ep or etp stays cut, and is refused.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import UsageError
from shardwise.compose.apply import Phase, apply_steps
from shardwise.engine.model.known_modules import KnownModules
from shardwise.engine.model.model_calls import ModuleGuards
from shardwise.engine.model.original import OriginalAttributes
from shardwise.engine.parts.parts import EngineParts, RunProgress
from shardwise.engine.state import state
from shardwise.engine.state.away import StateOffload
from shardwise.observe.memory import available_bytes
from shardwise.plan.mesh import Mesh

_log = logging.getLogger(__name__)


class ModelHandle:
    """The hooks of one engine on its model.

    Args:
        parts: the parts of the engine.
        original: the attributes of the model before the engine changed them.
        close: ends the engine.
        before_pass: called before every forward pass of the model.
    """

    def __init__(
        self,
        parts: EngineParts,
        original: OriginalAttributes,
        close: Callable[[], None],
        before_pass: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._original = original
        self._calls = ModuleGuards(parts)
        self.away = StateOffload(parts)
        """State that is offloaded between two steps."""

        def before_any_pass() -> None:
            self.away.check("forward", reads_weights_alone=True)
            before_pass()

        owner = _OwnerHook(parts.mesh, parts.progress, close, before_any_pass)
        apply_steps(
            Phase.ENGINE,
            {
                "state dicts": self._calls.hook_state_dicts,
                "conversions": self._calls.refuse_conversions,
                "owner": lambda: self._hook(owner),
            },
        )
        # After the steps: an attribute that is set later is taken for the user's and set on copies of the module.
        self.known = KnownModules([parts.model, *(stage.module for stage in parts.stages)])
        """The modules that the model consisted of when the engine was built."""
        self.is_over = False
        """True after ``give_back``."""
        parts.optimizer_groups.hold()

    def _hook(self, owner: "_OwnerHook") -> None:
        self._owner = self._parts.model.register_forward_pre_hook(owner, prepend=True)

    def check(self, call: str, reads_weights_alone: bool = False) -> None:
        """Check that ``call`` may use the model now.

        Args:
            call: name of the call, for the message.
            reads_weights_alone: True if ``call`` only reads weights.

        Raises:
            UsageError: if the engine is closed, or state that ``call`` needs is offloaded.
        """
        if self.is_over:
            raise UsageError(
                f"{call}: this engine is closed (by close(), or because initialize() was called again on its model); "
                "use the engine that has the model now, or the model itself"
            )
        self.away.check(call, reads_weights_alone)

    def give_back(self, whole: bool) -> None:
        """Remove all hooks and restore the model; see ``Engine.close``. Collective if ``whole``."""
        parts, self.is_over = self._parts, True
        if whole and (why := state.lacks_room(parts)):
            whole = False
            _log.warning("close: %s; they stay as they lie, and close(whole=False) says so", why)
        if whole:
            self.away.come()
        else:
            self.away.drop()
        self._calls.remove()
        parts.passes.own_use.end()
        parts.optimizer_groups.release()
        for stage in parts.stages:
            stage.hooks.remove()
            for handle in stage.handles:
                handle.remove()
        if not _is_cut(parts.mesh):  # a cut model keeps the hook, by which take_back refuses it
            hand_on = self._tables_to_hand_on(whole)
            self._original.put_back()
            self._owner.remove()
            hand_on()
        if whole:
            state.give_back(parts)

    def _tables_to_hand_on(self, whole: bool) -> Callable[[], None]:
        """Copy the rows of tables, and return a function that gives the model its tables back with them.

        Rows that lie on several ranks, on a disk, or that memory does not hold twice are not copied, and the tables
        refuse every later use.
        """
        collections = [*self._parts.tables.collections.values()]
        free = available_bytes(torch.device("cpu"))
        fits = free is None or 2 * sum(each.bytes_here for each in collections) < free
        states = [each.rows_to_hand_on() if whole and fits else None for each in collections]
        why = "they lay on several ranks or on a disk" if whole and fits else "they were not to be kept"
        if not fits:
            why = "memory does not hold them twice"

        def hand_on() -> None:
            for collection, given in zip(collections, states, strict=True):
                collection.hand_on(given, why)

        return hand_on


class _OwnerHook:
    """A forward pre-hook that runs before all others and identifies the engine of the model."""

    def __init__(
        self, mesh: Mesh, progress: RunProgress, close: Callable[[], None], before_pass: Callable[[], None]
    ):
        self.mesh = mesh
        self.progress = progress
        self.close = close
        self._before_pass = before_pass

    def __deepcopy__(self, memo: Any) -> Callable[[nn.Module, Any], None]:
        return _nobodys

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._before_pass()


def _nobodys(module: nn.Module, arguments: Any) -> None:
    """Do nothing. This hook replaces ``_OwnerHook`` in a copy of the model, which belongs to no engine."""


def _is_cut(mesh: Mesh) -> bool:
    """Return True if a rank has a slice, some stages or some experts of the model."""
    return mesh.size("model") * mesh.ep * mesh.etp > 1


def take_back(model: nn.Module) -> None:
    """Close the engine that ``model`` belongs to, if there is one. Collective as ``Engine.close`` is.

    Args:
        model: the model.

    Raises:
        UsageError: if the model was cut along tp, pp, ep or etp, so that this rank cannot make it whole.
    """
    for hook in list(model._forward_pre_hooks.values()):
        if not isinstance(hook, _OwnerHook):
            continue
        if _is_cut(hook.mesh):
            raise UsageError(
                f"initialize: this model was cut along tp, pp or ep by an engine before (mesh {hook.mesh}), so this "
                "rank holds a part of it alone; build the model anew, and load what the engine before saved"
            )
        _log.warning(
            "initialize: the model belonged to an engine after %d steps, which is closed now; its weights are the "
            "start of the new one",
            hook.progress.step_count,
        )
        hook.close()
