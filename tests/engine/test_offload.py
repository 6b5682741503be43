"""Masters and moments on a disk: every loss, norm, weight and moment has the bits of a run in memory."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, DamagedError, TierError
from shardwise.comm.world import World
from shardwise.models import Gpt, GptPolicy
from shardwise.plan.action import Kind
from shardwise.plan.plan import bytes_by_tier

VOCABULARY, CONTEXT = 13, 6


class Case(NamedTuple):
    """A way to train, beside where its state lies."""

    stage: int = 0
    fraction: float = 1.0
    accumulation: int = 1
    precision: str = "fp32"
    tp: int = 1
    pp: int = 1
    recompute: str = "none"
    optimizer: str = "adamw"
    step: str = "before_use"
    replicate: int = 1
    prefetch: int = 0
    buffers: int = 1
    parameters: str = "device"

    def config(self, disk: str | None) -> dict[str, Any]:
        """``disk``: folder for the state."""
        config: dict[str, Any] = {
            "mesh": {"tp": self.tp, "pp": self.pp},
            "zero": {"stage": self.stage, "prefetch_bytes": self.prefetch},
            "precision": self.precision,
            "recompute": self.recompute,
            "batch": {"accumulation": self.accumulation},
            "optimizer": {"type": self.optimizer, "lr": 0.05}
            | ({"momentum": 0.9} if self.optimizer == "sgd" else {}),
            "max_grad_norm": 0.3,
            "check_first_step": "off",
        }
        if self.replicate > 1:
            config["mesh"]["dp"] = {"replicate": self.replicate, "shard": 2}
        if disk is not None:
            config["offload"] = {
                "optimizer": "disk", "disk_path": disk, "fraction": self.fraction, "step": self.step,
                "buffers": self.buffers, "parameters": self.parameters,
            }  # fmt: skip
        return config


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(GptPolicy(layers=3, width=8, heads=2, hidden=12, context=CONTEXT, vocab=VOCABULARY))


def batches(rank: int, step: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (2, CONTEXT + 1), generator=generator)
        found.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    return found


class Run(NamedTuple):
    """What a run came to, on this rank."""

    steps: list[tuple[str, str]]
    """Loss and norm, to the bit."""
    state: dict[str, Tensor]
    """Weights, masters and moments, whole."""
    kinds: list[Kind]
    """Of the list's end."""
    rows: dict[str, int]
    """The ledger."""
    predicted: dict[str, int]


def state_of(engine: Any) -> dict[str, Tensor]:
    found = dict(engine.state_dict())
    labels = {info.label for info in engine.plan.registry.of_kind("moment")}
    with ExitStack() as stack:
        for bucket, _ in engine._parts.trained:  # or each tensor brings all of its bucket
            stack.enter_context(bucket.opened())
        for name in sorted({info.name for info in engine.plan.registry.of_kind("master")}):
            for of in ("master", *sorted(labels)):
                found[f"{of} {name}"] = engine.full_tensor(name, of)
    return found


def train(world: World, case: Case, disk: str | None, steps: int = 3) -> Run:
    engine = shardwise.initialize(gpt(), case.config(disk), world=world)
    data = engine._parts.dp.index
    results = [engine.train_step(batches(data, step, case.accumulation)) for step in range(steps)]
    plan = engine.plan
    run = Run(
        [(result.loss.hex(), result.grad_norm.hex()) for result in results],
        state_of(engine),
        [action.kind for action in plan.own.actions],
        {row: size for row, size in engine._parts.site.ledger.bytes_by_row().items() if size},
        plan.own.bytes_of_units(plan.mesh),
    )
    engine.close()
    return run


_PLAIN: dict[tuple[int, Case], Run] = {}
"""Of this process: cases that differ in where state lies alone have one run in memory."""


def plain_run(world: World, case: Case) -> Run:
    key = (world.size, case._replace(fraction=1.0, buffers=1, parameters="device", step="before_use"))
    if key not in _PLAIN:
        _PLAIN[key] = train(world, case, None)
    return _PLAIN[key]


def compare(world: World, case: Case, folder: str) -> tuple[bool, list[str], Run]:
    """(whether steps are equal, names of tensors that differ, the run with state on the disk)."""
    plain, moved = plain_run(world, case), train(world, case, folder)
    assert plain.state.keys() == moved.state.keys()
    unlike = [name for name, tensor in plain.state.items() if not torch.equal(tensor, moved.state[name])]
    return plain.steps == moved.steps, unlike, moved


