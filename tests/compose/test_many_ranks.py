"""A Plan of all ranks is made of data alone, and is no larger for many ranks than for few."""

import ast
from pathlib import Path

import pytest
from tests.plan.described import model, plan

import shardwise
from shardwise.plan.mesh import Mesh

SOURCE = Path(shardwise.__file__).parent


def imports_of(module: str) -> set[str]:
    """Every module that ``module`` imports when it is loaded, ours followed to the end."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        path = SOURCE.parent / Path(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not name.startswith("shardwise.") or not file.is_file():
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                waiting += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        waiting += [name.rpartition(".")[0]]
    return found


def test_a_plan_needs_no_module_and_no_process_group() -> None:
    seen = imports_of("shardwise.compose.plan")
    assert {"shardwise.plan.validate", "shardwise.parallel.pipeline.schedules", "torch"} <= seen
    foreign = (
        "torch.nn",
        "torch.distributed",
        "shardwise.comm",
        "shardwise.memory.",
        "shardwise.tiers.",
        "shardwise.passes.",
        "shardwise.engine",
    )
    keys = "shardwise.tiers.offload"  # what may be asked for, and no mechanism
    assert not [name for name in seen if name.startswith(foreign) and not name.startswith(keys)]


def test_the_walk_over_imports_finds_what_is_far_away() -> None:
    assert "torch.distributed" in imports_of("shardwise.parallel.zero.batch_norm")


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_ten_thousand_ranks_are_eight_classes(virtual_stages: int) -> None:
    schedule = "1f1b" if virtual_stages == 1 else "interleaved_1f1b"
    mesh = Mesh(pp=8, dp_shard=160, tp=2)
    whole = plan(mesh, 3, 8, schedule, virtual_stages, model(blocks=80))
    assert list(whole.actions) == [f"pp {place}" for place in range(8)]
    assert sum(len(each.units) for each in whole.classes.values()) == 80 + 8 * virtual_stages
    assert all(len(each.stages) == virtual_stages for each in whole.classes.values())
    names = [info.name for info in whole.registry.of_kind("parameter")]
    held = [
        slot.name
        for each in whole.classes.values()
        for u in each.units
        for b in u.buckets
        for slot in b.slots
    ]
    assert sorted(held) == sorted(names)


def test_many_ranks_cost_what_few_cost() -> None:
    few = plan(Mesh(pp=2, dp_shard=2, tp=2), 3, 4)
    many = plan(Mesh(pp=2, dp_replicate=32, dp_shard=1024, tp=2), 3, 4)
    assert many.mesh.world_size == 131_072
    assert many.actions == few.actions and len(many.registry) == len(few.registry)
    assert set(many.bytes_per_rank(131_071)) == set(few.bytes_per_rank(7))
