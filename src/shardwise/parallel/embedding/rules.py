"""Conversion of policies to the kernels' optimizer rules, and the columns, dtypes and bytes of a row with its state."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.base.errors import PlanError
from shardwise.kernels.tables import row_rules as rule
from shardwise.kernels.tables.row_replay import StepHistory
from shardwise.parallel.embedding.policy import RowDtypeName, RowOptimizerPolicy, TablePolicy


def optimizer_of(policy: RowOptimizerPolicy) -> rule.RowOptimizer:
    """Return the kernels' optimizer rule of a policy."""
    decay = policy.weight_decay
    if policy.type == "sgd":
        return rule.Sgd(decay)
    if policy.type == "momentum":
        return rule.Momentum(policy.momentum, policy.nesterov, decay)
    if policy.type == "adagrad":
        return rule.Adagrad(policy.eps, policy.initial_accumulator, decay)
    if policy.type == "rowwise_adagrad":
        return rule.RowwiseAdagrad(policy.eps, policy.initial_accumulator, decay)
    if policy.type == "adam":
        return rule.Adam(*policy.betas, policy.eps, decay, policy.exact)
    return rule.Ftrl(policy.l1, policy.l2, policy.beta, policy.initial_accumulator)


_STATE: Mapping[type, tuple[str, ...]] = {
    rule.Sgd: (),
    rule.Momentum: ("momentum_buffer",),
    rule.Adagrad: ("sum",),
    rule.RowwiseAdagrad: ("row_sum",),
    rule.Adam: ("exp_avg", "exp_avg_sq", "step"),
    rule.Ftrl: ("z", "n"),
}
ONE_A_ROW = ("row_sum", "step")
"""Names of the state of which a row has one number, whatever its width."""


def state_columns(optimizer: rule.RowOptimizer, width: int) -> Iterable[tuple[str, int]]:
    """Yield the names of the state after the weights, with the number of columns of each."""
    for name in _STATE[type(optimizer)]:
        if name != "step" or history_of(optimizer) is not None:
            yield name, 1 if name in ONE_A_ROW else width


def history_of(optimizer: rule.RowOptimizer, lrs: Sequence[float] = ()) -> StepHistory | None:
    """Return the step history of an Adam that replays steps, else None.

    An Adam that replays has a column for the step up to which a row is updated.
    """
    return StepHistory(optimizer, lrs) if isinstance(optimizer, rule.Adam) and optimizer.exact else None


class RowDtypes(NamedTuple):
    """Dtypes in which the rows of a table are stored."""

    weights: torch.dtype
    state: torch.dtype

    @property
    def is_one(self) -> bool:
        """True if weights and optimizer state lie in one line of at least 32 bits a number."""
        return self.weights == self.state and self.weights.itemsize >= torch.float32.itemsize

    def line_bytes(self, width: int, state: int) -> int:
        """Return the bytes of a row of ``width`` weights with ``state`` columns of optimizer state."""
        return width * self.weights.itemsize + state * self.state.itemsize


def dtypes_of(table: TablePolicy, dtype: torch.dtype) -> RowDtypes:
    """Return the dtypes in which the rows of a table are stored.

    Args:
        table: the table.
        dtype: dtype of the collection, in which updates are computed.
    """

    def stored(name: RowDtypeName) -> torch.dtype:
        return torch.bfloat16 if name == "bf16" else dtype

    return RowDtypes(stored(table.dtype), stored(table.state_dtype))


def row_bytes(table: TablePolicy, optimizer: RowOptimizerPolicy, dtype: torch.dtype) -> int:
    """Return the bytes of a whole row with its optimizer state.

    Args:
        table: the table.
        optimizer: optimizer of tables without their own.
        dtype: dtype of the collection.
    """
    rule_of_table = optimizer_of(table.optimizer or optimizer)
    return dtypes_of(table, dtype).line_bytes(table.width, rule_of_table.columns(table.width))


def check_dtypes(table: TablePolicy, optimizer: RowOptimizerPolicy, dtype: torch.dtype) -> None:
    """Check that a table that stores 16 bits is updated in fp32, by an optimizer that allows it.

    Args:
        table: the table.
        optimizer: the optimizer of the table.
        dtype: dtype of the collection, in which updates are computed.

    Raises:
        PlanError: if it is not.
    """
    if dtypes_of(table, dtype).is_one:
        return
    asked = f"table {table.name!r}: dtype {table.dtype} with state_dtype {table.state_dtype}"
    if dtype != torch.float32:
        raise PlanError(
            f"{asked} needs updates in torch.float32, and this run computes them in {dtype}; set precision: fp32 (or "
            "dtype= of the collection), or leave the table's dtype and state_dtype at fp32"
        )
    if optimizer.exact:
        raise PlanError(
            f"{asked} and an exact Adam, which replays the steps that a row missed whenever the row is read, and would "
            "round it each time; set optimizer.exact: false, or dtype and state_dtype: fp32"
        )
