"""Of what is alike on the ranks of tp each keeps a part in host memory: gradients of one process, and the bytes."""

from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.collectives import Group
from shardwise.engine.fit.foresee import foresee
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import Kind
from shardwise.tiers import activations as module
from shardwise.tiers.activations import ActivationOffload, _BlockPass
from shardwise.tiers.alike import AlikeStorages
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.accelerator.test_activations import late_copies
from tests.engine.conformance import Conformance
from tests.ranks import RankPool

WIDTH, VOCABULARY, SAMPLES = 8, 13, 2


class Way(NamedTuple):
    """A way to train."""

    tp: int = 2
    pp: int = 1
    recompute: str = "none"
    tokens: int = 6
    dropout: float = 0.0
    sequence: bool = False
    """Whether a sequence that can be cut is."""
    family: str = "llama"
    experts: bool = False
    stage: int = 0
    dp: int = 1
    microbatches: int = 1
    mlp: int = 0
    """Tokens of a tile; 0: none."""
    layers: int = 4


def gpt(way: Way) -> nn.Module:
    torch.manual_seed(0)
    experts = {"count": 4, "hidden": 6, "first": 1, "shared": 1} if way.experts else None
    shape = {"width": WIDTH, "heads": 2, "hidden": 12, "context": 8, "vocab": VOCABULARY}
    return Gpt(
        GptPolicy(**shape, layers=way.layers, family=way.family, dropout=way.dropout, experts=experts)
    ).double()


def config_of(way: Way, moves: bool) -> dict[str, Any]:
    return {
        "mesh": {"tp": way.tp, "pp": way.pp, "dp": way.dp},
        "tensor": {"sequence_parallel": way.sequence},
        "zero": {"stage": way.stage},
        "recompute": way.recompute,
        "batch": {"accumulation": way.microbatches},
        "tiles": {"mlp": way.mlp or "off"},
        "offload": {"activations": "host"} if moves else {},
        "check_first_step": "off",
        "optimizer": {"type": "sgd", "lr": 0.1},
    }


def batches(way: Way, step: int, dp: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shape = (way.microbatches, way.dp, SAMPLES, way.tokens + 1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)[:, dp]
    return [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in tokens]


Gradients = list[dict[str, Tensor]]
"""Of each step."""


def trained(world: Any, way: Way, moves: bool) -> Gradients:
    engine = shardwise.initialize(gpt(way), config_of(way, moves), world=world)
    step_of, found = engine._training.step, []

    def with_gradients() -> Any:
        if engine._parts.accumulation.is_complete:
            found.append({name: grad.cpu().clone() for name, grad in engine.gradients().items()})
        return step_of()

    engine._training.step = with_gradients  # type: ignore[method-assign]
    conformance = Conformance(engine)
    for step in range(2):
        engine.train_step(batches(way, step, engine.dp_index))
    recalled = sum(action.kind is Kind.RELOAD for action in engine.trace.actions)
    keeps_last = engine.plan.mesh.index("pp", world.rank) == way.pp - 1
    assert recalled == moves * way.microbatches * (way.layers // way.pp - keeps_last)
    assert not conformance.departures
    engine.close()
    return found


def worst(found: Gradients, wanted: Gradients) -> float:
    pairs = list(zip(found, wanted, strict=True))
    assert all(one.keys() == other.keys() for one, other in pairs)
    return max(
        float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-3))
        for one, other in pairs
        for name in other
    )


def alone(way: Way) -> Way:
    return way._replace(
        tp=1, pp=1, dp=1, microbatches=way.microbatches * way.dp, stage=0, recompute="none", mlp=0
    )


class Outcome(NamedTuple):
    """Of one way."""

    error: float
    """Of gradients, against one process."""
    same_bits: bool
    """As where activations stay on the device."""
    misplaced: list[str]
    late: int
    """Blocks for which no RELOAD came before what they saved was needed."""
    proved: bool
    """Whether any went down in parts, and all that is said to be alike was, in each pass of each block."""


def outcome_of(_: Any, way: Way) -> Outcome:
    device, size = register(), way.tp * way.pp * way.dp
    with Bench():
        [one] = Crew(1, device).run(trained, alone(way), False)
        kept = Crew(size, device).run(trained, way, False)
    decide, proved = ActivationOffload._decide, []

    def proving(self: ActivationOffload, call: Any) -> None:
        decide(self, call)
        if call.parts:
            memories = [each.memory() for each in call.parts]
            proved.append(self._alike.are_alike(memories, "a proof"))  # type: ignore[union-attr]

    opened, late = _BlockPass.open, []

    def seen(self: _BlockPass) -> None:
        late.extend([self] * (bool(self.moved) and not self._is_recalled))
        opened(self)

    with ExitStack() as stack:
        stack.enter_context(late_copies())
        stack.enter_context(patch.object(_BlockPass, "open", seen))
        bench = stack.enter_context(Bench())
        stack.enter_context(patch.object(ActivationOffload, "_decide", proving))
        moved = Crew(size, device).run(trained, way, True)
    bits = [
        torch.equal(a[name], b[name])
        for x, y in zip(kept, moved, strict=True)
        for a, b in zip(x, y, strict=True)
        for name in a
    ]
    return Outcome(
        max(worst(each, one) for each in moved),
        all(bits),
        bench.misplaced,
        len(late),
        bool(proved) and all(proved),
    )


