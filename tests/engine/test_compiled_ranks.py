"""``compile: blocks`` on ranks that share tensors or experts: no break in any graph, and the gradients of one process.

The exchanges are operators of the graph (comm/operators.py), and experts are one opaque operator (kernels/opaque.py).
"""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from tests.engine import test_experts as experts
from tests.engine import test_model_parallel as dense

DENSE = [
    dense.Layout(tp=2, stage=3, recompute="full", layers=3),
    dense.Layout(tp=2, layers=3, overlap=3),
]
EXPERTS = [
    experts.Layout(dp=2, ep=2, exchange="blocks"),
    experts.Layout(tp=2, ep=2, microbatches=2),
]


def measured(world: Any, layouts: list[Any]) -> list[tuple[float, dict[str, int], int]]:
    """Return the largest error from one process, the breaks and the number of graphs of each layout.

    Only the first layout is evaluated too: without gradients every graph is compiled again.
    """
    found = []
    for i, layout in enumerate(layouts):
        torch._dynamo.reset()
        counters.clear()
        table = dense if isinstance(layout, dense.Layout) else experts
        right = table.config_of

        def compiled(*args: Any, right: Any = right) -> dict[str, Any]:
            return {**right(*args), "compile": {"scope": "blocks", "backend": "aot_eager"}}

        evaluated = table.evaluation_departures if i == 0 else lambda *args: []
        with (
            patch.object(table, "config_of", compiled),
            patch.object(table, "evaluation_departures", evaluated),
            warnings.catch_warnings(),
        ):
            # What dynamo does itself: it looks at every input, and makes an object of each autograd.Function.
            warnings.filterwarnings("ignore", "The .grad attribute|.*should not be instantiated")
            figures = table.measure(world, layout)
        found.append((max(figures), dict(counters["graph_break"]), counters["stats"]["unique_graphs"]))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    "layouts",
    [DENSE[1:], pytest.param(DENSE, marks=pytest.mark.soak), pytest.param(EXPERTS, marks=pytest.mark.soak)],
    ids=["in pieces", "dense", "experts"],
)
def test_a_block_is_one_graph_and_equals_one_process(ranks: Any, layouts: list[Any]) -> None:
    results = ranks(2).run(measured, layouts, timeout_s=600.0)
    for by_layout in zip(layouts, *results, strict=True):
        layout, *by_rank = by_layout
        for error, breaks, graphs in by_rank:
            assert not breaks, (layout, breaks)
            assert graphs > 0, layout
            assert error <= 1e-10, layout
