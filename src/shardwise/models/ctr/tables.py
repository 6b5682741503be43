"""The tables of a click-through model: one for each feature of its data, under the feature's name.

what a table is        from the first that says it
rows or dynamic        tables.named, tables.defaults, the rows that the data is known to have; else dynamic
everything else        tables.named, tables.defaults, TablePolicy
"""

from collections.abc import Mapping
from typing import Any

from shardwise.data.clicks.rows import Schema
from shardwise.parallel.embedding.policy import DynamicPolicy, TableOptions, TablePolicy, TablesPolicy
from shardwise.plan.errors import ConfigError
from shardwise.plan.policy import nearest

_KINDS = ("rows", "dynamic")


def tables_for(
    schema: Schema, width: int, policy: TablesPolicy | None = None, rows: Mapping[str, int] | None = None
) -> list[TablePolicy]:
    """A table of ``width`` for every feature, in their order. ``rows``: of features whose keys are 0 to rows - 1.

    Errors: ConfigError where the policy names a feature that there is not.
    """
    policy, rows = policy or TablesPolicy(), rows or {}
    features = [feature.name for feature in schema.features]
    for name in policy.named:
        if name not in features:
            raise ConfigError(f"tables.named: the data has no feature {name!r}{nearest(name, features)}")
    return [_table(name, width, policy, rows.get(name)) for name in features]


def _table(name: str, width: int, policy: TablesPolicy, rows: int | None) -> TablePolicy:
    own, defaults = _given(policy.named.get(name)), _given(policy.defaults)
    if any(kind in own for kind in _KINDS):
        defaults = {key: value for key, value in defaults.items() if key not in _KINDS}
    given = defaults | own
    if not any(kind in given for kind in _KINDS):
        given |= {"dynamic": DynamicPolicy()} if rows is None else {"rows": rows}
    return TablePolicy(name=name, width=width, **given)


def _given(options: TableOptions | None) -> dict[str, Any]:
    """The keys that were given, their values as they are."""
    if options is None:
        return {}
    return {key: value for key in options.model_fields_set if (value := getattr(options, key)) is not None}
