"""Triton's forms of the kernels, where Triton is installed: equal to the plain forms, and they compile."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardwise

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("tests", "examples"), [("not soak", 1), pytest.param("soak or not soak", 40, marks=pytest.mark.soak)]
)
def test_in_the_interpreter_they_equal_the_plain_forms(tests: str, examples: int) -> None:
    """Chosen when Triton is imported, so in a process of its own."""
    words = ["pytest", "tests/kernels/fused", "-p", "no:cacheprovider", "-m", tests]
    out = run(*words, TRITON_INTERPRET="1", EXAMPLES=str(examples))
    assert " passed" in out and "skipped" not in out


@pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=pytest.mark.soak) for target in (("cuda", "90"), ("hip", "gfx942"))],
    ids=lambda target: target[1],
)
def test_they_compile_for_devices_that_are_not_here(target: tuple[str, str], tmp_path: Path) -> None:
    out = run("tests.kernels.fused.compiled", *target, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert all(int(line.split()[1]) > 0 for line in out.splitlines())


def test_the_package_is_imported_without_triton() -> None:
    """It takes half a second, and a CPU has no use for it."""
    run_code = "import sys, shardwise, shardwise.kernels.dropout; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", run_code], check=True)


def _not_specialized(kernel: ast.FunctionDef) -> tuple[bool, set[str]]:
    """(whether it is a kernel that is launched, the arguments that its decorator does not specialize)."""
    for decorator in kernel.decorator_list:
        text = ast.unparse(decorator)
        if text.startswith("triton.jit"):
            is_launched = not any(isinstance(each, ast.Return) and each.value for each in ast.walk(kernel))
            return is_launched and any(isinstance(each, ast.Call) for each in ast.walk(kernel)), {
                each.value for each in ast.walk(decorator) if isinstance(each, ast.Constant)
            }
    return False, set()


def test_kernels_are_not_compiled_again_for_another_number_of_rows() -> None:
    """Numbers of rows change from batch to batch: choice.py, [Note: compiled once]."""
    counts = {"rows", "count", "given", "places", "length", "messages", "pairs", "slots_in", "programs"}
    seen = set()
    for path in (Path(shardwise.__file__).parent / "kernels" / "fused").glob("*.py"):
        for kernel in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(kernel, ast.FunctionDef):
                continue
            is_kernel, named = _not_specialized(kernel)
            pointers = {"rows"} if kernel.name == "_update" else set()
            given = {each.arg for each in kernel.args.args} & counts - pointers
            if is_kernel and given:
                assert given <= named, f"{path.name}: {kernel.name} specializes {given - named}"
                seen.add(kernel.name)
    assert len(seen) == 21, seen
