"""RouterPolicy: choice and weights of the experts of a token. ExpertsPolicy: the exchange of rows between ranks."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from shardwise.base.policy import Policy

Count = Annotated[int, Field(ge=1)]


class ExpertsPolicy(Policy):
    """Exchange of rows with experts: keys under ``experts:``.

    ``mesh.ep`` and ``mesh.etp`` set the number of ranks over which experts are spread.
    """

    rows: Count | None = None
    """Pairs of token and expert that a rank works on at once: more pairs are computed in rounds, which are computed
    again in the backward pass, so that skewed routing costs time and not memory. Must exceed top_k times mesh.ep. Left
    out: all at once.
    """
    exchange: Literal["counted", "blocks"] = "counted"
    """``counted``: only the rows that are needed travel; on a device the host reads a table of counts once a layer and
    microbatch. ``blocks``, for layers whose router has a capacity: padded blocks of one size, as large as the capacity
    allows, so that no host waits; no microbatch may be larger than those of the first pass. Passes without gradients
    use counts.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rows is not None and self.exchange == "blocks":
            raise ValueError(
                f"rows is {self.rows} beside exchange: blocks, whose size the routers' capacity bounds; leave one out"
            )
        return self


class RouterPolicy(Policy):
    """Rule of a router: by default the two experts of largest probability, with weights divided by their sum.

    Room and balance are counted in each sequence by itself, so that nothing depends on how a batch is cut.
    """

    top_k: Count = 2
    """Number of experts of a token."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """``softmax`` over all experts, or ``sigmoid`` of each expert by itself (DeepSeek-V3)."""
    normalize: bool | None = None
    """True divides the weights of a token's experts by their sum. Left out: true if there are several; a single weight
    divided by itself is 1, and the router would learn nothing.
    """
    scale: PositiveFloat = 1.0
    """Factor that multiplies the weights at the end."""
    groups: Count = 1
    """Number of groups of neighbouring experts; the groups are of equal size, and a token's experts lie in a few of
    them (DeepSeek).
    """
    top_groups: Count | None = None
    """Number of groups that a token's experts may lie in: those with the largest best score (softmax), or the largest
    sum of their two best scores (sigmoid). Left out: all.
    """
    noise: Literal["none", "jitter", "gumbel", "gumbel_rest"] = "none"
    """Noise in training. ``jitter``: the router's input is multiplied by 0.99 to 1.01, feature by feature (Switch);
    ``gumbel``: the choice, but not the weights, is by logits plus Gumbel noise, so that an expert is drawn with its
    probability; ``gumbel_rest``: the same for all but the expert of largest score, which is always chosen (GShard).
    Noise is keyed by seed, layer, token and expert or feature, as dropout is: the same on every layout.
    """
    capacity: PositiveFloat | None = None
    """An expert takes at most ``capacity`` · k · T / E tokens of a sequence of T, rounded up; a token without room
    skips that expert, and the weights of its other experts stay as they are. Left out: no limit.
    """
    min_capacity: NonNegativeInt = 0
    """Smallest number of tokens of a sequence that an expert has room for."""
    drop: Literal["score", "position"] = "score"
    """Pairs that get the room: ``score``, those of largest weight (of equals the earlier token), or ``position``,
    those of the earlier tokens.
    """
    balance: Literal["none", "loss", "bias"] = "none"
    """Means to spread tokens over experts. ``loss``: a term whose gradient is added at the router; the reported loss
    does not change. ``bias``: a number for each expert that is added to its score in the choice only, and moves after
    each step.
    """
    balance_over: Literal["sequence", "batch"] = "sequence"
    """Tokens over which ``balance: loss`` counts loads: ``sequence``, each by itself, or ``batch``, the whole batch,
    with the loads of the step before, because the gradient may not wait for the other microbatches.
    """
    balance_weight: NonNegativeFloat = 0.01
    """Weight of the term of ``balance: loss``."""
    z_weight: NonNegativeFloat = 0.0
    """Weight of the mean of logsumexp(logits)², which keeps logits small (ST-MoE)."""
    bias_rate: PositiveFloat = 0.001
    """Step by which ``balance: bias`` moves an expert's number."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.normalize and self.top_k == 1:
            raise ValueError(
                "normalize: true makes the weight of a token's only expert 1 (top_k is 1), so that the router gets no "
                "gradient; leave normalize out or set top_k to 2 or more"
            )
        if self.top_groups is not None and self.top_groups > self.groups:
            raise ValueError(
                f"top_groups is {self.top_groups} of {self.groups} groups; expected at most as many"
            )
        needs = (
            ("min_capacity", "capacity", self.capacity is not None),
            ("drop", "capacity", self.capacity is not None),
            ("balance_over", "balance: loss", self.balance == "loss"),
            ("balance_weight", "balance: loss", self.balance == "loss"),
            ("bias_rate", "balance: bias", self.balance == "bias"),
        )
        for key, other, is_there in needs:
            given = getattr(self, key)
            if not is_there and given != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} is {given!r}, which acts with {other} alone; set that too, or leave {key} out"
                )
        return self

    def check_experts(self, experts: int) -> str:
        """Return an error message if the policy does not fit this number of experts, else an empty string."""
        if self.top_k > experts:
            return f"router.top_k is {self.top_k} but there are {experts} experts; expected at most as many"
        if experts % self.groups:
            return f"router.groups is {self.groups}, which does not divide {experts} experts"
        reach = (self.top_groups or self.groups) * (experts // self.groups)
        if self.top_k > reach:
            return (
                f"router.top_groups: {self.top_groups} groups of {experts // self.groups} experts have {reach}, fewer "
                f"than the {self.top_k} of router.top_k; expected at least {-(-self.top_k * self.groups // experts)}"
            )
        return ""

    @property
    def normalizes(self) -> bool:
        """True if weights are divided by their sum."""
        return self.top_k > 1 if self.normalize is None else self.normalize

    def without_training(self) -> Self:
        """Return the policy without the fields that act in training only: noise, balance by loss, and z."""
        fields = type(self).model_fields
        told = {"noise", "balance_weight", "z_weight"} | ({"balance"} if self.balance == "loss" else set())
        return self.model_copy(update={key: fields[key].default for key in told})
