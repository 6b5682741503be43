"""Names that other tools use for pipeline schedules, for suggestions in errors.

A name of another tool is refused like any unknown name, and the error says what to write instead. The tools are
torch.distributed.pipelining with torchtitan, Megatron-LM with its zero-bubble branch, and DeepSpeed. Capitals, dashes,
underscores and the word "Schedule" in front do not count.
"""

_INTERLEAVED = "schedule: interleaved_1f1b with virtual_stages"
_BY_LIVE = "schedule: zb_greedy, whose key live bounds the microbatches in memory"
_NONE = "mesh.pp: 1, without pipeline"

FOREIGN_SCHEDULES = {
    # torch.distributed.pipelining and torchtitan
    "GPipe": "schedule: gpipe",
    "1F1B": "schedule: 1f1b",
    "Interleaved1F1B": _INTERLEAVED,
    "LoopedBFS": f"{_INTERLEAVED}, which keeps fewer activations than all forwards before all backwards",
    "InterleavedZeroBubble": "schedule: zb_h1 with one stage per rank, or zb_v with two",
    "ZBVZeroBubble": "schedule: zb_v",
    "DualPipeV": "schedule: dualpipe_v",
    # Megatron-LM and its zero-bubble branch
    "forward_backward_no_pipelining": _NONE,
    "forward_backward_pipelining_without_interleaving": "schedule: 1f1b",
    "forward_backward_pipelining_with_interleaving": _INTERLEAVED,
    "interleaved": _INTERLEAVED,
    "1f1b-interleaved": _INTERLEAVED,
    "combined_1f1b": "schedule: 1f1b; the exchange of experts does not run beside another microbatch's pass",
    "zero_bubble": "schedule: zb_h1, or zb_v with two stages per rank",
    "zb-h2": _BY_LIVE,
    "zb-2p": _BY_LIVE,
    "zbv": "schedule: zb_v",
    "v-zb": "schedule: zb_v",
    "v-half": _BY_LIVE,
    "v-min": _BY_LIVE,
    "1f1b-v": _BY_LIVE,
    "dualpipe": "schedule: dualpipe_v, which holds the weights once",
    # DeepSpeed
    "TrainSchedule": "schedule: 1f1b",
    "InferenceSchedule": "engine.evaluate or engine.predict, which run forward passes alone on any schedule",
    "DataParallelSchedule": _NONE,
}
"""What to write here, by the name of the other tool."""


def ours_for(name: str) -> str | None:
    """Return what to write in the place of another tool's name of a schedule, or None for an unknown name."""
    return _BY_FORM.get(_form(name))


def _form(name: str) -> str:
    form = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    return form.removeprefix("schedule").removesuffix("schedule")


_BY_FORM = {_form(name): ours for name, ours in FOREIGN_SCHEDULES.items()}
