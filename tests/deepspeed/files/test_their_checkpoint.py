"""Steps as DeepSpeed lays them out, made here of a plain model and its optimizer, read on our engine."""

import enum
import os
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CheckpointError, DamagedError
from shardwise.deepspeed.files import their_checkpoint
from shardwise.deepspeed.files.their_checkpoint import convert, find_step
from shardwise.deepspeed.files.whole_states import get_fp32_state_dict_from_zero_checkpoint

GROUPS = [["embed.weight", "first.weight", "last.weight"], ["first.bias"]]
RANKS = 2


class Net(nn.Module):
    """A tied table, a frozen layer, a buffer, and sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.last = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.last(self.frozen(self.first(self.embed(tokens)).tanh())))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Adam:
    named = dict(model.named_parameters())
    first, second = ([named[name] for name in names] for names in GROUPS)
    return torch.optim.AdamW([{"params": first}, {"params": second, "weight_decay": 0.0}], lr=0.01)


def batches(count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randint(11, (2, 6), generator=draws) for _ in range(count)]


@pytest.fixture
def plain() -> tuple[Net, torch.optim.Adam]:
    """A model after three plain steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_of(model)
    for batch in batches(3):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    model.seen += 4
    return model, optimizer


# DeepSpeed's side: the same names in the pickles, none of its code ---------------------------------------------------


@dataclass
class fragment_address:  # noqa: N801  its name stands in the file
    numel: int
    start: int


class ZeroStageEnum(int, enum.Enum):
    one, two, three = 1, 2, 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


_PLACES = {
    fragment_address: "deepspeed.utils.tensor_fragment",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
}


@pytest.fixture
def pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    name_as_theirs(monkeypatch)


def name_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the three classes the places that they have in such files."""
    for name in _PLACES.values():
        steps = name.split(".")
        for count in range(1, len(steps) + 1):
            monkeypatch.setitem(sys.modules, ".".join(steps[:count]), ModuleType(".".join(steps[:count])))
    for kind, name in _PLACES.items():
        setattr(sys.modules[name], kind.__name__, kind)
        monkeypatch.setattr(kind, "__module__", name)


def padded(flat: Tensor, size: int) -> Tensor:
    return torch.cat([flat, flat.new_full((size - flat.numel(),), torch.nan)])


def cut_groups(model: Net, values: dict[str, Tensor], rank: int, pads: bool) -> list[Tensor]:
    """Stages 1 and 2: a group end to end, in equal parts."""
    parts = []
    for names in GROUPS:
        flat = torch.cat([values[name].flatten() for name in names])
        size = -(-flat.numel() // RANKS)
        part = flat[rank * size : (rank + 1) * size]
        parts.append(padded(part, size) if pads else part.clone())
    return parts


def mappings(values: dict[str, Tensor], rank: int) -> list[dict[str, fragment_address]]:
    found = []
    for names in GROUPS:
        size = -(-sum(values[name].numel() for name in names) // RANKS)
        first, last, place, inside = rank * size, (rank + 1) * size, 0, {}
        for name in names:
            stop = place + values[name].numel()
            start, end = max(place, first), min(stop, last)
            if start < end:
                inside[name] = fragment_address(end - start, start - first)
            place = stop
        found.append(inside)
    return found


def cut_each(values: dict[str, Tensor], rank: int) -> list[Tensor]:
    """Stage 3: each parameter in equal parts, a group's end to end."""
    return [torch.cat([cut_one(values[name], rank) for name in names]) for names in GROUPS]


