"""Memory that ends in ``initialize`` or in a step is one short error: what was being made, what is held, what helps."""

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch._dynamo  # what torch's optimizers import: not under a limit
from torch import nn

import shardwise
from shardwise.base.errors import OutOfMemoryError
from shardwise.config.run import RunConfig, load
from shardwise.engine.parts.out_of_memory import advice, bytes_asked, is_out_of_memory, outgrown
from shardwise.memory.ledger import Ledger, Row
from tests.ranks import PRELOADED

CPU = torch.device("cpu")


class Net(nn.Module):
    """Repeated blocks of 8 · width² parameters."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _limit(mib: int) -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    now = int(next(line for line in status if line.startswith("VmData")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + mib * 2**20, resource.RLIM_INFINITY))


def _in_initialize() -> None:
    model = Net(6, 512)
    _limit(60)
    shardwise.initialize(model, {"optimizer": {"type": "adamw"}})


def _in_a_forward_pass() -> None:
    engine = shardwise.initialize(Net(2, 64), {"batch": {"micro_size": 4}})
    x = torch.zeros(1 << 16, 64)
    _limit(50)
    engine(x)


def _in_train_step() -> None:
    engine = shardwise.initialize(Net(2, 64), {})
    x = torch.zeros(1 << 16, 64)
    _limit(50)
    try:
        engine.train_step([x])
    finally:
        assert engine.train_step([x[:4]]).step == 1  # the engine stands between two steps again


def _foreseen(x: torch.Tensor) -> "shardwise.Engine":
    engine = shardwise.initialize(Net(2, 64), {})
    outlook = shardwise.foresee(lambda: Net(2, 64), {}, example=x[:4])
    engine.expect_bytes(outlook.rows(outlook.steps[0]))
    return engine


def _in_a_larger_batch() -> None:
    x = torch.zeros(1 << 16, 64)
    engine = _foreseen(x)
    engine.train_step([x[:4]])
    _limit(50)
    engine.train_step([x])


def _in_a_measured_step() -> None:
    x = torch.zeros(1 << 16, 64)
    engine = _foreseen(x)
    _limit(50)
    with engine.measure_memory([x]):
        engine.train_step([x])


def _run(failing: Callable[[], None], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        failing()
    except BaseException as error:
        pipe.send((str(error), isinstance(error, OutOfMemoryError), isinstance(error, MemoryError)))


def _told(failing: Callable[[], None]) -> tuple[str, bool, bool]:
    """Return the error of ``failing`` in a process of its own: (text, is ours, is a MemoryError).

    The process is forked from the server of ranks, which has imported torch and runs nothing else. A fork of the
    process of all tests has its threads' locks and its scattered heap, and has been seen to die when memory ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(failing, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        pytest.fail(f"The process ended with exit code {process.exitcode} and said nothing.")
    finally:
        process.join()


@pytest.mark.parametrize(
    ("failing", "where", "keys"),
    [
        (_in_initialize, "in initialize, making the state of Unit blocks.", ["offload.optimizer=disk"]),
        (
            _in_a_forward_pass,
            "in step 1, the forward pass of Unit blocks.0 (F(u",
            ["recompute=full", "batch.micro_size=2", "offload.optimizer=disk offload.disk_path=FOLDER"],
        ),
        (_in_train_step, "in step 1, the forward pass of Unit blocks.0", ["recompute=full"]),
    ],
)
def test_out_of_memory_is_told(failing: Callable[[], None], where: str, keys: list[str]) -> None:
    text, is_ours, is_of_memory = _told(failing)
    assert is_ours and is_of_memory, text
    lines = text.splitlines()
    assert len(lines) <= 10, text
    assert where in lines[0] and "MiB more could not be had on cpu" in lines[0]
    assert "RLIMIT_DATA" in lines[0]
    assert lines[1].startswith("  held: ") and "weights " in lines[1]
    assert all(any(line.startswith(f"  {key}") for line in lines) for key in keys), text
    assert "shardwise train CONFIG --check --memory SIZE" in text
    assert "DefaultCPUAllocator" in lines[-1]  # what other programs look for


