"""Layouts in fp32 and bf16 on the pretended device, with Triton's kernels in its interpreter, beside one process.

The device and the interpreter stay as long as their process, so this is run as a program; it prints, as JSON, one
``Outcome`` a row:

    TRITON_INTERPRET=1 python -m tests.accelerator.precisions few | all | mistakes

What is measured are the gradients of the first step and the losses of three, against fp64. The gradients of a layout
may be no farther from fp64 than ``FACTOR`` times those of one process on the CPU in the same precision, with the plain
forms of the kernels; a loss no farther than one rounding, for one process may be near by chance.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import shardwise
from shardwise.comm.world import World
from shardwise.kernels import choice
from shardwise.models import Gpt
from tests.accelerator.crew import Crew, CrewTransport
from tests.accelerator.pretend import NAME, Bench, register
from tests.engine.plain import worst
from tests.engine.test_model_parallel import Layout, config_of, pieces, policy_of, truth

FACTOR = 2.0
ROUNDING = {"fp32": 2.0**-22, "bf16": 2.0**-8}
STEPS = 3
LAYOUTS = [
    Layout(),
    Layout(dp=2, stage=3),
    Layout(tp=2, family="gpt2"),
    Layout(pp=2, microbatches=2),
    Layout(dp=2, stage=2, microbatches=2),
    Layout(dp=4, stage=1),
    Layout(tp=2),
    Layout(tp=2, sequence=False, kv_heads=2),
    Layout(tp=4, kv_heads=1, recompute="full"),
    Layout(pp=3, microbatches=4, family="gpt2"),
    Layout(pp=2, dp=2, stage=3, microbatches=2),
    Layout(dp=2, tp=2, stage=3, microbatches=2, recompute="selective"),
    Layout(pp=2, tp=2, microbatches=2, schedule="interleaved_1f1b", virtual_stages=2),
]
FEW = [
    (Layout(dp=2, stage=3, layers=2), "bf16"),
    (Layout(pp=2, microbatches=2, layers=2), "bf16"),
]


class Outcome(NamedTuple):
    """Errors of one layout, and of one process, against fp64."""

    row: str
    gradients: float
    single_gradients: float
    losses: float
    launches: int
    """Kernels of Triton's that ran."""
    wrong: list[str]
    """Misplaced operations and races."""

    @property
    def is_good(self) -> bool:
        """True if the layout is as near to fp64 as one process is."""
        is_near = self.gradients <= FACTOR * self.single_gradients
        rounding = ROUNDING[self.row.split()[0]]
        return is_near and self.losses <= rounding and not self.wrong and self.launches > 0


def train(world: World, layout: Layout, precision: str) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients of the first step, and the losses."""
    config = config_of(layout, "off") | {"precision": precision}
    engine = shardwise.initialize(Gpt(policy_of(layout)), config, world=world)
    found: dict[str, Tensor] = {}
    engine_step = engine._training.step

    def with_gradients() -> Any:
        if engine._parts.accumulation.is_complete and not found:
            found.update({name: each.cpu() for name, each in engine.gradients().items()})
        return engine_step()

    engine._training.step = with_gradients  # type: ignore[method-assign]
    losses = [engine.train_step(*pieces(layout, engine.dp_index, step)).loss for step in range(STEPS)]
    engine.close()
    return found, losses


def away(layout: Layout, gradients: dict[str, Tensor], losses: list[float]) -> tuple[float, float]:
    """Errors against fp64: of the gradients of the first step, and of the losses."""
    steps = truth(layout.family, layout.kv_heads, layout.layers, layout.heads)
    error = worst(gradients, steps[0].gradients, steps[0].addends)
    return error, max(abs(loss / step.loss - 1) for loss, step in zip(losses, steps, strict=True))


@cache
def alone(family: str, kv_heads: int, layers: int, heads: int, precision: str) -> float:
    """Error of the gradients of one process on the CPU, a microbatch for each two sequences."""
    layout = Layout(family=family, kv_heads=kv_heads, layers=layers, heads=heads, microbatches=5)
    with patch.object(choice, "DEVICES", frozenset()):
        return away(layout, *train(World(0, 1), layout, precision))[0]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Let the kernels serve the device; count their launches."""
    from triton.runtime.interpreter import GridExecutor

    launches, call = [0], GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[0] += 1
        return call(self, *args, **kwargs)

    served = frozenset({NAME, "cpu"})  # the bench runs an operation of the device on views of the host
    with patch.object(choice, "DEVICES", served), patch.object(GridExecutor, "__call__", launch):
        yield launches


def measure(layout: Layout, precision: str) -> Outcome:
    """Errors of a layout on the device."""
    device = register()
    single = alone(layout.family, layout.kv_heads, layout.layers, layout.heads, precision)
    with Bench() as bench, counted() as launches:
        ranks = Crew(layout.size, device).run(train, layout, precision)
    errors = [away(layout, *found) for found in ranks]
    return Outcome(
        f"{precision} {layout}",
        max(gradients for gradients, _ in errors),
        single,
        max(losses for _, losses in errors),
        launches[0],
        [*bench.misplaced, *bench.races],
    )


def half_a_gate() -> Any:
    """A kernel that forgets a term of its derivative."""
    from shardwise.kernels.fused import gated

    right = gated.gradient
    return patch.object(gated, "gradient", lambda grad, gate_up: right(grad, gate_up) * 0.75)


def narrow_sums() -> Any:
    """A reduction that rounds its addends to two bits."""
    right = CrewTransport.reduce_scatter

    def reduce_scatter(self: Any, out: Tensor, full: Tensor, *args: Any, **kwargs: Any) -> Any:
        coarse = full.detach().clone()
        coarse.copy_(full.to(torch.float8_e5m2).to(full.dtype))
        return right(self, out, coarse, *args, **kwargs)

    return patch.object(CrewTransport, "reduce_scatter", reduce_scatter)


MISTAKES: dict[str, tuple[Callable[[], Any], Layout, str]] = {
    "half a gate": (half_a_gate, *FEW[0]),
    "narrow sums": (narrow_sums, *FEW[0]),
}


def main() -> None:
    """Print the outcomes."""
    from tests.kernels.fused import conftest as _rounding  # noqa: F401 - how a device rounds to bf16

    torch.set_num_threads(1)
    which = sys.argv[1]
    every = [(layout, precision) for layout in LAYOUTS for precision in ("fp32", "bf16")]
    rows = [(nullcontext, *row) for row in (FEW if which == "few" else every)]
    for plant, layout, precision in MISTAKES.values() if which == "mistakes" else rows:
        with plant():
            print(json.dumps(measure(layout, precision)), flush=True)


if __name__ == "__main__":
    main()
