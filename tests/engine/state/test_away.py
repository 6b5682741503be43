"""State that leaves between two steps: the bits of a run that keeps it, the memory given back, uses named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import CommError, ConfigError, DamagedError, TierError, UsageError
from shardwise.comm.world import World
from shardwise.observe.memory import resident_bytes
from tests.engine.test_offload import Case, batches, gpt, state_of
from tests.ranks import RankPool


def trained(
    world: World, case: Case, folder: str | None, disk: str | None = None, include: Any = None
) -> Any:
    """Losses, norms and state; between steps all of it goes to ``folder`` and comes back."""
    engine = shardwise.initialize(gpt(), case.config(disk), world=world)
    data = engine._parts.dp.index
    seen = []
    for step in range(3):
        result = engine.train_step(batches(data, step, case.accumulation))
        seen.append((result.loss.hex(), result.grad_norm.hex()))
        if folder is not None:
            engine.offload_states("disk", folder, include)
            engine.reload_states()
        if step == 1:
            engine.eval()
            with torch.no_grad():
                seen.append(engine.evaluate([(batches(data, 7, 1)[0], None)]).hex())
            engine.train()
    found = state_of(engine)
    engine.close()
    return seen, found


def compare(world: World, case: Case, folder: str, disk: str | None = None, include: Any = None) -> Any:
    kept, moved = trained(world, case, None, disk), trained(world, case, folder, disk, include)
    unlike = [name for name, tensor in kept[1].items() if not torch.equal(tensor, moved[1][name])]
    return kept[0] == moved[0], unlike, list(Path(folder).iterdir())


def compare_all(world: World, folder: str, rows: list[tuple[Any, ...]]) -> list[Any]:
    return [compare(world, case, folder, *more) for case, *more in rows]


ONE: list[tuple[Any, ...]] = [(Case(),), (Case(precision="bf16"), None, ["moments"])]
TWO: list[tuple[Any, ...]] = [
    (Case(2, precision="bf16"), None, ["masters", "moments"]),
    (Case(3, precision="bf16", recompute="full", prefetch=1 << 20),),
]
MORE: list[tuple[Any, ...]] = [
    (Case(1),),
    (Case(3, parameters="disk", fraction=0.5), "disk"),
    (Case(tp=2),),
    (Case(pp=2, precision="fp16", accumulation=2),),
    (Case(2, optimizer="muon"),),
]


@pytest.mark.parametrize(
    ("size", "rows"), [(1, ONE), (2, TWO), pytest.param(2, MORE, marks=pytest.mark.soak)]
)
def test_it_comes_back_to_the_bit(
    ranks: Callable[[int], RankPool], tmp_path: Path, size: int, rows: list[tuple[Any, ...]]
) -> None:
    for name in ("away", "disk"):
        (tmp_path / name).mkdir()
    placed = [tuple(str(tmp_path / each) if each == "disk" else each for each in row) for row in rows]
    for found in ranks(size).run(compare_all, str(tmp_path / "away"), placed):
        assert [each[:2] for each in found] == [(True, [])] * len(rows)
    assert not [*(tmp_path / "away").iterdir()], "files are left"


def big(folder: str, include: Any = None) -> tuple[Any, int, int]:
    """(engine, bytes of its state, bytes that the process gave back)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    engine = shardwise.initialize(
        model, {"precision": "bf16"}, loss=lambda model, x: model(x).square().mean()
    )
    engine.train_step([torch.ones(2, 1024)])
    engine.offload_states("disk", folder)  # what is imported and compiled for it is there
    engine.reload_states()
    engine.train_step([torch.ones(2, 1024)])
    held, before = sum(engine.held_bytes().values()), resident_bytes()
    engine.offload_states("disk", folder, include)
    return engine, held, before - resident_bytes()


def test_the_memory_is_given_back(tmp_path: Path) -> None:
    engine, held, given_back = big(str(tmp_path))
    assert given_back > 0.8 * 14 * 3 * 2**20, f"of {held} bytes {given_back}"
    assert {row: size for row, size in engine.held_bytes().items() if size and row != "gradients"} == {}
    engine.close()
    assert torch.isfinite(next(engine.module.parameters())).all()


