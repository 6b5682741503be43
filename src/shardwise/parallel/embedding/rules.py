"""From a policy to the kernels' rule of an optimizer, and the names of the state that it keeps beside the weights."""

from collections.abc import Iterable, Mapping, Sequence

from shardwise.kernels.tables import row_rules as rule
from shardwise.kernels.tables.row_replay import StepHistory
from shardwise.parallel.embedding.policy import RowOptimizerPolicy


def optimizer_of(policy: RowOptimizerPolicy) -> rule.RowOptimizer:
    """The kernels' rule of a policy."""
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
"""State of which a row has one number, whatever its width."""


def state_columns(optimizer: rule.RowOptimizer, width: int) -> Iterable[tuple[str, int]]:
    """Names of the state after the weights, and how many columns each has."""
    for name in _STATE[type(optimizer)]:
        if name != "step" or history_of(optimizer) is not None:
            yield name, 1 if name in ONE_A_ROW else width


def history_of(optimizer: rule.RowOptimizer, lrs: Sequence[float] = ()) -> StepHistory | None:
    """Of an Adam that replays; it has a column for the step at which a row stands."""
    return StepHistory(optimizer, lrs) if isinstance(optimizer, rule.Adam) and optimizer.exact else None
