"""What the buckets of an engine share: the groups that their state moves over, and the memory that it moves into."""

from dataclasses import dataclass

import torch

from shardwise.comm.collectives import Group
from shardwise.memory.slots import SlotPool
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
    """Both together."""
    weights: SlotPool
    """Slots of unsharded weights."""
    gradients: SlotPool
    """Staging memory of gradients."""
    device: torch.device

    @property
    def owned_range(self) -> tuple[int, int]:
        """(index, count): this rank's master is range ``index`` of ``count`` equal ones."""
        return (self.shard.index, self.shard.size) if self.strategy.cuts_master else (0, 1)

    def own_range(self, layout: Bucket) -> slice:
        """This rank's range of what is cut."""
        piece = layout.shard_elements
        return slice(self.shard.index * piece, (self.shard.index + 1) * piece)
