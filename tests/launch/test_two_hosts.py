"""Two hosts of two ranks, as two network namespaces of this one: ``make soak``, as root on Linux."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.comm.rendezvous.besieged import SECRET, check_strangers
from tests.launch.curves import CURVES, TRAIN, check_curve, curve_alone
from tests.namespaces import NamespaceHost, namespaces

_TRAIN = """
import torch
from torch import nn

import shardwise

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
engine = shardwise.initialize(
    model,
    {"zero": {"stage": 3}, "optimizer": {"lr": 0.01}},
    loss=lambda model, batch: ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean(),
)
draws = torch.Generator().manual_seed(engine.dp_index)
for _ in range(3):
    engine.backward(engine(torch.randn(4, 8, generator=draws, dtype=torch.float64)))
    engine.print("loss", repr(engine.step().loss))
engine.close()
"""
_EXPERTS = """
import torch
from torch import nn

import shardwise

torch.manual_seed(0)
layers = (shardwise.MixtureOfExperts(8, 16, 8, router=shardwise.RouterPolicy(top_k=8)) for _ in range(2))
engine = shardwise.initialize(
    nn.Sequential(*layers).double(),
    {"mesh": {"ep": 4}, "zero": {"stage": 1}, "optimizer": {"lr": 0.01}},
    loss=lambda model, batch: (model(batch) - batch).square().mean(),
)
draws = torch.Generator().manual_seed(engine.dp_index)
for _ in range(3):
    engine.backward(engine(torch.randn(4, 5, 8, generator=draws, dtype=torch.float64)))
    engine.print("loss", repr(engine.step().loss))
for tally in engine.expert_tallies().values():
    engine.print("rows", tally.rows_sent, tally.rows_crossed)
engine.close()
"""
_COUNTED = """
import json
import sys
from pathlib import Path

import torch
from torch import nn

import shardwise

exchange, stage, reduce = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
config = {
    "precision": {"compute": "bf16", "reduce": reduce},
    "zero": {"stage": stage, "exchange": exchange},
    "comm": {"transport": "torch" if exchange == "all_to_all" else "auto"},
    "optimizer": {"lr": 0.0001},
}
engine = shardwise.initialize(model, config, loss=lambda model, batch: model(batch).float().square().mean())
(counter,) = Path("/sys/class/net").glob("cable*/statistics/tx_bytes")
batch = torch.randn(4, 256, generator=torch.Generator().manual_seed(engine.dp_index))


def step() -> float:
    engine.backward(engine(batch))
    return engine.step().loss


step()
engine.world.barrier()
before = int(counter.read_text())
losses = [step() for _ in range(4)]
engine.world.barrier()
engine.print(json.dumps({"sent": (int(counter.read_text()) - before) / 4, "losses": losses}))
engine.close()
"""


@pytest.fixture
def hosts() -> Iterator[list[NamespaceHost]]:
    """Two hosts with a cable between them, whose names resolve nowhere."""
    with namespaces() as made:
        yield made


def _losses(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss ")]


def _run(hosts: list[NamespaceHost], script: Path, *words: str, launcher: str = "") -> list[str]:
    """What two ranks on each host printed, by host."""
    return _outputs(hosts, _commands(hosts, script, *words, launcher=launcher))


def _commands(hosts: list[NamespaceHost], script: Path, *words: str, launcher: str = "") -> list[list[str]]:
    """Return a command for each host that starts two ranks there."""
    launch = [sys.executable, "-m", "shardwise", "launch", "-n", "2", "--num_nodes", "2"]
    launch += ["--launcher", launcher] if launcher else []
    return [
        [*launch, "--node_rank", str(number), "--master_addr", hosts[0].address, str(script), *words]
        for number in range(len(hosts))
    ]


def _started(hosts: list[NamespaceHost], commands: list[list[str]]) -> list["subprocess.Popen[str]"]:
    return [
        host.start(
            *command,
            env=os.environ | {"SHARDWISE_SECRET": SECRET},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, command in zip(hosts, commands, strict=True)
    ]


def _outputs(hosts: list[NamespaceHost], commands: list[list[str]]) -> list[str]:
    """What one command on each host printed."""
    started = _started(hosts, commands)
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return said


def _losses_alone(script: Path) -> list[float]:
    alone = [sys.executable, "-m", "shardwise", "launch", "-n", "4", str(script)]
    one = subprocess.run(alone, capture_output=True, text=True, timeout=120)
    assert len(_losses(one.stdout)) == 3, one.stderr
    return _losses(one.stdout)


@pytest.mark.soak
@pytest.mark.parametrize(("config", "crossing"), CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("launcher", ["", "torchrun"], ids=["ours", "torchrun"])
def test_two_hosts_train_as_one_process(
    hosts: list[NamespaceHost], tmp_path: Path, launcher: str, config: dict[str, Any], crossing: float
) -> None:
    """Names resolve nowhere, and torch's agents find one another by numeric addresses."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    said = _run(hosts, script, json.dumps(config), launcher=launcher)
    check_curve("".join(said), curve_alone(script), crossing)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["", "torchrun"], ids=["ours", "torchrun"])
