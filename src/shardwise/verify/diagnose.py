"""Collect the evidence on one wrong tensor: everything that may have been taken, lost or counted in its place.

    gradient                 addends of ranks, stages and microbatches before the sums; other steps and parameters
    activation               the same module in other microbatches and steps; other modules in the same microbatch
    weight, copy, master     the weight before the update, and the numbers of the update
    moment                   the clip factor, the betas, other steps
    norm                     sums that leave out ranks, stages or Units, or count copies more than once

explain.py tries the evidence in turn.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.optim.policy import OptimizerPolicy
from shardwise.plan.mesh import Mesh
from shardwise.verify.activations import PassKey
from shardwise.verify.explain import AdamUpdate, Evidence, explain
from shardwise.verify.ranks import RankRecords
from shardwise.verify.reference import Reference
from shardwise.verify.tensors import ComparedTensor

_MOST_OTHERS = 400
"""Other tensors that are compared with a wrong one."""
_AXES = ("tp", "dp", "pp", "cp", "ep")
_CLIP_EPS = 1e-6
"""What torch adds to a norm by which it divides."""


@dataclass(frozen=True)
class Diagnosis:
    """The run in which a tensor is wrong.

    Args:
        truth: The plain loop's run.
        records: The records of the ranks; None if nothing was recorded in the passes.
        mesh: The mesh of the layout.
        accumulation: Microbatches of a rank in a step.
        optimizer: The keys under ``optimizer:``.
        clip: The largest norm of the gradients, or None.
    """

    truth: Reference
    records: RankRecords | None
    mesh: Mesh
    accumulation: int
    optimizer: OptimizerPolicy
    clip: float | None

    def explanation(self, wrong: ComparedTensor) -> str:
        """Return the sentence that explains a wrong tensor; "" if none fits."""
        found = wrong.said or explain(wrong.got, wrong.wanted, self.evidence(wrong))
        if wrong.got.numel() != 1:
            return found
        got, wanted = float(wrong.got), float(wrong.wanted)
        if wrong.what == "step count":
            return f"it counts {got:g} updates in place of {wanted:g}"
        if not found and wrong.what == "activation gradient":
            return f"the microbatch counts {got:.6g} in place of {wanted:.6g} in the mean of the step"
        return found

    def evidence(self, wrong: ComparedTensor) -> Evidence:
        """Return the tensors and numbers from which a tensor may have been made."""
        if wrong.step >= len(self.truth.steps):
            return Evidence(self._counts(), pieces=wrong.pieces)  # the reference is not the plain loop
        if wrong.what == "gradient":
            return Evidence(self._counts(), dict(self._addends(wrong)), others=dict(self._gradients(wrong)))
        if wrong.what in ("weight", "replica", "master"):
            return self._of_weight(wrong)
        if wrong.what == "moment":
            return Evidence(self._moment_factors(wrong.step), others=dict(self._moments(wrong)))
        if wrong.what == "norm":
            return Evidence(self._norm_factors(wrong.step), sums=dict(self._norms(wrong.step)))
        others = dict(self._passed(wrong)) if wrong.key else {}
        return Evidence(self._counts(), pieces=wrong.pieces, others=others)

    # Numbers of the run --------------------------------------------------------------------------------------------

    def _counts(self) -> dict[str, float]:
        found = {axis: float(self.mesh.size(axis)) for axis in _AXES}
        found["microbatches"] = float(self.accumulation)
        found["microbatches of a step"] = float(self.accumulation * self.mesh.size("dp"))
        return found

    def _clip_factor(self, step: int) -> float:
        norm = self.truth.steps[step].norm
        return min(1.0, self.clip / (norm + _CLIP_EPS)) if self.clip and norm else 1.0

    def _moment_factors(self, step: int) -> dict[str, float]:
        clip = self._clip_factor(step)
        found = {"the clip factor": clip, "the squared clip factor": clip**2}
        options = self.optimizer.options()[0]
        if "betas" in options:
            one, two = options["betas"]
            found["(1 - beta2) / (1 - beta1)"] = (1 - two) / (1 - one)
        return found

    def _norm_factors(self, step: int) -> dict[str, float]:
        held = self.records.by_rank[0].get("held", {}) if self.records else {}
        divisors = held.get("divisors", ())
        found = {"the divisor of the step's sums": divisors[step]} if len(divisors) > step else {}
        found |= {f"√{name}": value**0.5 for name, value in self._counts().items()}
        return found | {"√replicas": float(self.mesh.size("dp_replicate")) ** 0.5} | self._counts()

    # Gradients -----------------------------------------------------------------------------------------------------

    def _gradients(self, wrong: ComparedTensor) -> Iterator[tuple[str, Tensor]]:
        for step, each in enumerate(self.truth.steps):
            if step != wrong.step and wrong.name in each.gradients:
                yield f"the gradient of step {step}", each.gradients[wrong.name]
        for name, other in self.truth.steps[wrong.step].gradients.items():
            if name != wrong.name:
                yield f"the gradient of {name}", other

    def _addends(self, wrong: ComparedTensor) -> Iterator[tuple[str, Tensor]]:
        """Yield sums of addends of a gradient, by description: of each rank, stage and microbatch, and the rest."""
        found = self._own_addends(wrong)
        total = torch.stack([tensor for _, tensor in found]).sum(0) if found else None
        wanted = wrong.wanted.double()
        if total is None or not bool((total - wanted).norm() <= 1e-6 * wanted.norm()):
            pieces = self.truth.steps[wrong.step].pieces
            for number, each in enumerate(pieces):
                if wrong.name in each:
                    yield f"the addend of microbatch {number} of the global batch", each[wrong.name].double()
            return
        for words in _GROUPINGS:
            values = sorted({place[words] for place, _ in found})
            for value in values if len(values) > 1 else ():
                mine = [tensor for place, tensor in found if place[words] == value]
                yield _GROUPINGS[words].format(value), torch.stack(mine).sum(0)
        for place, tensor in found:
            if sum(len({p[words] for p, _ in found}) > 1 for words in ("dp", "tp", "pp", "microbatch")) > 1:
                yield _SINGLE.format(**place), tensor
        for words in ("dp", "tp", "pp"):
            values = sorted({place[words] for place, _ in found})
            for value in values if len(values) > 2 else ():
                rest = [tensor for place, tensor in found if place[words] != value]
                yield f"the addends of all ranks but those at {words}={value}", torch.stack(rest).sum(0)

    def _own_addends(self, wrong: ComparedTensor) -> list[tuple[dict[str, int], Tensor]]:
        """Return the gradients of single backward passes before the sums, as whole tensors, with their places."""
        records = self.records
        if records is None or any(
            len(each.get("held", {}).get("addends", ())) <= wrong.step for each in records.by_rank
        ):
            return []
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, each in enumerate(records.by_rank):
            if each["held"]["addends"][wrong.step].get(wrong.name):
                groups.setdefault((each["place"]["pp"], each["place"]["dp"]), []).append(rank)
        found = []
        for (pp, dp), ranks in groups.items():
            each_has = [records.by_rank[rank]["held"]["addends"][wrong.step][wrong.name] for rank in ranks]
            divisor = records.by_rank[ranks[0]]["held"]["divisors"][wrong.step]
            for call in range(min(map(len, each_has))):
                pieces = {rank: has[call] for rank, has in zip(ranks, each_has, strict=True)}
                for kind, number, tensor in _split_by_copy(records, wrong.name, pieces):
                    place = {
                        "pp": pp,
                        "dp": dp,
                        "tp": number if kind == "tp" else 0,
                        "copy": number + 1 if kind == "copy" else 0,
                        "call": call,
                        "microbatch": call * self.mesh.size("dp") + dp,
                        "replicate": self.mesh.index("dp_replicate", ranks[0]),
                        "shard": self.mesh.index("dp_shard", ranks[0]),
                    }
                    found.append((place, tensor / divisor))
        return found

    # Passes --------------------------------------------------------------------------------------------------------

    def _passed(self, wrong: ComparedTensor) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the reference's passes that may have been taken for a wrong one."""
        if wrong.what == "weight" or not wrong.key or " step " not in wrong.key:
            return
        key = PassKey.parse(wrong.key)
        is_gradient = wrong.what == "activation gradient"
        of = self.truth.activation_gradients if is_gradient else self.truth.activations
        noun = "gradient of the output" if is_gradient else "output"
        tables = [(noun, of)] if is_gradient else [("input", self.truth.inputs), (noun, of)]
        own = "input" if "#" in key.name else noun
        others: list[tuple[str, Tensor]] = []
        for word, table in tables:
            for text, tensor in table.items():
                other = PassKey.parse(text)
                if tensor.shape != wrong.wanted.shape or tensor.dtype != wrong.wanted.dtype or other == key:
                    continue
                module = other.name.partition("#")[0] or "the model"
                said = f"the {word} of {module} in microbatch {other.piece} of step {other.step - 1}"
                if other.name == key.name and word == own:
                    yield said, tensor
                elif (other.step, other.piece) == (key.step, key.piece):
                    others.append((said, tensor))
        yield from others[:_MOST_OTHERS]

    # Weights and moments -------------------------------------------------------------------------------------------

    def _of_weight(self, wrong: ComparedTensor) -> Evidence:
        name = wrong.name.partition(" ")[0]
        held = [("at the start", self.truth.start)]
        held += [(f"after step {step}", each.weights) for step, each in enumerate(self.truth.steps)]
        others = {
            f"the weight {when}": weights[name]
            for when, weights in held
            if name in weights and not torch.equal(weights[name].double(), wrong.wanted.double())
        }
        others |= {
            f"the weight of {other}": weight for other, weight in self.truth.start.items() if other != name
        }
        is_after = wrong.name == name
        before = (self.truth.start if wrong.step == 0 else self.truth.steps[wrong.step - 1].weights).get(name)
        if not is_after or before is None:
            return Evidence(self._counts(), others=others)
        return Evidence(before=before, update=self._adam_update(name, wrong.step), others=others)

    def _adam_update(self, name: str, step: int) -> AdamUpdate | None:
        moments = self.truth.moments[step]
        first, second = moments.get(f"{name} exp_avg"), moments.get(f"{name} exp_avg_sq")
        rule = self.optimizer.rule_of(name, None)
        kind, options = self.optimizer.rules()[rule]
        rates = self.truth.rates[step] if self.truth.rates else []
        if first is None or second is None or kind != "adamw" or options.get("amsgrad"):
            return None
        return AdamUpdate(
            rates[rule] if rates else options["lr"],
            options["weight_decay"],
            tuple(options["betas"]),
            options["eps"],
            step + 1,
            first.double(),
            second.double(),
        )

    def _moments(self, wrong: ComparedTensor) -> Iterator[tuple[str, Tensor]]:
        for step, each in enumerate(self.truth.moments):
            for name, moment in each.items():
                if name == wrong.name and step != wrong.step:
                    yield f"the moment of step {step}", moment
                elif step == wrong.step and name != wrong.name:
                    yield f"the moment {name}", moment

    # The norm ------------------------------------------------------------------------------------------------------

    def _norms(self, step: int) -> Iterator[tuple[str, float]]:
        """Yield norms that leave something out or count something more than once, by description."""
        gradients = self.truth.steps[step].gradients
        squares = {name: float(each.double().square().sum()) for name, each in gradients.items()}
        total, records = sum(squares.values()), self.records
        if records is None:
            return
        held = [each.get("held", {}) for each in records.by_rank]
        stages: dict[int, set[str]] = {}
        units: dict[tuple[str, ...], None] = {}
        for each, own in zip(records.by_rank, held, strict=True):
            stages.setdefault(each["place"]["pp"], set()).update(own.get("positions", {}))
            units |= {tuple(names): None for names in own.get("buckets", ())}
        for stage, names in stages.items() if len(stages) > 1 else ():
            yield f"it is the norm of stage {stage} alone", sum(squares.get(n, 0.0) for n in names) ** 0.5
        for unit in units:
            rest = total - sum(squares.get(name, 0.0) for name in unit)
            said = f"{unit[0]} and {len(unit) - 1} more" if len(unit) > 1 else unit[0]
            yield f"it leaves out the squares of one Unit: {said}", max(rest, 0.0) ** 0.5
        yield from self._norms_of_ranks(step)
        counted = sum(self._counted_by_holders(name, each) for name, each in gradients.items())
        yield (
            "it counts elements that several ranks of the model hold once for each of these ranks",
            counted**0.5,
        )

    def _norms_of_ranks(self, step: int) -> Iterator[tuple[str, float]]:
        records = self.records
        assert records is not None, "the caller has checked"
        if self.mesh.size("tp") > 1 or self.mesh.size("cp") > 1:
            return
        for axis in ("dp", "pp"):
            values: dict[int, float] = {}
            for each in records.by_rank:
                squares = each.get("held", {}).get("squares", ())
                if len(squares) > step:
                    divisor = each["held"]["divisors"][step]
                    index = each["place"][axis]
                    values[index] = values.get(index, 0.0) + sum(squares[step]) / divisor**2
            for index, value in values.items() if len(values) > 1 else ():
                yield f"it counts the squares of the ranks at {axis}={index} alone", value**0.5

    def _counted_by_holders(self, name: str, gradient: Tensor) -> float:
        """Return Σ g², each element counted once for each rank of a model that holds it."""
        records = self.records
        assert records is not None, "the caller has checked"
        count = torch.zeros(gradient.numel(), dtype=torch.float64)
        for each in records.by_rank:
            places = each.get("held", {}).get("positions", {}).get(name)
            if places is not None and each["place"]["dp"] == 0:
                count[places[places >= 0]] += 1
        return float((gradient.double().flatten().square() * count).sum())


