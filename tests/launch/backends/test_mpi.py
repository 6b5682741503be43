"""Which mpirun is called, and how, without MPI."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.launch.backends.mpi import MpiLauncher
from shardwise.launch.hosts import Host


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    for name, says in programs.items():
        path = folder / name.replace("_", ".")
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("says", "kind", "words"),
    [
        ("mpirun (Open MPI) 4.1.4", "openmpi", ["--bind-to", "none", "-np", "1", "--host", "gpu1"]),
        ("HYDRA build details:", "mpich", ["-n", "1", "-hosts", "gpu1"]),
        ("Intel(R) MPI Library for Linux", "impi", ["-genv", "I_MPI_PIN", "0", "-n", "1", "-hosts", "gpu1"]),
    ],
)
def test_the_mpi_of_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, kind: str, words: list[str]
) -> None:
    install(tmp_path, monkeypatch, mpirun=says)
    launcher = MpiLauncher(["--quiet"])
    assert launcher.kind == kind
    assert launcher.command(Host("gpu1", (0,)), ["agent"]) == ["mpirun", "--quiet", *words, "agent"]


def test_a_program_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, mpirun="something")
    with pytest.raises(ConfigError, match="names neither Open MPI, MPICH nor Intel MPI"):
        MpiLauncher()


def test_the_program_of_a_kind_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, mpirun="", mpirun_mpich="")
    assert MpiLauncher(kind="mpich").program == "mpirun.mpich"
    assert MpiLauncher(kind="openmpi").program == "mpirun"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match="needs the program mpirun, which is not installed here .Debian: openmpi-bin"
    ):
        MpiLauncher(kind="openmpi").check()
