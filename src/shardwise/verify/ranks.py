"""Whole tensors, put together from what the ranks of a layout recorded in their passes.

Ranks with the same place on all axes but "tp" run the same microbatches. Along "tp" a tensor of a pass is

    whole      all ranks hold the tensor
    cut        each rank holds a part of one dim: in order, or as the rows of the module's own weight are cut
    addends    the sum over the ranks is the tensor

Along "cp" each rank holds tokens of its own, at the places that its passes recorded.

Placements that the static part derived decide between whole and addends (placements). Without them the output of a
module is taken as whole; the gradient of an output may be either, so that a gradient is wrong only if neither the
copies nor their sum are right.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.plan.placement import Partial, PerRank, Shard
from shardwise.plan.registry import TensorInfo
from shardwise.verify.activations import PassKey
from shardwise.verify.static import put_together
from shardwise.verify.tensors import module_of


class Assembled(NamedTuple):
    """A tensor that was put together from the pieces of ranks."""

    tensor: Tensor | None
    reason: str = ""
    """The reason why there is no tensor."""
    ranks: tuple[int, ...] = ()
    """Ranks whose pieces the tensor consists of; for a copy that is wrong, the ranks that hold wrong copies."""
    pieces: tuple[Tensor, ...] = ()
    """What each of the ranks along "tp" holds, if each holds a tensor of the whole shape."""


@dataclass
class RankRecords:
    """The records of all ranks of a layout."""

    by_rank: Sequence[Mapping[str, Any]]
    tp: int
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Shapes of whole parameters."""
    placements: Mapping[tuple[str, str], TensorInfo] = field(default_factory=dict)
    """Inputs, outputs and gradients of outputs as the static part placed them, by module and ``input``, ``output`` or
    ``gradient``."""

    def __post_init__(self) -> None:
        places = [each["place"] for each in self.by_rank]
        self._is_cut_elsewhere = any(place.get("cp", 0) for place in places)
        self._weights: dict[int, dict[tuple[str, int], list[tuple[PassKey, Tensor]]]] = {}
        groups: dict[tuple[int, int, int], list[int]] = {}
        for rank, place in enumerate(places):
            groups.setdefault((place.get("pp", 0), place.get("dp", 0), place.get("cp", 0)), []).append(rank)
        self.groups = list(groups.values())
        """Ranks that have the same place on all axes but "tp"."""
        self.stages = max((place.get("pp", 0) for place in places), default=0) + 1

    def positions(self, rank: int, name: str) -> Tensor | None:
        """Return the places of a rank's piece of a parameter in the whole; None if the rank has no such piece."""
        return self.by_rank[rank].get("held", {}).get("positions", {}).get(name)  # type: ignore[no-any-return]

    def weights_of(self, rank: int, module: str, step: int) -> list[tuple[PassKey, Tensor]]:
        """Return the weights of a module as a rank's passes used them in a step, under their first names."""
        if rank not in self._weights:
            index: dict[tuple[str, int], list[tuple[PassKey, Tensor]]] = {}
            canonical = self.by_rank[rank].get("held", {}).get("canonical", {})
            for text, tensor in self.by_rank[rank].get("weights", {}).items():
                key = PassKey.parse(text)
                own = key._replace(name=canonical.get(key.name, key.name))
                index.setdefault((module_of(key.name), key.step), []).append((own, tensor))
            self._weights[rank] = index
        return self._weights[rank].get((module, step), [])

    def has(self, of: str, key: str) -> bool:
        """Return True if any rank recorded the tensor."""
        return any(key in each[of] for each in self.by_rank)

    def ran(self, name: str, step: int) -> bool:
        """Return True if any rank ran the module in a step."""
        prefix = f"{name} step {step} piece "
        return any(key.startswith(prefix) for each in self.by_rank for key in each["outputs"])

    def whole(self, of: str, key: str, wanted: Tensor, module: str) -> Assembled:
        """Return the whole tensor of ``key``.

        Args:
            of: ``outputs``, ``inputs`` or ``gradients``.
            key: The key of the tensor.
            wanted: The right tensor, which decides between possible placements.
            module: Name of the module.
        """
        ranks = [rank for rank, each in enumerate(self.by_rank) if key in each[of]]
        if not ranks:
            return Assembled(None, "no rank runs this module by its own call")
        if self._is_cut_elsewhere:
            return self._over_tokens(of, key, ranks, wanted, module)
        return self._over_features(of, key, ranks, wanted, module)

    def _over_features(
        self,
        of: str,
        key: str,
        ranks: Sequence[int],
        wanted: Tensor,
        module: str,
        kept: tuple[int, Tensor] | None = None,
    ) -> Assembled:
        """Return the tensor that is put together over "tp" from ``ranks``, which run the same tokens.

        Args:
            of: As for ``whole``.
            key: As for ``whole``.
            ranks: The ranks that recorded the tensor.
            wanted: The right tensor, of these tokens alone.
            module: As for ``whole``.
            kept: The dim of tokens, and the places along a rank's piece that are no padding; None keeps the piece.
        """
        found = []
        for stage in range(self.stages):
            mine = [rank for rank in ranks if self.by_rank[rank]["place"]["pp"] == stage]
            held = sorted(mine, key=lambda rank: self.by_rank[rank]["place"]["tp"])
            pieces = [self.by_rank[rank][of][key] for rank in held]
            if kept is not None:
                pieces = [_without_padding(each, *kept) for each in pieces]
            for each in self._candidates(of, pieces, held, wanted, module) if pieces else ():
                found.append(each)
                if _distance(each.tensor, wanted) == 0:
                    break
        if not found:
            return Assembled(None, "the ranks hold parts of unknown placement")
        # Modules without weights outside of blocks run on each stage of a pipeline, on absent values on all but one.
        return min(found, key=lambda each: _distance(each.tensor, wanted))

    def _over_tokens(self, of: str, key: str, ranks: Sequence[int], wanted: Tensor, module: str) -> Assembled:
        """Return the tensor [B, T, ...] that is put together over "cp", along which each rank has tokens of its own."""
        if wanted.dim() < 2:
            return Assembled(None, 'each rank along "cp" has a number of its own tokens')
        pass_of = str(PassKey.parse(key)._replace(name=""))
        parts: dict[int, list[int]] = {}
        for rank in ranks:
            parts.setdefault(self.by_rank[rank]["place"]["cp"], []).append(rank)
        places = [self.by_rank[mine[0]].get("tokens", {}).get(pass_of) for mine in parts.values()]
        known = [each for each in places if each is not None]
        tokens = sum(int((each >= 0).sum()) for each in known)
        dim = 1 if wanted.shape[1] == tokens else 0
        if len(known) < len(places) or wanted.shape[dim] != tokens:
            return Assembled(None, 'no dim is known along which the ranks along "cp" hold tokens')
        whole, held, worst = torch.zeros_like(wanted), list[int](), 0.0
        for mine, at in zip(parts.values(), known, strict=True):
            if all(self.by_rank[rank][of][key].shape == wanted.shape for rank in mine):
                return self._over_features(of, key, ranks, wanted, module)  # such as the batch before the cut
            kept = (at >= 0).nonzero().flatten()
            truth = wanted.index_select(dim, at[kept])
            part = self._over_features(of, key, mine, truth, module, (dim, kept))
            if part.tensor is None or part.tensor.shape != truth.shape:
                return Assembled(None, part.reason or "the ranks hold parts of unknown placement")
            whole.index_copy_(dim, at[kept], part.tensor.to(whole.dtype))
            error = _distance(part.tensor, truth)
            if error >= worst:
                worst, held = error, [*(held if error == worst else ()), *part.ranks]
        return Assembled(whole, "", tuple(held))

    def _placed_as(self, of: str, module: str) -> TensorInfo | None:
        """Return the derived placement of the first input, the output or the gradient of the output of a module."""
        return self.placements.get((module, {"inputs": "input", "gradients": "gradient"}.get(of, "output")))

    def _candidates(
        self, of: str, pieces: list[Tensor], held: list[int], wanted: Tensor, module: str
    ) -> Iterator[Assembled]:
        shape = wanted.shape
        info = self._placed_as(of, module)
        said = None if info is None else info.on("tp")
        if all(piece.shape == shape for piece in pieces):
            together = tuple(pieces) if len(pieces) > 1 else ()
            if isinstance(said, PerRank):
                return  # such as the rows that each rank computes for experts
            is_addend = isinstance(said, Partial) and wanted.is_floating_point()
            if not is_addend:
                yield _farthest(pieces, held, wanted)
            may_be_addend = of == "gradients" and self.tp > 1 and said is None
            if is_addend or may_be_addend:
                yield Assembled(torch.stack(pieces).sum(0), "", tuple(held), together)
            return
        if len(pieces) != self.tp or any(piece.dim() != len(shape) for piece in pieces):
            return
        dims = [d for d in range(len(shape)) if any(piece.shape[d] != shape[d] for piece in pieces)]
        if len(dims) != 1:
            return
        sizes = [piece.shape[dims[0]] for piece in pieces]
        is_features = of != "inputs" and dims[0] == len(shape) - 1
        rows = self._rows_of_weight(module, held, sizes, shape[-1]) if is_features else None
        if rows is None and info is not None and isinstance(said, Shard) and said.blocks:
            blocks = put_together(info, pieces)
            if blocks is not None and blocks.shape == shape:
                yield Assembled(blocks, "", tuple(held))
            return
        orders = [rows] if rows is not None else self._orders(sizes, shape[dims[0]])
        for each in orders:
            yield Assembled(_placed(pieces, each, dims[0], wanted, of == "gradients"), "", tuple(held))

    def _rows_of_weight(
        self, module: str, held: list[int], sizes: list[int], size: int
    ) -> list[Tensor] | None:
        """Return the rows of the module's weight that each rank holds, if an output's features are cut as they are."""
        for label in ("weight", "bias"):
            rows = [self._weight_rows(rank, f"{module}.{label}") for rank in held]
            known = [each for each in rows if each is not None]
            is_cut_so = len(known) == len(rows) and [len(each) for each in known] == sizes
            if is_cut_so and max(int(each.max()) for each in known) + 1 == size:
                return known
        return None

    def _orders(self, sizes: list[int], size: int) -> Iterator[list[Tensor]]:
        """Yield the places of parts of a dim: parts in order, or the same part of each of several equal blocks.

        Tokens that are cut and then flattened, [B, T/N, D] to [B·T/N, D], lie in B blocks.
        """
        in_order = self._rows_in_order(sizes, size)
        if in_order is None:
            return
        yield in_order
        if len(set(sizes)) > 1 or sum(sizes) != size:
            return
        for blocks in range(2, sizes[0] + 1):
            if sizes[0] % blocks == 0:
                places = torch.arange(size).view(blocks, len(sizes), sizes[0] // blocks)
                yield [places[:, rank].reshape(-1) for rank in range(len(sizes))]

    def _rows_in_order(self, sizes: list[int], size: int) -> list[Tensor] | None:
        """Return the places of parts that lie in order, the last of which may be padded; None if sizes do not fit."""
        excess = sum(sizes) - size
        if not 0 <= excess < self.tp or (excess and len(set(sizes)) > 1):
            return None
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        places = [torch.arange(start, start + each) for start, each in zip(starts, sizes, strict=True)]
        return [torch.where(each < size, each, -1) for each in places]

    def _weight_rows(self, rank: int, name: str) -> Tensor | None:
        """Return the rows of a parameter that a rank holds, of the whole; None if the rank does not hold rows of it."""
        held = self.by_rank[rank].get("held", {})
        name = held.get("canonical", {}).get(name, name)
        places = held.get("positions", {}).get(name)
        if places is None or name not in self.shapes or not places.dim():
            return None
        width = torch.Size(self.shapes[name][1:]).numel()
        if places[0].numel() != width:
            return None
        first = places.reshape(len(places), -1)[:, 0]
        return torch.where(first < 0, -1, first // width)

    def parameter(
        self, of: Mapping[int, Mapping[str, Tensor]], name: str, ranks: Sequence[int]
    ) -> Tensor | None:
        """Return a whole parameter or gradient, put together from the pieces of some ranks.

        Args:
            of: The pieces of each rank by name.
            name: The parameter.
            ranks: The ranks; an element that several of them hold is that of the last.
        """
        if name not in self.shapes:
            return None
        whole = torch.zeros(torch.Size(self.shapes[name]).numel(), dtype=torch.float64)
        filled = torch.zeros(len(whole), dtype=torch.bool)
        for rank in ranks:
            piece, places = of[rank].get(name), self.positions(rank, name)
            if piece is None or places is None or piece.shape != places.shape:
                continue
            own = places >= 0
            whole[places[own]] = piece[own].double()
            filled[places[own]] = True
        return whole.view(torch.Size(self.shapes[name])) if filled.any() else None


def _without_padding(piece: Tensor, dim: int, kept: Tensor) -> Tensor:
    is_longer = piece.dim() > dim and piece.shape[dim] > len(kept)
    return piece.index_select(dim, kept) if is_longer else piece


def _distance(got: Tensor | None, wanted: Tensor) -> float:
    if got is None or got.shape != wanted.shape:
        return float("inf")
    found = float((got.double() - wanted.double()).norm())
    return found if found == found else float("inf")


def _farthest(pieces: Sequence[Tensor], held: Sequence[int], wanted: Tensor) -> Assembled:
    """Return the copy that differs most from the right tensor, so that a wrong copy does not hide behind right ones."""
    errors = [_distance(piece, wanted) for piece in pieces]
    worst = max(errors)
    scale = max(float(wanted.double().norm()), 1e-300)
    wrong = [rank for rank, each in zip(held, errors, strict=True) if each > 1e-10 * scale]
    is_some = 0 < len(wrong) < len(held)
    together = tuple(pieces) if len(pieces) > 1 else ()
    return Assembled(pieces[errors.index(worst)], "", tuple(wrong if is_some else held), together)


def _placed(pieces: Sequence[Tensor], rows: Sequence[Tensor], dim: int, wanted: Tensor, adds: bool) -> Tensor:
    """Return the pieces at their places along ``dim``.

    Args:
        pieces: The pieces of the ranks.
        rows: The places along ``dim`` of each piece; -1: padding.
        dim: The dim that is cut.
        wanted: The right tensor: of unequal copies, the one that differs more from it is returned.
        adds: True to add what several ranks hold at one place.
    """
    truth = wanted.movedim(dim, 0)
    whole = torch.zeros_like(truth)
    filled = torch.zeros(len(truth), dtype=torch.bool)
    for piece, places in zip(pieces, rows, strict=True):
        own = piece.movedim(dim, 0)[places >= 0]
        at = places[places >= 0]
        if adds:
            whole[at] += own
        else:
            before = whole[at]
            farther = (own - truth[at]).abs() > (before - truth[at]).abs()
            new = ~filled[at].view(-1, *[1] * (own.dim() - 1))
            whole[at] = (
                torch.where(new | farther | own.isnan(), own, before) if own.is_floating_point() else own
            )
        filled[at] = True
    return whole.movedim(0, dim)
