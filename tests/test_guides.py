"""Every code and command block of the guides, the techniques and the README runs.

A page is one folder. In the order of the page:
    ```python   first line ``# NAME.py``: written under that name; others are cells of one script, run at the end
    ```yaml     first line ``# NAME.yaml``: written; all are checked as configurations
    ```bash     run, line by line; ``shardwise train`` takes a few steps of a small model; ranks are forks (forked.py)
    ```text     shown
After the line <!-- shown, not run --> a block needs something that is not here (several hosts, a cluster), or fails on
purpose: it is parsed, and its flags of ours are known.
"""

import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from torch import nn

from shardwise.cli.main import app, main
from shardwise.compose.describe import describe
from shardwise.compose.plan import PlanPolicies, make_plan
from shardwise.config import keys
from shardwise.config.run import RunConfig, _UniqueKeys
from shardwise.observe.schedule_picture import draw_text
from shardwise.parallel.pipeline.passes import nominal_s
from shardwise.parallel.pipeline.policy import SCHEDULES, PipelinePolicy
from shardwise.parallel.pipeline.schedules import schedule
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.dataflow import timeline_of
from shardwise.plan.mesh import Mesh
from shardwise.precision.policy import PrecisionPolicy
from tests import forked

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/techniques/*.md"), ROOT / "README.md"])
READ = sorted(
    {
        *PAGES,
        *(
            page
            for folder in (".", "docs", "benchmarks", "examples")
            for page in (ROOT / folder).glob("*.md")
        ),
    }
)
"""Pages without blocks that run are held to what they name."""
PARTS = [
    "The problem",
    "The algorithm",
    "How to use it",
    "How it is built",
    "How it is tested",
    "What it costs",
    "Limits and risks",
    "Beside others",
]
KINDS = {"python", "python shown", "yaml", "bash", "bash shown", "text", ""}
SHOWN = "<!-- shown, not run -->"
SMALL = "train.steps=2 train.eval_every=0 train.sample_tokens=4 data.validation_samples=8 checkpoint.every=2"
SMALL_MODEL = "model.layers=2 model.width=16 model.heads=2 model.context=16"
SMALL_TEXT = f"{SMALL_MODEL} data.pattern=ab*.py schedule.total_steps=100"
SMALL_CLICKS = "data.synthetic.samples=4000 data.synthetic.validation_samples=200 batch.global_size=256"
SMALL_CLICKS += " schedule.total_steps=100"


def small(words: list[str]) -> list[str]:
    """``shardwise train ...`` for a few steps of a small model, which takes what the page sets last.

    ``shardwise verify`` gets a layout of two ranks; the soak runs the layout that README shows. ``shardwise plan
    --measure`` runs steps of the small model.
    """
    if words[1] == "verify":
        return ["tp=2" if word.count("=2") == 3 else word for word in words]
    if words[1] == "plan" and "--measure" in words:
        return [*words, *(part for each in SMALL_MODEL.split() for part in ("--set", each))]
    if words[1] != "train":
        return words
    text = Path(words[2]).read_text() if words[2].endswith(".yaml") else words[2]
    more = f"{SMALL} {SMALL_CLICKS if 'dlrm' in text else SMALL_TEXT}".split()
    words = [
        re.sub(r"^train\.steps=\d+$", "train.steps=5", word) for word in words
    ]  # a page resumes after 400 steps; three more have times of which the doctor tells
    return [*words[:3], *(part for each in more for part in ("--set", each)), *words[3:]]


def name_of(page: Path) -> str:
    """Return the name of a page in the names of tests, such as ``techniques/zero``."""
    return "/".join(page.relative_to(ROOT).with_suffix("").parts[-2:])


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
            if number > 1 and lines[number - 2] == SHOWN:
                kind += " shown"
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_and_in_good_form(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.kind in KINDS, f"{where}: {block.kind!r}"
        if block.kind.startswith("python"):
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


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Those that begin with a folder of the package or of the project; others are files of the user's."""
    missing = []
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page.read_text(encoding="utf-8")):
        inside = (ROOT / "src" / "shardwise" / name.partition("/")[0]).is_dir()
        if inside or (ROOT / name.partition("/")[0]).is_dir():
            missing += [name] * (not any((above / name).exists() for above in (ROOT, ROOT / "src/shardwise")))
    assert not missing, f"{page.name}: {missing}"


@pytest.mark.parametrize("page", [page for page in READ if page.name != "CHANGELOG.md"], ids=name_of)
def test_keys_that_a_page_names_are_there(page: Path) -> None:
    """`zero.stage: 3` in a sentence is a key of the configuration; the changelog names keys of other systems too."""
    known = {key.path for key in keys.all_keys()}
    blocks_of_keys = "|".join({path.partition(".")[0] for path in known if "." in path})
    named = re.findall(
        rf"`((?:{blocks_of_keys})(?:\.[a-z]\w*)+)(?::[^`]*)?`", page.read_text(encoding="utf-8")
    )
    missing = {name for name in named if name not in known and not name.endswith((".py", ".png", ".json"))}
    assert not missing, f"{page.name}: {missing}"


def test_the_step_in_the_design_is_what_a_plan_says() -> None:
    """The list in the drawing, and that the code cites all its numbers and no other."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    blocks_of_two = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)]
    spec = describe(nn.Sequential(*blocks_of_two, nn.Linear(4, 1)), ZeroPolicy(stage=3))
    policies = PlanPolicies(ZeroPolicy(stage=3), PipelinePolicy(), PrecisionPolicy(), lambda name: 0)
    plan = make_plan(spec, Mesh(dp_shard=2), policies)
    assert " ".join(map(str, plan.actions["all"])) in " ".join(page.split())
    drawn = set(re.findall(r"^\| \[(\d+)\] \|", page, re.M))
    cited = {
        number
        for file in ("parallel/zero/hooks.py", "engine/step/end.py")
        for number in re.findall(
            r"\[step (\d+)\]", (ROOT / "src/shardwise" / file).read_text(encoding="utf-8")
        )
    }
    assert drawn == cited == {str(number) for number in range(1, 12)}


TECHNIQUES = sorted({*ROOT.glob("docs/techniques/*.md")} - {ROOT / "docs/techniques/README.md"})


@pytest.mark.parametrize("page", TECHNIQUES, ids=name_of)
def test_a_technique_has_all_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == PARTS
    built, tested = (text.partition(f"## {part}\n")[2].partition("\n## ")[0] for part in PARTS[3:5])
    assert "Action" in built and "`tests/" in tested
    index = (ROOT / "docs/techniques/README.md").read_text(encoding="utf-8")
    assert f"]({page.name})" in index


def test_schedules_are_drawn_as_they_are() -> None:
    page = (ROOT / "docs/techniques/pipeline.md").read_text(encoding="utf-8")
    drawn = re.findall(
        r"^(\w+): (\d+) ranks × (\d+) microbatches(?: × (\d+) stages)?\n((?:pp .*\n)+)", page, re.M
    )
    assert {name for name, *_ in drawn} == set(SCHEDULES)
    for name, ranks, microbatches, stages, rows in drawn:
        lists = schedule(name, int(ranks), int(microbatches), int(stages or 1))
        assert draw_text(timeline_of(lists, nominal_s), row="pp") == rows.rstrip("\n")


README = ROOT / "README.md"


@pytest.mark.parametrize("page", [page for page in PAGES if page != README], ids=name_of)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(page, tmp_path, monkeypatch)


LEFT_TO_SOAK = ("shardwise launch --ranks 4", "shardwise verify")
"""Beginnings of README's lines that take a third of its seconds. Two ranks already print the line of one process, the
tests of tests/verify verify layouts, and the good form of each line is checked in every run."""


@pytest.mark.parametrize(
    "left", [LEFT_TO_SOAK, pytest.param((), marks=pytest.mark.soak)], ids=["most lines", "every line"]
)
def test_the_readme_runs_and_its_first_program_prints_the_same_digits_on_any_number_of_ranks(
    left: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """README prints the line that the program writes; it once printed another loss on two ranks than on one."""
    found = blocks(README)
    line = next(block for block in found if block.kind == "text").text.strip()
    commands = next(block for block in found if block.kind == "bash").text.splitlines()
    assert [command.partition("#")[0].rstrip() for command in commands] == [
        "python train.py",
        *(f"shardwise launch --ranks {ranks} train.py" for ranks in (2, 4)),
    ]
    run_blocks(README, tmp_path, monkeypatch, left)
    assert capfd.readouterr().out.splitlines().count(line) == sum(
        not command.startswith(left) for command in commands
    )


@pytest.mark.soak
def test_the_layout_that_readme_verifies_is_equal_to_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = next(
        line for line in README.read_text(encoding="utf-8").splitlines() if "shardwise verify" in line
    )
    words = shlex.split(line, comments=True)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *words[1:], "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 8


def run_blocks(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, left: tuple[str, ...] = ()) -> None:
    """Run the blocks of a page in `folder`, in this process and its forks, which have torch already.

    Lines of commands that begin with one of ``left`` are left out.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr("shardwise.launch.starting.run", forked.run)
    monkeypatch.setattr("shardwise.cli.outlook.measured.run_ranks", forked.ranks)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    start = subprocess.run

    def run(words: list[str], **given: Any) -> Any:
        if words[0] != "shardwise":
            return start(words, **given)
        call(words, f"{page.name}: {shlex.join(words)}", monkeypatch)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)  # a command that a cell starts
    cells: list[str] = []
    names: dict[str, object] = {}

    def run_cells() -> None:
        if cells:
            Path("cells.py").write_text("\n".join(cells), encoding="utf-8")
            names.update(runpy.run_path("cells.py", init_globals=names, run_name="cells"))
            cells.clear()

    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            cells.append(block.text)
        elif block.kind == "bash":
            run_cells()  # a command may look at what they wrote
            for line in block.text.replace("\\\n", " ").splitlines():
                if (words := shlex.split(line, comments=True)) and not line.startswith(left):
                    call(words, f"{page.name}:{block.line}: {line}", monkeypatch)
    run_cells()


@pytest.mark.parametrize(
    ("index", "named"),
    [
        (
            "docs",
            [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/reference/*.md")],
        ),
        ("benchmarks", [*ROOT.glob("benchmarks/*/README.md")]),
        ("examples", [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*.yaml")]),
    ],
    ids=["docs", "benchmarks", "examples"],
)
def test_an_index_names_every_page_of_its_folder(index: str, named: list[Path]) -> None:
    page = ROOT / index / "README.md"
    linked = {
        (page.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    }
    missing = sorted(str(path.relative_to(ROOT)) for path in named if path.resolve() not in {page, *linked})
    assert not missing, f"add to {index}/README.md: {missing}"


def test_pictures_are_what_the_code_draws() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "draw.py"))["pictures"]()
    stale = [name for name, text in made.items() if (ROOT / "docs/pictures" / name).read_text() != text]
    assert not stale, f"run `python docs/draw.py` and commit: {stale}"


def test_the_count_of_files_has_keys_that_are_there() -> None:
    counted = runpy.run_path(str(ROOT / "docs" / "count_files.py"))
    for given in (counted["CONFIG"], counted["MODEL"]):
        RunConfig.parse(given, "count_files.py")


def call(words: list[str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one line of a page."""
    if words[0] == "shardwise":
        monkeypatch.setattr(sys, "argv", small(words))
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, where
        return
    assert words[0] == "python", f"{where}: neither python nor shardwise"
    if words[1] == "-c":
        exec(compile(words[2], where, "exec"), {})
    else:
        forked.python(words[1:])
