"""Tiles: which modules of a model compute a tile of tokens at a time, by the policy of ``memory/tiles.py``.

Cost: an attribute of each such module; see ``kernels/head_loss.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from shardwise.kernels.head_loss import Tile
from shardwise.memory.replay import Replay
from shardwise.memory.tiled import tiled
from shardwise.memory.tiles import TilesPolicy
from shardwise.models.layers import GeluMlp, Head, SwiGlu
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.tensor.apply import hold_head, with_known_loss
from shardwise.parallel.tensor.layers import ColumnLinear, RowLinear, VocabularyHead
from shardwise.plan.errors import PlanError

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""Names in the code of a gated feed-forward part of transformers."""


def check_tiles(model: nn.Module, policy: TilesPolicy) -> None:
    """Before anything is changed. Errors: PlanError where tiles are asked for by name and nothing here has any."""
    modules, kind = list(model.modules()), type(model).__name__
    if policy.mlp != "off" and not any(map(_is_mlp, modules)):
        raise PlanError(
            f"tiles.mlp: {policy.mlp} asks for feed-forward parts that are computed of each token alone, but none of a "
            f"{kind} is known to be; leave tiles.mlp out, or build them of shardwise.models.layers.SwiGlu or GeluMlp"
        )
    serves = any(isinstance(module, Head) for module in modules) or with_known_loss(model) is not None
    if isinstance(model, Layers) or not serves:
        _refuse_logits(policy, kind)


def check_heads(model: nn.Module, policy: TilesPolicy) -> None:
    """Once more when the whole ``model`` is cut along "tp". Errors: PlanError as ``check_tiles``'."""
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
    """Make head and loss of a model that is not ours, and not cut along "tp", one, where tiles are asked for."""
    owner = None if policy.logits in (None, "off") else with_known_loss(model)
    if owner is not None:
        hold_head(owner)


def tile_model(model: nn.Module, policy: TilesPolicy, replay: Replay, at_once: bool) -> None:
    """Tell the modules of ``model``, a stage perhaps. ``at_once``: its backward passes follow their forward passes, so
    that gradients which are made in the forward pass wait for one pass alone."""
    loss, mlp = _tile(policy.logits, at_once), _tile(policy.mlp, at_once)
    for module in model.modules():
        if isinstance(module, Head):
            module.tile = loss
        elif isinstance(module, VocabularyHead):
            module.tile = None if policy.logits is None and not module.gives_loss else loss
        elif _is_mlp(module):
            method = "net" if isinstance(module, SwiGlu | GeluMlp) else "forward"
            _ByTiles.undo(module, method)
            if mlp is not None:
                setattr(module, method, _ByTiles(module, getattr(module, method), mlp, replay))


def _tile(given: int | str | None, at_once: bool) -> Tile | None:
    return None if given == "off" else Tile(given if isinstance(given, int) else None, at_once)


# Feed-forward parts ------------------------------------------------------------------------------------------------


def _is_mlp(module: nn.Module) -> bool:
    """Ours, and those of transformers whose forward is down(act(gate) · up) and nothing else."""
    if isinstance(module, SwiGlu | GeluMlp):
        return True
    code = getattr(type(module).forward, "__code__", None)
    known = type(module).__module__.startswith("transformers.models.")
    return known and code is not None and set(code.co_names) == _GATED


class _ByTiles:
    """Stands for the method of a feed-forward part that is computed of each token alone.

    Exchanges along "tp" go around all tiles together, as around the whole.
    """

    def __init__(
        self, module: nn.Module, whole: Callable[[Tensor], Tensor], tile: Tile, replay: Replay
    ) -> None:
        self._module = module
        self._whole = whole
        self._tile = tile
        self._replay = replay
        self._cut = [each for each in module.modules() if isinstance(each, ColumnLinear | RowLinear)]
        for layer in self._cut:
            layer.used_by = (module,)

    @classmethod
    def undo(cls, module: nn.Module, method: str) -> None:
        """Take away what an engine before has put there."""
        held = vars(module).get(method)
        if not isinstance(held, cls):
            return
        del vars(module)[method]
        if getattr(held._whole, "__func__", None) is not getattr(type(module), method):
            setattr(module, method, held._whole)

    def __call__(self, x: Tensor) -> Tensor:
        first = next((each for each in self._cut if isinstance(each, ColumnLinear)), None)
        last = next((each for each in self._cut if isinstance(each, RowLinear)), None)
        joined = first is not None and first.enters and first.cut
        rows = x.shape[:-1].numel() * (first.region.group.size if first is not None and joined else 1)
        tokens = self._tile.of(rows, self._columns(), x)
        if not tokens:
            return self._whole(x)
        x = x if first is None else first.enter(x)
        y = tiled(self._module, self._whole, x, tokens, self._replay, self._local)
        return y if last is None else last.leave(y)

    def _columns(self) -> int:
        """Features that are made of a token."""
        held = (p for each in self._module.modules() for p in each._parameters.values())
        return sum(p.shape[0] for p in held if p is not None and p.dim() == 2)

    @contextmanager
    def _local(self) -> Iterator[None]:
        for layer in self._cut:
            layer.is_local = True
        try:
            yield
        finally:
            for layer in self._cut:
                layer.is_local = False
