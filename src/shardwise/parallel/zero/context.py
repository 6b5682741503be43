"""The process groups and the memory that a bucket's state uses.

The buckets of one Unit lie on the same axes, the buckets of another Unit possibly on others; all share the slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.collectives import Group
from shardwise.memory.gradient_memory import GradientMemory
from shardwise.memory.ledger import Ledger
from shardwise.memory.slots import SlotPool
from shardwise.parallel.zero.scales import WeightScales
from shardwise.plan.strategy import Strategy
from shardwise.plan.unit import Bucket
from shardwise.tiers.tier import TierResources


@dataclass(frozen=True)
class BucketContext:
    """The process groups, slots and tiers that the buckets of one Unit use."""

    strategy: Strategy
    shard: Group
    """The ranks that each store one range of a buffer that is cut."""
    replicate: Group
    """The ranks that store the same range."""
    dp: Group
    """The ranks of both groups together, over which one gradient is summed."""
    weights: SlotPool
    """Slots of unsharded weights."""
    shards: SlotPool
    """Slots of shards that come from another tier, held until the shard is gathered."""
    gradients: SlotPool
    """Slots of staging memory for gradients."""
    gradient_memory: GradientMemory
    """Memory of the gradient buffers."""
    ledger: Ledger
    device: torch.device
    tiers: TierResources | None = None
    """The tiers off the device, or None if all state lies on the device."""
    scales: WeightScales | None = None
    """The scales of weights that are gathered in fp8, or None if there are none."""

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
        tiers: TierResources | None = None,
        scales: WeightScales | None = None,
    ) -> "BucketContext":
        """Make the context of the buckets that ``strategy`` places.

        Args:
            strategy: The placements and tiers of the Unit.
            group_over: Function that returns the process group of some axes together.
            weights: Slots of unsharded weights.
            shards: Slots of shards that come from another tier.
            gradients: Slots of staging memory for gradients.
            gradient_memory: Memory of the gradient buffers.
            ledger: The ledger that counts bytes.
            device: The device of the computation.
            tiers: The tiers off the device, or None.
            scales: The scales of weights that are gathered in fp8, or None.

        Returns:
            The context.
        """
        outer, inner = strategy.axes
        shard, replicate, both = (group_over(axes) for axes in ((inner,), (outer,), (outer, inner)))
        slots = (weights, shards, gradients, gradient_memory)
        return cls(strategy, shard, replicate, both, *slots, ledger, device, tiers, scales)

    @property
    def owned_range(self) -> tuple[int, int]:
        """Index and count: this rank's master is range ``index`` of ``count`` equal ranges."""
        return (self.shard.index, self.shard.size) if self.strategy.cuts_master else (0, 1)

    def own_range(self, layout: Bucket) -> slice:
        """Return this rank's range of a buffer that is cut."""
        piece = layout.shard_elements
        return slice(self.shard.index * piece, (self.shard.index + 1) * piece)
