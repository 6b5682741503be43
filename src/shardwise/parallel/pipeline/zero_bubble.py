"""Schedules that compute the gradients of weights (W) apart from those of inputs (I), and fill idle time with W.

Only I is on the way of a gradient from stage to stage, so the next stage need not wait for W. Four ranks
and microbatches of zb_h1, two ranks and three microbatches of the others, F, I and W of equal seconds:

    zb_h1               rank 0   F0 F1 F2 F3 .. .. .. I0 W0 I1 W1 I2 W2 I3 W3
                        rank 1   .. F0 F1 F2 .. .. I0 F3 I1 W0 I2 W1 I3 W2 W3
                        rank 2   .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
                        rank 3   .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

    zb_v                rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ...
                        rank 1   ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    dualpipe_v          rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 3F2 0I0 0W0 3I2 3W2 0I1 0W1 ... 0I2 0W2
                        rank 1   ... 1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 2I1 2W1 1I1 1W1 2I2 1I2 2W2 1W2

zb_v and dualpipe_v place two stages on each rank, in a V (plan/stage_places.py): the gradient that leaves the last
stage on rank 0 comes back to rank 0, so that no rank waits for it at the end.

Every stage runs F, I and W each in ascending order of the microbatches, so gradients have the bits of 1f1b.

zb_h1 runs W later than I only at the end of a step, where that makes the step shorter: what waits for W takes memory.

Papers: Qi et al. 2023, arXiv:2401.10241 (ZB-H1); Qi et al. 2024, arXiv:2405.15362 (ZB-V); DualPipeV, github.com/
        deepseek-ai/DualPipe ("cut in half").
Cost:   with F = I = W = 1 on p ranks, zb_h1 takes 3m + p - 1 for m >= p, where 1f1b takes 3 (m + p - 1); the V forms
        take 6m + p - 1 for m >= 2p - 1, in stages of half the size. Activations of at most p microbatches live on a
        rank from F to W, as under 1f1b; under dualpipe_v p + 1/2.
Shapes: p ranks along "pp", m microbatches.
"""

from shardwise.plan.action import Action, F, Kind


def zb_h1(stage: int, stages: int, microbatches: int, delay: int | None = None) -> list[Action]:
    """Return the ZB-H1 schedule of a stage: 1F1B in which W runs up to ``stage`` microbatches behind I at the end.

    As long as the first rank has F to run, each I reaches that rank in time although W follows its own I directly.
    Behind the last F of the first rank the I must follow one another faster, so the other ranks run W later.

    Args:
        stage: Number of the stage.
        stages: Number of stages.
        microbatches: Microbatches of the step.
        delay: Most microbatches by which W runs behind I; None: ``stage``.

    Returns:
        The stage's passes in order.
    """
    warmup = min(stages - stage - 1, microbatches)
    most = stage if delay is None else min(stage, delay)
    row = [F(stage, i) for i in range(warmup)]
    weights = [Action(Kind.W, -1, i, stage) for i in range(microbatches)]
    done = 0
    for i in range(microbatches):
        if warmup + i < microbatches:
            row.append(F(stage, warmup + i))
        row.append(Action(Kind.I, -1, i, stage))
        behind = min(most, max(0, i + 1 - (microbatches - stages)))
        row += weights[done : max(done, i + 1 - behind)]
        done = max(done, i + 1 - behind)
    return row + weights[done:]


def zb_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the ZB-V schedule of a rank, with the two stages ``rank`` and ``2 * ranks - 1 - rank``.

    Args:
        rank: Index of the rank on "pp".
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.

    Returns:
        The rank's passes in order.
    """
    row = _Row(rank, ranks, microbatches)
    row.add("F0", times=2 * (ranks - rank) - 1)
    row.add("F1 F0", times=rank)
    row.add("F1 I1 W1", times=ranks - rank)
    row.add("F0 I0 W0 F1 I1 W1", times=row.padded - 2 * ranks + rank + 1)
    row.add("I0 W0 F1 I1 W1", times=ranks - 1 - rank)
    row.add("I0 I1", times=rank)
    row.add("I0 W0", times=ranks - rank)
    row.add("W1", times=rank)
    row.add("W0", times=rank)
    return row.actions


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the DualPipeV schedule of a rank, with the two stages ``rank`` and ``2 * ranks - 1 - rank``.

    Args:
        rank: Index of the rank on "pp".
        ranks: Size of the "pp" axis.
        microbatches: Microbatches of the step.

    Returns:
        The rank's passes in order.
    """
    row = _Row(rank, ranks, microbatches)
    later = ranks - 1 - rank
    row.add("F0", times=2 * later)
    row.add("F0 F1", times=rank + 1)
    row.add("I1 W1 F1", times=later)
    row.add("F0 I1 W1 F1 I0 W0", times=row.padded - 2 * ranks + rank + 1)
    row.add("I1 W1 F1 I0 W0", times=later)
    # In the second half of these pairs W waits for idle time.
    whole, rest = divmod(rank + 1, 2)
    row.add("I1 W I0 W", times=whole)
    row.add("I1 W I0", times=rest)
    row.add("I1 I0", times=whole)
    row.add("W I0", times=later)
    row.add("W", times=rank + 1)
    return row.actions


class _Row:
    """The passes of one rank of a V, written as words: ``F0`` is F of the rank's first stage, ``I1`` I of its second.

    ``W`` alone is that of the I that has waited longest. Passes of microbatches that the step does not have are left
    out, because the first and the last phase are written for at least ``2 * ranks - 1`` of them.
    """

    def __init__(self, rank: int, ranks: int, microbatches: int):
        self.actions: list[Action] = []
        self.padded = max(2 * ranks - 1, microbatches)
        """Microbatches of the schedule, of which the step may have fewer."""
        self._microbatches = microbatches
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._next: dict[tuple[Kind, int], int] = {}
        self._waiting: list[int] = []
        """Stage of each I without its W."""

    def add(self, words: str, times: int) -> None:
        """Add the passes ``words``, ``times`` times over."""
        for word in words.split() * times:
            kind = Kind[word[0]]
            stage = self._stages[int(word[1:])] if word[1:] else self._waiting[0]
            if kind is Kind.I:
                self._waiting.append(stage)
            elif kind is Kind.W:
                self._waiting.remove(stage)
            microbatch = self._next.get((kind, stage), 0)
            self._next[kind, stage] = microbatch + 1
            if microbatch < self._microbatches:
                self.actions.append(Action(kind, -1, microbatch, stage))
