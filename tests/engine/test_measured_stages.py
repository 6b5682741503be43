"""Stages that are cut by measured seconds: the second step writes the file, the next run cuts by it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.models import Gpt, GptPolicy
from tests.engine.conformance import Conformance
from tests.engine.state.test_saving import fingerprint
from tests.engine.test_model_parallel import Layout, measure

MODEL = GptPolicy(layers=4, width=16, heads=2, context=8, vocab=17, hidden=24)
NAMES = [f"blocks.{i}" for i in range(4)]


def build(world: Any, path: str, schedule: str = "1f1b", **config: Any) -> Any:
    torch.manual_seed(3)
    given = {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": schedule, "partition": "measured", "seconds": path},
        "batch": {"accumulation": 3},
        "optimizer": {"type": "adamw", "lr": 1e-2},
        "comm": {"timeout_s": 20.0},
        **config,
    }
    return shardwise.initialize(Gpt(MODEL), given, world=world)


def step(engine: Any) -> float:
    tokens = torch.randint(0, 17, (6, 8), generator=torch.Generator().manual_seed(engine.step_count))
    return float(engine.train_step([(part, part) for part in tokens.chunk(3)]).loss)


def stages(engine: Any) -> list[int]:
    """Stage of each block."""
    found = {info.name: info.stages for info in engine.plan.registry.of_kind("parameter")}
    return [
        next(stage[0] for name, stage in found.items() if name.startswith(f"{block}.")) for block in NAMES
    ]


def write(path: str, seconds: list[float], back: float = 0.0) -> None:
    Path(path).write_text(
        json.dumps({"blocks": dict(zip(NAMES, seconds, strict=True)), "front": 0.0, "back": back})
    )


def first_run(world: Any, folder: str, schedule: str) -> tuple[Any, ...]:
    """Train without a file; then what the file holds, the stages, the notes, departures, and what stays on blocks."""
    path = f"{folder}/{schedule}.json"
    engine = build(world, path, schedule, recompute="full")
    conformance = Conformance(engine)
    hooks = [len(block._forward_hooks) for stage in engine._parts.stages for block in stage.module.modules()]
    losses, found = [], []
    for _ in range(3):
        losses.append(step(engine))
        found.append(Path(path).exists())
    after = [len(block._forward_hooks) for stage in engine._parts.stages for block in stage.module.modules()]
    notes = [note for note in engine.plan.notes if "measured" in note]
    cut = stages(engine)
    engine.close()
    return losses, found[0], cut, notes, conformance.departures, hooks == after


@pytest.mark.parametrize("schedule", ["1f1b", "zb_greedy"])
def test_the_second_step_of_a_first_run_measures_every_block(
    ranks: Any, tmp_path: Path, schedule: str
) -> None:
    for _, exists, cut, notes, departures, is_clean in ranks(2).run(first_run, str(tmp_path), schedule):
        assert not exists, "the first step is not measured"
        assert cut == ([0, 0, 1, 1] if schedule == "1f1b" else [0, 1, 2, 3]), "by parameters"
        assert "there is no" in notes[0] and not departures and is_clean
    found = json.loads((tmp_path / f"{schedule}.json").read_text())
    assert list(found["blocks"]) == NAMES and min(found["blocks"].values()) > 0
    assert found["back"] > 0, "the head and the loss"


def later_run(world: Any, folder: str) -> tuple[Any, ...]:
    """Save under a cut by parameters, go on under another cut, and compare states and losses."""
    path = f"{folder}/blocks.json"
    plain = build(world, path, pipeline={})
    step(plain)
    plain.save(folder)
    before, cut = fingerprint(plain), stages(plain)
    wanted = [step(plain) for _ in range(2)]
    plain.close()
    engine = build(world, path)
    engine.load(folder)
    after = fingerprint(engine)
    found, other = [step(engine) for _ in range(2)], stages(engine)
    notes = [note for note in engine.plan.notes if "measured" in note]
    engine.close()
    return before, after, found == wanted, cut, other, notes


def test_a_later_run_cuts_by_the_file_and_goes_on_from_a_checkpoint_of_another_cut(
    ranks: Any, tmp_path: Path
) -> None:
    """The first block takes four times as long as each other; the file stays as it is."""
    write(str(tmp_path / "blocks.json"), [4.0, 1.0, 1.0, 1.0])
    written = (tmp_path / "blocks.json").read_bytes()
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    for own, loaded, goes_on, cut, other, notes in ranks(2).run(later_run, str(tmp_path)):
        before, after = {**before, **own}, {**after, **loaded}
        assert goes_on
        assert (cut, other) == ([0, 0, 1, 1], [0, 1, 1, 1])
        assert f"by the seconds in {tmp_path / 'blocks.json'}" in notes[0]
    assert before == after, "weights, masters and moments of all stages"
    assert (tmp_path / "blocks.json").read_bytes() == written


def measured(world: Any, folder: str) -> list[float]:
    found = []
    for schedule, layers in (("zb_v", 6), ("1f1b", 4)):
        path = f"{folder}/{schedule}.json"
        layout = Layout(
            pp=2, microbatches=3, schedule=schedule, layers=layers, partition="measured", seconds=path
        )
        found.append(max(measure(world, layout)))
    return found


def test_measured_stages_equal_one_process(ranks: Any, tmp_path: Path) -> None:
    for schedule, layers in (("zb_v", 6), ("1f1b", 4)):
        blocks = {f"blocks.{i}": 4.0 if i == 1 else 1.0 for i in range(layers)}
        (tmp_path / f"{schedule}.json").write_text(json.dumps({"blocks": blocks, "front": 0.5, "back": 1.0}))
    for found in ranks(2).run(measured, str(tmp_path)):
        assert max(found) <= 1e-10


def unlike(world: Any, folder: str) -> str:
    """Build with one name for files that differ, as hosts without common files have them."""
    own, home = Path(folder) / f"rank-{world.rank}", Path.cwd()
    own.mkdir()
    if world.rank == 0:
        write(str(own / "blocks.json"), [4.0, 1.0, 1.0, 1.0])
    os.chdir(own)
    try:
        with pytest.raises(ConfigError) as raised:
            build(world, "blocks.json")
    finally:
        os.chdir(home)
    return str(raised.value)


def test_ranks_that_read_unlike_files_are_refused_together(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(unlike, str(tmp_path))
    assert first == second
    assert "the content of pipeline.seconds blocks.json is" in first and '"no file" on rank 1' in first
