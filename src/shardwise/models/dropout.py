"""Dropout layers that give the same mask on every layout, in the place of ``nn.Dropout``.

``replace_dropout`` swaps every ``nn.Dropout`` of a model for a ``KeyedDropout`` keyed by (seed, its name); the place
in the run comes from the engine's ``Replay``. What draws from torch's generator all the same (``F.dropout`` inside a
forward, fused attention with dropout, ``nn.Dropout2d``) cannot be swapped by name: ``unkeyed_dropout`` lists what can
be seen from outside.

Cost: see ``kernels.dropout``.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise.kernels.dropout import Draw, EqualPart, keyed_dropout
from shardwise.kernels.philox import key_of
from shardwise.memory.replay import Replay


class KeyedDropout(nn.Module):
    """Dropout of share ``p`` in training mode, the identity in evaluation mode."""

    def __init__(self, p: float, seed: int, name: str, replay: Replay, cut: EqualPart | None = None) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.cut = cut
        """How its input lies where the sequence, the heads or the features are cut."""
        self._key = key_of(seed, f"dropout:{name}")
        self._replay = replay

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        place = self._replay.place
        call = self._replay.next_call(self.name)
        draw = Draw(self._key, place.step, place.first_sample, place.samples, call)
        # A sequence is cut in passes with gradients alone, and not in all of them.
        cuts_sequence = torch.is_grad_enabled() and not self._replay.whole_sequence
        is_cut = self.cut is not None and (self.cut.dim != 1 or cuts_sequence)
        return keyed_dropout(x, self.p, draw, self.cut if is_cut else None)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (f", cut={tuple(self.cut)}" if self.cut else "")


def replace_dropout(
    model: nn.Module, seed: int, replay: Replay, cuts: Mapping[str, EqualPart] | None = None
) -> int:
    """Swap every ``nn.Dropout`` with p > 0, wherever it is held; returns how many places.

    One module held in two places becomes two, each with the name of its place, so that a pipeline may part them.
    ``cuts``: shell patterns of names -> how the input of those lies; the first that matches counts. To be called on
    the whole model, before a pipeline cuts it: the names are part of the key.
    """
    places = [
        (parent, attribute, f"{name}.{attribute}" if name else attribute, child)
        for name, parent in model.named_modules()
        for attribute, child in parent._modules.items()
        if isinstance(child, nn.Dropout) and type(child).forward is nn.Dropout.forward and child.p > 0
    ]
    for parent, attribute, name, child in places:
        cut = next((cut for pattern, cut in (cuts or {}).items() if fnmatchcase(name, pattern)), None)
        parent._modules[attribute] = KeyedDropout(child.p, seed, name, replay, cut).train(child.training)
    return len(places)


def unkeyed_dropout(model: nn.Module) -> list[str]:
    """Modules that drop by torch's generator, as far as their class and their attributes tell."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, KeyedDropout):
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            shares = {"p": module.p}
        else:
            shares = {key: value for key, value in vars(module).items() if "drop" in key}
        used = [key for key, value in shares.items() if isinstance(value, float) and value > 0]
        found += [f"{name or type(module).__name__} ({key}={shares[key]})" for key in used]
    return found
