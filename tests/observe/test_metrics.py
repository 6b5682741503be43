import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.observe.metrics import (
    ClickRecord,
    MetricsFile,
    StepRecord,
    exposed_columns,
    read,
    slowest_columns,
)
from shardwise.observe.stragglers import SlowestRank

BEFORE = "step,loss,val_loss,grad_norm,lr,tokens,tokens_per_s,step_s,memory,flops,pf_days,mfu"
HEADER = f"{BEFORE},forward_s,backward_s,update_s,loss_scale,expert_load,expert_drops,router_entropy"
HEADER += ",memory_allocated,memory_reserved,stalled,resumed_from"
HEADER += ",exposed_s,exposed_dp_s,exposed_tp_s,exposed_pp_s,exposed_ep_s,slowest_rank,slowest_phase"


def write(path: Path, steps: range, resume_step: int = 0, loss: float = 1.0) -> None:
    with closing(MetricsFile(path, resume_step)) as metrics:
        for step in steps:
            metrics.write(StepRecord(step, loss + step / 3))


def test_every_number_reads_back_to_the_bit(tmp_path: Path) -> None:
    records = [
        StepRecord(
            1, 0.1 + 0.2, None, 1e-300, 3e-4, 4096, 1234.5678901234567, 0.07, 2**40, 1e15, 1 / 3, None
        ),
        StepRecord(2, math.pi, math.e, math.inf, 0.0, 4096, 5e-324, 0.1, 12, 1e15, 2 / 3, 0.4137),
    ]
    with closing(MetricsFile(tmp_path / "metrics.csv")) as metrics:
        for record in records:
            metrics.write(record)
    assert read(tmp_path / "metrics.csv") == records


def test_a_loss_that_is_not_a_number_is_kept(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.csv")) as metrics:
        metrics.write(StepRecord(1, math.nan))
    assert math.isnan(read(tmp_path / "metrics.csv")[0].loss)


def test_columns_are_in_the_promised_order_and_absent_numbers_are_empty(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.csv")) as metrics:
        metrics.write(StepRecord(7, 2.5, grad_norm=1.0))
    assert (tmp_path / "metrics.csv").read_text() == f"{HEADER}\n7,2.5,,1.0,,,,,,,,,,,,,,,,,,,,,,,,,,\n"


def test_numpy_numbers_are_written_as_plain_ones(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.csv")) as metrics:
        metrics.write(StepRecord(np.int64(3), np.float64(0.5), tokens=np.int64(8)))  # type: ignore[arg-type]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1].startswith("3,0.5,,,,8,")


def test_each_row_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "metrics.csv")) as metrics:
        metrics.write(StepRecord(1, 1.0))
        assert len(read(tmp_path / "metrics.csv")) == 1, "nothing was closed yet"


def test_resuming_cuts_the_steps_that_are_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 14))
    write(path, range(11, 16), resume_step=10, loss=100.0)
    records = read(path)
    assert [r.step for r in records] == list(range(1, 16))
    assert [r.loss > 50 for r in records] == [False] * 10 + [True] * 5


def test_starting_anew_cuts_everything(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 5))
    write(path, range(1, 2))
    assert [r.step for r in read(path)] == [1]


def test_a_row_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 4))
    whole = path.read_text()
    path.write_text(whole + "4,1.2")
    assert [r.step for r in read(path)] == [1, 2, 3]
    write(path, range(4, 5), resume_step=3)
    assert [r.step for r in read(path)] == [1, 2, 3, 4]


def test_a_cut_number_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 3))
    path.write_text(path.read_text().rstrip("\n"))
    assert [r.step for r in read(path)] == [1]


def test_a_foreign_header_is_refused_and_the_file_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,accuracy\n1,0.5\n")
    with pytest.raises(DataError, match=r"metrics.csv: the header is 'epoch,accuracy'"):
        MetricsFile(path, resume_step=5)
    assert path.read_text() == "epoch,accuracy\n1,0.5\n"


@pytest.mark.parametrize("row", ["2,abc,,,,,,,,,,", "2,1.0", ",1.0,,,,,,,,,,", "2,,,,,,,,,,,"])
def test_a_damaged_row_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 2))
    with path.open("a") as file:
        file.write(row + "\n")
    with pytest.raises(DataError, match=r"metrics.csv, line 3"):
        read(path)


def test_a_file_of_a_run_killed_before_its_first_row_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("")
    assert read(path) == []


def test_a_click_through_model_has_columns_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    records = [
        ClickRecord(1, 0.1 + 0.2, samples=4096, samples_per_s=1e5, step_s=0.04, memory=2**30),
        ClickRecord(2, 0.5, 0.45, 0.7 + 0.1, 1.0, 0.01, 4096, 1e5, 0.04, 2**30, 10, 12, 2),
    ]
    with closing(MetricsFile(path, kind=ClickRecord)) as metrics:
        for record in records:
            metrics.write(record)
    assert read(path) == records
    assert path.read_text().splitlines()[2].endswith(",10,12,2" + "," * 18)
    assert [record.validation for record in records] == [None, 0.45]
    with closing(MetricsFile(path, 1, ClickRecord)):
        assert read(path) == records[:1]


def test_records_of_two_kinds_do_not_share_a_file(tmp_path: Path) -> None:
    write(tmp_path / "metrics.csv", range(1, 3))
    with pytest.raises(DataError, match="choose another folder with output_dir, or move the file away"):
        MetricsFile(tmp_path / "metrics.csv", 2, ClickRecord)
    with closing(MetricsFile(tmp_path / "metrics.csv", 0, ClickRecord)):
        pass  # nothing of the earlier run is kept


def test_a_file_of_before_the_last_columns_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"{BEFORE}\n1,2.5,,,,,,,,,,0.5\n2,2.0,,,,,,,,,,\n")
    with closing(MetricsFile(path, resume_step=1)) as metrics:
        metrics.write(StepRecord(2, 2.25, update_s=0.5))
    assert path.read_text().startswith(f"{HEADER}\n1,2.5,")
    assert read(path) == [StepRecord(1, 2.5, mfu=0.5), StepRecord(2, 2.25, update_s=0.5)]


def test_two_that_write_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with closing(MetricsFile(path)), pytest.raises(DataError, match="output_dir of its own"):
        MetricsFile(path)
    MetricsFile(path).close()


def test_exposed_seconds_have_a_column_for_each_axis_of_the_mesh() -> None:
    """Groups over several axes count in the sum of all alone."""
    seconds = {
        "dp_shard": 1.0,
        "edp": 2.0,
        "keys": 4.0,
        "tp": 8.0,
        "pp": 16.0,
        "ep across hosts": 32.0,
        "model": 64.0,
    }
    assert exposed_columns(seconds) == {
        "exposed_s": 127.0, "exposed_dp_s": 7.0, "exposed_tp_s": 8.0, "exposed_pp_s": 16.0, "exposed_ep_s": 32.0,
    }  # fmt: skip
    assert exposed_columns({}) == {}, "nothing was measured"
    assert exposed_columns({"world": 0.5}) == {"exposed_s": 0.5}


def test_the_slowest_rank_and_its_phase_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    record = StepRecord(1, 2.0, **slowest_columns(SlowestRank(3, "reading", 1.3, 0.1)))
    with closing(MetricsFile(path)) as file:
        file.write(record)
    assert read(path) == [record] and path.read_text().endswith(",3,reading\n")
    path.write_text(path.read_text().replace("reading", "sleeping"))
    with pytest.raises(
        DataError, match="slowest_phase is 'sleeping', expected one of reading, computing, waiting"
    ):
        read(path)
    assert slowest_columns(None) == {}
