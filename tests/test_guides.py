"""Every code and command block of the guides, the techniques and the README runs.

A page is one folder. In the order of the page:
    ```python   first line ``# NAME.py``: written under that name; others are cells of one script, run at the end
    ```yaml     first line ``# NAME.yaml``: written; all are checked as configurations
    ```bash     run, line by line; ``shardwise train`` takes a few steps of a small model
    ```bash elsewhere    needs what is not here (several hosts, a cluster): parsed, and its flags of ours are known
    ```text     shown
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from shardwise.cli.main import app
from shardwise.config.run import RunConfig, _UniqueKeys

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/techniques/*.md"), ROOT / "README.md"])
KINDS = {"python", "yaml", "bash", "bash elsewhere", "text", ""}
SMALL = ["train.steps=2", "train.eval_every=0", "train.sample_tokens=4", "data.validation_samples=8"]
"""Of a printed training run, so that it takes seconds."""
SMALL_TEXT = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=16", "data.pattern=ab*.py"]
SMALL_CLICKS = [
    "data.synthetic.samples=4000",
    "data.synthetic.validation_samples=200",
    "batch.global_size=256",
]
SHIM = """#!{python}
import sys
from shardwise.cli.main import main
words = sys.argv[1:]
if words[:1] == ["train"]:
    text = open(words[1]).read() if words[1].endswith(".yaml") else words[1]
    small = {clicks} if any(w in text for w in ("dlrm", "clicks")) else {text} if "target" not in text else []
    if "source: stdlib" not in text and "stdlib" not in text:
        small = [w for w in small if "pattern" not in w]
    if ".clicks" in text:
        small = [w for w in small if "synthetic" not in w]
    sys.argv += [part for word in {small} + small for part in ("--set", word)]
    sys.argv += ["--set", "schedule.total_steps=100", "--set", "checkpoint.every=2"]
main()
"""


class Block(NamedTuple):
    line: int
    kind: str
    text: str

    @property
    def file(self) -> str:
        """The name that its first line gives it."""
        named = re.match(r"# ([\w.]+\.(py|yaml))\n", self.text)
        return named.group(1) if named else ""


def blocks(page: Path) -> list[Block]:
    found, opened, lines = [], 0, page.read_text(encoding="utf-8").splitlines()
    kind = ""
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and not opened:
            opened, kind = number, line[3:].strip()
        elif line.startswith("```"):
            found.append(Block(opened, kind, "\n".join(lines[opened : number - 1]) + "\n"))
            opened = 0
    assert not opened, f"{page.name}:{opened}: a block without an end"
    return found


def known_flags(command: str) -> set[str]:
    """All names that the flags of one of our commands have."""
    (info,) = [info for info in app.registered_commands if info.name == command]
    assert info.callback is not None
    names = set()
    for parameter in inspect.signature(info.callback).parameters.values():
        option = parameter.annotation.__metadata__[0]
        given = [option.default, *(getattr(option, "param_decls", None) or ())]
        long = f"--{parameter.name.replace('_', '-')}"
        names |= {each for each in given if isinstance(each, str)} | {long, f"--no-{long[2:]}"}
    return names


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``shardwise`` and ``python`` of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    shim = folder / "shardwise"
    shim.write_text(SHIM.format(python=sys.executable, small=SMALL, text=SMALL_TEXT, clicks=SMALL_CLICKS))
    shim.chmod(0o755)
    for name in ("python", "python3"):
        (folder / name).symlink_to(sys.executable)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_of_a_kind_and_in_good_form(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.kind in KINDS, f"{where}: {block.kind!r}"
        if block.kind == "python":
            compile(block.text, where, "exec")
        if block.kind == "yaml":
            for each in block.text.split("\n---\n"):
                RunConfig.parse(yaml.load(each, _UniqueKeys), where)
        if block.kind.startswith("bash"):
            checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert not checked.stderr, f"{where}: {checked.stderr}"
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                for at, word in enumerate(words[:-1]):
                    if word == "shardwise" and (command := words[at + 1]) in {
                        info.name for info in app.registered_commands
                    }:
                        script = next((i for i, w in enumerate(words) if w.endswith(".py")), len(words))
                        flags = {
                            w.partition("=")[0] for w in words[at + 2 : script] if re.match(r"--?[a-z]", w)
                        }
                        assert flags <= known_flags(command), f"{where}: {flags - known_flags(command)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, programs: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    cells: list[str] = []

    def run(words: list[str], where: str) -> None:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, f"{where}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    if page.name == "README.md":
        for name in ("examples", "src"):
            (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            cells.append(block.text)
        elif block.kind == "bash":
            run([shutil.which("bash") or "bash", "-euc", block.text], f"{page.name}:{block.line}")
    if cells:
        (tmp_path / "cells.py").write_text("\n".join(cells), encoding="utf-8")
        run([sys.executable, "cells.py"], f"{page.name}: its cells")
