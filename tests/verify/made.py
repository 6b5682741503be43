"""Functions that ``shardwise verify MODULE:MODEL --example MODULE:BATCH`` names in the tests."""

import torch
import transformers
from torch import Tensor, nn

from tests.verify.test_run import Net, example


def net() -> nn.Module:
    """Make a model of plain torch."""
    return Net()


def net_batch() -> tuple[Tensor, Tensor]:
    """Make the batch of :func:`net`."""
    return example()


def llama() -> nn.Module:
    """Make a Llama that is large enough to be made smaller."""
    sizes = dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4
    )
    config = transformers.LlamaConfig(**sizes, use_cache=False)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def llama_batch() -> dict[str, Tensor]:
    """Make the batch of :func:`llama`."""
    tokens = torch.randint(0, 97, (8, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}
