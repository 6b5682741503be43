"""The tables of a click-through model: one for each feature of its data, under the feature's name.

option of a table      the first source that gives it
rows or dynamic        tables.named, tables.defaults, the known number of rows in the data; else dynamic
everything else        tables.named, tables.defaults, TablePolicy
"""

from collections.abc import Mapping
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.policy import nearest
from shardwise.data.clicks.rows import ClickSchema
from shardwise.parallel.embedding.policy import DynamicPolicy, TableOptions, TablePolicy, TablesPolicy

_KINDS = ("rows", "dynamic")


def tables_for(
    schema: ClickSchema, width: int, policy: TablesPolicy | None = None, rows: Mapping[str, int] | None = None
) -> list[TablePolicy]:
    """Return a table of width ``width`` for every feature, in the order of the features.

    Args:
        schema: The columns of the data.
        width: The numbers in a row.
        policy: The keys under ``tables:``.
        rows: The number of rows of each feature whose keys are 0 to rows - 1.

    Raises:
        ConfigError: if the policy names a feature that the data does not have.
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
    """Return the keys that were given, with their values as they are."""
    if options is None:
        return {}
    return {key: value for key in options.model_fields_set if (value := getattr(options, key)) is not None}
