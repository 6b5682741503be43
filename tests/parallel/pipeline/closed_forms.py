"""Cost of a schedule in closed form: idle time, live activations, messages.

With p ranks, v stages per rank (``virtual_stages``), m microbatches, f and b the seconds of one stage's forward and
backward, and messages that take no time, gpipe, 1f1b and interleaved 1f1b need

    makespan = (v * max(m, p) + min(m, p) - 1) * (f + b)

of which every rank computes ``v * m * (f + b)``. With m >= p the rest, the bubble, is ``(p - 1) * (f + b)``: a stage is
v times shorter than the rank's share of the model, so interleaving divides the bubble by v. Live activations on rank r,
in units of one microbatch of one stage, with groups of at most n microbatches (n = p if p divides m):

    gpipe             m
    1f1b              min(m, p - r)
    interleaved 1f1b  min(v * m, (v - 1) * n + 2 * (p - r - 1) + 1)

Papers: arXiv:1811.06965, 2006.09503, 2104.04473.
"""

from shardwise.parallel.pipeline.policy import ScheduleName
from shardwise.parallel.pipeline.schedules import microbatch_groups


def makespan_s(
    ranks: int, microbatches: int, virtual_stages: int = 1, forward_s: float = 1.0, backward_s: float = 2.0
) -> float:
    """Return the seconds of one step.

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        virtual_stages: Stages per rank.
        forward_s: Seconds of the forward pass of one stage and one microbatch.
        backward_s: Seconds of the backward pass of one stage and one microbatch.

    Returns:
        Seconds.
    """
    full, rest = max(microbatches, ranks), min(microbatches, ranks)
    return (virtual_stages * full + rest - 1) * (forward_s + backward_s)


def bubble_s(
    ranks: int, microbatches: int, virtual_stages: int = 1, forward_s: float = 1.0, backward_s: float = 2.0
) -> float:
    """Return the seconds of one step in which a rank computes nothing, which are the same on every rank.

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        virtual_stages: Stages per rank.
        forward_s: Seconds of the forward pass of one stage and one microbatch.
        backward_s: Seconds of the backward pass of one stage and one microbatch.

    Returns:
        Seconds.
    """
    busy = virtual_stages * microbatches * (forward_s + backward_s)
    return makespan_s(ranks, microbatches, virtual_stages, forward_s, backward_s) - busy


def idle_share(ranks: int, microbatches: int, virtual_stages: int = 1) -> float:
    """Return the share of a step in which a rank computes nothing, which does not depend on the seconds of a stage.

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        virtual_stages: Stages per rank.

    Returns:
        Share between 0 and 1.
    """
    return bubble_s(ranks, microbatches, virtual_stages) / makespan_s(ranks, microbatches, virtual_stages)


def peak_live(name: ScheduleName, rank: int, ranks: int, microbatches: int, virtual_stages: int = 1) -> int:
    """Return the most activations that are live at once on a rank.

    Args:
        name: The schedule.
        rank: Index of the rank on "pp".
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        virtual_stages: Stages per rank.

    Returns:
        Number of activations, in units of one microbatch of one stage.
    """
    if name == "gpipe":
        return microbatches
    if name == "1f1b":
        return min(microbatches, ranks - rank)
    group = max(map(len, microbatch_groups(ranks, microbatches)))
    return min(virtual_stages * microbatches, (virtual_stages - 1) * group + 2 * (ranks - rank - 1) + 1)


def split_length(ranks: int, microbatches: int, virtual_stages: int = 1) -> int:
    """Return the length of a step of zb_h1 or a V with enough microbatches, if F, I and W take one unit on a stage.

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step: at least ``ranks``, in a V at least ``2 * ranks - 1``.
        virtual_stages: Stages per rank: 1, in a V 2.
    """
    return 3 * virtual_stages * microbatches + ranks - 1


def delayed_length(ranks: int, microbatches: int, delay: int) -> int:
    """Return the length of a step of zb_h1 whose W are at most ``delay`` microbatches behind I.

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step: at least ``ranks``.
        delay: Less than ``ranks``.
    """
    return split_length(ranks, microbatches) + ranks - 1 - delay


def split_live(name: ScheduleName, ranks: int) -> int:
    """Return the most activations that may be live at once on a rank, in units of one microbatch of one stage."""
    return {"zb_h1": ranks, "zb_v": 2 * ranks, "dualpipe_v": 2 * ranks + 1, "zb_greedy": 2 * ranks + 1}[name]


def messages(ranks: int, microbatches: int, virtual_stages: int = 1, folded: bool = False) -> int:
    """Return the messages of one step over all ranks.

    There is an activation and a gradient per microbatch and border between stages of two ranks.

    Args:
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.
        virtual_stages: Stages per rank.
        folded: True if the stages lie in a V, in which the last rank sends nothing between its own.

    Returns:
        Number of messages.
    """
    borders = ranks * virtual_stages - 1 - folded
    return 2 * microbatches * borders if ranks > 1 else 0
