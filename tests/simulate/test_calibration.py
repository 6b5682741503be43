"""What ranks measure is kept as a table of hardware, with the machine and the date, and stale figures are told."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigError, RankError
from shardwise.base.hardware import Hardware, Product
from shardwise.base.hardware_files import find_hardware
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.engine.fit.calibration_rank import Channels, ModelPasses, PythonSeconds, python_s
from shardwise.models.gpt import GptPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.timeline import USES
from shardwise.simulate import calibration, measurements
from shardwise.simulate.calibration import calibrate, calibrated, calibration_file, cpu_hardware, this_machine
from shardwise.simulate.exchange_price import exchange_s
from shardwise.simulate.exchanges import ExchangeCall
from shardwise.simulate.storages import LiveBytes

FIGURES: dict[str, Any] = {
    "ranks": 2,
    "threads": 1,
    "rates": {
        "product fp32": [[1e6, 1e10], [1e9, 4e10]],
        "product bf16": [[1e6, 1e10], [1e9, 1e11]],
        "attention fp32": [[1e6, 6e10]],
        "convolution fp32": [[1e6, 2e10]],
        "batched fp32": [[1e6, 1e10]],
    },
    "operations": {
        "arithmetic": [[1e5, 3e10], [1e7, 2e10]],
        "function": [[1e5, 8e9]],
        "copy": [[1e5, 7e9]],
        "update": [[1e5, 4e10]],
    },
    "unevenness": [[2e-3, 0.07], [0.1, 0.0]],
    "spread": {"compute": [0.9, 1.2], "update": [0.8, 1.1], "exchange": [0.7, 1.5]},
    "rows": 1e10,
    "passes": [[1, 0.3], [2, 0.36]],
    "work": {
        "calls": 1000,
        "products": [["product", "fp32", 10**9, 8, 10**6]],
        "others": [["function", 10**5, 1000]],
    },
    "operation": 3e-6,
    "action": 1e-4,
    "ending_action": 2e-4,
    "disk": None,
    "exchanges": {
        "all_gather": [[1024, 5e-5], [1 << 24, 4e-3]],
        "all_reduce": [[2560, 6e-5], [1 << 25, 1e-2]],
    },
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a calibration of fixed figures."""
    monkeypatch.setattr(calibration, "_measured", lambda ranks, disk_path: FIGURES)
    calibrate(folder=tmp_path)
    return tmp_path


def test_figures_become_a_table_that_is_read_again(kept: Path) -> None:
    found = calibrated(kept)
    assert found is not None and found.machine.ranks == 2 and found.machine.cores >= 1
    hardware = found.hardware
    assert hardware.peaks == {"fp32": 4e10, "bf16": 1e11} and hardware.action_s == 1e-4
    assert hardware.share_of_peak(Product("product", "fp32", 10**6)) == 0.25
    assert hardware.share_of_peak(Product("product", "bf16", 10**6)) == 0.1
    assert hardware.share_of_peak(Product("attention", "fp32", 10**6)) == 1.0, "no operation exceeds the peak"
    assert hardware.memory_bytes_s == {"device": 2e10, "host": 2e10, "disk": 1e9}
    assert hardware.links["host"].bytes_s == pytest.approx((1 << 24) / 2 / 4e-3)
    assert hardware.exchanges["all_gather"] == ((1024, 5e-5), (1 << 24, 4e-3))
    gathered = ExchangeCall("all_gather", "weights", "dp", 1 << 23, 1)
    assert exchange_s(gathered, hardware, "shared_memory", "host", 2) == pytest.approx(4e-3)
    assert hardware.sources["memory.disk.rate"] == "assumed"
    assert (
        "measured on" in hardware.sources["peaks.fp32"]
        and "2 ranks" in hardware.sources["exchanges.all_reduce"]
    )
    assert hardware.spread["compute"] == hardware.spread["bubble"] == (0.9, 1.2)
    assert hardware.spread["waits"] == hardware.spread["exchange"] == (0.7, 1.5)
    assert set(hardware.spread) == set(USES)
    assert hardware.ending_action_s == 2e-4 and hardware.operations["update"] == ((1e5, 4e10),)
    assert hardware.share_of_peak(Product("batched", "fp32", 10**6)) == 0.25
    price_s = 1000 * 3e-6 + 8 * 1e9 / 4e10 + 1000 * 1e5 / 8e9
    assert dict(hardware.neighbours.passes) == pytest.approx({1: 0.3 / price_s, 2: 0.36 / price_s})
    assert hardware.pass_factor(2) == hardware.pass_factor(64) == hardware.neighbours.passes[1][1]
    assert hardware.pass_factor(1) == hardware.least_pass_factor == hardware.neighbours.passes[0][1]
    assert hardware.neighbours.unevenness == ((2e-3, 0.07), (0.1, 1e-4)), "a share is above zero"
    by_path = find_hardware(str(calibration_file(kept)))
    assert by_path.peaks == hardware.peaks and by_path.exchanges == hardware.exchanges
    assert not [path for path in kept.iterdir() if path.name != "cpu.json"]


