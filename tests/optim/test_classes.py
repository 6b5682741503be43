"""The optimizer that a configuration names, with its defaults."""

from typing import Any

import pytest
import torch
from torch import optim

from shardwise.optim.classes import from_policy
from shardwise.optim.lamb import Lamb
from shardwise.optim.lars import Lars
from shardwise.optim.lion import Lion
from shardwise.optim.policy import READS, OptimizerPolicy

OURS = {"lion": Lion, "lamb": Lamb, "lars": Lars}


@pytest.mark.parametrize("kind", [kind for kind in READS if kind != "muon"])
def test_a_type_by_name_is_the_class_of_torch_with_its_defaults(kind: Any) -> None:
    """But for AdamW's weight decay, 0.01 there, and the learning rate."""
    cls = OURS.get(kind) or next(c for n, c in vars(optim).items() if n.lower() == kind)
    made = from_policy(OptimizerPolicy(type=kind, lr=0.1))([torch.zeros(1)], 0)
    own = {"lr": 0.1, **({"weight_decay": 0.0} if kind == "adamw" else {})}
    fused = {"fused": True} if kind in ("adam", "adamw", "sgd") else {}
    assert type(made) is cls
    assert made.defaults == cls([torch.zeros(1)], **fused, **own).defaults
