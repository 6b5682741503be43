"""Which engine has a model: a hook on the model's root knows it.

A cell of a notebook runs twice, and ``initialize`` meets a model whose parameters are an engine's views already. The
engine before is closed then, which makes the weights whole again, where this rank holds whole weights: a model that was
cut along tp or pp stays cut.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.engine.parts import Progress
from shardwise.plan.errors import UsageError
from shardwise.plan.mesh import Mesh

_log = logging.getLogger(__name__)


class Held:
    """A forward pre-hook, before all others, of an engine on ``mesh``. ``close`` ends that engine; ``before_pass`` is
    called whenever the model is."""

    def __init__(
        self, mesh: Mesh, progress: Progress, close: Callable[[], None], before_pass: Callable[[], None]
    ):
        self.mesh = mesh
        self.progress = progress
        self.close = close
        self._before_pass = before_pass

    def __deepcopy__(self, memo: Any) -> Callable[[nn.Module, Any], None]:
        return nobodys

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._before_pass()


def nobodys(module: nn.Module, arguments: Any) -> None:
    """What stands in a copy of the model, which no engine has."""


def take_back(model: nn.Module) -> None:
    """Close the engine that has ``model``, if one has. Collective as ``Engine.close`` is.

    Errors: UsageError where the model was cut and cannot be made whole.
    """
    for hook in list(model._forward_pre_hooks.values()):
        if not isinstance(hook, Held):
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