def test_a_stale_calibration_is_told(kept: Path) -> None:
    path = calibration_file(kept)
    found = calibrated(kept)
    assert found is not None
    told = json.loads(path.read_text())
    told["measured"]["threads"] = this_machine(2).threads
    path.write_text(json.dumps(told))
    found = calibrated(kept)
    assert found is not None and found.staleness() == ""
    told["measured"] |= {"torch": "1.0", "processor": "abacus"}
    path.write_text(json.dumps(told))
    found = calibrated(kept)
    assert found is not None
    assert "processor was 'abacus' and is" in found.staleness() and "torch was '1.0'" in found.staleness()
    _, said = cpu_hardware(torch.float32, folder=kept)
    assert said == found.staleness() and "--calibrate" in said


def test_a_machine_that_was_not_calibrated(tmp_path: Path) -> None:
    assert calibrated(tmp_path) is None and calibrated(tmp_path / "none") is None
    found, said = cpu_hardware(torch.float32, folder=tmp_path)
    assert isinstance(found, Hardware) and "measured here" in said


def test_files_that_are_no_calibration(kept: Path) -> None:
    path = calibration_file(kept)
    told = json.loads(path.read_text())
    del told["measured"]["cores"]
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="cpu.json: measured: cores: Field required"):
        calibrated(kept)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cpu.json: not the JSON"):
        calibrated(kept)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cpu.json"):
        calibrated(kept)


