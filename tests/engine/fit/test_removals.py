"""Each change saves what two outlooks differ by, and each entry of a peak names the one that removes it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.fit import test_phases as phases
from torch import Tensor, nn

from shardwise.base.hardware import even_hardware
from shardwise.config.run import load
from shardwise.engine.fit import foresee as foreseeing
from shardwise.engine.fit.fits import seconds_of
from shardwise.engine.fit.foresee import JobFacts, MemoryEstimate, foresee, read
from shardwise.engine.fit.removals import EntryKey, Removal, removals, remover_of
from shardwise.models import Gpt, GptPolicy
from shardwise.simulate.why import MemoryReason

CPU = torch.device("cpu")

RATES = even_hardware(
    "test",
    1e10,
    host_bytes_s=1e10,
    device_bytes_s=1e10,
    link_bytes_s=1e10,
    disk_bytes_s=1e9,
    exchange_bytes_s=2.5e9,
)
GIVEN = {"batch": {"global_size": 8, "micro_size": 4}, "optimizer": {"type": "adamw"}}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return Gpt(GptPolicy(layers=1, width=16, heads=2, context=16, vocab=32))


def tokens(rows: int) -> dict[str, Tensor]:
    ids = torch.empty(rows, 16, dtype=torch.int64, device="meta")
    return {"tokens": ids, "targets": ids}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that take nothing by themselves."""
    monkeypatch.setattr(foreseeing, "resident_bytes", lambda: 0)


def test_single_changes_save_what_outlooks_differ_by() -> None:
    knobs = ("zero.stage", "batch.micro_size")
    found = removals(gpt, GIVEN, {"device": "1 GiB"}, tokens, ranks=2, hardware=RATES, knobs=knobs)
    by_set = {each.set: each for each in found}
    assert set(by_set) == {
        *((f"zero.stage={stage}",) for stage in (1, 2, 3)),
        *((f"batch.micro_size={size}",) for size in (1, 2)),
    }
    assert list(found) == sorted(found, key=lambda each: -each.saves_bytes)
    before = foresee(gpt, GIVEN, 2, example=tokens(4)).bytes_by_tier["device"]
    one = by_set["batch.micro_size=1",]
    after = foresee(gpt, GIVEN | {"batch": {"global_size": 8, "micro_size": 1}}, 2, example=tokens(1))
    assert one.saves_bytes == before - after.bytes_by_tier["device"] > 0
    for each in found:
        assert each.saves_bytes == sum(each.entries.values())


def looked_at(config: Any) -> tuple[JobFacts, MemoryEstimate]:
    """A job by itself, without what a search or removals share between jobs."""
    given = load(config)
    known = read(gpt, given, 2, CPU, tokens(given.batch.micro_size or 0))
    return known, known.outlook(known.settings.offload)


def composition(known: JobFacts, outlook: MemoryEstimate) -> tuple[MemoryReason, ...]:
    assert outlook.step is not None
    return known.reasons(outlook.plan, outlook.step)


def test_what_removes_each_entry_saves_and_costs_what_the_changed_job_does() -> None:
    knobs = ("zero.stage", "batch.micro_size", "recompute")
    found = removals(gpt, GIVEN, {"device": "1 GiB"}, tokens, ranks=2, hardware=RATES, knobs=knobs)
    known, before = looked_at(GIVEN)
    before_s = seconds_of(known, before, known.settings.offload, RATES).total
    removers: dict[tuple[str, ...], Removal] = {}
    removed: dict[tuple[str, ...], set[EntryKey]] = {}
    by_row: dict[str, set[tuple[str, ...]]] = {}
    for reason in composition(known, before):
        removal = remover_of(reason, found)
        if removal is not None:
            removers[removal.set] = removal
            removed.setdefault(removal.set, set()).add(EntryKey.of(reason))
            by_row.setdefault(reason.row, set()).add(removal.set)
    assert len(removers) >= 2 and {"moments", "kept"} <= by_row.keys()
    for said, removal in removers.items():
        changed, after = looked_at(load(GIVEN, said))
        peak = before.bytes_by_tier["device"]
        assert removal.saves_bytes == peak - after.bytes_by_tier["device"] > 0
        after_s = seconds_of(changed, after, changed.settings.offload, RATES).total
        assert removal.price_s == pytest.approx(after_s - before_s, rel=1e-9)
        for key in removed[said]:
            sizes = (
                sum(each.bytes for each in composition(*job) if EntryKey.of(each) == key)
                for job in ((known, before), (changed, after))
            )
            assert removal.entries[key] == next(sizes) - next(sizes) > 0


def reason(what: str, row: str = "kept") -> MemoryReason:
    return MemoryReason("all", row, "block", what, "", 1, 100, None)


def test_entries_of_one_row_are_removed_by_different_changes() -> None:
    one, other = EntryKey.of(reason("weight of blocks.3.a")), EntryKey.of(reason("softmax"))
    assert one == EntryKey.of(reason("weight of blocks.17.a")) != other
    idle = Removal(("a=1",), 0, 0.1, {one: 100})
    dear, cheap = Removal(("b=1",), 40, 0.2, {one: 50}), Removal(("c=1",), 40, 0.1, {one: 50})
    large = Removal(("d=1",), 90, 0.0, {one: 10, other: 80})
    every = [idle, dear, cheap, large]
    assert remover_of(reason("weight of blocks.0.a"), every) == cheap
    assert remover_of(reason("softmax"), every) == large
    assert remover_of(reason("softmax", "at work"), every) is None


@pytest.mark.soak
def test_the_peak_of_a_run_falls_by_what_is_said(ranks: Any, tmp_path: Path) -> None:
    """Storages of real runs, counted as in test_phases.py, with and without the change."""
    given: dict[str, Any] = {"batch": {"global_size": 8, "micro_size": 4}, "recompute": "none"}
    shapes = {name: torch.empty(4, 64, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}
    knobs = ("zero.stage", "recompute", "tiles.mlp", "tiles.logits")
    found = removals(phases.gpt, given, {"device": "1 GiB"}, shapes, ranks=2, hardware=RATES, knobs=knobs)
    known = read(phases.gpt, given, 2, CPU, shapes)
    removers = {
        removal.set: removal
        for each in composition(known, known.outlook(known.settings.offload))
        if (removal := remover_of(each, found)) is not None
    }
    assert len(removers) >= 2

    def real_peak(said: tuple[str, ...]) -> int:
        changed = load(given, said).model_dump(mode="json", exclude_unset=True)
        folder = str(tmp_path / "-".join(said).replace("/", "_"))
        found = ranks(2).run(phases.held, {}, changed, folder)
        return max(each[phase] for each in found for phase in ("build", "first step", "step", "evaluation"))

    before = real_peak(())
    for said, removal in removers.items():
        fall = before - real_peak(said)
        print(said, removal.saves_bytes, fall, before)
        assert abs(fall - removal.saves_bytes) <= 0.02 * before, said
