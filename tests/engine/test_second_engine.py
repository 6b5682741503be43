"""A second engine in one job, after one that was refused, closed, or dropped and collected.

torch's default group once outlived the store that it was made over: every ``initialize`` after the first engine was
gone ended in "Tried to call pure virtual function". Each test has a job of its own, because the ranks of a pool keep
the World that made the default group.
"""

import contextlib
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.base.errors import CheckpointError, MeshError, UsageError
from shardwise.parallel.embedding.rows.keyed_rows import KeyedRows
from shardwise.tiers.row_tiers import RowTiersPolicy
from tests.engine.engines_campaign import campaign, fresh_job
from tests.engine.tables_net import Net, batch, train

GLOO = {"comm": {"transport": "torch"}}
CARRIERS = pytest.mark.parametrize("carrier", [{}, GLOO], ids=["shared memory", "gloo"])


def build(config: dict[str, Any]) -> shardwise.Engine:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return shardwise.initialize(net, config, loss=lambda net, x: net(x).square().mean())


def step(engine: shardwise.Engine) -> float:
    return engine.train_step([torch.ones(2, 4)]).loss


def collected(on: tuple[int, ...]) -> None:
    if int(os.environ["RANK"]) in on:
        gc.collect()


def second_engines(carrier: dict[str, Any]) -> list[float]:
    """Each way in which a first engine may end, and who collects it: both ranks, rank 0 alone, rank 1 alone."""
    losses = []
    for on in ((0, 1), (0,), (1,)):
        with pytest.raises(MeshError):
            build(carrier | {"mesh": {"dp": 5}})
        collected(on)
        losses.append(step(build(carrier | {"zero": {"stage": 2}})))
        engine = build(carrier | {"zero": {"stage": 3}})
        losses.append(step(engine))
        engine.close()
        del engine
        collected(on)
        losses.append(step(build(carrier)))  # dropped unclosed
        collected(on)
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        assert total.item() == 2
    return losses


@CARRIERS
def test_an_engine_after_another_one(carrier: dict[str, Any]) -> None:
    for losses in fresh_job(second_engines, carrier):
        assert len(set(losses)) == 1, losses