def test_a_thousand_strangers_do_not_stop_a_job(
    hosts: list[NamespaceHost], tmp_path: Path, launcher: str
) -> None:
    """At the gate; torchrun's own store listens on every interface, in a process that is not the job's."""
    check_strangers(
        hosts,
        tmp_path,
        lambda program: _started(hosts, _commands(hosts, Path(program), launcher=launcher)),
    )


@pytest.mark.soak
def test_two_pods_train_as_one(tmp_path: Path) -> None:
    """The manifest's container commands, run on two hosts with the variables and the name that Kubernetes gives."""
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    render = ["launch", "--launcher", "kubernetes", "--render", "--launcher_args", "--name trial"]
    render += ["--num_nodes", "2", "--ranks", "2", str(script)]
    shown = subprocess.run([sys.executable, "-m", "shardwise", *render], capture_output=True, text=True)
    _, job = yaml.safe_load_all(shown.stdout)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    commands = [
        [sys.executable, "-m", *container["command"]]
        + [word.replace("$(JOB_COMPLETION_INDEX)", index).replace("$$", "$") for word in container["args"]]
        for index in "01"
    ]
    resolves = {"trial-0.trial": "10.213.7.1", "trial-1.trial": "10.213.7.2"}
    with namespaces(names=("trial-0", "trial-1"), resolves=resolves) as pods:
        said = _outputs(pods, commands)
    assert _losses(said[0]) == pytest.approx(_losses_alone(script), rel=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("training", [_TRAIN, _EXPERTS], ids=["dense", "experts"])
def test_two_hosts_train_as_one(hosts: list[NamespaceHost], tmp_path: Path, training: str) -> None:
    """Experts in two levels: of all 80 tokens, each with experts everywhere, a row crosses once."""
    script = tmp_path / "train.py"
    script.write_text(training)
    said = _run(hosts, script)
    for number, text in enumerate(said):
        assert f"interface cable{number + 1}" in text
        assert f"ranks {2 * number} to {2 * number + 1} of 4" in text
    assert _losses(said[0]) == pytest.approx(_losses_alone(script), rel=1e-12)
    assert [line for line in said[0].splitlines() if line.startswith("rows ")] == (
        ["rows 240 80"] * 2 if training is _EXPERTS else []
    )


@pytest.mark.soak
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("reduce", "most"), [("bf16", 0.55), ("fp32", 0.75)])
def test_two_levels_send_fewer_bytes(
    hosts: list[NamespaceHost], tmp_path: Path, stage: int, reduce: str, most: float
) -> None:
    """Bytes on the cable in a step, as the kernel counts them, beside those of exchanges in one level.

    Sums of a host in 32 bits take as many bytes as the gradients of its two ranks in 16; only gathers then send less.
    """
    script = tmp_path / "count.py"
    script.write_text(_COUNTED)
    found = {}
    for exchange in ("all_to_all", "auto"):
        text = _run(hosts, script, exchange, str(stage), reduce)[0]
        found[exchange] = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    print(f"stage {stage}, reduce {reduce}: {found}")
    assert found["auto"]["sent"] <= most * found["all_to_all"]["sent"], found
    assert found["auto"]["losses"] == pytest.approx(found["all_to_all"]["losses"], rel=1e-2)
