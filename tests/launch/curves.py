"""One training program, run on two hosts by every launcher, with the curve of one process and the bytes that it sends.

A host sends its sum of the gradients once: (H-1)/H of the elements for each of the two halves of an all-reduce. Stage 3
gathers before the forward and before the backward pass, and sums once: three halves.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 4
TRAIN = f"""
import json
import sys
from pathlib import Path

import torch

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy


def sent(interface):
    return sum(int(each.read_text()) for each in Path("/sys/class/net").glob(interface + "/statistics/tx_bytes"))


inside = sent("lo")
asked = json.loads(sys.argv[1])
torch.manual_seed(0)
model = Gpt(GptPolicy(family="gpt2", layers=4, width=128, heads=4, context=32, vocab=256, dropout=0.0)).double()
engine = shardwise.initialize(
    model,
    {{"optimizer": {{"lr": 0.001}}, "max_grad_norm": 1.0, "check_first_step": "off", **asked}},
    loss=lambda model, batch: model(batch[:, :-1], batch[:, 1:]),
)
ranks = engine.plan.mesh.size("dp")
before = 0
for step in range({STEPS}):
    draws = torch.Generator().manual_seed(step)
    batch = torch.randint(0, 256, (12, 33), generator=draws).chunk(ranks)[engine.dp_index]
    engine.backward(engine(batch))
    engine.print("loss", repr(engine.step().loss))
    if step == 0:  # the start weights have been sent, and all that is done once
        engine.world.barrier()
        before = sent("cable*")
engine.world.barrier()
crossed, inside = sent("cable*") - before, sent("lo") - inside
elements = sum(info.elements for info in engine.plan.registry.of_kind("parameter"))
said = {{"rank": engine.world.rank, "sent": crossed, "inside": inside, "elements": elements}}
print(json.dumps(said | {{"carries": engine.world.transports()}}), flush=True)
engine.close()
"""
CURVES: dict[str, tuple[dict[str, Any], float]] = {
    "stage 0": ({"zero": {"stage": 0}}, 1.0),
    "stage 3": ({"zero": {"stage": 3}}, 1.5),
    "tp 2 in a host": ({"mesh": {"tp": 2}, "zero": {"stage": 0}}, 1.0),
}
"""Keys of a run on two hosts of two ranks, and how often the elements of the model leave a host in a step."""


def losses(text: str) -> list[float]:
    """Return the losses that a run printed."""
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss ")]


def reports(text: str) -> dict[int, Any]:
    """Return what each rank of a run printed at its end, by rank; our launcher puts the rank before its line."""
    found = [
        json.loads(each) for each in re.findall(r'^(?:\[rank \d+\] )?(\{"rank".*\})$', text, re.MULTILINE)
    ]
    return {each["rank"]: each for each in found}


def curve_alone(script: Path) -> list[float]:
    """Return the losses of one process on the whole batch."""
    alone = subprocess.run([sys.executable, str(script), "{}"], capture_output=True, text=True, timeout=120)
    assert len(losses(alone.stdout)) == STEPS, alone.stderr
    return losses(alone.stdout)


def check_curve(
    text: str, wanted: list[float], crossing: float, first_ranks: tuple[int, ...] = (0, 2)
) -> None:
    """Check that a run on two hosts has the losses of one process, and sent what the closed form says.

    Args:
        text: What all ranks printed.
        wanted: Losses of one process.
        crossing: Times that the elements of the model leave a host in a step; 0: not compared.
        first_ranks: A rank of each host.
    """
    assert losses(text) == pytest.approx(wanted, rel=1e-10), text
    said = reports(text)
    print([(each["sent"], each["inside"]) for each in said.values()])
    for each in (said[rank] for rank in first_ranks) if crossing else ():
        assert each["carries"] == "shared memory and gloo"
        assert each["inside"] <= 1 << 20
        assert each["sent"] == pytest.approx(crossing * 8 * each["elements"] * (STEPS - 1), rel=0.05)