WAYS = [
    Way(dropout=0.2, tokens=5, layers=3),
    Way(recompute="full", tokens=5, sequence=True, dropout=0.2, layers=3),
    Way(pp=2, recompute="selective", microbatches=2),
]
MORE = [
    Way(recompute="full"),
    *(Way(recompute=how, family="gpt2", dropout=0.2) for how in ("none", "full", "selective")),
    *(Way(pp=2, recompute=how, microbatches=3, tokens=5, dropout=0.2) for how in ("none", "full")),
    *(Way(experts=True, recompute=how) for how in ("none", "full")),
    *(Way(stage=3, dp=2, recompute=how, microbatches=2) for how in ("none", "full")),
    Way(mlp=5),
    Way(mlp=5, family="gpt2", recompute="full"),
    Way(sequence=True, tokens=5),
]


def said(way: Way) -> str:
    usual = Way()._asdict()
    return "-".join(f"{key}{value}" for key, value in way._asdict().items() if value != usual[key])


@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=pytest.mark.soak) for way in MORE)], ids=said
)
def test_gradients_are_those_of_one_process(device_process: RankPool, way: Way) -> None:
    [found] = device_process.run(outcome_of, way)
    assert found.error <= 1e-10
    assert found[1:] == (True, [], 0, True)


def swapped_on(_: Any) -> float:
    """Error where each rank takes the other one's part for its own."""
    device, way, all_gather = register(), Way(recompute="full"), Group.all_gather

    def swaps(self: Group, output: Tensor, shard: Tensor, what: str, *rest: Any, **given: Any) -> Any:
        pending = all_gather(self, output, shard, what, *rest, **given)
        if "has saved" in what:
            pending.wait()
            output.copy_(output.view(2, -1).flip(0).flatten())
        return pending

    with ExitStack() as stack:
        stack.enter_context(late_copies())
        stack.enter_context(Bench())
        stack.enter_context(patch.object(Group, "all_gather", swaps))
        moved = Crew(2, device).run(trained, way, True)
        [one] = Crew(1, device).run(trained, alone(way), False)
    return max(worst(each, one) for each in moved)


def test_parts_in_another_order_are_seen(device_process: RankPool) -> None:
    [error] = device_process.run(swapped_on)
    assert error > 1e-3


def unlike_on(_: Any) -> tuple[float, list[bool], list[str]]:
    """(error, whether blocks go down in parts, what is said) where a last digit differs."""
    device, way, said = register(), Way(recompute="full"), []
    said_by = patch.object(module._log, "warning", lambda text, *given: said.append(text % given))
    unlike = patch.object(AlikeStorages, "are_alike", lambda self, memories, what: False)
    with ExitStack() as stack:
        made = stack.enter_context(late_copies())
        for context in (Bench(), said_by, unlike):
            stack.enter_context(context)
        moved = Crew(2, device).run(trained, way, True)
        [one] = Crew(1, device).run(trained, alone(way), False)
    parts = [each for activations in made for each in activations._has_parts.values()]
    return max(worst(each, one) for each in moved), parts, said


def test_what_differs_in_the_first_pass_stays_whole(device_process: RankPool) -> None:
    [(error, parts, said)] = device_process.run(unlike_on)
    assert error <= 1e-10 and parts and not any(parts)
    assert (
        len(said) == Way().layers - 1
        and "what block blocks.0 has saved should be alike on the ranks of tp" in said[0]
    )


# Bytes ----------------------------------------------------------------------------------------------------------------

TOKENS = torch.arange(6 * 64).view(6, 64) % 256
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def larger() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(GptPolicy(family="gpt2", layers=4, width=128, heads=4, context=64, vocab=256))


def settings_of(recompute: str, sequence: bool) -> dict[str, Any]:
    return {
        "mesh": {"tp": 2},
        "tensor": {"sequence_parallel": sequence},
        "recompute": recompute,
        "offload": {"activations": "host"},
        "check_first_step": "off",
    }


def bytes_of(world: Any, given: dict[str, Any]) -> tuple[int, int]:
    """(most in host memory at once, sent along tp in the second step)."""
    engine = shardwise.initialize(larger(), given, world=world)
    traffic = engine._parts.passes.tp.traffic
    engine.train_step([BATCH])
    before = traffic.total("activations").bytes
    engine.train_step([BATCH])
    sent = traffic.total("activations").bytes - before
    held = engine._parts.site.ledger.bytes_by_row()["activations"]
    engine.close()
    return held, sent


class Bytes(NamedTuple):
    """Of one rank of two."""

    held: int
    whole: int
    """Where each rank keeps all."""
    cut: int
    """With sequence parallelism."""
    sent: int
    """More than where each rank keeps all."""
    foreseen: tuple[int, int]


def bytes_on(_: Any, recompute: str) -> Bytes:
    device, given = register(), settings_of(recompute, False)
    step = foresee(larger, given, 2, device, example=BATCH).step
    assert step is not None
    with Bench():
        [(held, sent), other] = Crew(2, device).run(bytes_of, given)
        assert (held, sent) == other
        with patch.object(AlikeStorages, "knows", lambda *_: False):
            [(whole, usual), _] = Crew(2, device).run(bytes_of, given)
        [(cut, _), _] = Crew(2, device).run(bytes_of, settings_of(recompute, True))
    return Bytes(held, whole, cut, sent - usual, (step.moved_bytes, step.gathered_bytes))


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.soak)])
def test_bytes_are_those_of_a_cut_sequence_and_those_foreseen(
    device_process: RankPool, recompute: str
) -> None:
    [found] = device_process.run(bytes_on, recompute)
    assert found.held == found.cut and found.held + found.sent == found.whole and found.sent
    assert found.foreseen == pytest.approx((found.held, found.sent), rel=0.01)
