"""Dropout layers with the same mask on every layout, which replace ``nn.Dropout``.

``replace_dropout`` replaces every ``nn.Dropout`` of a model by a ``KeyedDropout`` whose key is (seed, its name); the
engine's ``DrawReplay`` provides the position in the run. Functions that still draw from torch's generator
(``F.dropout`` inside a forward, fused attention with dropout, ``nn.Dropout2d``) cannot be replaced by name:
``unkeyed_dropout`` lists those that are visible from outside.

Cost: see ``kernels.dropout``.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.kernels.dropout import EqualPart, MaskKey, TokenRanges, keyed_dropout
from shardwise.kernels.philox import key_of
from shardwise.passes.replay import DrawReplay


class KeyedDropout(nn.Module):
    """Dropout of a share ``p`` in training mode, the identity in evaluation mode."""

    def __init__(
        self, p: float, seed: int, name: str, replay: DrawReplay, cut: EqualPart | None = None
    ) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.cut = cut
        """The rank's part of the input, if the sequence, the heads or the features are cut; None for a whole input."""
        self.tokens: Callable[[], TokenRanges | None] = lambda: None
        """Returns the tokens that this rank has in a pass whose sequences are cut; None in a pass that is not cut."""
        self._key = key_of(seed, f"dropout:{name}")
        self._replay = replay

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with a share of its elements zeroed and the others scaled."""
        if not self.training or self.p == 0:
            return x
        place = self._replay.place
        call = self._replay.next_call(self.name)
        draw = MaskKey(self._key, place.step, place.first_sample, place.samples, call)
        # Only passes with gradients cut the sequence, and not all of them; a wrong cut would draw another mask.
        cuts_sequence = torch.is_grad_enabled() and not self._replay.whole_sequence
        cut = self.cut if self.cut is not None and (self.cut.dim != 1 or cuts_sequence) else None
        tokens = self.tokens()
        if tokens is None:
            return keyed_dropout(x, self.p, draw, cut)
        if x.dim() != 3:
            raise UsageError(
                f"dropout {self.name!r}: mesh.cp cuts sequences, and its input has the shape {list(x.shape)} in "
                "place of [samples, tokens, features], so the tokens of its mask are not known; set its p to 0"
            )
        if cut is not None and cut.dim == 1:
            tokens, cut = part_of_tokens(tokens, cut), None
        return keyed_dropout(x, self.p, draw, cut, tokens=tokens)

    def extra_repr(self) -> str:
        """Return the share and the cut, for the printed model."""
        return f"p={self.p}" + (f", cut={tuple(self.cut)}" if self.cut else "")


def part_of_tokens(tokens: TokenRanges, cut: EqualPart) -> TokenRanges:
    """Return the tokens of one equal part of a rank's tokens."""
    count = sum(stop - start for start, stop in tokens) // cut.parts
    first, last, found, place = cut.part * count, (cut.part + 1) * count, [], 0
    for start, stop in tokens:
        a, b = max(first - place, 0), min(last - place, stop - start)
        if a < b:
            found.append((start + a, start + b))
        place += stop - start
    return found


def replace_dropout(
    model: nn.Module, seed: int, replay: DrawReplay, cuts: Mapping[str, EqualPart] | None = None
) -> int:
    """Replace every ``nn.Dropout`` with p > 0 by a KeyedDropout, and return the number of places.

    A module that is used in two places becomes two modules, each with the name of its place, so that a pipeline may
    separate them. Call this function on the whole model before a pipeline cuts it, because the names are part of the
    key.

    Args:
        model: The whole model.
        seed: The seed of the run.
        replay: The engine's replay, which provides the position in the run.
        cuts: The cut of the input for shell patterns of names; the first pattern that matches counts.
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
    """Return the modules that draw dropout from torch's generator, as far as class and attributes show."""
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
