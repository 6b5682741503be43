"""What is done with a trained model: text, a look inside, and other forms of it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from shardwise.base.words import printable
from shardwise.checkpoint import Checkpoints
from shardwise.cli.main import main
from shardwise.cli.rank import train
from shardwise.cli.request import Request
from shardwise.cli.trained import open_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("abc " * 500)
    config = {
        "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
        "data": {"source": str(folder / "text.txt"), "validation_samples": 4},
        "batch": {"global_size": 4},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4, "sample_tokens": 0},
        "checkpoint": {"every": 2},
        "monitor": {"tensorboard": False, "picture": False},
        "output_dir": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert train(Request(str(folder / "config.yaml"))) == 0
    return folder / "run"


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def damaged(run: Path, tmp_path: Path) -> Path:
    """A copy of the newest step with one bit of a weight flipped."""
    step = tmp_path / "step_00000004"
    shutil.copytree(run / "checkpoints" / "step_00000004", step)
    file = step / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return step


def test_a_prompt_is_continued_the_same_way_from_any_path(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "abc", "--max-new-tokens", "5", "--temperature", "0"]
    texts = []
    for path in (run, run / "checkpoints", run / "checkpoints" / "step_00000004"):
        code, out, error = call(monkeypatch, capsys, "generate", str(path), *options)
        assert (code, error) == (0, "")
        texts.append(out)
    assert texts[0].startswith("abc") and len(set(texts)) == 1


def test_the_seed_decides_what_is_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(seed: str) -> str:
        options = ["--prompt", "a", "--max-new-tokens", "12", "--temperature", "2", "--seed", seed]
        return call(monkeypatch, capsys, "generate", str(run), *options)[1]

    assert text("1") == text("1") != text("2")


def test_no_text_comes_from_damaged_weights(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = call(monkeypatch, capsys, "generate", str(damaged(run, tmp_path)))
    assert (code, out) == (1, "")
    assert error.startswith("error: ") and "model.safetensors" in error and "CRC-32" in error


def test_a_checkpoint_of_a_users_own_loop_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, [], {"user": {}}, asynchronous=False)
    code, _, error = call(monkeypatch, capsys, "generate", str(tmp_path))
    assert code == 2 and "step_00000003 was saved by a loop of your own" in error


def test_what_a_model_writes_cannot_command_the_terminal() -> None:
    assert printable("a\tb\n\x1b[2Jc\x00\x9bd é") == "a\tb\n\ufffd[2Jc\ufffd\ufffdd é"


def test_inspect_lists_the_steps_of_a_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, "inspect", str(run))
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [(line[0], line[-1]) for line in lines[1:]] == [("4", "whole"), ("2", "whole")]


def test_inspect_shows_one_step_with_its_tensors(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = str(run / "checkpoints" / "step_00000004")
    code, out, _ = call(monkeypatch, capsys, "inspect", step, "--tensors")
    assert code == 0
    assert out.startswith(f"{step}: whole\n") and "ZeRO-0" in out
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert any(line.startswith(kind) and line.endswith("embed.weight") for line in out.splitlines()), kind
    assert "embed.weight" not in call(monkeypatch, capsys, "inspect", step)[1]


def test_inspect_names_the_damaged_file_and_tensor(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = str(damaged(run, tmp_path))
    code, out, _ = call(monkeypatch, capsys, "inspect", step)
    assert code == 1
    assert out.startswith(f"{step}: damaged\n") and "model/model.safetensors (tensor weight" in out
    code, out, _ = call(monkeypatch, capsys, "inspect", step, "--no-verify")
    assert code == 0 and "opens, not verified" in out


def test_inspect_and_generate_answer_programs_in_json(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, "inspect", str(run), "--json")
    steps = json.loads(out)["steps"]
    assert code == 0 and [(step["step"], step["verified"]) for step in steps] == [(4, True), (2, True)]
    assert steps[0]["bytes_by_kind"]["weight"] > 0 and "tensors" not in steps[0]
    code, out, _ = call(monkeypatch, capsys, "inspect", str(damaged(run, tmp_path)), "--json", "--tensors")
    (step,) = json.loads(out)["steps"]
    assert code == 1 and step["is_whole"] is False and "model.safetensors" in step["damage"][0]
    assert {"weight", "exp_avg"} <= {row["kind"] for row in step["tensors"]}
    words = ["--prompt", "abc", "--max-new-tokens", "5", "--top-p", "0.9", "--json"]
    made = json.loads(call(monkeypatch, capsys, "generate", str(run), *words)[1])
    assert made["step"] == 4 and made["prompt_tokens"] == 3 and len(made["tokens"]) == 8
    assert made["text"].startswith("abc")


def test_text_becomes_a_token_file_that_a_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("xyz" * 100)
    out = tmp_path / "text.tokens"
    code, said, _ = call(monkeypatch, capsys, "convert", str(tmp_path / "text.txt"), str(out))
    assert code == 0 and "read as text: 301 tokens, 1 document, " in said and said.startswith(f"{out}: "), (
        said
    )


def test_a_run_becomes_a_hugging_face_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = call(monkeypatch, capsys, "convert", str(run), str(tmp_path / "hf"))
    assert (code, error) == (0, "")
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    ours = load_file(run / "checkpoints" / "step_00000004" / "model" / "model.safetensors")
    assert torch.equal(theirs["model.embed_tokens.weight"], ours["embed.weight"])
    assert (tmp_path / "hf" / "config.json").exists()
    code, said, error = call(monkeypatch, capsys, "convert", str(tmp_path / "hf"), str(tmp_path / "back"))
    assert (code, error) == (0, "") and "init_from" in said
    (back,) = json.loads(call(monkeypatch, capsys, "inspect", str(tmp_path / "back"), "--json")[1])["steps"]
    assert back["is_whole"] and back["step"] == 0 and back["versions"]["torch"] == torch.__version__
    again = load_file(tmp_path / "back" / "step_00000000" / "model" / "model.safetensors")
    assert again.keys() == ours.keys() and all(again[name].equal(ours[name]) for name in ours)
    words = ["--prompt", "abc", "--max-new-tokens", "5", "--json"]
    made = [call(monkeypatch, capsys, "generate", str(each), *words)[1] for each in (run, tmp_path / "back")]
    assert json.loads(made[0])["text"] == json.loads(made[1])["text"]
    code, _, error = call(monkeypatch, capsys, "convert", str(tmp_path / "hf"), str(tmp_path / "back"))
    assert code == 2 and "holds checkpoints already" in error


def test_damaged_weights_are_not_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = call(monkeypatch, capsys, "convert", str(damaged(run, tmp_path)), str(tmp_path / "hf"))
    assert code == 1 and "nothing was exported" in error
    assert not (tmp_path / "hf").exists()


def test_a_pt_file_becomes_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"model": {"a": weight, "b": weight.T}, "epoch": 3}, tmp_path / "old.pt")
    code, _, error = call(
        monkeypatch, capsys, "convert", str(tmp_path / "old.pt"), str(tmp_path / "new.safetensors")
    )
    assert (code, error) == (0, "")
    made = load_file(tmp_path / "new.safetensors")
    assert torch.equal(made["model.a"], weight) and torch.equal(made["model.b"], weight.T)


class Payload:
    """What an attacker puts into a .pt file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def test_code_in_a_pt_file_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": Payload(tmp_path / "owned")}, tmp_path / "evil.pt")
    code, _, error = call(
        monkeypatch, capsys, "convert", str(tmp_path / "evil.pt"), str(tmp_path / "new.safetensors")
    )
    assert code == 1 and "a pickle can hold code, which is never run here" in error
    assert not (tmp_path / "owned").exists() and not (tmp_path / "new.safetensors").exists()


def test_a_dense_run_becomes_experts_that_start_as_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each expert is a copy, and the weights of a token's experts add up to 1: the same logits."""
    out = tmp_path / "experts"
    words = ("convert", str(run), str(out), "--experts", "{count: 4, router: {top_k: 2}}")
    code, said, _ = call(monkeypatch, capsys, *words)
    assert code == 0 and "4 experts a block as step 4" in said
    dense, sparse = (open_trained(path, torch.device("cpu")).model for path in (run, out))
    assert sparse.blocks[0].mlp.experts.down.shape == (4, 16, 64)
    x = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(dense(x), sparse(x), atol=1e-5)
    for wrong, said in (
        ("{count: 4, shared: 1}", "shared is 1"),
        ("{count: 4, router: {top_k: 1}}", "add up to 1"),
    ):
        code, _, error = call(monkeypatch, capsys, "convert", str(run), str(out / "2"), "--experts", wrong)
        assert code == 2 and said in error