def test_many_engines_refused_closed_and_dropped(tmp_path: Path) -> None:
    for (_, early), (_, late) in fresh_job(campaign, 12, 1, str(tmp_path)):
        assert late.threads <= early.threads
        assert late.descriptors <= early.descriptors
        assert late.resident_bytes <= 1.05 * early.resident_bytes
    assert not os.listdir(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_engines(tmp_path: Path, seed: int) -> None:
    for (_, early), (_, late) in fresh_job(campaign, 100, seed, str(tmp_path)):
        assert late.threads <= early.threads
        assert late.descriptors <= 1.05 * early.descriptors
        assert late.resident_bytes <= 1.05 * early.resident_bytes
    assert not os.listdir(tmp_path)


# What a refused engine holds ---------------------------------------------------------------------------------------


def refused_late(folder: str) -> dict[str, Any]:
    offload = {"optimizer": "disk", "disk_path": folder}
    gc.collect()  # engines of tests before this one
    maps = Path("/proc/self/maps").read_text().count("/dev/shm")
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(CheckpointError, match="neither a file nor a folder") as held:
        build({"offload": offload, "init_from": {"path": f"{folder}/nothing"}})
    dist.barrier()
    return {
        "files": os.listdir(folder),
        "shared maps": max(Path("/proc/self/maps").read_text().count("/dev/shm") - maps, 0),
        "grown": len(os.listdir("/proc/self/fd")) - before[0],
        "watches": [each.name for each in threading.enumerate() if "watch" in each.name],
        "held": str(held.value)[:9],  # the error is held until here
    }


def test_a_refused_engine_gives_all_back_at_once(tmp_path: Path) -> None:
    """While somebody holds the error, whose traceback refers to its parts."""
    for found in fresh_job(refused_late, str(tmp_path)):
        assert found["files"] == [] and found["shared maps"] == 0 and found["watches"] == [], found


# Threads -----------------------------------------------------------------------------------------------------------


def built_by_two_threads() -> list[str]:
    said: list[str] = []
    inside, may_go_on = threading.Event(), threading.Event()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        inside.set()
        assert may_go_on.wait(60)
        return torch.optim.SGD(parameters, 0.1)

    def first() -> None:
        engine = shardwise.initialize(
            nn.Linear(4, 1), {}, loss=lambda net, x: net(x).sum(), optimizer=optimizer
        )
        said.append(f"first {engine.train_step([torch.ones(1, 4)]).step}")

    thread = threading.Thread(target=first, name="first")
    thread.start()
    assert inside.wait(60)
    with pytest.raises(UsageError) as refused:
        build({})
    may_go_on.set()
    thread.join()
    said.append(str(refused.value))
    step(build({}))
    return said


def test_two_threads_that_build_at_once_are_refused() -> None:
    for first, refused in fresh_job(built_by_two_threads):
        assert first == "first 1"
        assert (
            "thread 'MainThread' of rank" in refused and "while thread 'first' builds another one" in refused
        )


# torch's default group ---------------------------------------------------------------------------------------------


def default_group_ended() -> tuple[str, list[float]]:
    """Build an engine, destroy torch's default group, and build another one; return what was printed, and losses."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        first = build({})
        losses = [step(first)]
        second = build({"zero": {"stage": 2}})
        losses.append(step(second))
        first.close()
        second.close()
        dist.destroy_process_group()
        third = build({"zero": {"stage": 3}})
        losses.append(step(third))
        third.close()
    return said.getvalue(), losses


def test_a_default_group_that_was_destroyed_is_made_again() -> None:
    """The store still held the first group's keys: another program was said to have written them."""
    (first, losses), (second, others) = fresh_job(default_group_ended)
    assert losses == others and len(set(losses)) == 1
    assert (
        first.splitlines() == ["shardwise: 2 ranks from the environment, cpu, gloo"] or first.count("\n") == 1
    ), first
    assert not second


# Forks -------------------------------------------------------------------------------------------------------------


def fork_and_collect() -> int:
    """The collector of a fork meets what is left of engines that ran on gloo."""
    gc.disable()
    step(build(GLOO))  # the job's first engine, which exchanges over torch's default group
    for ends in (True, False):
        engine = build(GLOO | {"zero": {"stage": 3}})
        step(engine)
        if ends:
            engine.close()
        del engine
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(0)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def test_a_fork_after_engines_on_gloo() -> None:
    """A child on one rank ended in a segmentation fault, on the other it hung."""
    assert fresh_job(fork_and_collect) == [0, 0]


def closed_on_gloo() -> list[bool]:
    """Groups of torch end in ``close``, with their C++ halves, and in no collector."""
    gc.disable()
    step(build(GLOO))  # the job's first engine, which exchanges over torch's default group
    engine = build(GLOO | {"zero": {"stage": 3}})
    step(engine)
    groups = [weakref.ref(each) for each in engine.world.links._groups]
    threads = len(os.listdir("/proc/self/task"))
    engine.close()
    return [bool(groups), *(each() is None for each in groups), len(os.listdir("/proc/self/task")) < threads]


def test_groups_end_in_close() -> None:
    assert fresh_job(closed_on_gloo) == [[True, True, True]] * 2


# Dropped -----------------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "gloo": GLOO,
    "disk": {"offload": {"optimizer": "disk", "parameters": "disk"}, "zero": {"stage": 3}},
    "host": {"offload": {"optimizer": "host"}, "zero": {"stage": 2}},
    "activations": {"offload": {"activations": "host"}, "zero": {"units": ["0", "2"]}},
    "recompute": {"recompute": "full", "zero": {"units": ["0", "2"], "stage": 3}},
    "fp16": {"precision": "fp16", "zero": {"stage": 1}},
}


