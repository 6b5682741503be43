"""unit_norms.csv: a row for each step, whole across kills and resumes."""

from pathlib import Path

import pytest

from shardwise.base.errors import DataError
from shardwise.observe.unit_norms import UnitNormsFile


def write(path: Path, *rows: tuple[int, dict[str, float]], resume_step: int = 0) -> str:
    file = UnitNormsFile(path, resume_step)
    for step, norms in rows:
        file.write(step, norms)
    file.close()
    return path.read_text() if path.exists() else ""


def test_a_row_for_each_step(tmp_path: Path) -> None:
    path = tmp_path / "unit_norms.csv"
    assert write(path, (1, {"(root)": 0.1, "a,b": 2}), (2, {"(root)": 1 / 3, "a,b": 0})) == (
        'step,(root),"a,b"\n1,0.1,2.0\n2,0.3333333333333333,0.0\n'
    )


def test_a_resumed_run_goes_on_behind_its_step_and_drops_a_row_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("step,a\n1,0.5\n2,0.25\n3,0.1")
    assert write(path, (3, {"a": 0.125}), resume_step=3) == "step,a\n1,0.5\n2,0.25\n3,0.125\n"
    assert write(path, (2, {"a": 7.0}), resume_step=1) == "step,a\n1,0.5\n2,7.0\n"
    assert write(path, resume_step=0) == "" and not path.exists()


def test_units_of_both_runs_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.csv"
    path.parent.mkdir()
    write(path, (1, {"a": 1.0, "old": 2.0}))
    text = write(path, (2, {"new": 4.0, "a": 3.0}), resume_step=1)
    assert text == "step,new,a,old\n1,,1.0,2.0\n2,4.0,3.0,\n"
    assert [file.name for file in path.parent.iterdir()] == ["x.csv"]
    assert write(path, (3, {"new": 5.0, "a": 6.0}), resume_step=2).endswith("2,4.0,3.0,\n3,5.0,6.0,\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time,a\n1,2\n", "the header is 'time,a'"),
        ("step,a,a\n1,2,3\n", "the header is"),
        ("step,a\n1,2,3\n", "line 2 has 3 cells under 2 columns"),
        ("step,a\n1,b\n", "could not convert"),
        ("step,a\nx,1\n", "invalid literal"),
    ],
)
def test_another_file_is_refused_and_stays(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"x.csv: expected a column step .* {said}.*move it away"):
        UnitNormsFile(path, 5)
    assert path.read_text() == text
    with pytest.raises(DataError, match="unit norms"):
        UnitNormsFile(tmp_path, 5)
