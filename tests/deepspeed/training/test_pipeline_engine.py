"""A PipelineModule's engine against its layers in one plain process, and what it refuses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shardwise.deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from shardwise.deepspeed.runtime.pipe.module import PipelineError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import DataError, ShardwiseError, UsageError
from shardwise.comm.world import World
from shardwise.deepspeed.training.topology import PipeDataParallelTopology
from tests.ranks import RankPool

PARTS, MICRO, STEPS = 3, 2, 3
Batch = tuple[Tensor, Tensor]


def by_table(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.T


def net(stages: int, in_a_v: bool = False, **more: Any) -> PipelineModule:
    """Modules, specs, a tied table, functions; a frozen layer."""
    torch.manual_seed(3)
    made = (DualPipeVModule if in_a_v else PipelineModule)(
        [
            TiedLayerSpec("table", nn.Embedding, 7, 6),
            LayerSpec(nn.Linear, 6, 6),
            torch.tanh,
            nn.Linear(6, 6),
            lambda x: x * 2,
            LayerSpec(nn.Linear, 6, 6, bias=False),
            TiedLayerSpec("table", nn.Embedding, 7, 6, forward_fn=by_table),
        ],
        num_stages=stages,
        loss_fn=nn.CrossEntropyLoss(),
        **more,
    ).double()
    made.get_submodule("5").requires_grad_(False)
    return made


def batches(count: int = STEPS * PARTS) -> Iterator[Batch]:
    draws = torch.Generator().manual_seed(5)
    return iter(
        [
            (torch.randint(7, (MICRO,), generator=draws), torch.randint(7, (MICRO,), generator=draws))
            for _ in range(count)
        ]
    )


def engine_of(model: PipelineModule, stage: int = 0, parts: int = PARTS) -> Any:
    return deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": parts,
            "gradient_clipping": 0.3,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        },
    )[0]


class Run(list[float]):
    """Losses of training, then of evaluation, of each of its microbatches, and the sum of the last one's logits."""


def in_deepspeeds_names(world: World, stage: int, folder: str, more: dict[str, Any]) -> tuple[Run, Run, Any]:
    engine = engine_of(net(2, **more), stage)
    data = batches()
    assert (engine.ours.config.recompute.scope == "full") == ("activation_checkpoint_interval" in more)
    last = 0 if more.get("in_a_v") else 1
    if last and more:  # a rank brings what its stage reads
        engine.set_batch_fn(lambda batch: (batch[0], None) if world.rank == 0 else (None, batch[1]))
    trained = Run(engine.train_batch(data).item() for _ in range(STEPS))
    assert (engine.global_steps, engine.micro_batches, engine.num_stages) == (STEPS, PARTS, 2)
    assert engine.is_first_stage() == (world.rank == 0) and engine.is_last_stage() == (world.rank == last)

    def evaluated(engine: Any) -> Run:
        mean, logits = engine.eval_batch(batches(PARTS), return_logits=True)
        each = engine.eval_batch(batches(2), reduce_output=None, num_micro_batches=2)
        assert (logits is not None) == engine.is_last_stage() and len(each) == 2
        alone = engine.eval_batch(batches(PARTS), bcast_loss=False)
        assert alone == (mean if engine.is_last_stage() else None)
        outputs = engine.eval_batch(batches(2), compute_loss=False, num_micro_batches=2)
        assert (outputs is not None) == engine.is_last_stage()
        return Run([float(mean), *map(float, each), 0.0 if logits is None else float(logits.double().sum())])

    after = evaluated(engine)
    engine.save_checkpoint(folder)
    whole = engine.module_state_dict()
    engine.destroy()
    torch.manual_seed(9)
    again = engine_of(net(2, bool(last), seed_layers=True, base_seed=world.rank), 1)
    again.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert evaluated(again)[:3] == after[:3], "loaded in the other order of stages"
    again.destroy()
    return trained, after, whole