def dropped(folder: str) -> dict[str, list[bool]]:
    """Each kind of engine, dropped without ``close``, between steps and in the middle of one."""
    found: dict[str, list[bool]] = {}
    for name, config in SHAPES.items():
        if "disk" in str(config):
            config = config | {"offload": config["offload"] | {"disk_path": folder}}
        gone: list[Callable[[], object]] = []
        for ends_in in ("a step", "a forward pass", "a backward pass"):
            engine = build(config)
            step(engine)
            if ends_in != "a step":
                loss = engine(torch.ones(2, 4))
                if ends_in == "a backward pass":
                    engine.set_boundary(False)
                    engine.backward(loss)
                del loss
            gone += [weakref.ref(each) for each in (engine, engine._parts, engine.module)]
            del engine
            gc.collect()
        found[name] = [each() is None for each in gone]
    return found


def test_a_dropped_engine_is_collected(tmp_path: Path) -> None:
    for found in fresh_job(dropped, str(tmp_path)):
        assert found == {name: [True] * 9 for name in SHAPES}


# The end of a job --------------------------------------------------------------------------------------------------


def tables_left(folder: str) -> list[Any]:
    """What a model with tables says after the engine was closed: in memory, in tiers, as dense weights alone."""
    found: list[Any] = []
    for tiers in (None, RowTiersPolicy(host_rows=200, disk=Path(folder))):
        net = Net({})
        net.tables.tables = tuple(each.model_copy(update={"tiers": tiers}) for each in net.tables.tables)
        config = {"precision": "fp64", "optimizer": {"type": "adamw", "lr": 1e-2}}
        engine = shardwise.initialize(net.double(), config)
        train(engine, 3)
        before = engine.evaluate([(batch(9), 1.0)])
        engine.close()
        try:
            again = shardwise.initialize(net, config)
            is_kept = again.evaluate([(batch(9), 1.0)]) == before
            train(again, 1)
            last = again.evaluate([(batch(9), 1.0)])
            again.close()
            found.append([is_kept, last != before, float(net.eval()(**batch(9)).detach()) == last])
        except UsageError as error:
            found.append(str(error))
        found.append(sorted(net.state_dict())[:2])
    return found


def test_tables_are_left_with_their_rows_or_refuse(tmp_path: Path) -> None:
    """Their forward pass once gave vectors of start rows, and the next engine trained on from those."""
    alone = tables_left(str(tmp_path))
    assert (
        alone[0] == [True] * 3 and "because they lay on several ranks or on a disk. Save before" in alone[2]
    )
    for found in fresh_job(tables_left, str(tmp_path)):
        assert "the rows of table 'large' and the others went with the engine" in found[0] and found[2]
        assert found[1] == found[3] == alone[1], "the dense weights are whole"


def test_a_row_that_was_evicted_does_not_come_back_with_the_rows_that_are_left() -> None:
    """Rows that were given before ``initialize`` were once loaded again beside those that close had left."""
    net = Net({}).double()
    given = KeyedRows.of_weights(torch.arange(-20, 0), torch.ones(20, 6, dtype=torch.float64))
    net.tables.load_rows("grows", given)
    engine = shardwise.initialize(net, {"precision": "fp64", "optimizer": {"type": "adamw", "lr": 1e-2}})
    train(engine, 12)
    kept = net.tables.rows_here("grows").keys
    assert not torch.isin(given.keys, kept).all(), "some were evicted"
    engine.close()
    assert torch.equal(net.tables.rows_here("grows").keys, kept)


def said_at_the_end(folder: str) -> str:
    """Rank 0, which serves the store, ends as soon as the training is over; rank 1 goes on for a while."""
    rank, path = int(os.environ["RANK"]), Path(folder) / "said"
    if rank:
        file = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 2)
    engine = build({})  # and stays unclosed, as in most scripts
    step(engine)
    if rank:
        time.sleep(3.5)
    return path.read_text() if rank else ""


def test_a_good_run_ends_in_silence(tmp_path: Path) -> None:
    """The watch of rank 1 asked the store of a process that had ended: a warning and 15 lines of C++ frames."""
    assert fresh_job(said_at_the_end, str(tmp_path)) == ["", ""]