@pytest.mark.parametrize(
    ("failing", "row"),
    [
        (_in_a_larger_batch, "kept, received and at work, foreseen "),
        (_in_a_measured_step, "at work, foreseen "),
    ],
)
def test_the_row_that_outgrew_its_forecast_is_named(failing: Callable[[], None], row: str) -> None:
    text, is_ours, _ = _told(failing)
    assert is_ours, text
    [line] = [each for each in text.splitlines() if "outgrew its forecast most: " in each]
    assert line.startswith(f"  outgrew its forecast most: {row}") and "batch.micro_size" in line
    held = line.split("held ")[1].split(" with")[0]
    # One tensor of 64 MiB could not be had; beside it the limit leaves room for 50 MiB, and the heap for some more.
    assert held.endswith("MiB") and 128 > float(held.split()[0]) >= 64, text


def test_the_row_with_the_largest_growth_is_named() -> None:
    ledger = Ledger()
    assert outgrown(ledger, {"gathered": 100}, CPU, 0) == [], "nothing was foreseen"
    ledger.foreseen = {"gathered": 10 << 20, "weights": 90 << 20, "kept": 5 << 20, "at work": 1 << 20}
    ledger.rows_now = lambda: {"kept": 6 << 20, "received": 0, "at work": 0}
    held: dict[Row, int] = {"gathered": 40 << 20, "weights": 90 << 20}
    [line] = outgrown(ledger, held, CPU, 1 << 20)
    assert line.startswith("  outgrew its forecast most: gathered, foreseen 10.0 MiB, held 40.0 MiB")
    assert "zero.prefetch_bytes" in line
    [line] = outgrown(ledger, held | {"gathered": 10 << 20}, CPU, 64 << 20)
    assert line.startswith("  outgrew its forecast most: at work, foreseen 1.0 MiB, held 64.0 MiB")
    ledger.rows_now = lambda: {"kept": 5 << 20, "received": 0, "at work": 0}
    [line] = outgrown(ledger, held | {"gathered": 10 << 20}, CPU, 1 << 20)
    assert "no row has outgrown its forecast" in line


def test_errors_of_allocators_are_known_and_others_are_not() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(OutOfMemoryError("told"))
    assert bytes_asked("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0") == 2 * 2**30
    assert bytes_asked("you tried to allocate 28317696 bytes.") == 28317696
    assert bytes_asked("Unable to allocate 1.5 KiB for an array") == 1536
    assert bytes_asked("") is None


def test_advice_leaves_out_what_is_set() -> None:
    cuda = torch.device("cuda")

    def keys(config: RunConfig, device: torch.device, dp: int) -> list[str]:
        return [key for key, _ in advice(config, device, dp, in_a_pass=False)]

    assert keys(load({}), cuda, 4)[:2] == ["zero.stage=3", "offload.optimizer=host"]
    settled = load(
        {"zero": {"stage": 3}, "recompute": "full", "offload": {"optimizer": "host", "parameters": "host"}}
    )
    assert keys(settled, cuda, 4) == [
        "offload.optimizer=disk offload.disk_path=FOLDER",
        "offload.optimizer=disk offload.parameters=disk offload.disk_path=FOLDER",
        "offload.activations=host",
    ]


def test_advice_is_taken_by_the_configuration() -> None:
    config = load({"batch": {"micro_size": 4, "accumulation": 1}})
    for text, _ in advice(config, CPU, 2, in_a_pass=True):
        given: dict[str, dict[str, object]] = {"batch": {"micro_size": 4}}
        for pair in text.replace("FOLDER", "folder").split():
            key, _, value = pair.partition("=")
            section, _, field = key.partition(".")
            given.setdefault(section, {})[field or "scope"] = int(value) if value.isdigit() else value
        load(given)