def compare_all(world: World, cases: list[Case], folder: str) -> list[tuple[bool, list[str], Run]]:
    return [compare(world, case, folder) for case in cases]


ALONE = [
    Case(),
    Case(fraction=0.5, buffers=2, precision="bf16"),
    Case(accumulation=2, optimizer="sgd", step="at_end"),
    Case(optimizer="adagrad", recompute="full"),
    Case(parameters="disk", accumulation=2),
    Case(parameters="disk", precision="bf16", fraction=0.5, recompute="full", prefetch=1 << 20),
]
PAIR = [
    *(Case(stage, fraction, accumulation=2) for stage, fraction in ((0, 0.5), (1, 1.0), (2, 0.5), (3, 1.0))),
    Case(3, precision="bf16", prefetch=1 << 20),
    Case(1, precision="bf16", prefetch=1 << 20, accumulation=2),
    Case(3, parameters="disk", accumulation=2),
    Case(3, parameters="disk", precision="bf16", fraction=0.5, prefetch=1 << 20),
    Case(0, tp=2, parameters="disk"),
    Case(0, pp=2, accumulation=3),
]
REST = [Case(stage, fraction, accumulation=2) for stage, fraction in ((0, 1.0), (1, 0.5), (2, 1.0), (3, 0.5))]
FOUR = [
    Case(3, replicate=2, accumulation=2),
    Case(2, tp=2, fraction=0.5),
    Case(3, pp=2, accumulation=2, precision="bf16", parameters="disk"),
]


def hold(found: list[tuple[bool, list[str], Run]], cases: list[Case]) -> None:
    for case, (equal, unlike, moved) in zip(cases, found, strict=True):
        assert equal and not unlike, (case, unlike)
        ends = moved.kinds[moved.kinds.index(Kind.NORM) :]
        assert ends.count(Kind.LOAD) == ends.count(Kind.STORE) > 0, case
        assert (ends.count(Kind.STEP) > ends.count(Kind.LOAD)) == (case.fraction < 1), case
        assert {row: moved.rows.get(row, 0) for row in moved.predicted} == moved.predicted, case
        assert moved.rows["disk"] > 0, case


def test_one_process_has_the_same_bits(tmp_path: Path) -> None:
    hold([compare(shardwise.comm.world.join(), case, str(tmp_path)) for case in ALONE], ALONE)
    assert not [path for path in tmp_path.iterdir() if path.name != "shardwise.lock"]


@pytest.mark.parametrize(
    ("size", "cases"), [(2, PAIR), (4, FOUR), pytest.param(2, REST, marks=pytest.mark.soak)]
)
def test_ranks_have_the_same_bits(ranks: Any, tmp_path: Path, size: int, cases: list[Case]) -> None:
    for found in ranks(size).run(compare_all, cases, str(tmp_path)):
        hold(found, cases)


def ahead(world: World, disk: str) -> list[str]:
    """When in a step block 1's shard is asked for and sent, among the forward passes before it."""
    case = Case(3, parameters="disk", prefetch=1)
    engine = shardwise.initialize(gpt(), case.config(disk), world=world)
    engine.train_step(batches(world.rank, 0, 1))
    found: list[str] = []
    (bucket,) = [
        bucket for bucket, _ in engine._parts.trained if bucket.layout.slots[0].name.startswith("blocks.1")
    ]
    bring, gather = bucket.state.bring, bucket.weight._around.shard.all_gather

    def note(what: str) -> None:
        if not found or found[-1] != what:
            found.append(what)

    def brought(*given: Any) -> Any:
        note("asked")
        return bring(*given)

    def gathered(output: Tensor, shard: Tensor, what: str, **more: Any) -> Any:
        if what == bucket.what:
            note("sent")
        return gather(output, shard, what, **more)

    bucket.state.bring, bucket.weight._around.shard.all_gather = brought, gathered
    watched = {
        "root": engine.module.embed,
        "block 0": engine.module.blocks[0],
        "block 1": engine.module.blocks[1],
    }
    for where, module in watched.items():
        module.register_forward_pre_hook(lambda *_, where=where: note(where))
    engine.backward(engine(batches(world.rank, 1, 1)[0]))
    bucket.weight._around.shard.all_gather = gather
    engine.step()
    engine.close()
    return found