def cut_one(value: Tensor, rank: int) -> Tensor:
    flat = value.flatten()
    size = -(-flat.numel() // RANKS)
    return padded(flat[rank * size : (rank + 1) * size], size)


def save(step: Path, stage: int, model: Net, optimizer: torch.optim.Adam, **client: Any) -> None:
    """What ``save_checkpoint`` leaves on ``RANKS`` ranks."""
    step.mkdir(parents=True)
    (step.parent / "latest").write_text(step.name)
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    states = {name: optimizer.state[p] for name, p in model.named_parameters() if p.requires_grad}
    frozen = model.frozen.weight.detach()
    for rank in range(RANKS):
        cut = cut_each if stage == 3 else lambda values, rank: cut_groups(model, values, rank, True)
        inner = {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}
        moments = {
            label: cut({name: state[label] for name, state in states.items()}, rank)
            for label in ("exp_avg", "exp_avg_sq")
        }
        for group in range(len(GROUPS)):
            state = {label: flats[group] for label, flats in moments.items()}
            inner["state"][group] = {"step": torch.tensor(3.0), **state}
        part: dict[str, Any] = {"loss_scaler": LossScaler(), "dynamic_loss_scale": False}
        if stage == 3:
            part |= {"optimizer_state_dict": inner, "fp32_flat_groups": cut_each(named, rank)}
            part |= {"partition_count": RANKS, "zero_stage": ZeroStageEnum.three}
        else:
            part |= {"base_optimizer_state": inner, "partition_count": [RANKS] * len(GROUPS)}
            part |= {"single_partition_of_fp32_groups": cut_groups(model, named, rank, False)}
            part |= {"zero_stage": ZeroStageEnum(stage or 1), "param_slice_mappings": mappings(named, rank)}
        if stage:
            torch.save(
                {"optimizer_state_dict": part}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            )
        module = dict(model.state_dict())
        if stage == 3:
            module = {k: v if k == "seen" else torch.zeros(0) for k, v in module.items()}
        whole: dict[str, Any] = {
            "module": module,
            "buffer_names": ["seen"],
            "optimizer": None if stage else optimizer.state_dict(),
            "global_steps": 3,
            "global_samples": 12,
            "skipped_steps": 0,
            "lr_scheduler": {"last_batch_iteration": 2},
            "ds_config": {},
            **client,
        }
        if stage:
            whole["param_shapes"] = [{name: named[name].shape for name in names} for names in GROUPS]
            whole["shared_params"] = {"head.weight": "embed.weight"}
        if stage == 3:
            whole["frozen_param_shapes"] = {"frozen.weight": frozen.shape}
            whole["frozen_param_fragments"] = {"frozen.weight": cut_one(frozen, rank)}
        name = (
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        )
        torch.save(whole, step / name)


# Ours --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_theirs_goes_on_as_the_plain_loop(
    stage: int, tmp_path: Path, plain: tuple[Net, torch.optim.Adam], pickled: None
) -> None:
    model, optimizer = plain
    save(tmp_path / "theirs" / "global_step3", stage, model, optimizer, note="mine")
    step = find_step(tmp_path / "theirs")
    assert step is not None
    assert their_checkpoint.rewrite(step, tmp_path / "ours", GROUPS if stage == 0 else None) == []
    torch.manual_seed(7)
    fresh = Net()
    engine = shardwise.initialize(fresh, {}, optimizer=optimizer_of(fresh), loss=loss_of)
    found = engine.load(tmp_path / "ours")
    assert found is not None and found["client"] == {"note": "mine"}
    assert found["counters"]["global_samples"] == 12 and found["lr_scheduler"] == {"last_batch_iteration": 2}
    assert engine.step_count == 3
    for name, value in model.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value), name
    for batch in batches(5)[3:]:
        engine.train_step([batch])
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    for name, value in model.state_dict().items():  # the moments and the step count came along
        assert torch.allclose(engine.state_dict()[name], value, rtol=0, atol=1e-7), name
    engine.close()


