"""The command line from outside: what is printed, the exit codes, and that it does not wait for torch."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import shardwise
from shardwise.cli.main import main

GOOD = {
    "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 8},
    "batch": {"global_size": 4},
    "train": {"steps": 1},
}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(GOOD | {"output_dir": str(tmp_path / "run")}))
    return path


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


def test_help_names_every_command_and_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from shardwise.cli.main import main\n"
        "sys.argv = ['shardwise', '--help']\n"
        "try:\n    main()\n"
        "finally:\n    print('torch' in sys.modules, 'pydantic' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("train", "launch", "generate", "inspect", "convert"):
        assert f" {command} " in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("zero.stag=3", "zero: unknown key 'stag'; did you mean 'stage'?"),
        ("zero.stage=7", "zero.stage"),
        ("batch.global_size=5", "batch: global_size 5 does not divide"),
        ("mesh.dp=3", "mesh"),
        ("model=null", "model is missing"),
        ("batch.global_size=null", "batch.global_size is missing"),
        ("nonsense", "expected key=value"),
        ("compile.backend=nothing", "compile.backend: torch has no backend 'nothing'; known here: "),
    ],
)
def test_a_wrong_configuration_is_one_line_before_anything_starts(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    sentence: str,
) -> None:
    assert call(monkeypatch, "train", str(config), "--ranks", "2", "--set", override) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
    assert sentence in error
    assert not (config.parent / "run").exists(), "no rank was started"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "missing.yaml"], "cannot read missing.yaml"),
        (["launch", "missing.py"], "there is no script 'missing.py'"),
        (["launch", "--ranks", "0", "x.py"], "0 ranks were requested"),
        (["launch", "--master_port", "1000000", "x.py"], "expected a port from 0 to 65535"),
        (["launch", "--master_port", "-1", "x.py"], "expected a port from 0 to 65535"),
        (["launch", "--ranks", "1000000", "x.py"], "at most 4096 are started"),
        (["launch", "--bind_core_list", "0-1000000000", "x.py"], "expected cores below 65536"),
        (["generate", "missing"], "missing: no such directory"),
        (["inspect", "missing"], "missing: no such directory"),
        (["convert", "missing", "out.tokens"], "missing"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *arguments) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert sentence in error


def test_train_has_the_options_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("gpu1 slots=1\ngpu2 slots=1\n")
    run = ["train", "gpt_stdlib", "--render", "--set", f"output_dir={tmp_path / 'run'}"]
    assert call(monkeypatch, *run, "-H", "hosts", "--ssh_port", "2222") == 0
    said = capsys.readouterr().out
    assert said.count("\nssh ") == 2 and "-p 2222 -- gpu2" in said and "# 2 ranks on 2 hosts" in said
    assert call(monkeypatch, *run, "--launcher", "slurm", "--num_nodes", "2", "--export", "PATH") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"train gpt_stdlib --set {run[-1]} --num_nodes 2 --launcher slurm --export PATH")
    assert call(monkeypatch, *run[:2], "-H", "hosts", "--ranks", "2") == 2
    assert "gpu1 has 1 slot: asked 2, have 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_defect_keeps_its_traceback(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of no code of a user's: a builtin in the place of the rank's program.
    monkeypatch.setattr("shardwise.cli.rank.train", functools.partial(int, base=0))
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", str(config)])
    with pytest.raises(TypeError):
        main()


def test_the_exit_code_of_a_launched_script_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)\n")
    words = ["--ranks", "9", "--", "--help", "a b", ""]
    assert call(monkeypatch, "launch", "--ranks", "1", str(script), *words) == 5
    assert capfd.readouterr().out == f"{words}\n"


@pytest.mark.parametrize(
    "words", [["--ranks", "2"], ["x", "--nproc-per-node=2"], ["--nproc_per_node", "2"], ["--num_gpus", "2"]]
)
def test_the_number_of_ranks_behind_the_script_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """``launch train.py --ranks 2`` ran one rank, without a word."""
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(5)\n")
    assert call(monkeypatch, "launch", str(script), *words) == 2
    option = next(word for word in words if word.startswith("--")).partition("=")[0]
    error = capsys.readouterr().err
    assert f"{option} stands behind the script" in error and f"shardwise launch {option} N {script}" in error
    assert call(monkeypatch, "launch", "-m", "job", *words) == 2, "the text of a module is not known"
    # The script's own option, by its text or by what the user says.
    assert call(monkeypatch, "launch", "--ranks", "1", str(script), *words) == 5
    script.write_text(f"# {option} num_gpus nproc_per_node\nraise SystemExit(5)\n")
    assert call(monkeypatch, "launch", str(script), *words) == 5


@pytest.mark.parametrize("option", ["--ranks", "--nproc-per-node", "--nproc_per_node"])
def test_names_of_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['WORLD_SIZE'])\n")
    assert call(monkeypatch, "launch", option, "2", str(script)) == 0
    assert capfd.readouterr().out.count("2\n") == 2


def test_a_launched_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text("import sys\nprint('module', __name__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "launch", "-m", "job", "-x") == 0
    assert capfd.readouterr().out == "module __main__ ['-x']\n"


def test_examples_are_told_by_whole_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "examples")
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.endswith(".") for line in lines)


def test_config_answers_with_the_name_that_a_key_has_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "config", "clip") == 2
    assert "there is no key 'clip'; here it is max_grad_norm" in " ".join(capsys.readouterr().err.split())
    assert call(monkeypatch, "config", "learning_rate") == 2
    assert "here it is optimizer.lr" in " ".join(capsys.readouterr().err.split())


def test_a_target_that_raises_shows_the_users_frames_alone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_broken_model.py").write_text("def build(**options):\n    return 1 // 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = yaml.safe_load(config.read_text()) | {"model": {"target": "my_broken_model:build", "context": 8}}
    config.write_text(yaml.safe_dump(given))
    assert call(monkeypatch, "train", str(config), "--check") == 1, capsys.readouterr().err
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("ZeroDivisionError")
    assert "my_broken_model.py" in lines[1] and len(lines) <= 6


def test_a_count_of_ranks_is_refused_alike_with_and_without_a_check(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in [], ["--check"]:
        assert call(monkeypatch, "train", str(config), "--ranks", "-2", *more) == 2
        assert "-2 ranks were requested; at least 1 is needed" in " ".join(capsys.readouterr().err.split())
