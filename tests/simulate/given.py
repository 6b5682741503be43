"""Steps of the small written-down model whose passes and hardware are given, for tests of clocks and of the bound."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.base.hardware import Hardware, Product, even_hardware
from shardwise.kernels.tables.wire import RowWire
from shardwise.parallel.embedding.calls import GroupLoad
from shardwise.parallel.embedding.cost import TableLoad
from shardwise.parallel.embedding.group import TableGroup
from shardwise.parallel.embedding.layout import TablePlacement
from shardwise.parallel.embedding.policy import RowOptimizerPolicy, TablePolicy
from shardwise.plan.action import Kind
from shardwise.plan.exchange_calls import ExchangeCall
from shardwise.plan.plan import Plan
from shardwise.plan.timeline import Timeline
from shardwise.simulate.passes import MeasuredPass, UnitPass
from shardwise.simulate.price import step_timeline
from shardwise.simulate.work import Work
from shardwise.tiers.offload import OffloadPolicy

NEVER = 1e30
"""Bytes a second of what takes no time."""
RATES = ("flops_s", "host_bytes_s", "device_bytes_s", "link_bytes_s", "disk_bytes_s", "exchange_bytes_s")


def hardware(**given: float) -> Hardware:
    """Hardware on which everything takes no time but what is given."""
    return even_hardware("given", **({each: NEVER for each in RATES} | given))  # type: ignore[arg-type]


def one_pass(flops: int, touched: int = 0, calls: int = 0, sends: tuple[ExchangeCall, ...] = ()) -> UnitPass:
    """A Unit's part of a pass: one product of so many FLOPs."""
    products = {Product("product", "fp32", flops): 1} if flops else {}
    return UnitPass(0, 1000, flops, touched, sends, work=Work(products, calls=calls))


def lookups() -> dict[str, tuple[GroupLoad, ...]]:
    """A collection ``users`` of one table of 8 columns with rows spread over ranks: 10 keys, 5 distinct, 4 bags."""
    table = TablePolicy(name="users", rows=100, width=8)
    sgd = RowOptimizerPolicy(type="momentum")
    group = TableGroup((table,), (TablePlacement("row"),), sgd, 2)
    return {"users": (GroupLoad(group, (TableLoad(10.0, 5.0, 4.0),), RowWire("fp32", torch.float32)),)}


def passes(plan: Plan, forward: UnitPass, backward: UnitPass) -> dict[int, MeasuredPass]:
    """Passes in which all Units do the same."""
    message = (ExchangeCall("send", "activations", "pp", 100, 4),)
    found = {}
    for ranks in plan.classes.values():
        for stage in ranks.stages:
            has_halves = any(action.kind is Kind.W for action in ranks.actions)
            kinds = (Kind.F, Kind.I, Kind.W) if has_halves else (Kind.F, Kind.B)
            names = [unit.name for unit in ranks.units_of(stage)]
            shares = {
                (kind, name): forward if kind is Kind.F else backward for name in names for kind in kinds
            }
            found[stage] = MeasuredPass(shares, 0, leaves=message, answered=message, lookups=lookups())
    return found


def timeline(
    plan: Plan,
    passed: Mapping[int, MeasuredPass],
    rates: Hardware,
    device: str = "cpu",
    microbatches: int = 2,
    data_s: float = 0.0,
) -> Timeline:
    """The foreseen timeline of a step."""
    policies: Any = SimpleNamespace(offload=OffloadPolicy(), microbatches=microbatches)
    return step_timeline(plan, policies, passed, rates, device, None, data_s)
