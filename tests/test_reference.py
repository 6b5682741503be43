"""docs/reference is what the code says, and says all of it."""

import importlib.util
import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

import shardwise
from shardwise.cli.main import app
from shardwise.config import keys
from shardwise.config.deepspeed_keys import KEYS
from shardwise.config.run import load
from tests.engine.state.test_hung_saving import quickly

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_errors_is_what_the_code_raises() -> None:
    errors = runpy.run_path(str(ROOT / "docs" / "make_errors.py"))
    written = (ROOT / "docs" / "guides" / "errors.md").read_text(encoding="utf-8")
    with quickly():  # one of the programs is ended by the watch
        made = errors["page"]()
    assert made == written, "run `make reference` and commit docs/guides/errors.md"


def test_the_list_of_changes_in_the_design_is_that_of_the_code() -> None:
    design = runpy.run_path(str(ROOT / "docs" / "make_design.py"))
    written = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert written.count(design["BEGIN"]) == written.count(design["END"]) == 1
    assert design["page"](written) == written, "run `make reference` and commit docs/design.md"
    words = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert design["glossary"](words) == words, "run `make reference` and commit docs/glossary.md"


def test_a_reader_finds_ten_answers_in_files_that_exist() -> None:
    written = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = written.partition("\n## Where to look: ten questions\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"
    ]
    answers = rows[2:]  # below the head
    assert len(answers) == 10
    for question, answer, files in answers:
        named = re.findall(r"`([^`]+)`", files)
        assert question.endswith("?") and answer.endswith("."), question
        assert ", ".join(f"`{file}`" for file in named) == files and 1 <= len(named) <= 3, question
        missing = [file for file in named if not (ROOT / "src" / "shardwise" / file).is_file()]
        assert not missing, f"{question} {missing}"


def test_the_pages_are_what_the_code_says(maker: ModuleType) -> None:
    made = maker.pages()
    assert {path.name for path in FOLDER.iterdir()} == set(made)
    stale = [name for name, text in made.items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert not stale, f"run `make reference` and commit: {stale}"
    assert (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8") == maker.deepspeed(), (
        "run `make reference`"
    )


def test_every_key_of_deepspeed_is_on_its_page() -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    for row in KEYS:
        block, _, name = row.path.rpartition(".")
        section = page.partition(f"\n## {block or 'Top level'}\n")[2].partition("\n## ")[0]
        assert f"`{name}`" in section, row.path


def test_every_public_name_has_a_section_and_every_member_a_word(maker: ModuleType) -> None:
    page = (FOLDER / "engine.md").read_text(encoding="utf-8")
    for name in shardwise.__all__:
        assert f"\n## `shardwise.{name}`\n" in page
    for name in dir(shardwise.Engine):
        if not name.startswith("_"):
            assert f"### `Engine.{name}`" in page or f"| `{name}` |" in page, name
    empty = re.findall(r"^\| `(\w+)` \|\s*\|$", page, re.M)
    assert not empty, f"attributes without a docstring: {empty}"
    bare = re.findall(r"^### `([\w.]+)`\n\n```python\n(?:(?!```)[^\n]*\n)+```\n\n(?=\n|#|\Z)", page, re.M)
    assert not bare, f"methods without a docstring: {bare}"


def test_every_command_and_flag_has_a_line() -> None:
    page = (FOLDER / "command_line.md").read_text(encoding="utf-8")
    for info in app.registered_commands:
        assert info.callback is not None
        section = page.partition(f"## `shardwise {info.name}`")[2].partition("\n## ")[0]
        assert info.callback.__doc__ and info.callback.__doc__.split()[0] in section
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert len(rows) == len(inspect.signature(info.callback).parameters), info.name
        assert all(row.split("|")[4].strip() for row in rows), f"{info.name}: a flag without a word"


def test_the_annotated_file_is_a_start(tmp_path: Path) -> None:
    """It parses, sets nothing but what a run needs, and names every key."""
    text = keys.annotated_yaml()
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert load(path) == load(keys.START)
    for key in keys.all_keys():
        if "[]" not in key.path and ".NAME." not in key.path:
            assert re.search(rf"^ *#?{key.path.rpartition('.')[2]}:", text, re.M), key.path


CONFIGURATIONS = [
    *(yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob("src/shardwise/examples/*.yaml"))),
    *(yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob("examples/*.yaml"))),
    keys.START,
    {
        "precision": "bf16",
        "recompute": "full",
        "compile": "blocks",
        "mesh": {"dp": {"replicate": 2, "shard": 2}},
    },
    {"tables": {"named": {"C9": {"rows": 3}}, "defaults": {"dynamic": {"eviction": {"type": "lfu"}}}}},
]


@pytest.fixture(scope="module")
def schema() -> Any:
    """Checked and read once."""
    kind = jsonschema.validators.validator_for(keys.schema())
    kind.check_schema(keys.schema())
    return kind(keys.schema())


@pytest.mark.parametrize("given", CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_the_schema_takes_what_the_program_takes(schema: Any, given: object) -> None:
    schema.validate(given)


@pytest.mark.parametrize(
    "given", [{"zero": {"stag": 3}}, {"nonsense": 1}, {"max_grad_norm": -1.0}, {"zero": {"stage": 7}}]
)
def test_the_schema_refuses_what_the_program_refuses(schema: Any, given: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(given)
