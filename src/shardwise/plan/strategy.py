"""Strategy: how the state of one Unit lies and moves, the row of ZeRO's table that its Actions follow from.

    strategy             weight   gradient between microbatches   master and moments
    ZeRO-0 / DDP         R        P                               R
    ZeRO-1               R        P                               S
    ZeRO-2               R        S                               S
    ZeRO-3 / FSDP        S        S                               S
    HSDP (outer, inner)  R,S      P,S                             R,S

A Plan holds the Strategy of each Unit (plan.py). The lists of Actions, their proof, the buffers of the engine, the
price and the memory of a step all read the Strategy there.

Paper: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from dataclasses import dataclass
from functools import cached_property

from shardwise.plan.exchange import GradientExchange
from shardwise.plan.mesh import DENSE, StateAxes
from shardwise.plan.placement import Placement, Shard, Tier


@dataclass(frozen=True)
class Strategy:
    """Placements of a Unit's state on an outer and an inner axis, its tiers, and the times of its moves."""

    weight: tuple[Placement, Placement]
    grad: tuple[Placement, Placement]
    master: tuple[Placement, Placement]
    windows: bool = False
    """True if weights that are not cut have windows too."""
    tier: Tier = "device"
    """Tier on which master and moments lie and are updated."""
    weight_tier: Tier = "device"
    """Tier on which the weight lies between its windows."""
    is_delayed: bool = False
    """True if an update takes effect one step late: SWAP_WEIGHT, at the next step's end."""
    waits_at_end: bool = False
    """True if the end of a step waits for updates on another tier: WAIT."""
    grad_tier: Tier = "device"
    """Tier on which the gradient lies from a reduction to the next reduction of the step, or to the update."""
    leaves_each: bool = False
    """True if the gradient moves to its tier after every microbatch though no axis cuts it: one rank has the sum."""
    saved_tier: Tier = "device"
    """Tier on which tensors that the forward saves wait for the backward."""
    exchange: GradientExchange = GradientExchange()
    """The way in which the ranks of the inner axis sum the gradient if each keeps a range of the sum."""
    axes: StateAxes = DENSE
    """The two axes, whose ranks together sum the gradient. Units may have different axes (experts, for example)."""

    def __post_init__(self) -> None:
        # The UNSHARD behind STEP, which gathers what was updated in pieces, would be mistaken for a window's UNSHARD.
        assert not self.has_windows or self.cuts_weight or not self.cuts_master, (
            "windows on updates in pieces"
        )
        assert self.weight_tier in ("device", self.tier), (
            "weights lie where their masters lie, or on the device"
        )

    @cached_property
    def has_windows(self) -> bool:
        """True if the whole weight is on the device only inside its Unit's windows.

        This holds if the weight is cut or lies on another tier, and if the caller sets ``windows``.
        """
        return self.windows or self.cuts_weight or self.weight_tier != "device"

    @cached_property
    def brings_shard(self) -> bool:
        """True if a rank's shard of the weights comes from another tier before it is gathered."""
        return self.cuts_weight and self.weight_tier != "device"

    @cached_property
    def gathers_behind_update(self) -> bool:
        """True if the weight is gathered from the result of an update that runs beside the forward pass."""
        return self.cuts_weight and self.tier != "device" and not self.is_delayed

    @cached_property
    def cuts_weight(self) -> bool:
        """True if a rank keeps only its shard of the weights."""
        return self.weight[1] == Shard()

    @cached_property
    def cuts_grad(self) -> bool:
        """True if a rank keeps only its shard of the gradients."""
        return self.grad[1] == Shard()

    @cached_property
    def reduces_each(self) -> bool:
        """True if gradients are reduced with every microbatch."""
        return self.cuts_grad or self.leaves_each

    @cached_property
    def cuts_master(self) -> bool:
        """True if a rank updates only its shard."""
        return self.master[1] == Shard()
