"""``shardwise generate``: the same text from any path, and none from damaged weights."""

from pathlib import Path

import pytest
from tests.cli.trained_run import call, damaged


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
