"""Budgets: what one step asks of the device, for each way to train. The table stands in docs/accelerators.md.

    host syncs          exact, by (what, file:function); their number may only shrink
    device operations   an upper bound

``python -m tests.accelerator.budget`` writes the page anew where nothing grew, and says what did; ``--grow`` writes it
all the same, for a new row or a better count; other words measure the rows alone that have one of them in their name.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from shardwise.kernels import choice
from shardwise.models import Gpt, GptPolicy
from shardwise.models.gpt import GptExperts
from shardwise.parallel.expert.policy import RouterPolicy
from tests.accelerator.crew import Crew
from tests.accelerator.mirror import mirror_world
from tests.accelerator.pretend import Bench, Sync, register
from tests.engine import tables_net

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"
BEGIN, END = "<!-- budgets: begin -->\n", "<!-- budgets: end -->\n"
VOCABULARY, CONTEXT, LAYERS, MICROBATCHES = 19, 8, 2, 2
_PLACE = re.compile(r"(\d+) ([^`]+) `([^`]+)`")


class Budget(NamedTuple):
    """Of one step."""

    syncs: dict[Sync, int]
    operations: int


class Row(NamedTuple):
    """One way to train: what it is made of, and on how many ranks, all of them this one."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    ranks: int
    config: dict[str, Any]
    has_kernels: bool = False
    """Whether the device is one that Triton's kernels serve; else the plain forms run."""
    is_crew: bool = False
    """Its ranks are threads, counted together: stages differ, so none mirrors another."""
    hosts: tuple[int, ...] = ()
    """Of each rank the number of its host; left out, all are on one."""