_GROUPINGS = {
    "dp": "the addends of the ranks at dp={}",
    "tp": "the addends of the ranks at tp={}",
    "pp": "the addends of stage {}",
    "replicate": "the addends of replica {}",
    "shard": "the addends of the ranks at dp_shard={}",
    "microbatch": "the addends of microbatch {} of the global batch",
    "call": "the addends of microbatch {} of each rank",
    "copy": "the addends of copy {} of the elements that neighbours along tp hold both",
}
_SINGLE = "the addend of microbatch {microbatch} of the global batch on the rank at pp={pp}, dp={dp}, tp={tp}"


def _split_by_copy(
    records: RankRecords, name: str, pieces: Mapping[int, Tensor]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield whole addends from the pieces of the ranks along "tp", each with the kind and number of its holders.

    Elements that one rank holds alone are one addend. Elements that several ranks hold are addends of their own on each
    of these ranks (``tp`` if all ranks hold all elements, else ``copy``), unless the ranks hold the same numbers.
    """
    if name not in records.shapes:
        return
    elements = math.prod(records.shapes[name])
    held = []
    count = torch.zeros(elements, dtype=torch.long)
    for rank, piece in pieces.items():
        places = records.by_rank[rank]["held"]["positions"].get(name)
        if places is None or places.shape != piece.shape:
            return
        own = places >= 0
        held.append((places[own], piece[own].double()))
        count[places[own]] += 1
    wholes = [torch.zeros(elements, dtype=torch.float64) for _ in range(int(count.max()))]
    alone = torch.zeros(elements, dtype=torch.float64)
    seen = torch.zeros(elements, dtype=torch.long)
    is_alike = True
    for at, values in held:
        single = count[at] == 1
        alone[at[single]] = values[single]
        for copy, whole in enumerate(wholes):
            mine = (seen[at] == copy) & ~single
            whole[at[mine]] = values[mine]
            is_alike &= not copy or torch.equal(wholes[0][at[mine]], values[mine])
        seen[at] += 1
    shape = torch.Size(records.shapes[name])
    if (count == 1).any():
        yield "alone", 0, alone.view(shape)
    if len(wholes) > 1:
        kind = "tp" if bool((count == len(pieces)).all()) else "copy"
        for copy, whole in enumerate(wholes[:1] if is_alike else wholes):
            yield kind, copy, whole.view(shape)
