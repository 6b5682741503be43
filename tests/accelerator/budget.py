"""Budgets: what one step asks of the device, for each way to train. The table stands in docs/accelerators.md.

    host syncs          exact, by (what, file:function); their number may only shrink
    device operations   an upper bound
    operations a block  what one more block adds to a microbatch: exact, may only shrink

``python -m tests.accelerator.budget`` writes the page anew where nothing grew, and says what did; ``--grow`` writes it
all the same, for a new row or a better count; other words measure the rows alone that have one of them in their name.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import World
from shardwise.kernels import choice
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.memory.streams import to_device
from shardwise.models import Gpt, GptPolicy, build_image_model
from shardwise.models.generate import generate
from shardwise.models.gpt import GptExperts
from shardwise.models.images.policy import ResNetPolicy
from shardwise.parallel.expert.policy import RouterPolicy
from tests.accelerator.crew import Crew
from tests.accelerator.mirror import mirror_world
from tests.accelerator.pretend import Bench, Sync, register
from tests.engine import tables_net
from tests.engine.nets import LLAMA
from tests.parallel.zero.cuda_batch_norm import on_the_cpu

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"
BEGIN, END = "<!-- budgets: begin -->\n", "<!-- budgets: end -->\n"
BLOCKS_BEGIN, BLOCKS_END = "<!-- blocks: begin -->\n", "<!-- blocks: end -->\n"
VOCABULARY, CONTEXT, LAYERS, MICROBATCHES = 19, 8, 2, 2
_PLACE = re.compile(r"(\d+) ([^`]+) `([^`]+)`")


class Budget(NamedTuple):
    """Of one step."""

    syncs: dict[Sync, int]
    operations: int


def _train(engine: Any, batches: list[Any]) -> None:
    assert not engine.train_step(batches).skipped, "the step was skipped"


def _evaluate(engine: Any, batches: list[Any]) -> None:
    engine.evaluate([(batch, 1.0) for batch in batches])


def _generate(engine: Any, batches: list[Any]) -> None:
    """Four tokens behind four of each sequence: a prefill, and three passes of one token."""
    prompt = to_device(batches[0][0][:, :4], engine.device)
    generate(engine.module, prompt, 4, temperature=0.8, top_k=5)


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
    run: Callable[[Any, list[Any]], None] = _train
    """What is counted, given the engine and its batches."""


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


class _ConvolutionNet(nn.Module):
    """Two blocks of a convolution and a batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"conv": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.BatchNorm2d(3)})
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block["norm"](block["conv"](x)))
        return cross_entropy(self.head(x.mean((2, 3))), labels)


def images(step: int) -> tuple[Tensor, Tensor]:
    """A microbatch: four images and their labels."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 5, (4,), generator=generator)


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
        "zero 3, 2 x 2 hosts, bf16": Row(
            gpt(),
            tokens,
            4,
            {**zero3, "zero": {"stage": 3, "exchange": "two_level"}},
            hosts=(0, 0, 1, 1),
        ),
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
        "images, synchronized norms, bf16, dp 4": Row(
            _ConvolutionNet, images, 4, {**_zero(0, "bf16"), "batch_norm": "synchronized"}
        ),
        "images, synchronized norms, kernels, bf16, dp 4": Row(
            _ConvolutionNet, images, 4, {**_zero(0, "bf16"), "batch_norm": "synchronized"}, True
        ),
        "static tables, dp 2": Row(lambda: _Tables(("a", "b", "d")), _clicks("abd"), 2, _zero(0, "fp32")),
        "dynamic tables, dp 2": Row(
            lambda: _Tables(("grows", "rare")), _clicks(("grows", "rare")), 2, _zero(0, "fp32")
        ),
    }
    return found


def _transformers_model() -> nn.Module:
    """A tiny LLaMA of transformers, from its configuration alone."""
    import transformers

    shape = LLAMA | {"vocab_size": VOCABULARY, "use_cache": False, "tie_word_embeddings": False}
    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    return made


class _ResidualNet(nn.Module):
    """A residual net of 18 layers for images of 8 x 8, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build_image_model(ResNetPolicy(depth=18, width=2, size=8), 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(images), labels)


def _small_images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def _named_tokens(step: int) -> dict[str, Tensor]:
    given, _ = tokens(step)
    return {"input_ids": given, "labels": given}


def _more_rows() -> dict[str, Row]:
    zero0, zero3 = _zero(0, "bf16"), _zero(3, "bf16")
    interleaved = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
    return {
        "interleaved, pp 2, bf16, both stages": Row(
            gpt(layers=4), tokens, 2, {**zero0, "mesh": {"pp": 2}, "pipeline": interleaved}, is_crew=True
        ),
        "pp 3, bf16, all stages": Row(gpt(layers=3), tokens, 3, {**zero0, "mesh": {"pp": 3}}, is_crew=True),
        "pp 2, tp 2, bf16, all ranks": Row(
            gpt(), tokens, 4, {**zero0, "mesh": {"pp": 2, "tp": 2}}, is_crew=True
        ),
        "transformers' llama, zero 3, bf16, dp 4": Row(_transformers_model, _named_tokens, 4, zero3),
        "residual net of images, synchronized norms, zero 2, bf16, dp 2": Row(
            _ResidualNet, _small_images, 2, _zero(2, "bf16", batch_norm="synchronized")
        ),
        "evaluation, zero 3, bf16, dp 4": Row(gpt(), tokens, 4, zero3, run=_evaluate),
        "generation, one device, bf16": Row(gpt(), tokens, 1, zero0, run=_generate),
    }


