"""What makes a job fit is what it takes, at a price by counted bytes and operations."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.base.hardware import Link, even_hardware
from shardwise.engine.fit import foresee as foreseeing
from shardwise.engine.fit.fits import FitReport, Memory, budget, fits, longest, seconds_of
from shardwise.engine.fit.foresee import read
from shardwise.models import Gpt, GptPolicy
from shardwise.tiers.offload import OffloadPolicy
from shardwise.tiers.tier_cost import tier_traffic

RATES = even_hardware(
    "given",
    1e10,
    host_bytes_s=1e10,
    device_bytes_s=1e10,
    link_bytes_s=1e10,
    disk_bytes_s=1e9,
    exchange_bytes_s=2.5e9,
)


TOKENS = torch.empty(4, 64, dtype=torch.int64, device="meta")


TILED = {"tiles": {"logits": 64, "mlp": 64}}


def gpt(layers: int = 24, width: int = 256) -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy(layers=layers, width=width, heads=4, context=64, vocab=256))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes nothing by itself."""
    monkeypatch.setattr(foreseeing, "resident_bytes", lambda: 0)


def fit(given: dict[str, Any], memory: Memory, rows: int = 4) -> FitReport:
    tokens = torch.empty(rows, 64, dtype=torch.int64, device="meta")
    return fits(gpt, given, memory, {"tokens": tokens, "targets": tokens}, hardware=RATES)


def test_the_cheapest_change_is_named_with_its_price(alone: None) -> None:
    found = fit(TILED, {"device": "400 MiB"}, rows=32)
    assert not found.fits and found.changes[0].overrides == ("recompute=full",)
    more = found.changes[0].outlook.flops - found.outlook.flops
    change = found.changes[0].seconds.spent["compute"] - found.seconds.spent["compute"]
    assert found.changes[0].price_s == pytest.approx(change) and change > more / RATES.flops_s("fp32") > 0
    assert any(line.startswith("  --set recompute=full: 3") and "MiB, +" in line for line in found.lines())


def test_state_goes_to_a_disk_by_the_smallest_fraction_that_does(alone: None) -> None:
    given = TILED | {"recompute": "full"}
    found = fit(given, {"device": "180 MiB", "disk": "1 GiB"})
    said = dict(each.removeprefix("offload.").split("=") for each in found.changes[0].overrides)
    assert said.keys() == {"optimizer", "disk_path", "fraction"}
    step = found.changes[0].outlook.step
    assert step is not None and step.bytes_by_tier["disk"] > 200 << 20
    said["fraction"] = f"{float(said['fraction']) - 0.05:.2f}"  # a Unit less, of twenty-six
    known = read(gpt, given, 1, torch.device("cpu"), {"tokens": TOKENS, "targets": TOKENS})
    step = known.outlook(OffloadPolicy.model_validate(said)).step
    assert step is not None and step.bytes_by_tier["device"] > 180 << 20


def test_nothing_makes_it_fit_a_memory_that_is_too_small(alone: None) -> None:
    found = fit(TILED | {"recompute": "full"}, {"device": "1 MB", "disk": "1 GiB"})
    assert not found.changes and found.least is not None
    assert "nothing known makes it fit; --set offload.optimizer=disk --set offload.parameters=disk" in str(
        found
    )


def test_sizes_are_read() -> None:
    assert budget({"device": "1.5 GiB", "host": 7, "disk": "2 TB"}) == {
        "device": 3 << 29,
        "host": 7,
        "disk": 2 * 10**12,
    }
    with pytest.raises(ConfigError, match="'1 GiBi' of device is no size"):
        budget({"device": "1 GiBi"})
    with pytest.raises(ConfigError, match="give that of the device"):
        budget({"disk": "1 GiB"})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"offload": {"parameters": "disk"}, "precision": "bf16"},
        {"offload": {"step": "delayed"}, "batch": {"accumulation": 3}},
        {"offload": {"state": "int8"}},
    ],
    ids=str,
)
def test_bytes_on_a_disk_are_counted(given: dict[str, Any], tmp_path: Path) -> None:
    offload = {"optimizer": "disk", "disk_path": str(tmp_path), **given.get("offload", {})}
    engine = shardwise.initialize(gpt(3, 64), {"optimizer": {"type": "adamw"}, **given, "offload": offload})
    tiers = engine._parts.site.tiers
    assert tiers is not None and tiers.scratch is not None
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "targets": torch.zeros(1, 8, dtype=torch.int64)}
    counted = []
    for _ in range(3):
        engine.train_step([batch] * engine.accumulation)
        tiers.settle()
        counted.append((Counter(tiers.scratch.bytes_read), Counter(tiers.scratch.bytes_written)))
    told = tier_traffic(engine.plan.own, engine.plan.mesh)
    engine.close()
    read, written = counted[2][0] - counted[1][0], counted[2][1] - counted[1][1]
    assert read.total() == told.read + told.weights_read + told.gradients_read > 0
    assert written.total() == told.written + told.gradients_written > 0
    assert written["grad"] == read["grad"] == told.gradients_written > told.gradients_read
    assert read["exp_avg"] == written["exp_avg"] == read["exp_avg_sq"] > 0


