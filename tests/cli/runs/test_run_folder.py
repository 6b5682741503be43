import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, UsageError
from shardwise.checkpoint.files import FileSystem
from shardwise.cli.runs.run_folder import RunFolder, differences


def with_step(root: Path) -> RunFolder:
    (root / "checkpoints" / "step_00000005").mkdir(parents=True)
    return RunFolder(root)


def test_a_new_folder_starts_fresh_either_way(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "run").start_from("auto") is None
    assert RunFolder(tmp_path / "run").start_from("never") is None


def test_a_save_that_was_cut_short_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000005.tmp-0-abc").mkdir(parents=True)
    assert RunFolder(tmp_path).start_from("auto") is None
    assert RunFolder(tmp_path).start_from("never") is None


def test_auto_goes_on_from_the_run_folder(tmp_path: Path) -> None:
    assert with_step(tmp_path).start_from("auto") == tmp_path / "checkpoints"


def test_never_refuses_to_mix_two_runs_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="holds checkpoints of an earlier run.*--resume auto.*--set output_dir="
    ):
        with_step(tmp_path).start_from("never")


def test_a_path_may_be_a_run_its_checkpoints_or_one_step(tmp_path: Path) -> None:
    other = with_step(tmp_path / "other")
    new = RunFolder(tmp_path / "new")
    assert new.start_from(str(other.root)) == other.checkpoints
    assert new.start_from(str(other.checkpoints)) == other.checkpoints
    step = other.checkpoints / "step_00000005"
    assert new.start_from(str(step)) == step


def test_a_run_may_go_back_to_a_step_of_its_own(tmp_path: Path) -> None:
    run = with_step(tmp_path)
    step = run.checkpoints / "step_00000005"
    assert run.start_from(str(step)) == step


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder; expected auto, best, never, or the path"):
        RunFolder(tmp_path).start_from(str(tmp_path / "nowhere"))


def test_another_runs_checkpoint_does_not_go_into_a_folder_that_has_its_own(tmp_path: Path) -> None:
    other = with_step(tmp_path / "other")
    with pytest.raises(UsageError, match="already holds checkpoints of its own"):
        with_step(tmp_path / "run").start_from(str(other.root))


def test_differences_name_every_changed_leaf() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "d": "x"}
    now = {"a": {"b": 2, "c": [1, 2], "e": None}, "d": {"f": 3}}
    assert differences(before, now) == ["a.b: 1 -> 2", "d: x -> {'f': 3}"]


def test_the_configuration_is_kept_and_changes_are_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.keep_config("train: {steps: 5}\n") == []
    assert folder.keep_config("train: {steps: 7}\n") == ["train.steps: 5 -> 7"]
    assert folder.config.read_text() == "train: {steps: 7}\n"
    assert [path.name for path in folder.root.iterdir()] == ["config.yaml"]


def test_a_configuration_that_somebody_broke_is_not_overwritten_in_silence(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1\n")
    with pytest.raises(
        ConfigError, match=r"the configuration of the earlier start: .*config\.yaml does not parse"
    ):
        RunFolder(tmp_path).keep_config("a: 1\n")


def test_names_in_a_run_folder_that_are_no_files_of_it(tmp_path: Path) -> None:
    """A FIFO held the start up for ever, and a link under config.yaml.new had the file behind it overwritten."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    (tmp_path / "precious").write_text("precious")
    for name in ("config.yaml.new", "run.json.new", "run.json"):
        (folder.root / name).symlink_to(tmp_path / "precious")
    folder.keep_start("train", 2)
    assert folder.keep_config("a: 1\n") == []
    assert (tmp_path / "precious").read_text() == "precious"
    assert folder.config.read_text() == "a: 1\n" and not (folder.root / "run.json").is_symlink()
    for name in ("config.yaml.new", "run.json.new", "run.json"):
        (folder.root / name).unlink(missing_ok=True)
        os.mkfifo(folder.root / name)
    folder.keep_start("train", 2)
    assert folder.keep_config("a: 2\n") == ["a: 1 -> 2"]
    folder.config.unlink()
    os.mkfifo(folder.config)
    with pytest.raises(ConfigError, match="earlier start: cannot read .*config.yaml: not a regular file"):
        folder.keep_config("a: 1\n")
    os.mkfifo(folder.root / ".running")
    with pytest.raises(UsageError, match=r"\.running: not a regular file; remove it"), folder.claimed():
        pass


def test_a_configuration_of_aliases_of_aliases(tmp_path: Path) -> None:
    """Nine levels of nine aliases each would be written out as 400 million words."""
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (tmp_path / "config.yaml").write_text(bomb)
    with pytest.raises(ConfigError, match="more than 200000 values once its aliases are written out"):
        RunFolder(tmp_path).keep_config("a: 1\n")


_HOLDS = """
import sys, time
from pathlib import Path
from shardwise.cli.runs.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).claimed():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    """The second is told who holds it; a dead one holds nothing."""
    folder = RunFolder(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", _HOLDS, str(folder.root)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        who = rf"another run is using this folder \(process {first.pid} on \S+ since .* UTC\)"
        with pytest.raises(UsageError, match=who), folder.claimed():
            pass
        first.kill()
    with folder.claimed(), pytest.raises(UsageError, match="another run is using"), folder.claimed():
        pass


def test_a_start_that_came_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").claimed():
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_leaves_nothing_new_and_takes_away_what_a_killed_run_left(tmp_path: Path) -> None:
    """Never what another process is writing: that is locked."""
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match="no such data"), folder.claimed():
        folder.logs.mkdir()
        (folder.logs / "rank_00000.log").write_text("mesh 1 rank")
        raise ValueError("no such data")
    assert list(tmp_path.iterdir()) == []
    half = folder.checkpoints / "step_00000004.tmp-1-abcdefabcdef"
    half.mkdir(parents=True)
    (folder.checkpoints / "step_00000002").mkdir()
    (folder.checkpoints / ".writing").touch()
    (folder.root / ".running").write_text("process 1 on nowhere")
    release = FileSystem().lock(folder.checkpoints / ".writing")
    assert release is not None
    with folder.claimed():
        assert half.exists(), "another process is saving"
    release()
    with folder.claimed():
        assert [path.name for path in folder.checkpoints.iterdir()] == ["step_00000002"]
    assert [path.name for path in folder.root.iterdir()] == ["checkpoints"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300), Path("/proc/run")):
        with pytest.raises(UsageError, match="the run folder cannot be made"), RunFolder(root).claimed():
            pass


def test_every_start_is_noted_with_versions_and_host(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.keep_start("shardwise train x.yaml", 2)
    (tmp_path / "again").mkdir()
    folder.keep_start("shardwise train y.yaml", 4, ["10.0.0.1", "10.0.0.2"])
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [(start["command"], start["ranks"]) for start in starts] == [
        ("shardwise train x.yaml", 2),
        ("shardwise train y.yaml", 4),
    ]
    assert [start["hosts"] for start in starts] == [[], ["10.0.0.1", "10.0.0.2"]]
    assert starts[0]["versions"]["torch"] and starts[0]["host"] == socket.gethostname()
    (tmp_path / "run.json").write_text("[" * 100_000)
    folder.keep_start("shardwise train z.yaml", 1)
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 1
