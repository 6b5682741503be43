"""The place of a batch in the global batch, and errors of shapes in a first pass over slices."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.base.errors import PlanError
from shardwise.base.ragged import Ragged
from shardwise.engine.parts.pass_context import PassContext
from shardwise.passes.replay import BatchPosition


def context(tp: int = 2, steps_done: int = 0) -> tuple[PassContext, list[Any]]:
    """The context of rank 1 of 3, and the places at which passes drew."""
    places: list[Any] = []
    nothing = SimpleNamespace(
        at=lambda *given: nullcontext(),
        looked_at=nullcontext,
        forward=nullcontext,
        checked=lambda batch: nullcontext(),
    )
    replay: Any = SimpleNamespace(draws=nothing, at=lambda place: places.append(place) or nullcontext())
    parts: dict[str, Any] = {
        "data": SimpleNamespace(size=3, index=1),
        "tp": SimpleNamespace(size=tp),
        "clock": SimpleNamespace(steps_done=steps_done),
        "loads": SimpleNamespace(microbatch=None, layers={"experts": 2}),
        "replay": replay,
    }
    return PassContext(vocabulary=nothing, own_use=nothing, profile=nothing, **parts), places  # type: ignore[arg-type]


def test_samples_of_a_rank_lie_behind_those_of_the_ranks_before() -> None:
    here, places = context()
    batch = {"x": torch.zeros(4, 2)}
    for microbatch in (0, 2):
        with here.at(5, microbatch, batch):
            pass
        assert here.loads.microbatch == microbatch
    assert places == [BatchPosition(5, 1 * 4, 4), BatchPosition(5, (2 * 3 + 1) * 4, 4)]
    assert here.place(5, 1, None, rows=2) == BatchPosition(5, (1 * 3 + 1) * 2, 2)


def test_samples_are_counted_and_not_keys() -> None:
    here = context()[0]
    features = {"a": Ragged.of_lists([[1, 2, 3], [4, 5], []]), "labels": torch.zeros(3)}
    assert here.place(5, 0, features) == BatchPosition(5, 3, 3)
    assert here.place(1, 0, "no tensor").samples is None


def test_a_misfit_of_shapes_in_the_first_pass_names_the_table() -> None:
    def end_with(text: str, **more: int) -> None:
        with context(**more)[0].at(0, 0, torch.zeros(1)):
            raise RuntimeError(text)

    with pytest.raises(PlanError, match="tp=2 ranks ended with: shapes 3 and 4\\. .*tensor.table"):
        end_with("shapes 3 \n and 4")
    for text, more in (("out of memory", {}), ("a size", {"tp": 1}), ("a size", {"steps_done": 1})):
        with pytest.raises(RuntimeError, match=text) as caught:
            end_with(text, **more)
        assert not isinstance(caught.value, PlanError)
