"""A fix for Hugging Face's Accelerate, which does not find the other ranks of a job without an accelerator.

``accelerate.PartialState`` chooses its backend by the accelerator that it finds. Without an accelerator it chooses
none, still calls DeepSpeed to connect to the other ranks, and then treats each rank as a job of one process: every
rank would read the same data, and a gather in the script would end in torch's "expected length 2, got 1".
"""

import sys

from shardwise.comm import default_group


def name_backend() -> None:
    """Write the backend of the default group into a ``PartialState`` that is under construction and has none.

    Accelerate calls DeepSpeed's ``is_initialized`` and ``init_distributed`` while it constructs its state, after
    choosing the backend and before counting the ranks. A complete state is left as it is.
    """
    module = sys.modules.get("accelerate.state")
    state = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if not isinstance(state, dict) or "backend" not in state or "num_processes" in state:
        return
    if state["backend"] is None and default_group.is_begun():
        state["backend"] = default_group.get_backend()
