"""``shardwise.launch(function, ranks=2)`` as a notebook uses it: what is called has no file."""

import multiprocessing
import signal
import warnings

import pytest

CELLS = '''
import os, signal, sys, time
import torch
from torch import nn
import shardwise
from shardwise.base.errors import RankError, UsageError

data = torch.randn(8, 3)
# This process has computed before, and has imported what each rank would import anew.
layer = nn.Linear(3, 1)
layer(data).sum().backward()
torch.optim.SGD(layer.parameters()).step()
shardwise.initialize


def train(steps, scale=1.0):
    torch.manual_seed(0)
    engine = shardwise.initialize(nn.Linear(3, 1), {"zero": {"stage": 3}}, loss=lambda m, x: m(x).square().mean())
    for _ in range(steps):
        mine = scale * data.chunk(engine.world.size)[engine.world.rank]
        engine.backward(engine(mine))
        result = engine.step()
    return result.step, result.loss, engine.state_dict()["weight"].shape, engine.world.rank


def left():
    """Children of this process."""
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    return open(path).read().split()


steps, loss, shape, rank = shardwise.launch(train, 2, scale=0.5)
assert (steps, shape, rank) == (2, (1, 3), 0) and loss > 0
alone = shardwise.launch(train, 2, scale=0.5, ranks=1)
assert abs(alone[1] - loss) < 1e-6
assert [each[3] for each in shardwise.launch(train, 1, ranks=2, every=True)] == [0, 1]


def fails():
    if int(os.environ["RANK"]) == 1:
        raise ValueError("of rank 1 alone")
    time.sleep(60)


def is_killed():
    if int(os.environ["RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def starts_more():
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return os.getpid()


def said_by(function):
    try:
        shardwise.launch(function)
    except (RankError, UsageError) as error:
        return str(error)


said = said_by(fails)
assert said.startswith("rank 1 failed: ValueError: of rank 1 alone"), said
assert "in fails" in said and "function.py" not in said, said
assert "killed by SIGKILL" in said_by(is_killed)
assert "a function, cannot be returned" in said_by(lambda: lambda: 1)
assert "itself a rank" in said_by(lambda: shardwise.launch(train, 1))
group = shardwise.launch(starts_more)
for _ in range(3000):  # until init has reaped it
    try:
        os.killpg(group, 0)
        time.sleep(0.01)
    except (ProcessLookupError, PermissionError):
        break
else:
    raise SystemExit("what a rank started is left")


notebook = os.getpid()


def interrupts():
    # Again, where the first one comes while Python forks: it drops what its own callbacks raise then.
    for wait_s in (0.5, 10.0, 10.0, 10.0):
        time.sleep(wait_s)
        if int(os.environ["RANK"]) == 1:
            os.kill(notebook, signal.SIGINT)


try:
    shardwise.launch(interrupts, ranks=2)
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("Ctrl-C did not end the launch")
assert left() == [], left()
print("every cell ran")
'''


def _cells() -> None:
    warnings.resetwarnings()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever tests before this one have left
    exec(compile(CELLS, "<cell>", "exec"), {})


def test_cells_of_a_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    """Results, keyword arguments, one rank, a failure, a kill, Ctrl-C; no process is left."""
    # A fork, which has torch already: children and signals are its own.
    process = multiprocessing.get_context("fork").Process(target=_cells)
    process.start()
    process.join(120)
    process.kill()
    found = capfd.readouterr()
    assert process.exitcode == 0 and "every cell ran" in found.out, found
