"""The loss scale, which keeps small fp16 gradients from becoming zero.

    backward(loss · scale);   gradient / scale before the update
    overflow:                 skip the step; at the ``hysteresis``-th  scale ← scale · backoff_factor
    ``growth_interval`` clean steps in a row:                          scale ← scale · growth_factor

Every rank passes the same flag (the check for finite gradients is reduced together with the norm), so all ranks have
the same scale and skip the same steps.

Paper: Micikevicius et al. 2018, arXiv:1710.03740.
"""

from dataclasses import dataclass

from shardwise.precision.policy import LossScalePolicy


@dataclass
class LossScale:
    """The state of the loss scale; ``update`` is called once per optimizer step."""

    policy: LossScalePolicy
    scale: float = 0.0
    clean_steps: int = 0
    overflows_left: int = 0

    def __post_init__(self) -> None:
        self.scale = self.scale or self.policy.init_scale
        self.clean_steps = self.clean_steps or -self.policy.growth_delay
        self.overflows_left = self.overflows_left or self.policy.hysteresis

    @property
    def is_spent(self) -> bool:
        """True if no smaller scale is available for one more overflow."""
        return not self.policy.dynamic or (self.overflows_left <= 1 and self.scale <= self.policy.min_scale)

    def update(self, finite: bool) -> None:
        """Update the scale after one step.

        Args:
            finite: True if all gradients of the step were finite.
        """
        policy = self.policy
        if not policy.dynamic:
            return
        if finite:
            self.clean_steps += 1
            if policy.consecutive_hysteresis:
                self.overflows_left = policy.hysteresis
            if self.clean_steps >= policy.growth_interval:
                self.clean_steps = 0
                self.scale *= policy.growth_factor
                self.overflows_left = policy.hysteresis
            return
        self.clean_steps = -policy.growth_delay
        self.overflows_left -= 1
        if self.overflows_left <= 0:
            self.scale = max(self.scale * policy.backoff_factor, policy.min_scale)
            self.overflows_left = (
                1  # until growth restores the tolerance, every further overflow reduces the scale
            )

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "overflows_left": self.overflows_left}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint; a constant scale keeps the configuration's value."""
        if not self.policy.dynamic:
            return
        self.scale = float(state["scale"])
        self.clean_steps = int(state["clean_steps"])
        self.overflows_left = int(state["overflows_left"])
