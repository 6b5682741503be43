"""Conversion of a policy to the kernels' optimizer rule, and the names of the state that a rule keeps for a row."""

from collections.abc import Iterable, Mapping, Sequence

from shardwise.kernels.tables import row_rules as rule
from shardwise.kernels.tables.row_replay import StepHistory
from shardwise.parallel.embedding.policy import RowOptimizerPolicy


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
