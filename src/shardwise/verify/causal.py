"""Tensors of the passes of one step beside those of the reference, in causal order.

    forward     for each module: its inputs as it begins, then, as it returns, its weights and its output
    backward    for each module, from the last that returned to the first: the gradient of its output, and then the
                gradients of its own parameters, which the caller yields

A module that no rank runs by its own call, such as a norm that a fused kernel computes, is left out. A module that the
ranks run for some microbatches and not for others is wrong.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardwise.verify.activations import PassKey
from shardwise.verify.ranks import Assembled, RankRecords
from shardwise.verify.reference import Reference
from shardwise.verify.tensors import ComparedTensor, module_of

_RATE = 1e-3
"""The size of an update by which a weight that starts at zero is measured."""
_SHARE = 1e-6
"""Share of the largest gradient of an output to which small gradients are held."""


def forward_tensors(
    reference: Reference, records: RankRecords, step: int, left_out: dict[str, str]
) -> Iterator[ComparedTensor]:
    """Yield the inputs, weights and outputs of all modules in one step.

    Args:
        reference: The plain loop's run.
        records: The records of the ranks.
        step: Number of the step, from 0.
        left_out: Receives each tensor that is not compared, with the reason.
    """
    outputs, inputs = _of_step(reference.activations, step), _of_step(reference.inputs, step)
    for event in reference.began:
        module = event.removesuffix(" >")
        if not module and records.stages > 1:
            continue  # a stage of a pipeline is called with other tensors than the model
        if event.endswith(">"):
            yield from _inputs(module, inputs.get(module, []), reference, records, left_out)
        else:
            yield from _weights_in_use(module, step, reference, records)
            yield from _outputs(module, outputs.get(module, []), reference, records, left_out)


def _of_step(tensors: Mapping[str, Tensor], step: int) -> dict[str, list[PassKey]]:
    """Return the keys of a step by module."""
    found: dict[str, list[PassKey]] = {}
    for text in tensors:
        key = PassKey.parse(text)
        if key.step == step + 1:
            found.setdefault(key.name.partition("#")[0], []).append(key)
    return found


def _said(module: str) -> str:
    return module or "the model"


def _inputs(
    module: str, keys: list[PassKey], reference: Reference, records: RankRecords, left_out: dict[str, str]
) -> Iterator[ComparedTensor]:
    for key in keys:
        wanted = reference.inputs[str(key)]
        number = key.name.partition("#")[2]
        more = str(key._replace(name=f"{module}#{len({k.name for k in keys})}"))
        name = f"input {number} of {_said(module)}"
        if not records.has("inputs", str(key)):
            continue  # the module is named by its output
        found = records.whole("inputs", str(key), wanted, module)
        if found.tensor is None or records.has("inputs", more) or found.tensor.dtype != wanted.dtype:
            left_out[name] = found.reason or "the module is called with other arguments than in one process"
            continue
        yield _tensor("activations", "activation", name, key, found.tensor, wanted, module, found)


def _outputs(
    module: str, keys: list[PassKey], reference: Reference, records: RankRecords, left_out: dict[str, str]
) -> Iterator[ComparedTensor]:
    is_loss = not module and all(reference.activations[str(key)].numel() == 1 for key in keys)
    kind = "loss" if is_loss else "activation"
    name = "loss" if is_loss else _said(module)
    for key in keys:
        wanted = reference.activations[str(key)]
        found = records.whole("outputs", str(key), wanted, module)
        if found.tensor is not None:
            counted = "loss" if is_loss else "activations"
            yield _tensor(counted, kind, name, key, found.tensor, wanted, module, found)
        elif not records.has("outputs", str(key)) and records.ran(module, key.step):
            nothing = torch.full_like(wanted, float("nan"))
            missing = _tensor("activations", kind, name, key, nothing, wanted, module, found)
            yield missing._replace(said="the module did not run for this microbatch")
        else:
            left_out[name] = found.reason


def _tensor(
    kind: str, what: str, name: str, key: PassKey, got: Tensor, wanted: Tensor, module: str, found: Assembled
) -> ComparedTensor:
    scale = max(float(wanted.double().norm()), 1e-300)
    said = f"{name}, microbatch {key.piece}"
    return ComparedTensor(
        kind, what, said, key.step - 1, got.cpu(), wanted, scale, module, found.ranks, str(key), found.pieces
    )


class OutputGradients:
    """The gradients of the outputs of all modules in one step.

    Args:
        step: Number of the step, from 0.
        reference: The plain loop's run.
        records: The records of the ranks.
        left_out: Receives each tensor that is not compared, with the reason.
    """

    def __init__(
        self, step: int, reference: Reference, records: RankRecords, left_out: dict[str, str]
    ) -> None:
        self._reference = reference
        self._records = records
        self._left_out = left_out
        self._keys = _of_step(reference.activation_gradients, step)
        norms = [float(each.double().norm()) for each in reference.activation_gradients.values()]
        self._floor = _SHARE * max(norms, default=0.0)

    def of(self, module: str) -> Iterator[ComparedTensor]:
        """Yield the gradients of the outputs of one module."""
        wanted = {key: self._reference.activation_gradients[str(key)] for key in self._keys.get(module, [])}
        if not module and self._records.stages > 1:
            return
        is_loss = not module and all(each.numel() == 1 for each in wanted.values())
        name = "gradient of the loss" if is_loss else f"gradient of the output of {_said(module)}"
        for key, truth in wanted.items():
            found = self._records.whole("gradients", str(key), truth, module)
            if found.tensor is None:
                self._left_out[name] = found.reason
                continue
            kind = "activation gradient"
            tensor = _tensor("activations", kind, name, key, found.tensor, truth, module, found)
            yield tensor._replace(scale=max(tensor.scale, self._floor))


def _weights_in_use(
    module: str, step: int, reference: Reference, records: RankRecords
) -> Iterator[ComparedTensor]:
    """Yield the weights of a module as the ranks' passes used them."""
    now = reference.start if step == 0 else reference.steps[step - 1].weights
    for ranks in records.groups:
        used: dict[tuple[str, int], dict[int, dict[str, Tensor]]] = {}
        for rank in ranks:
            for key, tensor in records.weights_of(rank, module, step + 1):
                used.setdefault((key.name, key.piece), {})[rank] = {key.name: tensor}
        for (name, piece), held in used.items():
            if name not in now or set(held) != set(ranks) or not _covers(records, held, name, now[name]):
                continue
            whole = records.parameter(held, name, ranks)
            if whole is None:
                continue
            truth = now[name].double()
            scale = max(float((truth.abs() + _RATE).norm()), 1e-300)
            said = f"{name} in the forward pass of microbatch {piece}"
            yield ComparedTensor(
                "weights", "weight", said, step, whole, truth, scale, module, tuple(ranks), name
            )


