"""How loops are compiled: late, without the interpreter's lock, and kept where nobody else can write."""

import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.kernels.tables import compiled
from shardwise.kernels.tables.compiled import (
    cache_folder,
    has_numba,
    is_installed,
    loop,
    own_folder,
    prefetch,
    runs_compiled,
)
from shardwise.kernels.tables.keys import mix, plain_mix
from shardwise.kernels.tables.unique import plain_unique, unique

numba = pytest.importorskip("numba")


@loop
def twice(x: float) -> float:
    return x + x


@loop
def four_times(x: float) -> float:
    return twice(twice(x))


def test_loops_call_loops() -> None:
    assert four_times(1.5) == 6.0
    assert four_times.compiled.signatures, "a machine-code version exists"
    assert four_times.compiled.targetoptions["nogil"] is True


def test_prefetch_is_python_too() -> None:
    assert prefetch.python(None, 0, 0) is None


def test_what_is_compiled() -> None:
    assert runs_compiled(
        torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    )
    assert not runs_compiled(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not runs_compiled(torch.zeros(2, device="meta"))


def test_imports_bring_no_numba() -> None:
    code = (
        "import sys\n"
        "from shardwise.kernels.tables import hash_index, pooling, row_optimizers, slab, start_rows, unique\n"
        "hash_index.HashIndex()\n"
        "print({'numba', 'llvmlite'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_folder_is_the_users_own() -> None:
    folder = cache_folder()
    if folder is None:
        pytest.skip("no home to write to")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


def test_foreign_and_open_folders_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert own_folder(tmp_path / "new" / "deep")
    assert stat.S_IMODE((tmp_path / "new" / "deep").stat().st_mode) == 0o700
    opened = tmp_path / "open"
    opened.mkdir()
    opened.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "new" / "deep")
    with caplog.at_level(logging.WARNING):
        assert not own_folder(opened)
        assert not own_folder(link)
    assert "open to other users" in caplog.text
    assert "not a folder of this user's own" in caplog.text


def test_settings_of_numba_stay() -> None:
    before = numba.config.CACHE_DIR
    assert loop(lambda x: x + 1)(1) == 2
    assert before == numba.config.CACHE_DIR


def test_settings_of_numba_stay_though_two_threads_declare_loops(tmp_path: Path) -> None:
    """The second comes while the first is in, and would go after it."""
    before = numba.config.CACHE_DIR
    first_is_in, first_is_out, second_is_in = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with compiled._cached_in(tmp_path):
            first_is_in.set()
            second_is_in.wait(0.2)  # in vain, as it should be
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(30)
        with compiled._cached_in(tmp_path):
            second_is_in.set()
            first_is_out.wait(30)

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == numba.config.CACHE_DIR


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for asked in (is_installed, has_numba):
        asked.cache_clear()
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    yield
    for asked in (is_installed, has_numba):
        asked.cache_clear()


def test_without_numba_the_references_run_and_one_note_says_so(
    no_numba: None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = torch.tensor([4, 2, 4])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(mix(keys), plain_mix(keys))
        assert torch.equal(unique(keys).inverse, plain_unique(keys).inverse)
    assert len(caplog.records) == 1
    assert "pip install numba" in caplog.text
