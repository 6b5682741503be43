"""Each change saves what two outlooks differ by, and the one that removes a row is named."""

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.hardware import even_hardware
from shardwise.engine.fit import foresee as foreseeing
from shardwise.engine.fit.foresee import foresee
from shardwise.engine.fit.removals import Removal, removals, remover_of
from shardwise.models import Gpt, GptPolicy

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


def test_single_changes_save_what_outlooks_differ_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreseeing, "resident_bytes", lambda: 0)
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
        assert each.saves_bytes == sum(each.rows.values())
    kept, moments = remover_of("kept", found), remover_of("moments", found)
    assert kept is not None and kept.set == ("batch.micro_size=1",)
    assert moments is not None and moments.set[0].startswith("zero.stage") and moments.rows["moments"] > 0
    assert remover_of("no such row", found) is None


def test_a_change_that_lowers_a_row_and_not_the_peak_removes_nothing() -> None:
    idle = Removal(("a=1",), 0, 0.1, {"kept": 100})
    dear, cheap = Removal(("b=1",), 40, 0.2, {"kept": 50}), Removal(("c=1",), 40, 0.1, {"kept": 50})
    assert remover_of("kept", [idle, dear, cheap]) == cheap