def test_a_gather_finds_the_shard_that_it_sends(ranks: Any, tmp_path: Path) -> None:
    """The disk is asked a Unit before the gather, which waits for the Unit's update behind the compute in front."""
    found = ranks(2).run(ahead, str(tmp_path))
    assert found == [["root", "asked", "block 0", "sent", "block 1", "asked", "sent"]] * 2


def resumed(
    world: World, folder: str, first: Case, second: Case, disks: tuple[str | None, str | None]
) -> list[str]:
    """Saved with state here, resumed with state there: what differs from a run in one go."""
    whole = train(world, first, None, steps=4)
    engine = shardwise.initialize(gpt(), first.config(disks[0]), world=world)
    for step in range(2):
        engine.train_step(batches(world.rank, step, 1))
    engine.save(folder)
    engine.close()
    engine = shardwise.initialize(gpt(), second.config(disks[1]), world=world)
    engine.load(folder)
    results = [engine.train_step(batches(world.rank, step, 1)) for step in range(2, 4)]
    state = state_of(engine)
    engine.close()
    unlike = [name for name, tensor in whole.state.items() if not torch.equal(tensor, state[name])]
    if [(result.loss.hex(), result.grad_norm.hex()) for result in results] != whole.steps[2:]:
        unlike.append("losses and norms")
    return unlike


def resumed_all(world: World, folder: str) -> list[list[str]]:
    disk = f"{folder}/disk"
    ways = [
        (Case(3, parameters="disk"), Case(3, fraction=0.5), (disk, disk)),
        (Case(2, precision="bf16"), Case(2, precision="bf16"), (disk, None)),
        (Case(1, optimizer="sgd"), Case(1, optimizer="sgd"), (None, disk)),
    ]
    return [resumed(world, f"{folder}/{i}", *way) for i, way in enumerate(ways)]


def test_a_checkpoint_knows_no_tier(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    assert ranks(2).run(resumed_all, str(tmp_path)) == [[[]] * 3] * 2


def edited(world: World, disk: str | None, parameters: str) -> dict[str, Tensor]:
    """Weights and moments that a user changes between steps, by every way there is."""
    engine = shardwise.initialize(gpt(), Case(3, parameters=parameters).config(disk), world=world)
    engine.train_step(batches(world.rank, 0, 1))
    name = (
        "blocks.1.mlp.down.weight"
        if "blocks.1.mlp.down.weight" in dict(engine.module.named_parameters())
        else ""
    )
    name = name or next(each for each, _ in engine.module.named_parameters() if each.startswith("blocks.1"))
    engine.set_full_tensor(name, engine.full_tensor(name, "exp_avg") * 2, "exp_avg")
    with engine.full_parameters(write=True) as whole:
        whole[name].mul_(0.5)
    engine.train_step(batches(world.rank, 1, 1))
    engine.load_state_dict({key: value + 1 for key, value in engine.state_dict().items()})
    mine = engine.local_tensor(name, "master")
    engine.set_local_tensor(name, mine + 1, "master")
    engine.train_step(batches(world.rank, 2, 1))
    found = state_of(engine)
    engine.close()
    return found


def edited_both(world: World, folder: str, parameters: str) -> list[str]:
    plain, moved = edited(world, None, parameters), edited(world, folder, parameters)
    return [name for name, tensor in plain.items() if not torch.equal(tensor, moved[name])]


@pytest.mark.parametrize("parameters", ["device", "disk"])
def test_edits_between_steps_reach_the_disk(ranks: Any, tmp_path: Path, parameters: str) -> None:
    assert ranks(2).run(edited_both, str(tmp_path), parameters) == [[], []]


def looked_at(world: World, disk: str | None, stage: int) -> tuple[dict[str, Tensor], list[bool]]:
    """Gradients that are read, changed and thrown away between backward and step; and which of them had left."""
    engine = shardwise.initialize(gpt(), Case(stage).config(disk), world=world)
    left, found = [], {}
    name = "blocks.1.attention.qkv.weight"
    for step in range(4):
        engine.backward(engine(batches(world.rank, step, 1)[0]))
        left += [bucket.gradient.has_left for bucket, _ in engine._parts.trained]
        if step == 1:
            found |= {f"gradient {each}": tensor for each, tensor in engine.gradients().items()}
        if step == 2:
            engine.set_full_tensor(name, engine.full_tensor(name, "gradient") * 3, "gradient")
        if step == 3:
            engine.discard()
            engine.backward(engine(batches(world.rank, 9, 1)[0]))
        engine.step()
    found |= state_of(engine)
    engine.close()
    return found, left


def looked_at_both(world: World, folder: str) -> list[tuple[list[str], bool]]:
    answers = []
    for stage in (0, 2, 3):
        (plain, stayed), (moved, left) = looked_at(world, None, stage), looked_at(world, folder, stage)
        unlike = [name for name, tensor in plain.items() if not torch.equal(tensor, moved[name])]
        answers.append((unlike, all(left) and not any(stayed)))
    return answers


def test_gradients_leave_and_come_back_when_they_are_asked_for(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(looked_at_both, str(tmp_path)) == [[([], True)] * 3] * 2


def added_up(world: World, disk: str | None, case: Case) -> tuple[dict[str, Any], list[bool]]:
    """Two microbatches a step, of which the second has one backward pass more than anybody knew of (without replicas,
    whose sums were taken by then: other last digits), and gradients that are looked at; whether they had left after
    each backward pass, and before the first update."""
    config = case.config(disk)
    config["zero"]["reductions_under_way"] = int(case.stage == 2)
    engine = shardwise.initialize(gpt(), config, world=world)
    place, left = engine._parts.dp.index, []
    handlers, norms = engine._parts.walker.handlers, []
    load = handlers[Kind.LOAD]

    def look() -> None:
        left.append(all(bucket.gradient.has_left for bucket, _ in engine._parts.trained[1:]))

    def load_first(action: Any) -> None:
        if not norms:
            look()  # the norm has asked for none of them
        load(action)

    handlers[Kind.LOAD] = load_first
    for step in range(3):
        for number in (0, 1) + (2,) * (step == 1 and case.replicate == 1):
            engine.backward(engine(batches(place, 10 * step + number, 1)[0]))
            look()
            if number == 0:
                engine.step()
        found = engine.gradients() if step == 2 else {}
        norms.append(engine.step().grad_norm)
    found |= {f"{name} after": tensor for name, tensor in state_of(engine).items()}
    found["norms"] = torch.tensor(norms, dtype=torch.float64)
    engine.close()
    return found, left


def added_up_both(world: World, folder: str, cases: list[Case]) -> list[tuple[list[str], bool]]:
    answers = []
    for case in cases:
        (plain, _), (moved, left) = added_up(world, None, case), added_up(world, folder, case)
        unlike = [name for name, tensor in plain.items() if not torch.equal(tensor, moved[name])]
        answers.append((unlike, all(left)))
    return answers


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (1, [Case(accumulation=2)]),
        (2, [Case(2, accumulation=2), Case(3, accumulation=2, precision="bf16")]),
        (4, [Case(3, replicate=2, accumulation=2)]),
    ],
)
def test_gradients_leave_between_microbatches(
    ranks: Any, tmp_path: Path, size: int, cases: list[Case]
) -> None:
    assert ranks(size).run(added_up_both, str(tmp_path), cases) == [[([], True)] * len(cases)] * size


