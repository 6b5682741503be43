"""What an engine keeps on a model while it has it, and how it gives the model back: a hook on the root that knows whose
the model is, hooks on calls that scripts make by habit (model_calls.py), and a hold on the user's optimizer.

A cell of a notebook runs twice, and ``initialize`` meets a model whose parameters are an engine's views already. The
engine before is closed then, which makes the weights whole again, where this rank holds whole weights: a model that was
cut along tp or pp stays cut.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.engine import state
from shardwise.engine.away import Away
from shardwise.engine.known_modules import KnownModules
from shardwise.engine.model_calls import ModelCalls
from shardwise.engine.original import Original
from shardwise.engine.parts import Parts, Progress
from shardwise.plan.errors import UsageError
from shardwise.plan.mesh import Mesh

_log = logging.getLogger(__name__)


class Held:
    """Of one engine. ``close`` ends that engine; ``before_pass`` is called whenever the model is."""

    def __init__(
        self,
        parts: Parts,
        original: Original,
        close: Callable[[], None],
        before_pass: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._original = original
        self._calls = ModelCalls(parts)
        self.away = Away(parts)
        """What left the device between two steps."""
        self.known = KnownModules([parts.model, *(stage.module for stage in parts.stages)])
        """What the model was made of."""

        def before_any_pass() -> None:
            self.away.check("forward", reads_weights_alone=True)
            before_pass()

        owner = _Owner(parts.mesh, parts.progress, close, before_any_pass)
        self._owner = parts.model.register_forward_pre_hook(owner, prepend=True)
        self.is_over = False
        """After ``give_back``."""
        parts.optimizer_groups.hold()

    def check(self, call: str, reads_weights_alone: bool = False) -> None:
        """Errors: UsageError where the model was given back, or what ``call`` needs has left the device."""
        if self.is_over:
            raise UsageError(
                f"{call}: this engine is closed (by close(), or because initialize() was called again on its model); "
                "use the engine that has the model now, or the model itself"
            )
        self.away.check(call, reads_weights_alone)

    def give_back(self, whole: bool) -> None:
        """See ``Engine.close``. Collective where ``whole``."""
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
        if parts.groups["model"].size == 1:  # what was cut stays cut, and its owner says so
            self._original.put_back()
            self._owner.remove()
        if whole:
            state.give_back(parts)


class _Owner:
    """A forward pre-hook, before all others."""

    def __init__(
        self, mesh: Mesh, progress: Progress, close: Callable[[], None], before_pass: Callable[[], None]
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
    """What stands in a copy of the model, which no engine has."""


def take_back(model: nn.Module) -> None:
    """Close the engine that has ``model``, if one has. Collective as ``Engine.close`` is.

    Errors: UsageError where the model was cut and cannot be made whole.
    """
    for hook in list(model._forward_pre_hooks.values()):
        if not isinstance(hook, _Owner):
            continue
        if hook.mesh.tp > 1 or hook.mesh.pp > 1:
            raise UsageError(
                f"initialize: this model was cut along tp and pp by an engine before (mesh {hook.mesh}), so this rank "
                "holds a part of it alone; build the model anew, and load what the engine before saved"
            )
        _log.warning(
            "initialize: the model belonged to an engine after %d steps, which is closed now; its weights are the "
            "start of the new one",
            hook.progress.step_count,
        )
        hook.close()