@pytest.mark.parametrize("method", ["planned", "ring", "ulysses"])
def test_two_ranks_that_share_a_sequence_hold_a_longer_one(method: str, alone: None) -> None:
    """A sequence of 1.8 times the tokens takes no more activations on two ranks than the shorter one does on one."""

    def activations(ranks: int, length: int) -> int:
        with torch.device("meta"):
            model = Gpt(GptPolicy(layers=2, width=16, heads=2, context=length, vocab=32))
        ids = torch.empty(1, length, dtype=torch.int64, device="meta")
        config = {"mesh": {"cp": ranks}, "context": method}
        known = read(lambda: model, config, ranks, torch.device("cpu"), {"tokens": ids, "targets": ids})
        step = known.outlook(OffloadPolicy()).step
        assert step is not None
        return sum(step.points["step"].rows.get(row, 0) for row in ("kept", "received", "at work"))

    assert activations(2, 3686) <= activations(1, 2048)


def test_the_longest_sequence_fits_and_a_longer_one_does_not(alone: None) -> None:
    def make(tokens: int) -> nn.Module:
        with torch.device("meta"):
            return Gpt(GptPolicy(layers=2, width=32, heads=4, context=tokens, vocab=64))

    def example(tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        return {"tokens": ids, "targets": ids}

    found = longest(make, {}, {"device": "1.5 MiB"}, example, multiple=64)
    assert found.outlook.step is not None
    assert 0 < found.tokens < 1024 and found.outlook.step.bytes_by_tier["device"] <= 1.5 * 2**20
    more = found.tokens + 64
    known = read(lambda: make(more), {}, 1, torch.device("cpu"), example(more))
    step = known.outlook(OffloadPolicy()).step
    assert step is not None and step.bytes_by_tier["device"] > 1.5 * 2**20
    assert longest(make, {}, {"device": 1000}, example).tokens == 0


def test_changes_are_priced_over_the_hosts_of_the_job(alone: None) -> None:
    """Two hosts send what one host copies, so the same change has another price."""
    hardware = replace(RATES, links={**RATES.links, "cluster": Link(2e7, 1e-4)})
    given = TILED | {"zero": {"stage": 1}, "batch": {"micro_size": 4}}
    batch = {"tokens": TOKENS, "targets": TOKENS}
    found = {}
    for per_host in (None, 1):
        job = read(lambda: gpt(2, 32), given, 2, torch.device("cpu"), batch, per_host=per_host)
        outlook = job.outlook(job.settings.offload)
        needs = outlook.bytes_by_tier["device"] - 1
        report = fits(
            lambda: gpt(2, 32), given, {"device": needs}, batch, ranks=2, hardware=hardware, per_host=per_host
        )
        assert report.seconds == seconds_of(job, outlook, job.settings.offload, hardware)
        [change] = [each for each in report.changes if each.overrides == ("recompute=full",)]
        changed = read(
            lambda: gpt(2, 32),
            given | {"recompute": "full"},
            2,
            torch.device("cpu"),
            batch,
            per_host=per_host,
        )
        after = seconds_of(changed, change.outlook, changed.settings.offload, hardware)
        assert change.price_s == pytest.approx(after.total - report.seconds.total, rel=1e-9)
        found[per_host] = report.seconds.total
    assert found[1] > 1.5 * found[None]
