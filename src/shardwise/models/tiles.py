"""The modules of a model that compute one tile of tokens at a time, chosen by the policy of ``passes/tiles.py``.

Cost: an attribute of each such module; see ``kernels/head_loss.py``.
"""

import logging
import re
from collections.abc import Collection

from torch import nn

from shardwise.base.errors import PlanError
from shardwise.kernels.head_loss import LossTile
from shardwise.models.feed_forward import TiledMethod, feed_forward_parts
from shardwise.models.layers import Head
from shardwise.parallel.expert.stacks import find_stacks
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.tensor.apply import hold_head, with_known_loss
from shardwise.parallel.tensor.layers import VocabularyHead
from shardwise.passes.replay import DrawReplay
from shardwise.passes.tiles import TilesPolicy

_log = logging.getLogger(__name__)

_CALLED = re.compile("mlp|ffn|feed_?forward", re.IGNORECASE)
"""Usual names of feed-forward parts."""


def check_tiles(model: nn.Module, policy: TilesPolicy, units: Collection[str] = ()) -> None:
    """Check that a model can compute by tiles, before anything is changed.

    Args:
        model: The whole model.
        policy: The keys under ``tiles:``.
        units: Names of modules whose weights are gathered separately.

    Raises:
        PlanError: if the policy requires tiles that no module of the model supports.
    """
    kind = type(model).__name__
    if policy.mlp != "off":
        _check_parts(model, policy, units)
    serves = any(isinstance(module, Head) for module in model.modules()) or with_known_loss(model) is not None
    if isinstance(model, Layers) or not serves:
        _refuse_logits(policy, kind)


def _check_parts(model: nn.Module, policy: TilesPolicy, units: Collection[str]) -> None:
    parts, stacks = feed_forward_parts(model), find_stacks(model)
    experts = [*stacks.stacks, *stacks.refused]
    if not parts:
        where = f"; experts ({experts[0]}) take turns by experts.rows instead" if experts else ""
        raise PlanError(
            f"tiles.mlp: {policy.mlp} asks for feed-forward parts that are computed of each token alone, but none of a "
            f"{type(model).__name__} is known to be (two or three matrices, one after the other, in a module whose "
            f"forward takes one tensor){where}; leave tiles.mlp out"
        )
    for unit in units:
        name = next((each for each in parts if unit.startswith(f"{each}.")), None)
        if name is not None:
            raise PlanError(
                f"tiles.mlp: {name} is computed a tile at a time, with all its weights at hand, but the Unit {unit} "
                f"inside of it is gathered by itself; leave tiles.mlp out, or name {name} in zero.units"
            )
    others = [name for name, each in model.named_modules() if _has_matrices(name, each, parts, experts)]
    if others:
        _log.info("tiles.mlp: not by tiles: %s", ", ".join(others))
    if experts:
        _log.info("tiles.mlp: experts (%s ...) take turns by experts.rows, not by tiles", experts[0])


def _has_matrices(name: str, module: nn.Module, parts: Collection[str], experts: Collection[str]) -> bool:
    """Return whether a module is named like a feed-forward part and has matrices, but is not a known part."""
    called = _CALLED.search(type(module).__name__) or _CALLED.search(name.rpartition(".")[2])
    apart = not any(
        f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in (*parts, *experts)
    )
    return bool(called) and apart and sum(isinstance(each, nn.Linear) for each in module.modules()) > 1


def check_heads(model: nn.Module, policy: TilesPolicy) -> None:
    """Check the heads again after the whole ``model`` was cut along "tp".

    Raises:
        PlanError: if the policy requires tiles of logits that no head supports.
    """
    heads = [module for module in model.modules() if isinstance(module, Head | VocabularyHead)]
    if not any(isinstance(head, Head) or head.gives_loss or head.region.knows_loss for head in heads):
        _refuse_logits(policy, type(model).__name__)


def _refuse_logits(policy: TilesPolicy, kind: str) -> None:
    if policy.logits in (None, "off"):
        return
    raise PlanError(
        f"tiles.logits: {policy.logits} asks for a head and a loss that are computed as one, but what a {kind} "
        "does between its head and its loss is not known; leave tiles.logits out, let the model end in "
        "shardwise.models.layers.Head, called with the targets, or take a causal language model of transformers "
        "with an lm_head and its own loss"
    )


def tile_foreign(model: nn.Module, policy: TilesPolicy) -> None:
    """Join head and loss of a foreign model that is not cut along "tp", if the policy requires tiles of logits."""
    owner = None if policy.logits in (None, "off") else with_known_loss(model)
    if owner is not None:
        hold_head(owner)


def tile_model(model: nn.Module, policy: TilesPolicy, replay: DrawReplay, at_once: bool) -> None:
    """Set the tiles of the modules of a model or of a stage.

    Args:
        model: The model, or one stage of it.
        policy: The keys under ``tiles:``.
        replay: The engine's replay, with which tiles repeat dropout in the backward pass.
        at_once: True if each backward pass follows its forward pass at once, so that gradients made in the forward
            pass are kept for only one pass.
    """
    loss, mlp = _tile(policy.logits, at_once), _tile(policy.mlp, at_once)
    for module in model.modules():
        TiledMethod.undo(module)
        if isinstance(module, Head):
            module.tile = loss
        elif isinstance(module, VocabularyHead):
            module.tile = None if policy.logits is None and not module.gives_loss else loss
    if mlp is not None:
        for name, part in feed_forward_parts(model).items():
            TiledMethod.put(name, part, mlp, replay)


def _tile(given: int | str | None, at_once: bool) -> LossTile | None:
    return None if given == "off" else LossTile(given if isinstance(given, int) else None, at_once)