USES: dict[str, Callable[[Any, Path], Any]] = {
    "engine.batch.": lambda engine, folder: engine(torch.ones(2, 4)),
    "forward": lambda engine, folder: engine.module(torch.ones(2, 4)),
    "backward": lambda engine, folder: engine.backward(torch.ones((), requires_grad=True)),
    "step": lambda engine, folder: engine.step(),
    "train_step": lambda engine, folder: engine.train_step([torch.ones(2, 4)]),
    "evaluate": lambda engine, folder: engine.evaluate([]),
    "predict": lambda engine, folder: engine.predict([torch.ones(2, 4)]),
    "run": lambda engine, folder: engine.run("forward", torch.ones(2, 4)),
    "log_probs": lambda engine, folder: engine.log_probs(torch.ones(2, 4), torch.ones(2, 4)),
    "save": lambda engine, folder: engine.save(folder),
    "load": lambda engine, folder: engine.load(folder),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "load_state_dict": lambda engine, folder: engine.load_state_dict({}),
    "full_tensor": lambda engine, folder: engine.full_tensor("0.weight"),
    "set_full_tensor": lambda engine, folder: engine.set_full_tensor("0.weight", torch.ones(4, 4)),
    "local_tensor": lambda engine, folder: engine.local_tensor("0.weight"),
    "set_local_tensor": lambda engine, folder: engine.set_local_tensor("0.weight", torch.ones(16)),
    "gradients": lambda engine, folder: engine.gradients(),
    "full_parameters": lambda engine, folder: engine.full_parameters(),
    "gathered": lambda engine, folder: engine.gathered(),
    "save_pretrained": lambda engine, folder: engine.save_pretrained(folder),
    "offload_states": lambda engine, folder: engine.offload_states("disk", folder),
}
FORWARD = (
    "engine.batch.",
    "forward",
    "evaluate",
    "predict",
    "run",
    "state_dict",
    "full_parameters",
    "gathered",
)


def small(**more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return shardwise.initialize(model, {"precision": "bf16", **more}, loss=lambda model, x: model(x).sum())


@pytest.mark.parametrize("to", ["host", "disk"])
def test_whatever_needs_it_names_reload_states(tmp_path: Path, to: Any) -> None:
    engine = small()
    engine.offload_states(to, tmp_path)
    for call, use in USES.items():
        with pytest.raises(
            UsageError, match=rf"^{call}: .*masters, moments, weights; call engine.reload_states"
        ):
            use(engine, tmp_path)
    if to == "disk":
        with pytest.raises(UsageError, match="reload_states"):
            engine.module[0].weight.sum()
    engine.reload_states()
    engine.reload_states()
    engine.offload_states(to, tmp_path, ["masters", "moments"])
    for call, use in USES.items():
        if call in FORWARD:
            use(engine, tmp_path)
        elif call not in ("log_probs", "save_pretrained"):
            with pytest.raises(UsageError, match=rf"^{call}: .*masters, moments; call engine.reload_states"):
                use(engine, tmp_path)
    engine.close(whole=False)


def test_what_is_refused(tmp_path: Path) -> None:
    engine = small()
    x = torch.ones(2, 4)
    with pytest.raises(UsageError, match="'nvme' is no place"):
        engine.offload_states("nvme")
    with pytest.raises(UsageError, match="include: 'gradients' is none of weights"):
        engine.offload_states(include=["gradients"])
    with pytest.raises(UsageError, match="say the folder"):
        engine.offload_states("disk")
    with pytest.raises(ConfigError, match="does not exist"):
        engine.offload_states("disk", tmp_path / "none")
    with engine.gathered(), pytest.raises(UsageError, match="not inside"):
        engine.offload_states("disk", tmp_path)
    engine.backward(engine(x))
    with pytest.raises(UsageError, match="middle of a step"):
        engine.offload_states("disk", tmp_path)
    engine.step()
    engine.offload_states("disk", tmp_path)
    file = next(path for path in tmp_path.iterdir() if path.name.endswith("exp_avg"))
    with file.open("r+b") as opened:
        opened.write(b"\xff" * 8)
    with pytest.raises((DamagedError, TierError), match="exp_avg"):
        engine.reload_states()
    engine.close(whole=False)


def half_way(world: World, folder: str) -> Any:
    """The disk of one rank fails: every rank has its state as it was."""
    engine = shardwise.initialize(gpt(), Case(2, precision="bf16").config(None), world=world)
    data = engine._parts.dp.index
    engine.train_step(batches(data, 0, 1))
    try:
        engine.offload_states("disk", folder if world.rank == 0 else "/nowhere")
    except (ConfigError, CommError) as error:
        said = str(error)
    loss = engine.train_step(batches(data, 1, 1)).loss
    engine.close()
    return said, loss


def test_a_rank_that_fails_leaves_all_as_they_were(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (first, loss), (second, _) = ranks(2).run(half_way, str(tmp_path))
    assert "another rank" in first and "/nowhere does not exist" in second
    assert torch.isfinite(torch.tensor(loss)) and not [*tmp_path.iterdir()]