def in_plain_torch() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, data = net(1), batches()
    assert model.loss_fn is not None
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean = sum(cross_entropy(model(x), y) for x, y in (next(data) for _ in range(PARTS))) / PARTS
        mean.backward()
        nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        losses.append(mean.item())
    with torch.no_grad():
        outputs = [(model(x), y) for x, y in batches(PARTS)]
        each = [cross_entropy(output, y).item() for output, y in outputs]
        seen = [sum(each) / PARTS, *each[:2], outputs[-1][0].sum().item()]
    return losses, seen, model.state_dict()


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (3, {"activation_checkpoint_interval": 1, "partition_method": "type:linear"}),
        (0, {"in_a_v": True, "partition_method": "uniform"}),
        (3, {"in_a_v": True, "activation_checkpoint_interval": 1, "partition_method": "uniform"}),
    ],
    ids=["stage 0", "stage 3, recomputed", "in a V", "in a V, stage 3, recomputed"],
)
def test_a_pipeline_of_deepspeeds(
    ranks: Callable[[int], RankPool], stage: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """Trains, evaluates, saves and loads as its layers do in one process."""
    losses, seen, weights = in_plain_torch()
    for rank, (trained, after, whole) in enumerate(
        ranks(2).run(in_deepspeeds_names, stage, str(tmp_path), more)
    ):
        assert trained == pytest.approx(losses, rel=1e-10)
        has_logits = rank == (0 if more.get("in_a_v") else 1)
        assert after == pytest.approx([*seen[:3], seen[3] if has_logits else 0.0], rel=1e-10, abs=1e-12)
        torch.testing.assert_close(whole, {name: weights[name] for name in whole}, rtol=1e-10, atol=1e-12)
        assert {f"{i}.weight" for i in (0, 1, 3, 5, 6)} <= whole.keys()


def unlike_microbatches(step: int, dp: int, parts: int) -> list[Batch]:
    """Microbatches of 1 to 4 samples, which differ between steps and data-parallel ranks."""
    draws = torch.Generator().manual_seed(10 * step + dp)
    sizes = [1 + (step + dp + part) % 4 for part in range(parts)]
    return [
        (torch.randint(7, (rows,), generator=draws), torch.randint(7, (rows,), generator=draws))
        for rows in sizes
    ]


def in_a_v_on_unlike_shapes(world: World, stage: int, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(net(2, True, partition_method="uniform"), stage, parts)
    dp = engine.ours.dp_index
    losses = [engine.train_batch(iter(unlike_microbatches(step, dp, parts))).item() for step in range(STEPS)]
    whole = engine.module_state_dict()
    engine.destroy()
    return losses, whole


def unlike_shapes_in_plain_torch(parts: int) -> tuple[list[float], dict[str, Tensor]]:
    model = net(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [
            cross_entropy(model(x), y) for dp in range(2) for x, y in unlike_microbatches(step, dp, parts)
        ]
        mean = torch.stack(each).mean()
        mean.backward()
        nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        losses.append(mean.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        (1, 1),
        (2, 3),
        *[
            pytest.param(stage, parts, marks=pytest.mark.soak)
            for stage in range(4)
            for parts in (1, 2, 3, 5, 8)
            if (stage, parts) not in ((1, 1), (2, 3))
        ],
    ],
)
def test_shapes_change_in_a_v_beside_zero(ranks: Callable[[int], RankPool], stage: int, parts: int) -> None:
    """Two data-parallel ranks share the state, at any stage, with fewer microbatches than stages too.

    DeepSpeed's module has one shape for a run, stages 0 and 1 alone, and at least two microbatches for each stage.
    """
    losses, weights = unlike_shapes_in_plain_torch(parts)
    for got, whole in ranks(4).run(in_a_v_on_unlike_shapes, stage, parts):
        assert got == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(whole, {name: weights[name] for name in whole}, rtol=1e-10, atol=1e-12)


def test_labels_keep_their_dtype_in_16_bits() -> None:
    seen = []

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        seen.append((output.dtype, labels.dtype))
        return (output - labels).square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }
    model = PipelineModule([LayerSpec(nn.Linear, 2, 2), nn.ReLU()], 1, loss_fn=loss)
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.train_batch(iter([(torch.ones(2, 2), torch.ones(2, 2))])).dtype == torch.float32
    assert seen == [(torch.bfloat16, torch.float32)]
    engine.destroy()


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", "nothing"


def refusals(world: World) -> list[tuple[str, str]]:
    deepspeed.init_distributed()
    engine = engine_of(net(2))
    short = batches(PARTS - world.rank)
    found = [
        refused(lambda: net(3)),
        refused(lambda: net(None, topology=PipeDataParallelTopology(2, 2))),  # type: ignore[arg-type]
        refused(lambda: engine_of(net(2, partition_method="profile"))),
        refused(lambda: engine(torch.zeros(2))),
        refused(lambda: engine.backward(torch.zeros(()))),
        refused(lambda: engine.step()),
        refused(lambda: engine.train_batch(short)),
        refused(lambda: engine.train_batch(iter([torch.zeros(2)]))),
    ]
    assert engine.train_batch(batches(PARTS)).item() > 0, "the next batch is trained on"
    engine.destroy()
    return found


def test_bad_input_is_refused_on_all_ranks(ranks: Callable[[int], RankPool]) -> None:
    wanted = [
        ("UsageError", "num_stages 3 does not divide the 2 ranks of the job; give one of 1, 2"),
        ("UsageError", "expected pipe first, then data"),
        ("ConfigError", "'profile' is no way to cut a model"),
        (PipelineError.__name__, "call train_batch or eval_batch"),
        (PipelineError.__name__, "call train_batch"),
        (PipelineError.__name__, "call train_batch"),
        (DataError.__name__, "train_batch: "),
        (UsageError.__name__, r"expected \(inputs, labels\), given a Tensor"),
    ]
    for found in ranks(2).run(refusals):
        for (kind, text), (wanted_kind, pattern) in zip(found, wanted, strict=True):
            assert kind == wanted_kind, (kind, text)
            assert pattern.replace("\\", "") in text