def test_a_step_that_is_skipped_moves_nothing(tmp_path: Path) -> None:
    """fp16 overflows: no LOAD is begun, and the next steps have the bits of a run in memory."""

    def run(disk: str | None) -> tuple[list[bool], list[Tensor]]:
        config = Case(precision="fp16").config(disk)
        config["precision"] = {"compute": "fp16", "loss_scale": {"init_scale": 2.0**24}}
        engine = shardwise.initialize(gpt(), config)
        skipped = [engine.train_step(batches(0, step, 1)).skipped for step in range(40)]
        found = list(state_of(engine).values())
        engine.close()
        return skipped, found

    (skipped, plain), (again, moved) = run(None), run(str(tmp_path))
    assert skipped == again and any(skipped) and not all(skipped)
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ({"type": "lamb"}, "looks at whole tensors"),
        ({"type": "sgd", "momentum": 0.9, "dampening": 0.5}, "makes state in its first step"),
    ],
)
def test_what_cannot_move_is_refused(tmp_path: Path, optimizer: dict[str, Any], why: str) -> None:
    config = Case().config(str(tmp_path)) | {"optimizer": {"lr": 0.1, **optimizer}}
    with pytest.raises(ConfigError, match=why) as refused:
        shardwise.initialize(gpt(), config)
    assert not [*tmp_path.iterdir()], f"{refused} is held, as by a notebook, and holds no files"


def test_a_disk_that_cannot_be_read_is_let_go_of(tmp_path: Path) -> None:
    engine = shardwise.initialize(gpt(), Case(parameters="disk").config(str(tmp_path)))
    engine.train_step(batches(0, 0, 1))
    engine._parts.site.tiers.settle()
    (tmp_path / "shardwise.rank0.weight").write_bytes(b"")
    with pytest.raises(DamagedError, match="weight of Unit"):
        engine.close()
    assert not [*tmp_path.iterdir()]
    engine.close()


