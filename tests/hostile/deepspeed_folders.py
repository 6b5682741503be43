"""Steps as DeepSpeed leaves them, of which the file of one rank says something else."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import CheckpointError
from shardwise.deepspeed.files.their_checkpoint import find_step, rewrite
from shardwise.formats.safetensors import read_header
from tests.deepspeed.files.test_their_checkpoint import (
    Net,
    batches,
    loss_of,
    name_as_theirs,
    optimizer_of,
    save,
)

from .trial import Case, Kind, of_bytes

OPTIM, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
KEYS = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
"""Of a file of model states: what decides where the numbers of a tensor are."""
PARTS = ("optimizer_state_dict", "base_optimizer_state", "fp32_flat_groups", "single_partition_of_fp32_groups",
         "partition_count", "zero_stage", "param_slice_mappings")  # fmt: skip


def maker(stage: int) -> Any:
    def make(folder: Path) -> Path:
        torch.manual_seed(0)
        model = Net()
        optimizer = optimizer_of(model)
        for batch in batches(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        with pytest.MonkeyPatch.context() as patch:
            name_as_theirs(patch)
            save(folder / "theirs" / "global_step3", stage, model, optimizer)
        return folder / "theirs"

    return make


def read(root: Path) -> Any:
    """All tensors of the step that is written, and what is said to be left out."""
    step = find_step(root)
    if step is None:
        raise CheckpointError(f"{root} holds no step")
    left_out = rewrite(step, root / "ours", None)
    return left_out, sorted(
        (file.parent.name, name, stored.shape, str(stored.dtype), stored.read(0, stored.elements).tolist())
        for file in (root / "ours").glob("step_*/**/*.safetensors")
        for name, stored in read_header(file).items()
    )


def places_in(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of nested containers and stand-ins lie."""
    if hasattr(value, "numel") and hasattr(value, "start"):
        value = vars(value)
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*above, key)
        yield from places_in(inner, (*above, key))


def edit(draws: random.Random, content: Any) -> str:
    """Damage one value of ``content`` in place."""
    *outer, last = draws.choice(list(places_in(content)))
    target = content
    for key in outer:
        target = target[key] if isinstance(target, dict | list) else vars(target)[key]
    target = target if isinstance(target, dict | list) else vars(target)
    value = target[last]
    told = ".".join(map(str, (*outer, last)))
    if isinstance(value, torch.Tensor) and draws.random() < 0.7:
        size = value.numel()
        ways = {
            "cut": lambda: value.flatten()[: size // 2].clone(),
            "grown": lambda: torch.cat([value.flatten(), torch.ones(7)]),
            "wide": lambda: value.expand(3, *value.shape),
            "empty": lambda: torch.empty(0),
            "other": lambda: value.to(torch.int8),
            "twice": lambda: torch.stack([value, value]),
            "sparse": lambda: torch.ones(3).to_sparse(),
            "huge": lambda: torch.ones(1).expand(10**10),
            "scalar": lambda: torch.tensor(3.0),
        }
        way = draws.choice(list(ways))
        target[last] = ways[way]()
        return f"{told} {way}"
    new = draws.choice(
        [None, -1, 10**9, 2**62, "x" * 300, "\x1b[2J", [], {}, [[]], float("nan"), "remove", "rename"]
    )
    if new == "remove":
        del target[last]
    elif new == "rename" and isinstance(target, dict):
        target[draws.choice(["master", "weight", "../x", "other"])] = target.pop(last)
    else:
        target[last] = new
    return f"{told} {str(new)[:20]!r}"


def cases(count: int) -> Iterator[Case]:
    for number in range(count):
        draws = random.Random(f"deepspeed {number}")
        if number % 4 == 0:
            name = draws.choice([OPTIM, MODEL, "mp_rank_00_model_states.pt"]).format(draws.randrange(2))

            def file_of(root: Path, name: str = name) -> Path:
                path = root / "global_step3" / name
                return path if path.exists() else root / "global_step3" / OPTIM.format(0)

            yield of_bytes(draws, file_of)._replace(name=f"{name}, bytes {number}")
            continue
        rank, of_model = draws.randrange(2), draws.random() < 0.3

        def damage(
            root: Path, draws: random.Random = draws, rank: int = rank, of_model: bool = of_model
        ) -> None:
            path = root / "global_step3" / MODEL.format(rank)
            if not (of_model and path.exists()):
                path, of_model = root / "global_step3" / OPTIM.format(rank), False
            with pytest.MonkeyPatch.context() as patch:
                name_as_theirs(patch)
                content = torch.load(path, weights_only=False)
                inside = content if of_model else content["optimizer_state_dict"]
                chosen = {key: inside[key] for key in (KEYS if of_model else PARTS) if key in inside}
                edit(draws, chosen)
                for key in KEYS if of_model else PARTS:
                    inside.pop(key, None)
                inside.update(chosen)
                torch.save(content, path)

        yield Case(f"{'model' if of_model else 'optim'} of rank {rank}, edit {number}", damage)


KINDS = tuple(Kind(f"deepspeed stage {stage}", maker(stage), read, cases) for stage in (2, 3))
