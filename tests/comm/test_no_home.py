"""A container's user without HOME and without an entry in passwd: nothing needs a home folder."""

import os
import pwd
from pathlib import Path

import pytest

from shardwise.base.errors import SourceError
from shardwise.base.regular_files import expanded
from shardwise.comm.rendezvous.handshake import private_folder
from shardwise.comm.world import _private_candidates
from shardwise.data.tokenizer import load_tokenizer
from shardwise.launch.as_deepspeed import read_env_file


@pytest.fixture
def _no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError):
        Path.home()


@pytest.mark.usefixtures("_no_home")
def test_nothing_needs_a_home_folder(tmp_path: Path) -> None:
    """Ranks that torchrun started ended in "Could not determine home directory"."""
    assert private_folder(_private_candidates()) == tmp_path / f"shardwise-{os.getuid()}"
    assert read_env_file() == {}
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    assert read_env_file() == {"A": "1"}
    assert expanded("~/x") == Path("~/x") and expanded("~nobody at all/x") == Path("~nobody at all/x")
    with pytest.raises(SourceError, match="there is no file ~/tokenizer"):
        load_tokenizer("~/tokenizer")