def gpt(**changes: Any) -> Callable[[], nn.Module]:
    """A decoder of two blocks."""
    policy = {
        "layers": LAYERS, "width": 16, "heads": 4, "hidden": 24, "context": CONTEXT, "vocab": VOCABULARY, **changes
    }  # fmt: skip
    return lambda: Gpt(GptPolicy(**policy))


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """A microbatch: tokens and targets, [2, 8] each."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, VOCABULARY, (2, 2, CONTEXT), generator=generator)
    return found[0], found[1]


def _clicks(names: Sequence[str]) -> Callable[[int], Any]:
    def batch(step: int) -> Any:
        found = tables_net.batch(step)
        return {"sparse": {name: found["sparse"][name] for name in names}, "labels": found["labels"]}

    return batch


class _Tables(nn.Module):
    """Two tables beside a linear layer."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.tables = tables_net.Net({}).tables
        self.names = names
        self.tables.tables = tuple(
            table for table in self.tables.tables if set(table.features or (table.name,)) & set(names)
        )
        self.out = nn.Linear(sum(8 if name == "d" else 6 for name in names), 1)

    def forward(self, sparse: Any, labels: Tensor) -> Tensor:
        found = self.tables(sparse)
        logits = self.out(torch.cat([found[name] for name in self.names], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def _zero(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage}, "precision": precision, **more}


def _rows() -> dict[str, Row]:
    found = {
        f"zero {stage}, {precision}, dp 4": Row(gpt(), tokens, 4, _zero(stage, precision))
        for stage in range(4)
        for precision in ("fp32", "bf16", "fp16")
    }
    zero3 = _zero(3, "bf16")
    found |= {
        "one device, bf16": Row(gpt(), tokens, 1, _zero(0, "bf16")),
        "hsdp 2 x 2, bf16": Row(gpt(), tokens, 4, {**zero3, "mesh": {"dp": {"replicate": 2, "shard": 2}}}),
        "tied, zero 3, bf16, dp 4": Row(gpt(family="gpt2", tied_head=True), tokens, 4, zero3),
        "tp 2, bf16": Row(gpt(), tokens, 2, {**zero3, "mesh": {"tp": 2}}),
        "tp 2, dp 2, zero 3, bf16": Row(gpt(), tokens, 4, {**zero3, "mesh": {"tp": 2, "dp": 2}}),
        "pp 2, bf16, both stages": Row(
            gpt(), tokens, 2, {**_zero(0, "bf16"), "mesh": {"pp": 2}}, is_crew=True
        ),
        "dropout, zero 3, bf16, dp 4": Row(gpt(family="gpt2", dropout=0.1), tokens, 4, zero3),
        "no dropout, kernels, zero 3, bf16, dp 4": Row(gpt(family="gpt2"), tokens, 4, zero3, True),
        "dropout, kernels, zero 3, bf16, dp 4": Row(gpt(family="gpt2", dropout=0.1), tokens, 4, zero3, True),
        "llama, kernels, zero 3, bf16, dp 4": Row(gpt(), tokens, 4, zero3, True),
        "recompute, zero 3, bf16, dp 4": Row(gpt(), tokens, 4, {**zero3, "recompute": "full"}),
        "experts, ep 2, zero 2, bf16": Row(
            gpt(experts=GptExperts(count=4)), tokens, 2, {**_zero(2, "bf16"), "mesh": {"ep": 2}}
        ),
        "experts, ep 2 x 2 hosts, recompute, zero 2, bf16": Row(
            gpt(experts=GptExperts(count=4)),
            tokens,
            4,
            {**_zero(2, "bf16"), "mesh": {"ep": 4}, "recompute": "full"},
            hosts=(0, 0, 1, 1),
        ),
        "experts in blocks, ep 2, recompute, zero 2, bf16": Row(
            gpt(experts=GptExperts(count=4, router=RouterPolicy(capacity=1.5))),
            tokens,
            2,
            {
                **_zero(2, "bf16"),
                "mesh": {"ep": 2},
                "experts": {"exchange": "blocks"},
                "recompute": "full",
            },
        ),
        "experts in blocks, ep 2 x 2 hosts, zero 2, bf16": Row(
            gpt(experts=GptExperts(count=4, router=RouterPolicy(capacity=1.5))),
            tokens,
            4,
            {**_zero(2, "bf16"), "mesh": {"ep": 4}, "experts": {"exchange": "blocks"}},
            hosts=(0, 0, 1, 1),
        ),
        "experts, pp 2, recompute, bf16, both stages": Row(
            gpt(experts=GptExperts(count=4)),
            tokens,
            2,
            {**_zero(0, "bf16"), "mesh": {"pp": 2}, "recompute": "full"},
            is_crew=True,
        ),
        "router noise, kernels, ep 2, zero 2, bf16": Row(
            gpt(experts=GptExperts(count=4, router=RouterPolicy(noise="jitter"))),
            tokens,
            2,
            {**_zero(2, "bf16"), "mesh": {"ep": 2}},
            True,
        ),
        "8 experts, kernels, ep 2, zero 2, bf16": Row(
            gpt(experts=GptExperts(count=8)), tokens, 2, {**_zero(2, "bf16"), "mesh": {"ep": 2}}, True
        ),
        "8 experts, kernels, one device, bf16": Row(
            gpt(experts=GptExperts(count=8)), tokens, 1, _zero(0, "bf16"), True
        ),
        "8 experts in blocks, kernels, ep 2, zero 2, bf16": Row(
            gpt(experts=GptExperts(count=8, router=RouterPolicy(capacity=1.5))),
            tokens,
            2,
            {**_zero(2, "bf16"), "mesh": {"ep": 2}, "experts": {"exchange": "blocks"}},
            True,
        ),
        "masters in host memory, zero 2, bf16, dp 4": Row(
            gpt(), tokens, 4, {**_zero(2, "bf16"), "offload": {"optimizer": "host"}}
        ),
        "weights in host memory, zero 3, bf16, dp 4": Row(
            gpt(), tokens, 4, {**zero3, "offload": {"optimizer": "host", "parameters": "host"}}
        ),
        "activations in host memory, zero 3, bf16, dp 4": Row(
            gpt(), tokens, 4, {**zero3, "offload": {"activations": "host"}}
        ),
        "tiles, zero 3, bf16, dp 4": Row(gpt(), tokens, 4, {**zero3, "tiles": {"mlp": 4, "logits": 4}}),
        "lamb, zero 3, bf16, dp 4": Row(gpt(), tokens, 4, {**zero3, "optimizer": {"type": "lamb"}}),
        "hsdp 2 x 2, tp 2, bf16": Row(
            gpt(), tokens, 8, {**zero3, "mesh": {"tp": 2, "dp": {"replicate": 2, "shard": 2}}}
        ),
        "static tables, dp 2": Row(lambda: _Tables(("a", "b", "d")), _clicks("abd"), 2, _zero(0, "fp32")),
        "dynamic tables, dp 2": Row(
            lambda: _Tables(("grows", "rare")), _clicks(("grows", "rare")), 2, _zero(0, "fp32")
        ),
    }
    return found


ROWS = _rows()


def measure(name: str) -> tuple[Budget, list[str]]:
    """Budget of the row's third step, and what was misplaced in any."""
    row, device = ROWS[name], register()
    with Bench() as bench, pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "DEVICES", frozenset({device.type} if row.has_kernels else ()))
        patch.setattr(choice, "has_grouped_mm", lambda device: row.has_kernels and device.type != "cpu")
        config = {
            "batch": {"accumulation": MICROBATCHES},
            "optimizer": {"type": "adamw", "lr": 0.01},
            "max_grad_norm": 1e-3,  # so that every step is clipped, whatever its numbers
            "check_first_step": "off",  # it compares numbers, which mirror ranks do not have
            **row.config,
        }

        def steps(world: World) -> Budget:
            torch.manual_seed(0)
            engine = shardwise.initialize(row.make(), config, world=world)
            for step in range(3):
                batches = [row.batch(MICROBATCHES * step + i) for i in range(MICROBATCHES)]
                world.barrier()
                bench.clear()
                world.barrier()
                assert not engine.train_step(batches).skipped, f"{name}: the step was skipped"
            world.barrier()
            found = Budget(dict(bench.syncs), sum(bench.operations.values()))
            world.barrier()
            engine.close()
            return found

        if row.is_crew:
            found = Crew(row.ranks, device).run(steps)[0]
        else:
            world = mirror_world(row.ranks, device)
            world.hosts = row.hosts or world.hosts
            found = steps(world)
    return found, bench.misplaced


