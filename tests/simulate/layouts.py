"""Small models and the layouts in which they train: what is foreseen of each is held to a real step of it."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.ragged import Ragged
from shardwise.comm.world import World
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models import Gpt, GptPolicy
from shardwise.models.ctr.build import build_ctr
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.models.images import build_image_model
from shardwise.models.images.policy import AlexNetPolicy, ResNetPolicy
from shardwise.parallel.embedding.policy import DynamicPolicy, TableOptions, TablesPolicy
from shardwise.tiers.row_tiers import RowTiersPolicy

SEQUENCES, CONTEXT, VOCABULARY = 2, 16, 37
SHAPE: dict[str, Any] = {"layers": 4, "width": 16, "heads": 4, "kv_heads": 2, "context": CONTEXT}
EXPERTS: dict[str, Any] = {"count": 4, "hidden": 16}


class Layout(NamedTuple):
    """One layout of one model."""

    name: str
    ranks: int
    config: dict[str, Any]
    model: str = "gpt"
    is_exact: bool = True
    """False if the numbers decide what is sent inside the passes."""


def gpt(**given: Any) -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy.model_validate(SHAPE | {"vocab": VOCABULARY} | given))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.engine.nets import LLAMA

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **LLAMA))  # type: ignore[no-any-return]


def dlrm(**options: Any) -> nn.Module:
    schema = ClickSchema(("a", "b", "c"), (SparseFeature("user"), SparseFeature("item")))
    tables = TablesPolicy(defaults=TableOptions(**options))
    policy = DlrmPolicy(width=8, bottom=(8,), top=(8,))
    return build_ctr(policy, schema, tables, {"user": 64, "item": 64})


def tokens(context: int = CONTEXT) -> dict[str, Tensor]:
    ids = torch.arange(SEQUENCES * context).view(SEQUENCES, context) * 7 % VOCABULARY
    return {"tokens": ids, "targets": ids}


def clicks() -> dict[str, Any]:
    keys = {
        name: Ragged.of_lists([[3 * row + at] for row in range(4)])
        for at, name in enumerate(("user", "item"))
    }
    return {"dense": torch.ones(4, 3), "sparse": keys, "labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


def pictures() -> dict[str, Tensor]:
    return {"images": torch.ones(2, 3, 8, 8), "labels": torch.tensor([0, 3])}


def large_pictures() -> tuple[Tensor, Tensor]:
    return torch.ones(2, 3, 63, 63), torch.tensor([0, 3])


def words() -> dict[str, Tensor]:
    ids = tokens()["tokens"]
    return {"input_ids": ids, "labels": ids}


@cache
def disk() -> "tempfile.TemporaryDirectory[str]":
    """A folder of this process for rows on a disk."""
    return tempfile.TemporaryDirectory()


def tiered() -> nn.Module:
    return dlrm(placement="table", tiers=RowTiersPolicy(host_rows=32, disk=Path(disk().name)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt": (gpt, tokens),
    "gpt2": (lambda: gpt(family="gpt2", kv_heads=None), tokens),
    "tied": (lambda: gpt(tied_head=True), tokens),
    "experts": (lambda: gpt(experts=EXPERTS), tokens),
    "capacity": (lambda: gpt(experts=EXPERTS | {"router": {"capacity": 1.25}}), tokens),
    "wide": (lambda: gpt(width=64, context=160), lambda: tokens(160)),
    "llama": (llama, words),
    "alexnet": (
        lambda: build_image_model(AlexNetPolicy(width=2, hidden=8, size=63), classes=5),
        large_pictures,
    ),
    "resnet": (lambda: build_image_model(ResNetPolicy(depth=18, width=4, size=8), classes=5), pictures),
    "dlrm": (lambda: dlrm(placement="row"), clicks),
    "dlrm, copies": (lambda: dlrm(placement="data_parallel"), clicks),
    "dlrm, columns": (lambda: dlrm(placement="column"), clicks),
    "dlrm, dynamic": (lambda: dlrm(placement="row", dynamic=DynamicPolicy(capacity=100)), clicks),
    "dlrm, tables": (lambda: dlrm(placement="table"), clicks),
    "dlrm, tiers": (tiered, clicks),
    "dlrm, 16 bits": (lambda: dlrm(placement="table", dtype="bf16"), clicks),
}


ACCUMULATED = {"batch": {"accumulation": 3}}
LAYOUTS = [
    Layout("zero 0", 2, {"zero": {"stage": 0}}),
    Layout("zero 0, bf16", 2, {"zero": {"stage": 0}, "precision": "bf16"}),
    Layout("zero 0, bf16, accumulation", 2, {"zero": {"stage": 0}, "precision": "bf16", **ACCUMULATED}),
    Layout("zero 1, accumulation", 2, {"zero": {"stage": 1}, **ACCUMULATED}),
    Layout("zero 1, bf16", 2, {"zero": {"stage": 1}, "precision": "bf16", "max_grad_norm": 1.0}),
    Layout("zero 2, bf16, accumulation", 2, {"zero": {"stage": 2}, "precision": "bf16", **ACCUMULATED}),
    Layout("zero 3, clip", 2, {"zero": {"stage": 3}, "max_grad_norm": 1.0}),
    Layout(
        "zero 3, ahead, bf16, accumulation",
        2,
        {
            "zero": {"stage": 3, "prefetch_bytes": 1 << 20, "reductions_under_way": 1},
            "precision": "bf16",
            **ACCUMULATED,
        },
    ),
    Layout(
        "zero 3, reduce bf16", 2, {"zero": {"stage": 3}, "precision": {"compute": "bf16", "reduce": "bf16"}}
    ),
    Layout("zero 3, step", 2, {"zero": {"stage": 3, "reduce": "step"}, **ACCUMULATED}),
    Layout("zero 3, recompute", 2, {"zero": {"stage": 3}, "recompute": "full"}),
    Layout("tp", 2, {"mesh": {"tp": 2}}),
    Layout(
        "tp, uncut sequence, bf16",
        2,
        {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}, "precision": "bf16"},
    ),
    Layout(
        "tp, recompute, tiles",
        2,
        {"mesh": {"tp": 2}, "recompute": "full", "tiles": {"logits": 8, "mlp": 8}, **ACCUMULATED},
    ),
    Layout("tp, selective", 2, {"mesh": {"tp": 2}, "recompute": "selective"}),
    Layout("pp", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 4}}),
    Layout(
        "pp, gpipe, bf16",
        2,
        {
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "gpipe"},
            "precision": "bf16",
            "batch": {"accumulation": 4},
        },
    ),
    Layout(
        "pp, interleaved",
        2,
        {
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
            "batch": {"accumulation": 4},
        },
    ),
    Layout("pp, tied", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, "tied"),
    Layout("zero 2, gpt2", 2, {"zero": {"stage": 2}}, "gpt2"),
    Layout("ep, blocks", 2, {"mesh": {"ep": 2}, "experts": {"exchange": "blocks"}}, "capacity"),
    Layout("ep, counted", 2, {"mesh": {"ep": 2}}, "experts", is_exact=False),
    Layout("pp, experts", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, "experts"),
    Layout(
        "state on a host", 2, {"zero": {"stage": 1}, "offload": {"optimizer": "host"}, "precision": "bf16"}
    ),
    Layout(
        "weights on a host",
        2,
        {"zero": {"stage": 3}, "offload": {"optimizer": "host", "parameters": "host", "activations": "host"}},
    ),
    Layout(
        "delayed",
        2,
        {"zero": {"stage": 2}, "offload": {"optimizer": "host", "step": "delayed"}, "precision": "bf16"},
    ),
    Layout("seconds of ranks", 2, {"mesh": {"tp": 2}, "monitor": {"rank_seconds": True}}),
    Layout("norms of Units", 2, {"zero": {"stage": 2}, "monitor": {"unit_norms": True}}),
    Layout("lamb", 2, {"zero": {"stage": 2}, "optimizer": {"type": "lamb"}}),
    Layout("muon", 2, {"zero": {"stage": 2}, "optimizer": {"type": "muon"}}),
    Layout("llama", 2, {"zero": {"stage": 3}, "precision": "bf16"}, "llama"),
    Layout("llama, tp", 2, {"mesh": {"tp": 2}}, "llama"),
    Layout("resnet", 2, {"zero": {"stage": 2}}, "resnet"),
    Layout("resnet, synchronized", 2, {"zero": {"stage": 3}, "batch_norm": "synchronized"}, "resnet"),
    Layout("dlrm, rows", 2, {}, "dlrm", is_exact=False),
    Layout("dlrm, copies", 2, ACCUMULATED, "dlrm, copies"),
    Layout("dlrm, columns", 2, {"zero": {"stage": 2}}, "dlrm, columns", is_exact=False),
    Layout("dlrm, dynamic", 2, {}, "dlrm, dynamic", is_exact=False),
    Layout("dlrm, pp", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, "dlrm"),
    Layout("alexnet, pp", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, "alexnet"),
    Layout(
        "state on a disk",
        2,
        {
            "zero": {"stage": 3},
            "offload": {"optimizer": "disk", "parameters": "disk", "disk_path": tempfile.gettempdir()},
            **ACCUMULATED,
        },
    ),
    Layout(
        "tp, activations on a host",
        2,
        {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": False}, "offload": {"activations": "host"}},
        "wide",
    ),
    Layout(
        "tp, inputs of blocks on a host",
        2,
        {
            "mesh": {"tp": 2},
            "tensor": {"sequence_parallel": False},
            "recompute": "full",
            "offload": {"activations": "host"},
        },
        "wide",
    ),
    Layout("dlrm, tables", 2, {}, "dlrm, tables"),
    Layout("dlrm, tiers", 2, {}, "dlrm, tiers"),
    Layout("dlrm, tiers, pp", 2, {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}, "dlrm, tiers"),
    Layout("dlrm, 8 bits between ranks", 2, {"tables": {"wire": "int8"}}, "dlrm, 16 bits"),
    Layout(
        "hsdp", 4, {"mesh": {"dp": {"replicate": 2, "shard": 2}}, "zero": {"stage": 3}, "precision": "bf16"}
    ),
    Layout(
        "hsdp, host",
        4,
        {
            "mesh": {"dp": {"replicate": 2, "shard": 2}},
            "zero": {"stage": 2},
            "offload": {"optimizer": "host"},
            **ACCUMULATED,
        },
    ),
    Layout(
        "zero 3 x tp", 4, {"mesh": {"tp": 2}, "zero": {"stage": 3}, "precision": "bf16", "max_grad_norm": 1.0}
    ),
    Layout("zero 1 x pp", 4, {"mesh": {"pp": 2}, "zero": {"stage": 1}, "batch": {"accumulation": 4}}),
    Layout("tp x pp, tied", 4, {"mesh": {"tp": 2, "pp": 2}, "batch": {"accumulation": 2}}, "tied"),
    Layout("tp over KV heads", 4, {"mesh": {"tp": 4}, "tensor": {"sequence_parallel": False}}),
    Layout(
        "zero 2 x ep, blocks",
        4,
        {"mesh": {"ep": 2}, "zero": {"stage": 2}, "experts": {"exchange": "blocks"}, **ACCUMULATED},
        "capacity",
    ),
    Layout(
        "ep x etp", 4, {"mesh": {"tp": 2, "ep": 2, "etp": 2}, "experts": {"exchange": "blocks"}}, "capacity"
    ),
    Layout(
        "pp x ep, blocks",
        4,
        {"mesh": {"pp": 2, "ep": 2}, "experts": {"exchange": "blocks"}, "batch": {"accumulation": 2}},
        "capacity",
    ),
    Layout(
        "zero 3 x tp x pp, interleaved",
        8,
        {
            "mesh": {"tp": 2, "pp": 2},
            "zero": {"stage": 3},
            "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
            "batch": {"accumulation": 4},
            "precision": "bf16",
        },
    ),
    Layout(
        "hsdp x tp",
        8,
        {"mesh": {"dp": {"replicate": 2, "shard": 2}, "tp": 2}, "zero": {"stage": 2}, "max_grad_norm": 1.0},
    ),
]


THIN = (
    "zero 3, clip",
    "tp, uncut sequence, bf16",
    "pp, tied",
    "ep, blocks",
    "seconds of ranks",
    "dlrm, 8 bits between ranks",
)
"""Names of the layouts that every run of the tests compares."""


class Counted(NamedTuple):
    """What a rank sent in its second step, and the bytes that its engine holds between steps."""

    sent: dict[tuple[str, str, str], tuple[int, int, int]]
    """Calls, elements and bytes by operation, purpose and axis."""
    held: dict[str, int]
    """Bytes by row of the ledger."""
    said: list[str]
    """Each call in words, for a reader of a failure."""


def settings(layout: Layout) -> dict[str, Any]:
    given = {"check_first_step": "off", "batch": {}} | layout.config
    return given | {"batch": {"duplicates": "allow"} | given["batch"]}


def count(world: World, layout: Layout) -> Counted:
    """Train two steps, and count the second. Collective."""
    make, batch = MODELS[layout.model]
    engine = shardwise.initialize(make(), settings(layout), world=world)
    batches = [batch()] * engine.accumulation
    said: list[str] = []
    engine.train_step(batches)
    traffic = engine.traffic
    traffic.clear()
    add = traffic.add

    def told(
        operation: Any,
        purpose: Any,
        elements: int,
        itemsize: int,
        ranks: int,
        what: str = "",
        axis: str = "dp",
    ) -> None:
        said.append(f"{operation} of {what}: {elements} x {itemsize} bytes, {purpose}, {axis} of {ranks}")
        add(operation, purpose, elements, itemsize, ranks, what, axis)

    traffic.add = told  # type: ignore[method-assign]
    engine.train_step(batches)
    del traffic.add
    sent = {key: tuple(number) for key, number in traffic.counts.items()}
    found = Counted(sent, engine.held_bytes(), said)  # type: ignore[arg-type]
    engine.close()
    return found


def count_all(world: World, layouts: list[Layout]) -> list[Counted]:
    return [count(world, layout) for layout in layouts]
