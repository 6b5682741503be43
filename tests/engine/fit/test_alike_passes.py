"""Passes that stages and jobs share are those that each job has by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.run import load
from shardwise.engine.fit.alike_passes import can_share, shared_passes
from shardwise.engine.fit.foresee import read
from shardwise.engine.fit.jobs import JobShelf
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import Kind
from shardwise.simulate.passes import MeasuredPass, UnitPass

CPU = torch.device("cpu")


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy(layers=9, width=16, heads=2, context=8, vocab=32))


def tokens(rows: int) -> dict[str, Tensor]:
    ids = torch.empty(rows, 8, dtype=torch.int64, device="meta")
    return {"tokens": ids, "targets": ids}


def batch(micro: int) -> dict[str, Any]:
    return {"batch": {"global_size": 8, "micro_size": micro}}


def agree(shelf: JobShelf, given: dict[str, Any], ranks: int) -> None:
    """The shared job has the passes, the memory and the Plan of the job by itself."""
    config = load(given)
    ours, alone = (
        shelf.job(config, ranks),
        read(gpt, config, ranks, CPU, tokens(config.batch.micro_size or 1)),
    )
    assert ours.passed == alone.passed and ours.starts == alone.starts and ours.mesh == alone.mesh
    ours, alone = (each._replace(process_bytes=0) for each in (ours, alone))
    found, expected = (each.outlook(each.settings.offload) for each in (ours, alone))
    assert found.steps == expected.steps and found.flops == expected.flops
    assert found.plan.actions == expected.plan.actions


def test_blocks_take_the_shares_of_the_block_in_their_place() -> None:
    def stage(name: int) -> MeasuredPass:
        shares = {
            (kind, f"blocks.{3 * name + i}"): UnitPass(i, 10 * name, 1)
            for kind in (Kind.F, Kind.B)
            for i in range(3)
        }
        return MeasuredPass(
            {**shares, (Kind.F, ""): UnitPass(name, 7, 0)}, 5, alike_sizes={f"blocks.{3 * name}": (9,)}
        )

    measured = [[f"blocks.{3 * name + i}" for i in range(3)] for name in range(3)]
    wanted = [
        ["blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3", "blocks.4", "blocks.5"],
        ["blocks.6", "blocks.7"],
    ]
    assert can_share(measured, wanted) and not can_share(measured, [["blocks.0"], ["blocks.1"]])
    assert not can_share(measured[:2], wanted)
    found = shared_passes({name: stage(name) for name in range(3)}, measured, wanted)
    for name, units in enumerate(wanted):
        assert (
            found[name].of(Kind.F, "") == UnitPass(name, 7, 0)
            and len(found[name].shares) == 2 * len(units) + 1
        )
        places = [found[name].of(Kind.B, unit).rise_bytes for unit in units]
        assert places == [0, *[1] * (len(units) - 2), 2]
        assert {found[name].of(Kind.F, unit).net_bytes for unit in units} == {10 * name}
        assert found[name].alike_bytes == {units[0]: 9}


@pytest.mark.soak
def test_stages_of_a_pipeline_take_their_passes_from_three() -> None:
    shelf = JobShelf(gpt, CPU, tokens)
    agree(shelf, {**batch(1), "mesh": {"pp": 2}}, 4)
    assert shelf.passes == 1
    shelf.job(load({**batch(1), "mesh": {"pp": 2}, "zero": {"stage": 1}}), 8)
    assert shelf.passes == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"mesh": {"pp": 4}, **batch(1)}, 4),
        (
            {
                "mesh": {"pp": 2},
                "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
                **batch(1),
            },
            2,
        ),
        ({"mesh": {"pp": 2, "tp": 2}, "recompute": "full", **batch(2)}, 4),
        ({"mesh": {"pp": 2}, "recompute": {"scope": "full", "blocks": 0.5}, **batch(2)}, 4),
        ({"mesh": {"tp": 2}, "zero": {"stage": 3}, "tiles": {"mlp": 8}, **batch(2)}, 4),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "gpipe"}, "precision": "bf16", **batch(1)}, 4),
    ],
    ids=str,
)
def test_any_job_is_as_by_itself(given: dict[str, Any], ranks: int) -> None:
    agree(JobShelf(gpt, CPU, tokens), given, ranks)
