"""Two hosts of two ranks, as two network namespaces of this one: ``make soak``, as root on Linux."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
_ADDRESS = "10.213.7.{}"


def _can_make_namespaces() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    made = subprocess.run(["ip", "netns", "add", "shardwise_trial"], capture_output=True)
    subprocess.run(["ip", "netns", "delete", "shardwise_trial"], capture_output=True)
    return made.returncode == 0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with a cable between them."""
    if not _can_make_namespaces():
        pytest.skip("needs the right to make network namespaces")
    names = [f"shardwise{number}_{os.getpid()}" for number in (1, 2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "cable1",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable2",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"{_ADDRESS.format(number)}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"cable{number}", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _losses(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss ")]


@pytest.mark.soak
@pytest.mark.parametrize("training", [_TRAIN, _EXPERTS], ids=["dense", "experts"])
def test_two_hosts_train_as_one(hosts: list[str], tmp_path: Path, training: str) -> None:
    """Experts in two levels: of all 80 tokens, each with experts everywhere, a row crosses once."""
    script = tmp_path / "train.py"
    script.write_text(training)
    launch = [sys.executable, "-m", "shardwise", "launch"]
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *launch, "-n", "2", "--num_nodes", "2", "--node_rank", str(number)]
            + ["--master_addr", _ADDRESS.format(1), str(script)],
            env=os.environ | {"SHARDWISE_SECRET": "of both hosts"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, name in enumerate(hosts)
    ]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    for number, text in enumerate(said):
        assert f"interface cable{number + 1}" in text
        assert f"ranks {2 * number} to {2 * number + 1} of 4" in text
    one = subprocess.run([*launch, "-n", "4", str(script)], capture_output=True, text=True, timeout=60)
    assert len(_losses(one.stdout)) == 3, one.stderr
    assert _losses(said[0]) == pytest.approx(_losses(one.stdout), rel=1e-12)
    assert [line for line in said[0].splitlines() if line.startswith("rows ")] == (
        ["rows 240 80"] * 2 if training is _EXPERTS else []
    )
