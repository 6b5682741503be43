"""The address that rank 0 of an MPI job tells the others."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.comm.rendezvous.mpi import broadcast_address


def _refuse() -> str:
    raise ConfigError("comm: this host has two addresses")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What rank 0 sent, in an mpi4py whose ranks call one after another."""
    values: list[Any] = []

    def bcast(value: Any, root: int) -> Any:
        values.append(value)
        return values[root]

    module = ModuleType("mpi4py")
    module.MPI = SimpleNamespace(COMM_WORLD=SimpleNamespace(bcast=bcast))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    return values


def test_all_ranks_take_the_address_of_rank_0(sent: list[Any]) -> None:
    assert broadcast_address(0, lambda: "10.0.0.1") == "10.0.0.1"
    assert broadcast_address(1, _refuse) == "10.0.0.1"


def test_all_ranks_refuse_for_rank_0_s_reason(sent: list[Any]) -> None:
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="this host has two addresses"):
            broadcast_address(rank, _refuse)


def test_an_mpi4py_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match="mpi4py, which does not load here: .* Set MASTER_ADDR"):
        broadcast_address(1, _refuse)
