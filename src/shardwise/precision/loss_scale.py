"""Dynamic loss scale: keeps small fp16 gradients from vanishing.

    backward(loss · scale);   gradient / scale before the update
    overflow:                 skip the step; after ``hysteresis`` overflows  scale ← scale / 2
    ``growth_interval`` clean steps in a row:                                scale ← scale · 2

Every rank feeds the same flag (the finite check travels with the norm), so all hold the same scale and skip together.

Paper: Micikevicius et al. 2018, arXiv:1710.03740.
"""

from dataclasses import dataclass

from shardwise.precision.policy import LossScalePolicy


@dataclass
class LossScale:
    """State of the scale; ``update`` is called once per optimizer step."""

    policy: LossScalePolicy
    scale: float = 0.0
    clean_steps: int = 0
    overflows_left: int = 0

    def __post_init__(self) -> None:
        self.scale = self.scale or self.policy.init_scale
        self.overflows_left = self.overflows_left or self.policy.hysteresis

    @property
    def at_floor(self) -> bool:
        """True where another halving would pass the floor."""
        return self.scale <= self.policy.min_scale

    def update(self, finite: bool) -> None:
        """Take note of one step's gradients."""
        if finite:
            self.clean_steps += 1
            if self.clean_steps >= self.policy.growth_interval:
                self.clean_steps = 0
                self.scale *= 2
                self.overflows_left = self.policy.hysteresis
            return
        self.clean_steps = 0
        self.overflows_left -= 1
        if self.overflows_left <= 0:
            self.scale = max(self.scale / 2, self.policy.min_scale)
            self.overflows_left = (
                1  # from here every further overflow halves, until the scale has grown again
            )

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "overflows_left": self.overflows_left}

    def load_state(self, state: dict[str, float]) -> None:
        """From the checkpoint."""
        self.scale = float(state["scale"])
        self.clean_steps = int(state["clean_steps"])
        self.overflows_left = int(state["overflows_left"])
