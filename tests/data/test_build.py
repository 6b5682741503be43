"""From the keys of ``data:`` to training and validation data."""

from pathlib import Path

import pytest
import torch

from shardwise.base.errors import DataError
from shardwise.data import DataPolicy, Loader, build, convert, load_tokenizer
from shardwise.data.windows import TokenWindows


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(500)))
    return path


def test_default_corpus_is_the_standard_library(tmp_path: Path) -> None:
    corpus = build(DataPolicy(), context=128, cache=tmp_path)
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))  # type: ignore[arg-type]
    assert 0.025 < share < 0.1
    assert corpus.vocab_size == 256
    loader = Loader(corpus.train, global_batch=4, micro_batch=2)
    batches = loader.step_batches()
    loader.close()
    assert [batch["tokens"].shape for batch in batches] == [(2, 128)] * 2
    assert build(DataPolicy(), context=128, cache=tmp_path).fingerprint() == corpus.fingerprint()


def test_training_and_validation_share_no_token(text: Path, tmp_path: Path) -> None:
    corpus = build(DataPolicy(source=str(text), validation=0.2), context=16, cache=tmp_path / "cache")
    assert isinstance(corpus.train, TokenWindows)
    assert isinstance(corpus.validation, TokenWindows)
    assert corpus.train.spans[0].stop == corpus.validation.spans[0].start
    joined = torch.cat([corpus.train[i]["tokens"] for i in range(len(corpus.train))])
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.decode(joined.tolist()) == text.read_text()[: len(joined)]


def test_a_token_file_gives_what_its_text_gives(text: Path, tmp_path: Path) -> None:
    convert(str(text), load_tokenizer("bytes"), tmp_path / "text.tokens")
    direct = build(DataPolicy(source=str(text)), 16, tmp_path / "cache")
    mapped = build(DataPolicy(source=str(tmp_path / "text.tokens")), 16, tmp_path / "cache")
    assert direct.fingerprint() == mapped.fingerprint()


def test_several_sources_are_all_held_out_from(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("something else entirely. " * 200)
    corpus = build(DataPolicy(source=[str(text), str(other)]), 16, tmp_path / "cache")
    assert len(corpus.train.spans) == 2
    assert corpus.validation is not None
    assert len(corpus.validation.spans) == 2


def test_validation_of_its_own_and_none(text: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("never seen " * 30)
    corpus = build(DataPolicy(source=str(text), validation=str(held_out)), 16, tmp_path / "cache")
    assert corpus.validation is not None
    assert len(corpus.validation) == 20
    assert len(corpus.train) == text.stat().st_size // 16
    assert build(DataPolicy(source=str(text), validation=0), 16, tmp_path / "cache").validation is None


def test_the_policy_may_name_the_cache(text: Path, tmp_path: Path) -> None:
    build(DataPolicy(source=str(text), cache=str(tmp_path / "mine")), 16, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "mine").iterdir()] == [".tokens"]
    assert not (tmp_path / "cache").exists()


def test_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError, match=r"short-.*tokens holds 10 tokens.*34 tokens; give more text"):
        build(DataPolicy(source=str(tmp_path / "short.txt")), 16, tmp_path / "cache")
    with pytest.raises(DataError, match="one window of context 16 takes 17"):
        build(DataPolicy(source=str(tmp_path / "short.txt"), validation=0), 16, tmp_path / "cache")


@pytest.fixture
def _users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_data.py").write_text(
        "def train(size): return list(range(size))\n"
        "def both(): return [1, 2], [3]\n"
        "def three(): return 1, 2, 3\n"
        "def nothing(): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_users_module")
def test_target(tmp_path: Path) -> None:
    corpus = build(DataPolicy(target="users_data:train", arguments={"size": 3}), 16, tmp_path)
    assert (corpus.train, corpus.validation, corpus.tokenizer) == ([0, 1, 2], None, None)
    assert (corpus.vocab_size, corpus.fingerprint()) == (None, None)
    corpus = build(DataPolicy(target="users_data:both", tokenizer="bytes"), 16, tmp_path)
    assert (corpus.train, corpus.validation, corpus.vocab_size) == ([1, 2], [3], 256)
    with pytest.raises(DataError, match="returned 3 things"):
        build(DataPolicy(target="users_data:three"), 16, tmp_path)
    with pytest.raises(DataError, match="returned None"):
        build(DataPolicy(target="users_data:nothing"), 16, tmp_path)
