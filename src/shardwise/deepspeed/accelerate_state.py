"""Tell Hugging Face's Accelerate that the ranks of a job without an accelerator belong together.

``accelerate.PartialState`` chooses its backend by the accelerator that it finds. Without one it chooses none, asks
DeepSpeed to meet the other ranks all the same, and then takes each rank for a job of one process: every rank would read
the same data, and a gather of the script's would end in torch's "expected length 2, got 1".
"""

import sys

from shardwise.comm import default_group


def name_backend() -> None:
    """Write the backend of the default group into a ``PartialState`` that is being made and has none.

    Accelerate calls DeepSpeed's ``is_initialized`` and ``init_distributed`` in the middle of making its state, after
    the backend is chosen and before the ranks are counted. A state that is complete is left as it is.
    """
    module = sys.modules.get("accelerate.state")
    state = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    if not isinstance(state, dict) or "backend" not in state or "num_processes" in state:
        return
    if state["backend"] is None and default_group.is_begun():
        state["backend"] = default_group.get_backend()