def _covers(records: RankRecords, held: Mapping[int, Mapping[str, Tensor]], name: str, whole: Tensor) -> bool:
    """Return True if the pieces of ranks fill a parameter; they may be a part of the experts alone."""
    filled = torch.zeros(whole.numel(), dtype=torch.bool)
    for rank, own in held.items():
        places = records.positions(rank, name)
        if places is None or places.shape != own[name].shape:
            return False
        filled[places[places >= 0]] = True
    return bool(filled.all())


def unequal_copies(when: int, wanted: Mapping[str, Tensor], records: RankRecords) -> Iterator[ComparedTensor]:
    """Yield the weights whose copies on several ranks do not have the same bits.

    Args:
        when: 0 for the start weights, n for those after step n.
        wanted: The reference's weights.
        records: The records of the ranks.
    """
    for name, truth in wanted.items():
        first: dict[int, tuple[Tensor, Tensor]] = {}
        for rank, each in enumerate(records.by_rank):
            held = each.get("held", {})
            if len(held.get("copies", ())) <= when or name not in held["copies"][when]:
                continue
            piece, places = held["copies"][when][name], held["positions"][name]
            first[rank] = (piece.flatten(), places.flatten())
        wrong = _odd_ones(first, truth)
        if not wrong:
            continue
        others = [rank for rank in first if rank not in wrong]
        of = {rank: {name: records.by_rank[rank]["held"]["copies"][when][name]} for rank in first}
        whole = records.parameter(of, name, [*others, *wrong])
        if whole is None:
            continue
        scale = max(float((truth.double().abs() + _RATE).norm()), 1e-300)
        said = name if when else f"{name} at the start"
        step = max(when - 1, 0)
        yield ComparedTensor(
            "weights",
            "replica",
            said,
            step,
            whole,
            truth.double(),
            scale,
            module_of(name),
            tuple(wrong),
            name,
        )


def _odd_ones(held: Mapping[int, tuple[Tensor, Tensor]], truth: Tensor) -> list[int]:
    """Return the ranks whose copies differ from another rank's, those farther from the right tensor; [] if none do."""
    flat = truth.flatten()
    values = torch.full((flat.numel(), 2), float("nan"), dtype=torch.float64)
    for piece, places in held.values():
        own = places[places >= 0]
        new = piece[places >= 0].double()
        values[own, 0] = torch.fmin(values[own, 0], new)
        values[own, 1] = torch.fmax(values[own, 1], new)
    unequal = values[:, 0] != values[:, 1]
    unequal &= ~values[:, 0].isnan()
    if not unequal.any():
        return []
    errors = {}
    for rank, (piece, places) in held.items():
        own = places >= 0
        at = places[own]
        off = (piece[own].double() - flat[at].double())[unequal[at]]
        if off.numel():
            errors[rank] = float(off.norm())
    least = min(errors.values())
    wrong = [
        rank for rank, error in errors.items() if error > max(2 * least, 1e-12 * float(flat.double().norm()))
    ]
    return wrong or list(errors)
