"""What is sent and what is kept equals the closed forms: counted on real steps and real buffers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise
from shardwise.comm import transports
from shardwise.parallel.zero.layout import strategies_of, strategy_of
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.unit import Bucket, BucketKey, Unit, lay_out
from tests.engine.nets import seeded
from tests.parallel.zero.closed_forms import elements_sent_per_step
from tests.parallel.zero.nets import Net
from tests.parallel.zero.test_hooks import piece


class Case(NamedTuple):
    stage: int
    accumulation: int
    replicate: int = 1
    reduce: str = "auto"
    transport: str = "auto"


class Counted(NamedTuple):
    sent: int
    control: int
    planned: int
    trained: int
    """Elements of trained buckets, padding counted."""
    frozen: int


def half_frozen() -> nn.Module:
    model: nn.Module = seeded(Net)
    model.blocks[1].requires_grad_(False)  # type: ignore[operator, union-attr]
    model.blocks[2].up.requires_grad_(False)  # type: ignore[operator, union-attr]
    return model


def count(world: Any, case: Case) -> Counted:
    engine = shardwise.initialize(
        half_frozen(),
        {
            "zero": {"stage": case.stage, "reduce": case.reduce},
            "mesh": {"dp": {"replicate": case.replicate, "shard": world.size // case.replicate}},
            "batch": {"accumulation": case.accumulation},
            "comm": {"transport": case.transport},
            "max_grad_norm": 1.0,
        },
        world=world,
    )
    for step in range(2):
        engine.traffic.clear()
        for microbatch in range(case.accumulation):
            engine.backward(engine(piece(step, microbatch * world.size + world.rank)))
            engine.step()
    plan = engine.plan
    strategies = strategies_of(engine.config.zero, plan.mesh, plan.units)
    buckets = [bucket for unit in plan.units for bucket in unit.buckets]
    counted = Counted(
        engine.traffic.total("weights", "gradients").elements,
        engine.traffic.total("control").elements,
        elements_sent_per_step(plan.units, strategies, plan.mesh, case.accumulation),
        sum(bucket.elements for bucket in buckets if bucket.key.trained),
        sum(bucket.elements for bucket in buckets if not bucket.key.trained),
    )
    engine.close()
    return counted


def count_all(world: Any, cases: list[Case]) -> list[Counted]:
    return [count(world, case) for case in cases]


def formula(case: Case, size: int, trained: int, frozen: int) -> int:
    """The issue's closed forms, written once more by hand."""
    a, n, m = case.accumulation, size // case.replicate, case.replicate
    if case.stage == 0:
        return 2 * trained * (size - 1) // size
    per_stage = {1: 2 * trained, 2: (a + 1) * trained, 3: 3 * a * trained + 2 * a * frozen}
    moved = per_stage[case.stage]
    if case.reduce == "step":
        moved = {2: 2 * trained, 3: (2 * a + 1) * trained + 2 * a * frozen}[case.stage]
    return moved * (n - 1) // n + 2 * (trained // n) * (m - 1) // m


@pytest.mark.parametrize(
    ("size", "every"), [(2, True), (4, False), pytest.param(4, True, marks=pytest.mark.soak)]
)
def test_elements_sent(ranks: Any, size: int, every: bool) -> None:
    transports = ("auto", "torch") if every else ("auto",)
    cases = [Case(stage, a, transport=t) for stage in range(4) for a in (1, 3) for t in transports]
    cases += [Case(stage, 3, reduce="step") for stage in (2, 3) if every]
    cases += [Case(stage, a, replicate=2) for stage in range(4) for a in (1, 3) if size == 4]
    for rank in ranks(size).run(count_all, cases):
        for case, counted in zip(cases, rank, strict=True):
            wanted = formula(case, size, counted.trained, counted.frozen)
            assert (counted.sent, counted.planned) == (wanted, wanted), case
            assert counted.control < 100 * size, "the norm and what travels with it stay small"


