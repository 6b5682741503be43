"""Tiles: which modules of a model compute a tile of tokens at a time, by the policy of ``memory/tiles.py``.

Cost: an attribute of each such module; see ``kernels/head_loss.py``.
"""

from torch import nn

from shardwise.kernels.head_loss import Tile
from shardwise.memory.tiles import TilesPolicy
from shardwise.models.layers import Head
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.tensor.apply import hold_head, with_known_loss
from shardwise.parallel.tensor.layers import VocabularyHead
from shardwise.plan.errors import PlanError


def check_tiles(model: nn.Module, policy: TilesPolicy) -> None:
    """Before anything is changed. Errors: PlanError where tiles are asked for by name and nothing here has any."""
    if policy.logits in (None, "off"):
        return
    serves = any(isinstance(module, Head) for module in model.modules()) or with_known_loss(model) is not None
    if isinstance(model, Layers) or not serves:
        raise PlanError(
            f"tiles.logits: {policy.logits} asks for a head and a loss that are computed as one, but what a "
            f"{type(model).__name__} does between its head and its loss is not known; leave tiles.logits out, let the "
            "model end in shardwise.models.layers.Head, called with the targets, or take a causal language model of "
            "transformers with an lm_head and its own loss"
        )


def tile_foreign(model: nn.Module, policy: TilesPolicy) -> None:
    """Make head and loss of a model that is not ours, and not cut along "tp", one, where tiles are asked for."""
    owner = None if policy.logits in (None, "off") else with_known_loss(model)
    if owner is not None:
        hold_head(owner)


def tile_model(model: nn.Module, policy: TilesPolicy, at_once: bool) -> None:
    """Tell the modules of ``model``, a stage perhaps. ``at_once``: its backward passes follow their forward passes, so
    that gradients which are made in the forward pass wait for one pass alone."""
    tokens = policy.logits if isinstance(policy.logits, int) else None
    tile = None if policy.logits == "off" else Tile(tokens, at_once)
    for module in model.modules():
        if isinstance(module, Head):
            module.tile = tile
        elif isinstance(module, VocabularyHead):
            module.tile = None if policy.logits is None and not module.gives_loss else tile
