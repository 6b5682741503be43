"""The models in plain torch: one ``nn.EmbeddingBag`` for each feature, torch's optimizers, formulas written out."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.base.ragged import Ragged
from shardwise.kernels.initializers import Uniform
from shardwise.kernels.philox import key_of
from shardwise.kernels.tables.start_rows import start_rows
from shardwise.models import ClickModel


class Plain(nn.Module):
    """The twin of a model that has not been used yet: the same dense weights, and rows for all keys of some batches.

    A bag's row is the key's place among the distinct keys of its feature.
    """

    def __init__(self, model: ClickModel, batches: Sequence[Mapping], dtype: torch.dtype) -> None:
        super().__init__()
        self.policy = model.policy
        for name, part in model.named_children():
            if name != "tables":
                self.add_module(name, copy.deepcopy(part))
        self.keys: dict[str, Tensor] = {}
        self.bags = nn.ModuleDict()
        for table in model.tables.tables:
            keys = torch.cat([batch["sparse"][table.name].values for batch in batches]).unique()
            initializer = Uniform(-table.start_bound, table.start_bound)
            weight = start_rows(
                key_of(model.tables.seed, f"table {table.name}"), keys, table.width, initializer, dtype=dtype
            )
            self.keys[table.name] = keys
            self.bags[table.name] = nn.EmbeddingBag.from_pretrained(
                weight, freeze=False, mode="sum", include_last_offset=True
            )
        self.to(dtype)

    def bag(self, name: str, ragged: Ragged) -> Tensor:
        return self.bags[name](torch.searchsorted(self.keys[name], ragged.values), ragged.offsets)

    def forward(self, dense: Tensor, sparse: Mapping[str, Ragged], labels: Tensor) -> Tensor:
        rows = [self.bag(name, sparse[name]) for name in self.keys]
        logits = getattr(self, self.policy.name)(dense, rows)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def wide(self, dense: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return sum(weights) + self.linear.bias + dense @ self.linear.weight

    def logistic_regression(self, dense: Tensor, rows: Sequence[Tensor]) -> Tensor:
        return self.wide(dense, [row[:, 0] for row in rows])

    def wide_deep(self, dense: Tensor, rows: Sequence[Tensor]) -> Tensor:
        deep = self.deep(torch.cat([dense, *(row[:, 1:] for row in rows)], 1))
        return self.wide(dense, [row[:, 0] for row in rows]) + deep[:, 0]

    def deepfm(self, dense: Tensor, rows: Sequence[Tensor]) -> Tensor:
        pairs = sum((rows[i][:, 1:] * rows[j][:, 1:]).sum(1) for i in range(len(rows)) for j in range(i))
        return self.wide_deep(dense, rows) + pairs

    def dcn(self, dense: Tensor, rows: Sequence[Tensor]) -> Tensor:
        x0 = x = torch.cat([dense, *rows], 1)
        for layer in self.cross:
            inner = x if layer.down is None else x @ layer.down.weight.T
            x = x0 * (inner @ layer.up.weight.T + layer.up.bias) + x
        if self.policy.structure == "stacked":
            return self.head(self.deep(x))[:, 0]
        return self.head(torch.cat([x, self.deep(x0)], 1))[:, 0]

    def dlrm(self, dense: Tensor, rows: Sequence[Tensor]) -> Tensor:
        z = [self.bottom(dense), *rows]
        dots = [(z[i] * z[j]).sum(1) for i in range(len(z)) for j in range(i)]
        return self.top(torch.cat([z[0], torch.stack(dots, 1)], 1))[:, 0]
