"""``import shardwise`` gives a user's program its types: mypy finds mistakes of use, and none in a right program."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RIGHT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise


def note(engine: shardwise.Engine, result: shardwise.StepResult) -> None:
    engine.print(result.step, result.loss)


def train(steps: int) -> float:
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    engine = shardwise.initialize(
        model,
        {"zero": {"stage": 1}},
        loss=lambda module, batch: (module(batch[0]) - batch[1]).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
        on_step=[note],
    )
    reveal_type(engine)
    loader = engine.loader(DataLoader(data, batch_size=4), epochs=2)
    print(len(loader), engine.plan.mesh.size("dp"))
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        result = engine.step()
        if result is not None:
            print(result.grad_norm, result.skipped)
    value = engine((torch.randn(1, 4), torch.randn(1, 1)))
    print(value.item(), engine.gather_metrics(value).shape)
    one, two = engine.gather_metrics(value, value, samples=1)
    output = engine({"input_ids": torch.zeros(1, 4)}).loss
    state = engine.load("folder")
    if state is not None:
        print(state["epoch"], output, one + two)
    engine.save("folder", {"epoch": 1})
    return engine.evaluate(engine.evaluation_loader(data, batch_size=4))


losses: list[float] = shardwise.launch(train, 3, ranks=2, every=True)
loss: float = shardwise.launch(train, 3, ranks=2)
try:
    print(shardwise.fits(lambda: nn.Linear(4, 1), {"zero": {"stage": 3}}, {"device": "2 GiB"}, torch.randn(1, 4)))
except shardwise.ShardwiseError as error:
    print(error)
"""
WRONG = """
import torch
from torch import nn

import shardwise

model = nn.Linear(4, 1)
engine = shardwise.initialize(model)
data = torch.utils.data.TensorDataset(torch.randn(8, 4))
loss = engine((torch.randn(1, 4),))

engine.train_stp([])  # 1
engine.save(3)  # 2
shardwise.initialize(model, lose=None)  # 3
print(engine.step().loss)  # 4
shardwise.initialize(nn.Linear)  # 5
shardwise.initialise(model)  # 6
engine.backward()  # 7
engine.loader(data, batch=16)  # 8
loss.bakward()  # 9
engine.step(weight="many")  # 10
engine.gather_metrics([1.0, 2.0])  # 11
number: str = shardwise.launch(lambda: 1, ranks=2)  # 12
"""


def test_mypy_finds_mistakes_of_use_and_none_in_a_right_program(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    # The settings and the cache of `make types`, so that one of the two finds the other's types read; another flag
    # would make both read everything again.
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache")]
    command += ["--config-file", str(ROOT / "pyproject.toml"), "--no-pretty"]
    command += [str(tmp_path / "right.py"), str(tmp_path / "wrong.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    right = [line for line in done.stdout.splitlines() if "right.py" in line]
    assert len(right) == 1, done.stdout + done.stderr
    assert 'Revealed type is "shardwise.engine.engine.Engine"' in right[0]
    wrong = WRONG.splitlines()
    found = {
        int(wrong[int(place[1]) - 1].rsplit("# ", 1)[1])
        for place in re.finditer(r"wrong\.py:(\d+): error", done.stdout)
    }
    assert found == set(range(1, 13)), done.stdout
