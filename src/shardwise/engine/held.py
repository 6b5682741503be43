"""Which engine has a model: a hook on the model's root says it, and tells the engine's check of a pass.

A cell of a notebook runs twice, and ``initialize`` meets a model whose parameters are an engine's views already. The
engine before is closed then, which makes the weights whole again, where this rank holds whole weights: a model that was
cut along tp or pp stays cut.
"""

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.plan.errors import UsageError

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

_log = logging.getLogger(__name__)


class Held:
    """A forward pre-hook, before all others, that changes nothing."""

    def __init__(self, engine: "Engine | None"):
        self.engine = engine

    def __deepcopy__(self, memo: Any) -> "Held":
        return Held(None)  # a copy of the model is nobody's

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if self.engine is not None and self.engine.check is not None:
            self.engine.check.meets_the_cut_model()


def take_back(model: nn.Module) -> None:
    """Close the engine that has ``model``, if one has. Collective as ``Engine.close`` is.

    Errors: UsageError where the model was cut and cannot be made whole.
    """
    for hook in list(model._forward_pre_hooks.values()):
        if not isinstance(hook, Held) or hook.engine is None:
            continue
        mesh = hook.engine.plan.mesh
        if mesh.tp > 1 or mesh.pp > 1:
            raise UsageError(
                f"initialize: this model was cut along tp and pp by an engine before (mesh {mesh}), so this rank "
                "holds a part of it alone; build the model anew, and load what the engine before saved"
            )
        if not hook.engine.is_closed:
            _log.warning(
                "initialize: the model belonged to an engine after %d steps, which is closed now; its weights are the "
                "start of the new one",
                hook.engine.step_count,
            )
            hook.engine.close()