ROWS = _rows() | _more_rows()

BLOCK_ROWS: dict[str, Callable[[int], Row]] = {
    "zero 0, dp 4": lambda layers: Row(gpt(layers=layers), tokens, 4, _zero(0, "bf16"), True),
    "zero 3, dp 4": lambda layers: Row(gpt(layers=layers), tokens, 4, _zero(3, "bf16"), True),
    "zero 3, dp 4, gpt2": lambda layers: Row(
        gpt(layers=layers, family="gpt2"), tokens, 4, _zero(3, "bf16"), True
    ),
    "tp 2": lambda layers: Row(
        gpt(layers=layers),
        tokens,
        2,
        {**_zero(0, "bf16"), "mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}},
        True,
    ),
    "tp 2, cut sequence": lambda layers: Row(
        gpt(layers=layers), tokens, 2, {**_zero(0, "bf16"), "mesh": {"tp": 2}}, True
    ),
    "8 experts, ep 2, zero 2": lambda layers: Row(
        gpt(layers=layers, experts=GptExperts(count=8)),
        tokens,
        2,
        {**_zero(2, "bf16"), "mesh": {"ep": 2}},
        True,
    ),
}
"""Ways to train in bf16 with kernels, by the number of the model's blocks."""


def measure(name: str) -> tuple[Budget, list[str]]:
    """Budget of the row's third step, and what was misplaced in any."""
    return measure_row(ROWS[name], name)


def per_block(name: str) -> float:
    """Device operations of one block in one microbatch, forward and backward, with its share of the step's end: half
    the difference between four blocks and two, over the microbatches."""
    many, few = (measure_row(BLOCK_ROWS[name](layers), name)[0].operations for layers in (4, 2))
    return (many - few) / 2 / MICROBATCHES


def measure_row(row: Row, name: str) -> tuple[Budget, list[str]]:
    """Budget of a row's third step, and what was misplaced in any."""
    device = register()
    norms = on_the_cpu(device.type) if row.has_kernels else nullcontext()
    with Bench(fuses_attention=True) as bench, pytest.MonkeyPatch.context() as patch, norms:
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
                _end_updates(engine)
                world.barrier()
                bench.clear()
                world.barrier()
                row.run(engine, batches)
            _end_updates(engine)
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


def _end_updates(engine: Any) -> None:
    """Let the tiers' thread end the updates of the step before, so that its waits count with their own step."""
    if engine._parts.site.tiers is not None:
        engine._parts.site.tiers.begin(lambda: None).result()


def measure_all(_world: Any, names: Sequence[str]) -> dict[str, tuple[Budget, list[str]]]:
    """In a process of its own."""
    return {name: measure(name) for name in names}


def measure_blocks(_world: Any, names: Sequence[str] = tuple(BLOCK_ROWS)) -> dict[str, float]:
    """In a process of its own."""
    return {name: per_block(name) for name in names}


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


def read_blocks() -> dict[str, float]:
    """Operations a block that stand in the docs."""
    text = PAGE.read_text(encoding="utf-8").split(BLOCKS_BEGIN)[1].split(BLOCKS_END)[0]
    return {
        row: float(count) for row, count in re.findall(r"^\| ([^|]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    }


def written_blocks(counts: dict[str, float]) -> str:
    """The table of operations a block."""
    lines = ["| bf16, with kernels | operations a block and microbatch |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {count:g} |" for name, count in counts.items())]) + "\n"


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
    blocks, before_blocks = {name: per_block(name) for name in BLOCK_ROWS}, read_blocks()
    more += [
        f"{name}: {count:g} operations a block, {before_blocks.get(name)} stand in the table"
        for name, count in blocks.items()
        if count > before_blocks.get(name, 0)
    ]
    print("\n".join(more) or "nothing grew")
    if more and "--grow" not in sys.argv:
        sys.exit("the page stays as it is: mend that, or write it with --grow")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    for name, (syncs, operations) in found.items():
        above = stands.get(name, Budget({}, 0)).operations
        bound = bound_of(operations)
        found[name] = Budget(syncs, min(above, bound) if operations <= above else bound)
    PAGE.write_text(before + BEGIN + written(found) + END + rest.split(END)[1], encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BLOCKS_BEGIN)
    PAGE.write_text(
        before + BLOCKS_BEGIN + written_blocks(blocks) + BLOCKS_END + rest.split(BLOCKS_END)[1],
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
