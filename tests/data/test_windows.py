"""Windows: every token predicted once, and the cut for validation."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.base.errors import DataError
from shardwise.data.token_file import TokenFile, TokenWriter
from shardwise.data.windows import TokenSpan, TokenWindows, hold_out


def _file(path: Path, lengths: list[int]) -> TokenFile:
    """Token i has the value i, so that a window shows where it was cut."""
    start = 0
    with TokenWriter(path, "numbers", 1 << 20) as writer:
        for length in lengths:
            writer.append(np.arange(start, start + length))
            writer.end_document()
            start += length
    return TokenFile(path)


def test_every_token_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    file = _file(tmp_path / "x.tokens", [101])
    windows = TokenWindows([TokenSpan(file, 0, 101)], context=10)
    assert len(windows) == 10
    samples = [windows.sample(i) for i in range(len(windows))]
    assert torch.equal(torch.cat([sample["tokens"] for sample in samples]), torch.arange(100))
    assert torch.equal(torch.cat([sample["targets"] for sample in samples]), torch.arange(1, 101))
    assert all(sample["tokens"].dtype == torch.int64 for sample in samples)
    assert windows.tokens == 100


def test_windows_stay_inside_their_span(tmp_path: Path) -> None:
    one, two = _file(tmp_path / "1.tokens", [25]), _file(tmp_path / "2.tokens", [1000])
    windows = TokenWindows(
        [TokenSpan(one, 3, 25), TokenSpan(two, 0, 4), TokenSpan(two, 500, 531), TokenSpan(two, 600, 620)],
        context=10,
    )
    starts = [int(windows[i]["tokens"][0]) for i in range(len(windows))]
    assert starts == [3, 13, 500, 510, 520, 600]
    for beyond in (-1, 6):
        with pytest.raises(IndexError):
            windows[beyond]


def test_worker_processes_get_the_same_windows(tmp_path: Path) -> None:
    windows = TokenWindows([TokenSpan(_file(tmp_path / "x.tokens", [500]), 0, 500)], context=7)
    copy = pickle.loads(pickle.dumps(windows))
    assert torch.equal(copy[33]["tokens"], windows[33]["tokens"])
    assert copy.fingerprint() == windows.fingerprint()


def test_fingerprint_follows_the_cut(tmp_path: Path) -> None:
    file = _file(tmp_path / "x.tokens", [500])
    cuts = [([TokenSpan(file, 0, 500)], 7), ([TokenSpan(file, 0, 500)], 8), ([TokenSpan(file, 0, 499)], 7)]
    assert len({TokenWindows(spans, context).fingerprint() for spans, context in cuts}) == 3


def test_too_short_names_file_and_need(tmp_path: Path) -> None:
    file = _file(tmp_path / "x.tokens", [10])
    with pytest.raises(DataError, match=r"x\.tokens holds 10 tokens, but one window of context 10 takes 11"):
        TokenWindows([TokenSpan(file, 0, 10)], context=10)
    with pytest.raises(DataError, match=r"x\.tokens holds 10 tokens.*12 tokens; give more text"):
        hold_out(file, 0.1, context=5)


def test_held_out_part_is_the_end_and_loses_nothing(tmp_path: Path) -> None:
    file = _file(tmp_path / "x.tokens", [1000])
    train, validation = hold_out(file, 0.1, context=10)
    assert (train.start, train.stop, validation.start, validation.stop) == (0, 900, 900, 1000)
    assert hold_out(file, 0, context=10)[0] == TokenSpan(file, 0, 1000)


def test_held_out_part_is_at_least_a_window(tmp_path: Path) -> None:
    train, validation = hold_out(_file(tmp_path / "x.tokens", [100]), 0.01, context=30)
    assert (train.tokens, validation.tokens) == (69, 31)
    train, validation = hold_out(_file(tmp_path / "y.tokens", [100]), 0.99, context=30)
    assert (train.tokens, validation.tokens) == (31, 69)


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ([880, 120], 880),  # the nearest end, within half of the 100 asked for
        ([930, 70], 930),
        ([880, 30, 90], 910),
        ([700, 300], 900),  # too far: cut inside the document
        ([1000], 900),
    ],
)
def test_cut_prefers_the_end_of_a_document(tmp_path: Path, lengths: list[int], cut: int) -> None:
    train, validation = hold_out(_file(tmp_path / "x.tokens", lengths), 0.1, context=10)
    assert (train.stop, validation.start) == (cut, cut)


def test_documents_of_a_window(tmp_path: Path) -> None:
    """Documents of 7, 13, 10 and 80 tokens: one ends inside a window, one at the end of a window."""
    file = _file(tmp_path / "x.tokens", [7, 13, 10, 80])
    windows = TokenWindows([TokenSpan(file, 0, 110)], context=10, documents=True)
    first, second, third, *others = (windows[i] for i in range(len(windows)))
    assert first["documents"].tolist() == [0] * 7 + [1] * 3
    assert first["targets"].tolist() == [*range(1, 7), -100, *range(8, 11)]
    assert first["tokens"].tolist() == list(range(10))
    assert second["documents"].tolist() == third["documents"].tolist() == [0] * 10
    assert second["targets"].tolist() == [*range(11, 20), -100]
    assert third["targets"].tolist() == [*range(21, 30), -100]
    assert not any(each["documents"].any() or (each["targets"] < 0).any() for each in others)
    counted = sum(int((windows[i]["targets"] >= 0).sum()) for i in range(len(windows)))
    assert windows.tokens == counted == 97
    plain = TokenWindows([TokenSpan(file, 0, 110)], context=10)
    assert "documents" not in plain[0] and windows.fingerprint() != plain.fingerprint()


def test_documents_of_a_span_that_begins_inside_one(tmp_path: Path) -> None:
    file = _file(tmp_path / "x.tokens", [7, 2, 3, 50])
    (sample,) = TokenWindows([TokenSpan(file, 5, 17)], context=11, documents=True)
    assert sample["documents"].tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert sample["targets"].tolist() == [6, -100, 8, -100, 10, 11, -100, 13, 14, 15, 16]
