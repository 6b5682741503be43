"""Bytes, a tokenizer.json, and the errors of both."""

import sys
from pathlib import Path

import pytest

from shardwise.base.errors import DataError
from shardwise.data.tokenizer import load_tokenizer


def _write_json_tokenizer(path: Path, words: list[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "<|endoftext|>", *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(path))


def test_bytes_round_trip_any_text() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "plain, ünïcödé, 漢字, \N{OWL}\n"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < tokenizer.vocab_size == 256


def test_bytes_decode_what_a_model_may_emit() -> None:
    assert load_tokenizer("bytes").decode([0xFF, 65]) == "\N{REPLACEMENT CHARACTER}A"


def test_json_tokenizer_encodes_and_knows_the_end_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    _write_json_tokenizer(path, ["one", "two"])
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("two one six") == [3, 2, 0]
    assert tokenizer.decode([2, 3]) == "one two"
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (4, 1)
    assert load_tokenizer(str(tmp_path)).name == tokenizer.name


def test_name_follows_the_content_not_the_place(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    for path, words in ((tmp_path, ["one"]), (tmp_path / "moved", ["one"])):
        _write_json_tokenizer(path / "tokenizer.json", words)
    before = load_tokenizer(str(tmp_path)).name
    renamed = (tmp_path / "moved" / "tokenizer.json").rename(tmp_path / "moved" / "other.json")
    assert load_tokenizer(str(renamed)).name == before
    _write_json_tokenizer(tmp_path / "tokenizer.json", ["other"])
    assert load_tokenizer(str(tmp_path)).name != before


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*expected 'bytes'"):
        load_tokenizer(str(tmp_path / "nowhere"))
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_missing_library_tells_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install tokenizers"):
        load_tokenizer(str(tmp_path))


def test_a_library_that_panics_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library raises where a regular expression gives up is no Exception."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    inner.save(str(tmp_path / "tokenizer.json"))
    made = load_tokenizer(str(tmp_path))

    class Panic(BaseException):
        pass

    class Gives:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def encode(self, *_: object, **__: object) -> None:
            raise self.error

    monkeypatch.setattr(made, "_inner", Gives(Panic("called Result::unwrap on an Err")))
    with pytest.raises(DataError, match="cannot read a text .called Result"):
        made.encode("a")
    monkeypatch.setattr(made, "_inner", Gives(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        made.encode("a")