def test_a_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="offload.disk_path"):
        shardwise.initialize(gpt(), {"offload": {"optimizer": "disk"}})


def test_host_memory_is_where_a_cpu_keeps_state(tmp_path: Path) -> None:
    config = Case().config(None) | {"offload": {"optimizer": "host"}}
    engine = shardwise.initialize(gpt(), config)
    assert engine.config.offload.optimizer == "device"
    engine.close()


def test_a_flipped_bit_is_seen_before_it_is_used(tmp_path: Path) -> None:
    engine = shardwise.initialize(gpt(), Case().config(str(tmp_path)))
    engine.train_step(batches(0, 0, 1))
    engine.state_dict()
    engine._parts.site.tiers.settle()
    (file,) = tmp_path.glob("*exp_avg_sq*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(DamagedError, match="exp_avg_sq of Unit"):
        for step in range(1, 4):
            engine.train_step(batches(0, step, 1))
    with pytest.raises((DamagedError, TierError)):
        engine.save(tmp_path / "checkpoints")
    engine.close(whole=False)


def damaged(world: World, folder: str, call: str) -> tuple[str, str]:
    """A bit of each Unit's state is turned on rank 1 before ``call``: what it raises."""
    disk = Path(folder) / f"disk {call}"
    disk.mkdir(exist_ok=True)
    engine = shardwise.initialize(gpt(), Case(2).config(str(disk)), world=world)
    engine.train_step(batches(world.rank, 0, 1))
    engine.save(folder)
    engine.train_step(batches(world.rank, 1, 1))
    engine._parts.site.tiers.settle()
    if world.rank == 1:
        file = disk / "shardwise.rank1.exp_avg"
        content = bytearray(file.read_bytes())
        content[::4096] = bytes(byte ^ 4 for byte in content[::4096])
        file.write_bytes(content)
    try:
        getattr(engine, call)(folder)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        engine.close(whole=False)
    return "nothing", ""


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_checkpoint_is_not_blamed_for_a_disk(
    ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], call: str
) -> None:
    """State that is damaged while it is saved, or filled, is named on all ranks, and no older step is tried."""
    for kind, said in ranks(2).run(damaged, str(tmp_path), call):
        assert kind == "DamagedStateError" and "shardwise.rank1.exp_avg: exp_avg of Unit" in said
        assert "can be loaded" not in said
    assert "trying" not in capfd.readouterr().err


def test_the_plan_says_what_lies_where(tmp_path: Path) -> None:
    engine = shardwise.initialize(gpt(), Case(fraction=0.5).config(str(tmp_path)))
    rows = engine.state_bytes()
    tiers = bytes_by_tier(rows)
    assert tiers == {"device": sum(rows.values()) - rows["disk"], "disk": rows["disk"]}
    assert f"and {rows['disk'] / 2**10:.1f} KiB on a disk" in str(engine.plan), str(engine.plan)
    engine.close()


class Around(nn.Module):
    """Blocks, the last of which data may go round."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        for block in self.blocks[: 2 if skips else 3]:
            x = torch.tanh(block(x))
        return x.square().mean()


def gone_around(disk: str | None) -> list[Tensor]:
    """Steps whose data leave the last block out, now and then; its state comes late from the disk."""
    torch.manual_seed(0)
    offload = {"optimizer": "disk", "disk_path": disk, "buffers": 1} if disk else {}
    config = {"zero": {"units": ["blocks.*"]}, "optimizer": {"type": "adamw", "lr": 0.1}, "offload": offload}
    engine = shardwise.initialize(Around(), config, loss=lambda model, given: model(*given))
    state = engine._parts.trained[-1].bucket.state
    if state is not None:
        load = state.load

        def late(*args: Any, **keys: Any) -> None:
            time.sleep(0.2)
            load(*args, **keys)

        state.load = late  # type: ignore[method-assign]
    for step in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        engine.train_step([(x, step % 2 == 1)])
    found = list(state_of(engine).values())
    engine.close()
    return found


def test_a_gradient_waits_for_the_update_that_reads_the_last_one(tmp_path: Path) -> None:
    for plain, moved in zip(gone_around(None), gone_around(str(tmp_path)), strict=True):
        assert torch.equal(plain, moved)
