"""The models, layouts and batches under which seeded bugs show (bugs.py).

One global batch of 10 sequences a step is cut into data-parallel ranks × microbatches, unevenly where they do not
divide; targets are masked unevenly, so that no two pieces weigh alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from shardwise.models import Gpt, GptPolicy
from shardwise.models.gpt import GptExperts
from shardwise.parallel.expert.policy import RouterPolicy
from shardwise.verify.layout import parse_layout, with_layout
from tests.engine.nets import seeded

SEQUENCES, CONTEXT, VOCABULARY = 10, 12, 19
STEPS = 2
CLIP = 0.5
BETAS = (0.9, 0.95)
OPTIMIZER = {
    "type": "adamw",
    "lr": 0.01,
    "weight_decay": 0.1,
    "betas": list(BETAS),
    "groups": [{"match": "*norm*", "weight_decay": 0.0}],
}
BRANCH: dict[str, int] = {}
"""``rank``: the rank that a user's model branches on; absent where no bug is planted."""


def _gpt(**sizes: Any) -> nn.Module:
    given = dict(layers=4, width=16, heads=4, context=CONTEXT, vocab=VOCABULARY, hidden=24)
    return Gpt(GptPolicy(**(given | sizes))).double()


class UsersModel(nn.Module):
    """A model of a user, whose code may look at the rank (``BRANCH``)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rank, branch = BRANCH.get("rank", 0), BRANCH.get("branch", 0)
        x = self.embed(tokens)
        for place, block in enumerate(self.blocks):
            if rank and branch == 1 and place == 2:
                continue  # a layer that only the first rank has
            x = x + torch.tanh(block(x)) * (1.1 if rank and branch == 2 and place == 1 else 1.0)
        logits = self.head(self.norm(x))
        kept = logits.flatten(0, 1)[: (-3 if rank and branch == 3 else None)]
        loss = nn.functional.cross_entropy(kept, targets.flatten()[: len(kept)])
        return loss * 2 if rank and branch == 4 else loss


def _users_model() -> nn.Module:
    model = seeded(UsersModel)
    if BRANCH.get("rank") and BRANCH.get("branch") == 5:
        with torch.no_grad():
            model.blocks[3].weight.mul_(1.5)
    return model.double()


def _foreign_gpt2() -> nn.Module:
    shape = dict(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=8, n_layer=2, n_head=2, use_cache=False)
    dropouts = dict(attn_pdrop=0.0, resid_pdrop=0.3, embd_pdrop=0.3)
    model = seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(**shape, **dropouts))
    return model.double().train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _gpt(),
    "llama kv2": lambda: _gpt(kv_heads=2),
    "gpt2": lambda: _gpt(family="gpt2"),
    "packed": lambda: _gpt(family="gpt2"),
    "windows": lambda: _gpt(layers=2, kv_heads=2, sliding_window=4, sinks=True),
    "dropout": lambda: _gpt(dropout=0.2),
    "experts": lambda: _gpt(layers=2, experts=GptExperts(count=4, hidden=8, router=RouterPolicy(top_k=2))),
    "user": _users_model,
    "foreign gpt2": _foreign_gpt2,
}


class Case(NamedTuple):
    """A model, a layout as ``--layout`` has it, and further keys."""

    layout: str
    model: str = "llama"
    microbatches: int = 1
    keys: tuple[tuple[str, Any], ...] = ()
    """Keys of the configuration, as ``tensor.sequence_parallel``, and their values."""
    reference: Literal["plain", "layout"] = "plain"
    """The truth: the plain loop in fp64, or the same layout without the bug, where random numbers or 16 bits make
    the plain loop another one."""

    @property
    def size(self) -> int:
        return parse_layout(self.layout).ranks

    def make(self) -> nn.Module:
        return MODELS[self.model]()

    def config(self, more: Mapping[str, Any] = {}) -> dict[str, Any]:
        """The configuration, with its layout; ``more``: further keys."""
        given: dict[str, Any] = {
            "optimizer": dict(OPTIMIZER),
            "max_grad_norm": CLIP,
            "batch": {"accumulation": self.microbatches},
            "comm": {"timeout_s": 20.0},
            "pipeline": {"partition": "uniform"},
        }
        for key, value in {**dict(self.keys), **more}.items():
            *outer, last = key.split(".")
            block = given
            for part in outer:
                block = block.setdefault(part, {})
            block[last] = value
        layout = parse_layout(self.layout)
        return with_layout(given, layout).model_dump(mode="json", exclude_unset=True)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the global batch of a step."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
        targets = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=generator)
        targets[7:9, 3 + step :] = -100
        targets[1, 2:] = -100
        targets[4, :4] = -100
        return tokens, targets

    def pieces(self, dp: int, dp_index: int, step: int) -> tuple[list[Any], list[float]]:
        """This rank's microbatches and their numbers of targets."""
        parts = self.microbatches * dp
        tokens, targets = (torch.tensor_split(each, parts) for each in self.batch(step))
        mine = range(dp_index, parts, dp)
        return [self.arranged(tokens[i], targets[i]) for i in mine], [self.weight(targets[i]) for i in mine]

    def arranged(self, tokens: Tensor, targets: Tensor) -> Any:
        """A microbatch as the model takes it; packed sequences have two documents each, of a length that their first
        token decides."""
        if self.model == "packed":
            documents = (torch.arange(tokens.shape[1]) >= 3 + tokens[:, :1] % 6).long()
            return {"tokens": tokens, "targets": targets, "documents": documents}
        return (
            {"input_ids": tokens, "labels": targets}
            if self.model.startswith("foreign")
            else (tokens, targets)
        )

    def weight(self, targets: Tensor) -> float:
        """The number of targets that count."""
        held = targets[:, 1:] if self.model.startswith("foreign") else targets
        return float((held != -100).sum())