def measure_all(_world: Any, names: Sequence[str]) -> dict[str, tuple[Budget, list[str]]]:
    """In a process of its own."""
    return {name: measure(name) for name in names}


# The page -----------------------------------------------------------------------------------------------------------


def read_page() -> dict[str, Budget]:
    """The tables that stand in the docs."""
    text = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    kinds = {
        kind: {(what, where): int(count) for count, what, where in _PLACE.findall(places)}
        for kind, places in re.findall(r"^\| ([A-Z]+) \| ([^|]*) \|$", text, re.MULTILINE)
    }
    lines = re.findall(r"^\| ([^|]+) \| \d+ \| (\d+) \| ([A-Z]+) \|$", text, re.MULTILINE)
    return {row: Budget(kinds[kind], int(operations)) for row, operations, kind in lines}


def written(budgets: dict[str, Budget]) -> str:
    """The tables: steps, and the kinds of syncs that they have."""
    kinds: list[dict[Sync, int]] = []
    lines = ["| step | host syncs | device operations, at most | which syncs |", "|---|---|---|---|"]
    for name, (syncs, operations) in budgets.items():
        if syncs not in kinds:
            kinds.append(syncs)
        lines.append(f"| {name} | {sum(syncs.values())} | {operations} | {_letter(kinds.index(syncs))} |")
    lines += ["", "| | which syncs: how many, what, where |", "|---|---|"]
    for number, syncs in enumerate(kinds):
        places = ", ".join(f"{count} {what} `{where}`" for (what, where), count in sorted(syncs.items()))
        lines.append(f"| {_letter(number)} | {places or 'none'} |")
    return "\n".join(lines) + "\n"


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def grown(name: str, found: Budget, stands: Budget | None) -> list[str]:
    """What is above the table. A sync that only moved to another line is not."""
    if stands is None:
        return [f"{name}: a new row"]
    said = []
    if sum(found.syncs.values()) > sum(stands.syncs.values()):
        more = Counter(found.syncs) - Counter(stands.syncs)
        said = [f"{name}: {count} more of {what} in {where}" for (what, where), count in sorted(more.items())]
    if found.operations > stands.operations:
        said.append(
            f"{name}: {found.operations} device operations, at most {stands.operations} stand in the table"
        )
    return said


def bound_of(operations: int) -> int:
    """A tenth above what was counted: a bound is there to see what grows by much."""
    return -(-operations * 11 // 100) * 10


def main() -> None:
    """Write the page."""
    stands = read_page()
    words = [word for word in sys.argv[1:] if word != "--grow"]
    found = {
        name: measure(name)[0]
        if not words or name not in stands or any(word in name for word in words)
        else stands[name]
        for name in ROWS
    }
    more = [line for name, budget in found.items() for line in grown(name, budget, stands.get(name))]
    print("\n".join(more) or "nothing grew")
    if more and "--grow" not in sys.argv:
        sys.exit("the page stays as it is: mend that, or write it with --grow")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    for name, (syncs, operations) in found.items():
        above = stands.get(name, Budget({}, 0)).operations
        bound = bound_of(operations)
        found[name] = Budget(syncs, min(above, bound) if operations <= above else bound)
    PAGE.write_text(before + BEGIN + written(found) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
