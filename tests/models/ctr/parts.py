"""Small click-through models for tests of single formulas: two features of one key each, three numbers."""

from typing import Any

import torch
from torch import Tensor

from shardwise.data.clicks.rows import ClickSchema, SparseFeature
from shardwise.models.ctr.build import build_ctr
from shardwise.models.ctr.model import ClickModel
from shardwise.models.ctr.policy import CTR_POLICIES
from shardwise.parallel.embedding.policy import TablesPolicy

SCHEMA = ClickSchema(("a", "b", "c"), (SparseFeature("user"), SparseFeature("item")))


def small(name: str, dense: bool = True, **keys: Any) -> ClickModel:
    """A model of this name in fp64, whose parameters are all drawn anew."""
    policy = CTR_POLICIES[name](**keys)
    schema = SCHEMA if dense else ClickSchema((), SCHEMA.features)
    model = build_ctr(policy, schema, TablesPolicy(), {"user": 5, "item": 5}).double()
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def inputs(width: int, dense: int = 3) -> tuple[Tensor, Tensor]:
    """Numbers [4, dense] and rows of the two features [4, 2, width]."""
    draws = torch.Generator().manual_seed(2)
    return (
        torch.randn(4, dense, generator=draws, dtype=torch.float64),
        torch.randn(4, 2, width, generator=draws, dtype=torch.float64),
    )
