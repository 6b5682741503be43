"""Without an accelerator Accelerate learns the ranks' backend while it makes its state."""

import sys
from types import ModuleType
from typing import Any

import pytest

from shardwise.deepspeed.calls import collectives


def stand_in(monkeypatch: pytest.MonkeyPatch, state: dict[str, Any]) -> dict[str, Any]:
    """Put a module in Accelerate's place whose ``PartialState`` has ``state``."""
    module: Any = ModuleType("accelerate.state")
    module.PartialState = type("PartialState", (), {"_shared_state": state})
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    return state


@pytest.mark.parametrize("is_met", [False, True])
def test_a_state_in_the_making_gets_the_backend(is_met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask as Accelerate does, where the ranks met before and where they meet now."""
    if is_met:
        collectives.init_distributed()
    state = stand_in(monkeypatch, {"_cpu": False, "backend": None, "device": None})
    if not collectives.is_initialized():
        assert state["backend"] is None
        collectives.init_distributed(dist_backend=state["backend"], auto_mpi_discovery=False)
    assert state["backend"] == "gloo"


@pytest.mark.parametrize("state", [{}, {"backend": None, "num_processes": 1}, {"backend": "xla"}])
def test_other_states_stay(state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    collectives.init_distributed()
    before = dict(stand_in(monkeypatch, state))
    assert collectives.is_initialized() and state == before


def test_accelerate_counts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's own class, where it is installed: a state with a backend, thus one that belongs to a job."""
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setitem(sys.modules, "deepspeed", sys.modules["shardwise.deepspeed"])
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("accelerate.state.is_deepspeed_available", lambda: True)
    accelerate.PartialState._reset_state()
    try:
        made = accelerate.PartialState()
        assert made.backend == "gloo" and made.num_processes == 1
    finally:
        accelerate.PartialState._reset_state()
