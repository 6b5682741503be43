"""Models other than a GPT whose phases are compared with what was foreseen, with one microbatch of each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.ragged import Ragged
from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models.ctr.build import build_ctr
from shardwise.models.ctr.policy import DlrmPolicy
from shardwise.models.images import build_image_model
from shardwise.models.images.policy import ResNetPolicy
from shardwise.parallel.embedding.policy import TableOptions, TablesPolicy

WORDS, LENGTH = 256, 64


def llama() -> nn.Module:
    """Return a Llama of transformers with its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **shape, **heads))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    """Return a GPT-2 of transformers with its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=WORDS, **shape, **dropout, **tokens)
        return GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def words() -> dict[str, Tensor]:
    """Return token indices and labels."""
    ids = torch.arange(4 * LENGTH).view(4, LENGTH) % WORDS
    return {"input_ids": ids, "labels": ids}


def resnet() -> nn.Module:
    """Return a ResNet-18 with its weights; it has the modules and the names of torchvision's."""
    return build_image_model(ResNetPolicy(depth=18, width=16, size=32), classes=5)


def pictures() -> dict[str, Tensor]:
    """Return pictures and their classes."""
    return {"images": torch.ones(4, 3, 32, 32), "labels": torch.tensor([0, 3, 1, 2])}


def dlrm() -> nn.Module:
    """Return a DLRM with two tables."""
    schema = ClickSchema(("a", "b", "c"), (SparseFeature("user"), SparseFeature("item")))
    tables = TablesPolicy(defaults=TableOptions(placement="row"))
    policy = DlrmPolicy(width=32, bottom=(128,), top=(256, 128))
    return build_ctr(policy, schema, tables, {"user": 4096, "item": 1024})


def clicks() -> dict[str, Any]:
    """Return clicks with one key for each feature."""
    keys = {
        name: Ragged.of_lists([[(37 * row + at) % 1024] for row in range(512)])
        for at, name in enumerate(("user", "item"))
    }
    return {"dense": torch.ones(512, 3), "sparse": keys, "labels": torch.ones(512)}


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama": (llama, words),
    "gpt2": (gpt2, words),
    "resnet": (resnet, pictures),
    "dlrm": (dlrm, clicks),
}