@contextmanager
def counting(composed: bool) -> Iterator[dict[str, int]]:
    """Bytes that torch's calls send, by call. Not composed: as between devices, with the backend's own calls."""
    sent: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:

        def tap(name: str, place: int, factor: int, whole: bool = True) -> None:
            call = getattr(dist, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                tensor, size = args[place], dist.get_world_size(kwargs["group"])
                if tensor.is_floating_point() and tensor.numel() >= size and tensor.dtype != torch.float64:
                    others = size - 1
                    mine = whole or kwargs["src"] == dist.get_rank()
                    moved = factor * tensor.nbytes * others // (size if whole else 1)
                    sent[name] = sent.get(name, 0) + moved * mine
                return call(*args, **kwargs)

            patch.setattr(dist, name, counted)

        tap("all_to_all_single", 1, 1)
        tap("all_reduce", 0, 2)
        tap("broadcast", 0, 1, whole=False)
        tap(transports._gather_call().__name__, 0, 1)
        tap(transports._scatter_call().__name__, 1, 1)
        if not composed:
            build = transports.TorchTransport.__init__
            patch.setattr(
                transports.TorchTransport,
                "__init__",
                lambda self, group, ranks, index, composed, *rest: build(
                    self, group, ranks, index, False, *rest
                ),
            )
        yield sent


def sixteen(
    world: Any, compute: str, stage: int, replicate: int, composed: bool
) -> tuple[int, int, int, list[float]]:
    """Bytes that torch's calls sent, that were counted, that the Plan's formula gives; the norms of two steps."""
    shard = world.size // replicate
    config = {
        "zero": {"stage": stage},
        "mesh": {"dp": {"replicate": replicate, "shard": shard}},
        "precision": compute,
        "comm": {"transport": "torch"},
    }
    with counting(composed) as sent:
        engine = shardwise.initialize(half_frozen(), config, world=world.among(range(world.size)))
        norms = []
        for step in range(2):
            engine.traffic.clear()
            sent.clear()
            engine.backward(engine(piece(step, world.rank)))
            norms.append(engine.step().grad_norm)
        plan = engine.plan
        strategies = strategies_of(engine.config.zero, plan.mesh, plan.units)
        planned = 2 * elements_sent_per_step(plan.units, strategies, plan.mesh, 1)
        trained = sum(b.elements for unit in plan.units for b in unit.buckets if b.key.trained)
        planned += (
            2 * 2 * (trained // shard) * (replicate - 1) // replicate
        )  # sums of replicas are fp32 numbers
        moved, counted = sum(sent.values()), engine.traffic.total("weights", "gradients").bytes
        engine.close()
    return moved, counted, planned, norms


def sixteen_all(world: Any, cases: list[tuple[str, int, int]]) -> list[tuple[Any, Any]]:
    return [(sixteen(world, *case, composed=True), sixteen(world, *case, composed=False)) for case in cases]


@pytest.mark.parametrize(
    ("size", "cases"), [(2, [("bf16", 1, 1), ("bf16", 2, 1), ("fp16", 3, 1)]), (4, [("bf16", 3, 2)])]
)
def test_sixteen_bits_on_the_wire(ranks: Any, size: int, cases: list[tuple[str, int, int]]) -> None:
    """Backends other than gloo were once given fp32, twice the bytes that were planned and counted."""
    for rank in ranks(size).run(sixteen_all, cases):
        for case, (gloo, device) in zip(cases, rank, strict=True):
            for sent, counted, planned, norms in (gloo, device):
                assert sent == counted == planned, case
                assert norms == gloo[3], case


def test_replicas_that_do_not_divide_the_padding() -> None:
    key = BucketKey(torch.float32, True, 0)
    bucket: Bucket = lay_out(key, [("w", (7,), ())], 1)
    mesh = Mesh(dp_replicate=3)
    sent = elements_sent_per_step(
        [Unit(0, "", (bucket,))], [strategy_of(ZeroPolicy(stage=0), mesh)], mesh, accumulation=1
    )
    assert sent == 2 * bucket.elements * 2 // 3  # as the trace counts an all-reduce


# Bytes -------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough that padding does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(192, 192), nn.Linear(192, 192)) for _ in range(3))
        self.last = nn.Linear(192, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x).square().mean()
        return result


def bytes_of(world: Any, stage: int, grad: str) -> tuple[float, float, bool]:
    model = Wide()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    before = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    config = {"zero": {"stage": stage}, "precision": {"compute": "bf16", "grad": grad}}
    engine = shardwise.initialize(model, config, world=world)
    engine.train_step([torch.randn(2, 192) + world.rank])
    kept, planned = sum(engine.state_bytes().values()), sum(engine.plan.bytes_per_rank().values())
    first_weights_are_gone = all(storage.expired() for storage in before)
    engine.close()
    return kept / parameters, planned / parameters, first_weights_are_gone


def bytes_of_all(world: Any) -> list[tuple[float, float, bool]]:
    return [bytes_of(world, stage, grad) for grad in ("fp32", "bf16") for stage in range(4)]


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_per_parameter(ranks: Any, n: int) -> None:
    # One microbatch makes a step: stage 1 keeps no more of a gradient than stage 2.
    wanted = [18, 2 + 16 / n, 2 + 16 / n, 18 / n, 16, 2 + 14 / n, 2 + 14 / n, 16 / n]
    for rank in ranks(n).run(bytes_of_all):
        for (kept, planned, gone), exact in zip(rank, wanted, strict=True):
            assert kept == planned
            assert exact <= kept <= 1.02 * exact
            assert gone, "the weights that the model came with must not stay in memory"
