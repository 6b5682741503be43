"""The steps of ``Containerfile``, without an engine for containers."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from shardwise.launch.backends.kubernetes import manifest, manifest_options
from shardwise.launch.hosts import Host

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps() -> list[tuple[str, str]]:
    """Instruction and rest of each step, in order."""
    text = re.sub(r"\\\n", " ", (ROOT / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def arguments() -> dict[str, str]:
    return dict(rest.partition("=")[::2] for name, rest in steps() if name == "ARG")


def test_the_image_has_what_the_project_asks_for() -> None:
    found = steps()
    rest = [text for name, text in found if name != "ARG"]
    assert all(any(f"${{{name}" in text for text in rest) for name in arguments()), "an ARG that nothing uses"
    assert arguments()["TORCH"].strip('"') in PROJECT["dependencies"]
    major, minor = re.search(r">=(\d+)\.(\d+)", PROJECT["requires-python"]).groups()
    assert tuple(map(int, arguments()["PYTHON"].split("."))) >= (int(major), int(minor))
    extras = re.search(r"/opt/shardwise\[([\w,]+)\]", " ".join(rest))
    assert extras is not None and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert [text for name, text in found if name == "USER"][-1] not in ("root", "0")
    for name, text in found:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)


def test_its_program_is_that_of_a_manifest() -> None:
    program = json.loads(dict(steps())["ENTRYPOINT"])
    _, job = yaml.safe_load_all(
        manifest([Host("pod", (0,))], ["train", "run.yaml"], [], manifest_options([]), 29500)
    )
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == program == ["shardwise"]
    assert "shardwise" in PROJECT["scripts"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_its_steps_run(tmp_path: Path) -> None:
    """Each RUN in order, in a new environment; torch is looked up and not installed, and no user is made."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    for name in ("useradd", "chown"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\n')
        (programs / name).chmod(0o755)
    given = {name: value.strip('"') for name, value in arguments().items()}
    environment = os.environ | given | {"PATH": f"{programs}:{os.environ['PATH']}", "PIP_NO_DEPS": "1"}
    environment.pop("PYTHONPATH", None)
    image = tmp_path / "image"
    (image / "opt").mkdir(parents=True)
    for name, text in steps():
        if name == "COPY":
            tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
            (image / "opt" / "shardwise").mkdir()
            copy = ["cp", "--parents", "-t", str(image / "opt" / "shardwise")]
            subprocess.run([*copy, *filter(None, tracked.stdout.decode().split("\0"))], cwd=ROOT, check=True)
        if name == "RUN":
            text = text.replace("/opt/shardwise", f"{image}/opt/shardwise").replace("/work", f"{image}/work")
            dry = {"PIP_DRY_RUN": "1"} if "TORCH" in text else {}
            done = subprocess.run(["sh", "-c", text], env=environment | dry, capture_output=True, text=True)
            assert done.returncode == 0, (text, done.stderr)
    assert "useradd --create-home trainer" in (tmp_path / "called").read_text() and (image / "work").is_dir()
    # Its dependencies are those of this environment.
    here = subprocess.run(
        [sys.executable, "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True,
        text=True,
    )
    shown = subprocess.run(
        [*shlex.split(str(programs / "shardwise")), "--version"],
        env=environment | {"PYTHONPATH": here.stdout.strip()},
        capture_output=True,
        text=True,
    )
    assert shown.stdout.startswith(f"shardwise {PROJECT['version']}"), shown.stderr