def test_a_process_of_its_own_reads_the_files(
    tmp_path: Path, plain: tuple[Net, torch.optim.Adam], pickled: None
) -> None:
    save(tmp_path / "theirs" / "global_step3", 2, *plain)
    assert convert(tmp_path / "theirs" / "global_step3", tmp_path / "ours") == []
    assert [path.name for path in (tmp_path / "ours").glob("step_*")] == ["step_00000003"]
    save(tmp_path / "other" / "global_step3", 0, *plain, hook=Harmful(str(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"a pickle can hold code, which is never run here"):
        their_checkpoint.rewrite(tmp_path / "other" / "global_step3", tmp_path / "none", GROUPS)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "none").exists()


class Harmful:
    """Runs a command where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_moments_without_names_are_left_out_or_refused(
    tmp_path: Path, plain: tuple[Net, torch.optim.Adam], pickled: None
) -> None:
    save(tmp_path / "theirs" / "global_step3", 0, *plain)
    step = tmp_path / "theirs" / "global_step3"
    assert "saves it without names" in their_checkpoint.rewrite(step, tmp_path / "ours", None)[0]
    with pytest.raises(CheckpointError, match="other groups or shapes"):
        their_checkpoint.rewrite(step, tmp_path / "more", [GROUPS[1], GROUPS[0]])


def test_what_is_not_whole_is_refused(
    tmp_path: Path, plain: tuple[Net, torch.optim.Adam], pickled: None
) -> None:
    model, optimizer = plain
    step = tmp_path / "theirs" / "global_step3"
    save(step, 1, model, optimizer)
    second = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cut short, damaged"):
        their_checkpoint.rewrite(step, tmp_path / "ours", None)
    second.unlink()
    with pytest.raises(DamagedError, match="the state of rank 0 is cut in 2, and 1 files"):
        their_checkpoint.rewrite(step, tmp_path / "ours", None)
    expert = step / "layer_0_expert_1_mp_rank_00_model_states.pt"
    expert.write_bytes(whole)
    with pytest.raises(
        CheckpointError, match="is of experts, which is not read here; load it in .* with ep_size=1"
    ):
        their_checkpoint.rewrite(step, tmp_path / "ours", None)
    expert.unlink()
    (step / "mp_rank_01_model_states.pt").write_bytes(whole)
    with pytest.raises(CheckpointError, match="of tensor-parallel ranks"):
        their_checkpoint.rewrite(step, tmp_path / "ours", None)
    assert find_step(tmp_path) is None
    (step.parent / "latest").write_text("../global_step3")
    with pytest.raises(CheckpointError, match="not a plain name"):
        find_step(step.parent)
    assert not (tmp_path / "ours").exists()


def test_sizes_are_those_that_nothing_divides(plain: tuple[Net, torch.optim.Adam]) -> None:
    assert all(prod(p.shape) % RANKS for name, p in plain[0].named_parameters() if p.requires_grad)


OPTIM, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def inner_of(part: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state in a rank's file."""
    part = part["optimizer_state_dict"]
    found = part.get("optimizer_state_dict") or part["base_optimizer_state"]
    return found["state"]


def shorter(part: dict[str, Any]) -> None:
    state = inner_of(part)[0]
    state["exp_avg"] = state["exp_avg"][:-3].clone()


def longer_masters(part: dict[str, Any]) -> None:
    part = part["optimizer_state_dict"]
    key = "fp32_flat_groups" if "fp32_flat_groups" in part else "single_partition_of_fp32_groups"
    part[key][0] = torch.cat([part[key][0], torch.ones(9)])


def called(name: str) -> Any:
    def change(part: dict[str, Any]) -> None:
        for state in inner_of(part).values():
            state[name] = state.pop("exp_avg")

    return change


def later(part: dict[str, Any]) -> None:
    for state in inner_of(part).values():
        state["step"] += 1


def later_in_one_group(part: dict[str, Any]) -> None:
    inner_of(part)[1]["step"] += 1


def without_a_shape(model: dict[str, Any]) -> None:
    model["param_shapes"][0].pop("first.weight")


def other_shape(model: dict[str, Any]) -> None:
    model["param_shapes"][0]["first.weight"] = torch.Size((5, 7))


def longer_frozen(model: dict[str, Any]) -> None:
    model["frozen_param_fragments"]["frozen.weight"] = torch.ones(30)


def expanded_master(part: dict[str, Any]) -> None:
    part["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.ones(1).expand(10**9)


CHANGES: list[tuple[int, str, Any, str]] = [
    (1, OPTIM, shorter, "exp_avg has the shape .* were cut or are of different runs"),
    (3, OPTIM, shorter, "exp_avg has the shape .* were cut or are of different runs"),
    (2, OPTIM, longer_masters, "exp_avg has the shape .* were cut or are of different runs"),
    (3, OPTIM, longer_masters, "exp_avg has the shape|the shapes of the parameters ask for"),
    (1, OPTIM, called("master"), "a state called 'master'"),
    (3, OPTIM, called("weight"), "a state called 'weight'"),
    (3, OPTIM, called("../x"), "a state called '../x'"),
    (2, OPTIM, later, "the optimizer of rank 1 counts .*'step': 4.*of different steps"),
    (
        3,
        OPTIM,
        lambda part: part["optimizer_state_dict"].update(zero_stage=2),
        "of ZeRO stage 2 and rank 0's of 3",
    ),
    (
        1,
        OPTIM,
        lambda part: part["optimizer_state_dict"].update(partition_count=[3, 3]),
        "is cut in 3, and 2 files",
    ),
    (1, OPTIM, expanded_master, "a tensor of shape .1000000000. has 4 bytes in the file"),
    (3, MODEL, without_a_shape, "param_shapes of rank 1 is not that of rank 0"),
    (3, MODEL, other_shape, "param_shapes of rank 1 is not that of rank 0"),
    (3, MODEL, lambda model: model.update(global_steps=4), "global_steps of rank 1 is not that of rank 0"),
    (3, MODEL, longer_frozen, "rank 1's part of frozen.weight has 30 elements; 25 are expected"),
]


def changed(path: Path, change: Any) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize(("stage", "file", "change", "says"), CHANGES)
def test_ranks_that_differ_are_refused(
    stage: int,
    file: str,
    change: Any,
    says: str,
    tmp_path: Path,
    plain: tuple[Net, torch.optim.Adam],
    pickled: None,
) -> None:
    """Moments that were too short were left out without a word, and of unlike ranks rank 0 counted."""
    step = tmp_path / "theirs" / "global_step3"
    save(step, stage, *plain)
    changed(step / file.format(1), change)
    with pytest.raises(CheckpointError, match=says):
        their_checkpoint.rewrite(step, tmp_path / "ours", None)
    assert not (tmp_path / "ours").exists()


def both(change: Any) -> Any:
    def apply(step: Path, file: str) -> None:
        for rank in range(RANKS):
            changed(step / file.format(rank), change)

    return apply


@pytest.mark.parametrize(
    ("stage", "file", "change", "says"),
    [
        (
            3,
            MODEL,
            both(lambda model: model.update(param_shapes=[])),
            "the shapes of the parameters ask for 0",
        ),
        (3, MODEL, both(without_a_shape), "the shapes of the parameters ask for"),
        (
            3,
            MODEL,
            lambda step, file: (step / file.format(1)).unlink(),
            "2 files of optimizer states and 1 of model",
        ),
        (
            3,
            OPTIM,
            lambda step, file: [(step / file.format(r)).unlink() for r in range(RANKS)],
            "are missing; copy",
        ),
        (
            2,
            OPTIM,
            lambda step, file: [(step / file.format(r)).unlink() for r in range(RANKS)],
            "are missing; copy",
        ),
        (
            2,
            OPTIM,
            both(later_in_one_group),
            "different numbers of steps .step is 3 and 4.*load the weights alone",
        ),
    ],
)
def test_what_is_missing_on_all_ranks(
    stage: int,
    file: str,
    change: Any,
    says: str,
    tmp_path: Path,
    plain: tuple[Net, torch.optim.Adam],
    pickled: None,
) -> None:
    step = tmp_path / "theirs" / "global_step3"
    save(step, stage, *plain)
    change(step, file)
    with pytest.raises(CheckpointError, match=says):
        their_checkpoint.rewrite(step, tmp_path / "ours", None)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_without_state_is_told(
    stage: int, tmp_path: Path, plain: tuple[Net, torch.optim.Adam], pickled: None
) -> None:
    step = tmp_path / "theirs" / "global_step3"
    save(step, stage, *plain)
    both(lambda part: inner_of(part).clear())(step, OPTIM)
    assert their_checkpoint.rewrite(step, tmp_path / "ours", None) == [
        "moments: the optimizer's state holds none"
    ]


def test_latest_is_a_small_regular_file(
    tmp_path: Path, plain: tuple[Net, torch.optim.Adam], pickled: None
) -> None:
    save(tmp_path / "theirs" / "global_step3", 2, *plain)
    latest = tmp_path / "theirs" / "latest"
    latest.unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(latest)
        with pytest.raises(CheckpointError, match="latest: not a regular file; expected .* the newest tag"):
            get_fp32_state_dict_from_zero_checkpoint(tmp_path / "theirs")
        latest.unlink()
    assert "embed.weight" in get_fp32_state_dict_from_zero_checkpoint(tmp_path / "theirs", "global_step3")
