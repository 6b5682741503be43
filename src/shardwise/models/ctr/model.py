"""The base of all click-through models: a batch of a click log as input, the loss and one logit per sample as output.

    vectors = tables(sparse)                                  [B, F, W]
    logit   = a function of dense and vectors                 [B]
    loss    = mean over b of softplus(logit) - label · logit  the binary cross-entropy, in fp32

The tables are one ``EmbeddingCollection`` with a table of the same width for every feature. A model with a separate
weight for every key (the wide part of Wide&Deep, the first order of a factorisation machine) stores this weight as
the first number of the key's row, W = 1 + D, so that one lookup reads both. Measured on one thread with 26 features x
2,048 samples, forward, backward and update: rows of D + 1 take 2 to 8 % longer than rows of D, a second collection of
width 1 takes 50 to 70 % longer (Adagrad, Adam, row-wise Adagrad; D 8 and 16).

Dense parameters are initialized by rules (models/initial.py), rows by (seed, table, key): the model is the same on
every layout. A batch without samples has the loss 0 and gradients of 0.

Shapes: B samples, F features, D width of vectors, W width of rows, N dense features.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.ragged import Ragged
from shardwise.kernels.initializers import Constant, Initializer, Normal
from shardwise.models.ctr.policy import CtrPolicy
from shardwise.models.initial import draw_all
from shardwise.parallel.embedding.collection import EmbeddingCollection
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy


class ClickModel(nn.Module, ABC):
    """The base class of click-through models.

    Args:
        policy: The keys under ``model:``.
        dense: The number of dense features.
        tables: One table for each feature, all of the same width, in the order of the features.
        optimizer: The optimizer of the rows.
        seed: The seed of the initial weights.

    Raises:
        ConfigError: if the tables have different widths.
    """

    def __init__(
        self,
        policy: CtrPolicy,
        dense: int,
        tables: Sequence[TablePolicy],
        optimizer: RowOptimizerPolicy | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        widths = sorted({table.width for table in tables})
        if len(widths) > 1:
            raise ConfigError(
                f"model: tables have widths {widths}; the built-in models interact vectors of one width"
            )
        self.tables = EmbeddingCollection(tables, optimizer, seed)
        self._features = [name for table in tables for name in table.feature_names]
        self.policy = policy
        self.dense = dense
        self.make_layers(dense)
        if not any(parameter.is_meta for parameter in self.parameters()):
            draw_all(self, self.initial_rules(), seed)

    @abstractmethod
    def make_layers(self, dense: int) -> None:
        """Make the dense layers, for ``dense`` numbers per sample."""

    @abstractmethod
    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and rows [B, F, W]."""

    def forward(
        self, dense: Tensor, sparse: Mapping[str, Ragged], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return ``{"loss": [], "logits": [B]}`` in fp32, or in fp64 if the model is in fp64.

        Args:
            dense: Dense features, [B, N].
            sparse: The keys of each feature.
            labels: [B]; None: the result has no loss.

        Raises:
            DataError: if the dense features do not go with the keys.
        """
        if not isinstance(dense, Tensor):
            raise DataError(
                f"dense features are a {type(dense).__name__}; expected a tensor [B, {self.dense}]"
            )
        vectors = self.vectors(sparse).to(dense.dtype)
        if dense.shape != (vectors.shape[0], self.dense):
            raise DataError(
                f"dense features are {[*dense.shape]} beside {vectors.shape[0]} samples of keys; this model takes "
                f"[{vectors.shape[0]}, {self.dense}]"
            )
        return outcome(self.logits(dense, vectors), labels)

    def vectors(self, sparse: Mapping[str, Ragged]) -> Tensor:
        """Return the vectors of a batch in the order of the features: [B, F, W]."""
        return self._in_order(self.tables.stacked(sparse))

    def _in_order(self, stacked: Tensor) -> Tensor:
        """Return the vectors in the order of the features.

        Placements group tables, which changes the order of features; without this step another layout would be
        another model.
        """
        there = self.tables.feature_names
        if there == self._features:
            return stacked
        place = {name: i for i, name in enumerate(there)}
        order = torch.tensor([place[name] for name in self._features], device=stacked.device)
        return stacked.index_select(1, order)

    def initial_rules(self) -> dict[str, Initializer]:
        """Return the initial rules: matrices normal with variance 2 / (inputs + outputs), biases 0.

        DLRM uses the same rules (Glorot and Bengio 2010).
        """
        return {
            name: Normal(math.sqrt(2 / sum(parameter.shape))) if parameter.dim() == 2 else Constant(0.0)
            for name, parameter in self.named_parameters()
        }

    def unit_patterns(self) -> list[str]:
        """Return no patterns: the dense part of a click-through model is small, and one bucket is reduced fastest."""
        return []


def outcome(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """Return a model's output for logits [B]: the logits, and the loss if there are labels."""
    logits = widened(logits)
    if labels is None:
        return {"logits": logits}
    total = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return {"loss": total / max(logits.numel(), 1), "logits": logits}


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in fp32 or wider, because logits are not summed in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mlp(inputs: int, outputs: Sequence[int], ends_linear: bool) -> nn.Sequential:
    """Return linear layers, each followed by a ReLU, except the last one if ``ends_linear`` is True."""
    layers: list[nn.Module] = []
    for width in outputs:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*(layers[:-1] if ends_linear else layers))


class WideLinear(nn.Module):
    """A linear function, the wide part of every model: Σ of the weights of a sample's keys + w · dense + bias, [B]."""

    def __init__(self, dense: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(dense)) if dense else None

    def forward(self, dense: Tensor, key_weights: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and the weights of keys [B, F]."""
        total = widened(key_weights).sum(1) + self.bias
        return total if self.weight is None else total + widened(dense @ self.weight)
