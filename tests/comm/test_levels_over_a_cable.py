"""Two hosts of two ranks, as network namespaces: the curve of one process, and bytes as the kernel counts them.

``make soak``, as root on Linux.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import NamespaceHost, namespaces

_STEPS = 4
_TRAIN = f"""
import json
import sys
from pathlib import Path

import torch

import shardwise
from shardwise.models.gpt import Gpt, GptPolicy

asked = json.loads(sys.argv[1])
torch.manual_seed(0)
model = Gpt(GptPolicy(family="gpt2", layers=4, width=128, heads=4, context=32, vocab=256, dropout=0.0)).double()
engine = shardwise.initialize(
    model,
    {{"optimizer": {{"lr": 0.001}}, "max_grad_norm": 1.0, "check_first_step": "off", **asked}},
    loss=lambda model, batch: model(batch[:, :-1], batch[:, 1:]),
)
ranks = engine.plan.mesh.size("dp")
cable = [*Path("/sys/class/net").glob("cable*/statistics/tx_bytes")]
before = 0
for step in range({_STEPS}):
    draws = torch.Generator().manual_seed(step)
    batch = torch.randint(0, 256, (12, 33), generator=draws).chunk(ranks)[engine.dp_index]
    engine.backward(engine(batch))
    engine.print("loss", repr(engine.step().loss))
    if step == 0 and cable:  # the start weights have been sent, and all that is done once
        engine.world.barrier()
        before = int(cable[0].read_text())
engine.world.barrier()
sent = int(cable[0].read_text()) - before if cable else 0
elements = sum(info.elements for info in engine.plan.registry.of_kind("parameter"))
print(json.dumps({{"sent": sent, "elements": elements, "carries": engine.world.transports()}}))
engine.close()
"""


@pytest.fixture
def hosts() -> Iterator[list[NamespaceHost]]:
    with namespaces() as made:
        yield made


def _losses(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss ")]


def _said(text: str) -> Any:
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def _run(
    hosts: list[NamespaceHost], script: Path, counts: tuple[int, ...], config: dict[str, Any]
) -> list[str]:
    """What the ranks of each host printed."""
    secret = os.environ | {"SHARDWISE_SECRET": "of both hosts"}
    total, first, started = sum(counts), 0, []
    for number, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        ranks = {
            str(local): {
                "RANK": str(first + local),
                "WORLD_SIZE": str(total),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29617",
                "GLOO_SOCKET_IFNAME": f"cable{number + 1}",
            }
            for local in range(count)
        }
        started += [
            host.start(
                *(sys.executable, str(script), json.dumps(config)),
                env=secret | each,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for each in ranks.values()
        ]
        first += count
    said = [process.communicate(timeout=300)[0] for process in started]
    assert {process.returncode for process in started} == {0}, said
    return said


@pytest.mark.soak
@pytest.mark.parametrize(
    ("counts", "config", "crossing"),
    [
        ((2, 2), {"zero": {"stage": 0}}, 1.0),
        ((2, 2), {"zero": {"stage": 3}}, 1.5),
        ((2, 2), {"mesh": {"tp": 2}, "zero": {"stage": 0}}, 1.0),
        ((2, 1), {"zero": {"stage": 0}}, 0.0),
        ((2, 1), {"zero": {"stage": 3}}, 0.0),
    ],
    ids=["stage 0", "stage 3", "tp 2 in a host", "stage 0 on 2 and 1", "stage 3 on 2 and 1"],
)
def test_hosts_of_ranks_train_as_one_process(
    hosts: list[NamespaceHost],
    tmp_path: Path,
    counts: tuple[int, ...],
    config: dict[str, Any],
    crossing: float,
) -> None:
    """A host sends its sum of the gradients once: (H-1)/H of the elements for each of the two halves of an all-reduce.

    Stage 3 gathers before the forward and before the backward pass, and sums once: three halves. Its ranges go
    in one step over hosts with different numbers of ranks.

    Args:
        hosts: The hosts.
        tmp_path: Folder of the script.
        counts: Ranks of each host.
        config: Keys of the run.
        crossing: Times that the elements of the model leave a host in a step; 0: not compared.
    """
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    alone = subprocess.run([sys.executable, str(script), "{}"], capture_output=True, text=True, timeout=120)
    wanted = _losses(alone.stdout)
    assert len(wanted) == _STEPS, alone.stderr
    before = [host.counted("lo").sent for host in hosts]
    texts = _run(hosts, script, counts, config)
    assert _losses(texts[0]) == pytest.approx(wanted, rel=1e-10)
    inside = [host.counted("lo").sent - start for host, start in zip(hosts, before, strict=True)]
    said = [_said(texts[rank]) for rank in (0, counts[0])]
    print(said, inside)
    assert {each["carries"] for each in said} == {"shared memory and gloo"} or len({*counts}) > 1
    if crossing:
        assert max(inside) <= 1 << 20
        for each in said:
            assert each["sent"] == pytest.approx(crossing * 8 * each["elements"] * (_STEPS - 1), rel=0.05)
