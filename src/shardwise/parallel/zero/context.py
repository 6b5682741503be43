"""What a bucket's state moves over and into: the groups of the axes that it is placed on, and the slots.

The buckets of one Unit lie on the same axes, those of another Unit perhaps on others; all share the slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.collectives import Group
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.ledger import Ledger
from shardwise.memory.slots import SlotPool
from shardwise.memory.tier import Tiers
from shardwise.plan.lists import Strategy
from shardwise.plan.unit import Bucket


@dataclass(frozen=True)
class BucketContext:
    """See the module's docstring."""

    strategy: Strategy
    shard: Group
    """The ranks that each keep a range of what is cut."""
    replicate: Group
    """The ranks that keep the same range."""
    dp: Group
    """Both together: those that sum one gradient."""
    weights: SlotPool
    """Slots of unsharded weights."""
    shards: SlotPool
    """What comes from another tier, until it is gathered."""
    gradients: SlotPool
    """Staging memory of gradients."""
    gradient_memory: GradientMemory
    """Of their buffers."""
    ledger: Ledger
    device: torch.device
    tiers: Tiers | None = None
    """Where state lies off the device."""

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        group_over: Callable[[Sequence[str]], Group],
        weights: SlotPool,
        shards: SlotPool,
        gradients: SlotPool,
        gradient_memory: GradientMemory,
        ledger: Ledger,
        device: torch.device,
        tiers: Tiers | None = None,
    ) -> "BucketContext":
        """That of buckets which lie as ``strategy`` says. ``group_over``: the group of some axes together."""
        outer, inner = strategy.axes
        shard, replicate, both = (group_over(axes) for axes in ((inner,), (outer,), (outer, inner)))
        slots = (weights, shards, gradients, gradient_memory)
        return cls(strategy, shard, replicate, both, *slots, ledger, device, tiers)

    @property
    def owned_range(self) -> tuple[int, int]:
        """(index, count): this rank's master is range ``index`` of ``count`` equal ones."""
        return (self.shard.index, self.shard.size) if self.strategy.cuts_master else (0, 1)

    def own_range(self, layout: Bucket) -> slice:
        """This rank's range of what is cut."""
        piece = layout.shard_elements
        return slice(self.shard.index * piece, (self.shard.index + 1) * piece)