def test_a_calibration_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="none does not exist"):
        calibrate(disk_path=tmp_path / "none", folder=tmp_path)
    monkeypatch.setattr(calibration, "_RANK_MODULE", "shardwise.no_such_module")
    with pytest.raises(RankError, match="its 1 ranks ended with exit code"):
        calibrate(ranks=1, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def measure_briefly(world: World) -> tuple[dict[str, Any], dict[float, list[float]], PythonSeconds]:
    """Points of exchanges of two sizes, shares of lateness, and seconds of Python."""
    sizes, before = (1 << 12, 1 << 20), measurements._WORK_S
    channels = Channels.of(world)
    measurements._WORK_S = (1e-3, 4e-3)  # type: ignore[assignment]
    try:
        late = measurements.late_shares(channels.group)
    finally:
        measurements._WORK_S = before
    found = measurements.exchange_repeats(channels.group, sizes)
    found["send"] = measurements.message_repeats(channels.group, channels.peers, sizes)
    found["gloo send"] = measurements.message_repeats(channels.gloo, channels.gloo_peers, sizes)
    return {name: measurements.times(each) for name, each in found.items()}, late, python_s(world)


def measure_passes(world: World) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """Seconds of passes of a small model, their operations, and those that a pass on the same module counts."""
    passes = ModelPasses(
        Channels.of(world).group, GptPolicy(layers=1, width=16, heads=1, context=8, vocab=32)
    )
    found, counted = passes.repeats(), passes.counted()
    with LiveBytes() as live:
        passes._run()
    return found, counted, live.work.take().flops, live.touched


def test_passes_of_a_model_are_measured_alone_and_together(ranks: Any) -> None:
    for found, counted, flops, touched in ranks(2).run(measure_passes):
        assert {ranks: len(each) for ranks, each in found["passes"].items()} == {1.0: 4, 2.0: 4}
        assert all(seconds > 0 for each in found["passes"].values() for seconds in each)
        assert sum(row[2] * row[3] for row in counted["products"]) == flops > 0
        assert sum(nbytes * calls for _, nbytes, calls in counted["others"]) == touched > 0
        json.dumps(counted)


def test_ranks_measure_together(ranks: Any) -> None:
    (first, late, python), (second, late_there, _) = ranks(2).run(measure_briefly)
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        assert first[name] == second[name], "the seconds of the slowest rank"
    assert late == late_there and set(late) == {1e-3, 4e-3}
    assert all(0 <= share <= 1 for shares in late.values() for share in shares), (
        "of two ranks, at most all of the work"
    )
    assert {"send", "gloo send"} < set(first)
    for points in first.values():
        assert len(points) == 2 and [size for size, _ in points] == sorted(size for size, _ in points)
        assert all(0 < before <= after for (_, before), (_, after) in zip(points, points[1:], strict=False))
    assert all(0 < seconds < 0.1 for seconds in python)


def test_repeats_in_which_a_rank_lost_its_core_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one rank that loses its core in its second and third round, and then in all rounds."""
    lost, slept = iter([0, 0, 0, 1, 1, 2, 2, 2]), iter([0.02, 0.0, 0.0, 0.04])
    monkeypatch.setattr(measurements, "_switches", lambda: next(lost))
    world = World(0, 1)
    group = world.group(Mesh(), "dp", CommPolicy(), StepClock(60.0), Traffic())
    kept = measurements._everyones_s(group, lambda: time.sleep(next(slept)), 4)
    assert len(kept) == 2 and kept[0][0] >= 0.02 and kept[1][0] >= 0.04, "not those that slept 0 s"
    counter, slept = itertools.count(), iter([0.02, 0.0, 0.04])
    monkeypatch.setattr(measurements, "_switches", lambda: next(counter))
    kept = measurements._everyones_s(group, lambda: time.sleep(next(slept)), 3)
    assert len(kept) == 1 and kept[0][0] < 0.02, "the fastest, if there are no others"


def test_figures_of_repeats() -> None:
    sweeps = [{1.0: [1.0, 2.0], 4.0: [3.0]}, {1.0: [9.0], 4.0: [5.0], 8.0: [7.0]}]
    united = measurements.united(sweeps)
    assert united == {1.0: [1.0, 2.0, 9.0], 4.0: [3.0, 5.0]}
    assert measurements.rates(united) == ((1.0, 0.5), (4.0, 1.0))
    fallen = measurements.times({1.0: [8.0], 4.0: [2.0], 8.0: [5.0]})
    assert [seconds for _, seconds in fallen] == pytest.approx([4.0, 4.0, 5.0]), "more takes no less"
    assert measurements.times({1.0: [9.0], 4.0: [3.0], 8.0: [1.0]})[2] == (8.0, pytest.approx(3.0))
    assert sorted(measurements.differences(united)) == [0.5, 0.75, 1.0, 1.25, 4.5]


def test_rates_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_LONG_S", 2e-3)
    monkeypatch.setattr(measurements, "_ROUND_S", 1e-4)
    monkeypatch.setattr(measurements, "_TABLE_ROWS", 1 << 10)
    for kind in ("product", "batched", "attention", "convolution"):
        points = measurements.rates(measurements.product_repeats(kind, torch.float32))  # type: ignore[arg-type]
        assert len(points) >= 3 and all(flops > 0 and 1e6 < rate < 1e15 for flops, rate in points)
        assert [flops for flops, _ in points] == sorted({flops for flops, _ in points})
    for of_class in ("arithmetic", "function", "copy", "update"):
        points = measurements.rates(measurements.operation_repeats(of_class))  # type: ignore[arg-type]
        assert points and all(nbytes > 0 and 1e7 < rate < 1e13 for nbytes, rate in points)
    assert all(1e7 < rate < 1e14 for _, rate in measurements.rates(measurements.row_repeats()))


@pytest.mark.parametrize("of_class", ["arithmetic", "function", "copy", "update"])
def test_the_bytes_of_measured_operations_are_those_that_a_pass_counts(of_class: Any) -> None:
    make = getattr(measurements, f"_{of_class}")
    run, touched, operations = make(1 << 17)
    with LiveBytes() as live:
        run()
    work = live.work.take()
    if of_class == "update":  # counted by the state of a Unit (tiers/tier_cost.py)
        return
    assert (work.calls, live.touched) == (operations, pytest.approx(touched, rel=0.01))
    assert {name for name, _ in work.others} == {of_class}


@pytest.mark.soak
def test_this_machine_is_calibrated(tmp_path: Path) -> None:
    found = calibrate(disk_path=tmp_path, folder=tmp_path / "kept")
    again = calibrated(tmp_path / "kept")
    assert again is not None and again.machine == found.machine
    assert set(again.hardware.peaks) == {"fp64", "fp32", "bf16", "fp16"} and again.hardware.action_s > 0
    assert again.hardware.memory_bytes_s["disk"] != 1e9
