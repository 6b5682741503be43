"""What is done with a trained model: text, a look inside, and other forms of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.trained_run import call, damaged

from shardwise.base.words import printable
from shardwise.checkpoint import Checkpoints
from shardwise.cli.runs.trained import open_trained


def test_a_checkpoint_of_a_users_own_loop_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, [], {"user": {}}, asynchronous=False)
    code, _, error = call(monkeypatch, capsys, "generate", str(tmp_path))
    assert code == 2 and "step_00000003 was saved by a loop of your own" in error


def test_what_a_model_writes_cannot_command_the_terminal() -> None:
    assert printable("a\tb\n\x1b[2Jc\x00\x9bd é") == "a\tb\n\ufffd[2Jc\ufffd\ufffdd é"


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
