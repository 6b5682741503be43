"""The walls that import-linter cannot express, read from the sources with ast."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "shardwise"
FILES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def room(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0]


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    yield
    tree_of.cache_clear()
    nodes.cache_clear()


COMM = SOURCE / "comm"


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))


def imported(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_walls(file: Path) -> None:
    assert ast.get_docstring(tree_of(file)), "a module opens with its idea"
    modules = set(imported(file))
    if room(file) not in ("comm", "launch"):
        assert not any(name.startswith("torch.distributed") for name in modules), (
            "torch.distributed is for comm/ alone"
        )
    assert not {name.split(".")[0] for name in modules} & FORBIDDEN_MODULES, "no pickle in any form"
    for node in nodes(file):
        assert not isinstance(node, ast.Global), "no global state"
        if isinstance(node, ast.Attribute):
            pickles = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
            assert node.attr not in pickles | {"send_object_list", "recv_object_list"}, (
                "these collectives pickle"
            )
            if node.attr == "environ" and room(file) != "launch":
                assert file in (COMM / "world.py", COMM / "rendezvous" / "environment.py"), (
                    "the environment is read in launch/, comm/world.py and comm/rendezvous/environment.py"
                )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), "no eval"
        if isinstance(node, ast.keyword) and node.arg == "shell":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, "no shell strings"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                assert any(k.arg == "weights_only" for k in node.keywords), "torch.load unpickles"


def test_siblings_in_parallel_do_not_import_one_another() -> None:
    techniques = {
        path.name for path in (SOURCE / "parallel").iterdir() if path.is_dir() and path.name[0] != "_"
    }
    for file in (SOURCE / "parallel").rglob("*.py"):
        own = file.relative_to(SOURCE / "parallel").parts[0]
        for name in imported(file):
            parts = name.split(".")
            if parts[:2] == ["shardwise", "parallel"] and len(parts) > 2 and parts[2] in techniques:
                assert parts[2] == own, f"{file} imports {name}"


def test_no_drawer_modules() -> None:
    drawers = {"utils", "helpers", "common", "misc", "manager", "runtime"}
    assert not [file for file in FILES if file.stem in drawers or file.parent.name in drawers]


MOST_FILES = 25


def test_a_folder_is_a_chapter() -> None:
    """A reader who opens a folder reads its names as a table of contents."""
    folders = [SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir())]
    sizes = {str(path.relative_to(SOURCE)): len(list(path.glob("*.py"))) for path in folders}
    assert not {name: size for name, size in sizes.items() if size > MOST_FILES}


def named(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def edges(file: Path, modules: set[str]) -> set[str]:
    """Modules of ours that one imports, for types alone and inside functions too; its own package where it asks that
    for a name, and not for having been imported on the way."""
    found: set[str] = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found & modules - {named(file)}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another: what stays when whoever imports nothing, or is imported by nobody, is
    taken away again and again."""
    left = dict(graph)
    while True:
        wanted = {each for imports in left.values() for each in imports & left.keys()}
        ends = [each for each, imports in left.items() if not imports & left.keys() or each not in wanted]
        if not ends:
            return [[each, *sorted(imports & left.keys())] for each, imports in sorted(left.items())]
        for each in ends:
            del left[each]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"c"}}) == [["b", "c"], ["c", "b"]]


def test_no_modules_import_one_another() -> None:
    """A circle of imports says that nobody can read one of the files without the others; imports for types count, but
    for the public names in the package's own ``__init__``."""
    modules = {named(file) for file in FILES}
    found = circles({named(file): edges(file, modules) for file in FILES if named(file) != "shardwise"})
    assert not found, "each line: a module, and what it imports of the circle\n" + "\n".join(map(str, found))


def test_no_class_name_stands_for_two_things() -> None:
    """One word, one thing: who reads a name in an error or a trace finds one class of that name."""
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    doubles = {name: found for name, found in homes.items() if len(found) > 1}
    assert not doubles


MOST_STATE = 15
WITHOUT_STATE = {"NamedTuple", "Policy"}
"""Values: results that are made once and read by name, and the keys of a configuration."""


def own_state(kind: ast.ClassDef) -> set[str]:
    """Attributes that a class assigns on ``self`` or declares in its body."""
    found = {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return found


def state_by_class(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Of the classes that hold state."""
    found: dict[str, set[str]] = {}
    for kind in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        bases = {ast.unparse(base).rpartition(".")[2] for base in kind.bases}
        if not bases & WITHOUT_STATE:
            found[kind.name] = own_state(kind)
    return found


def test_state_is_what_is_assigned_or_declared() -> None:
    tree = ast.parse(
        "class Held:\n    size: int = 0\n    def grow(self):\n        self._old, self.size = self.size, 1\n"
        "class Pair(NamedTuple):\n    left: int\n"
    )
    assert state_by_class([tree]) == {"Held": {"size", "_old"}}


def test_no_class_holds_more_state_than_a_reader_does() -> None:
    """Who reads a method must know what may change under it: a class with more is two."""
    trees = [tree_of(file) for file in FILES]
    found = {name: sorted(state) for name, state in state_by_class(trees).items() if len(state) > MOST_STATE}
    assert not found


MOST_LINES = 60


def lengths(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines, from ``def`` to the end, of each function inside ``node``."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}" if name[-3:] != ".py" else f"{name} {child.name}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            yield inner, child.end_lineno - child.lineno + 1
        yield from lengths(child, inner)


def test_lengths_are_those_of_functions() -> None:
    tree = ast.parse(
        "class Pair:\n    @property\n    def left(self):\n        def inner():\n            pass\n"
    )
    assert list(lengths(tree, "pair.py")) == [("pair.py Pair.left", 3), ("pair.py Pair.left.inner", 2)]


def test_no_function_is_longer_than_a_screen() -> None:
    """A reader holds a function in the head as a whole; a part of a longer one wants a name of its own."""
    found = {
        name: lines
        for file in FILES
        for name, lines in lengths(tree_of(file), file.relative_to(SOURCE).as_posix())
        if lines > MOST_LINES
    }
    assert not found


LEAST_WITH_TEST = 0.80
"""Least share of the source files with a test of their name; raise it as the share rises."""


def with_test(sources: list[str], tests: set[str]) -> list[str]:
    """Return the sources, relative to the package, whose test lies in the same folder of ``tests`` as ``test_NAME``."""
    mirrored = {source: str(Path(source).with_name(f"test_{Path(source).name}")) for source in sources}
    return [source for source in sources if mirrored[source] in tests]


def test_a_test_of_a_name_lies_in_the_same_folder() -> None:
    tests = {"plan/test_unit.py", "test_plan.py", "engine/test_state.py"}
    assert with_test(["plan/unit.py", "plan/plan.py", "engine/state/state.py"], tests) == ["plan/unit.py"]


def test_tests_mirror_the_tree() -> None:
    """A reader finds the test of ``parallel/zero/weight.py`` by name: ``tests/parallel/zero/test_weight.py``."""
    sources = [str(file.relative_to(SOURCE)) for file in FILES if file.name != "__init__.py"]
    tests = {str(file.relative_to(TESTS)) for file in TESTS.rglob("test_*.py")}
    found = set(with_test(sources, tests))
    assert len(found) >= LEAST_WITH_TEST * len(sources), sorted({*sources} - found)
