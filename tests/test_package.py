"""The wheel runs an example by itself; the source archive is the whole project."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from shardwise.cli import examples
from shardwise.config.run import load

ROOT = Path(__file__).parent.parent
BUILD = (
    "import sys\nfrom setuptools import build_meta\nprint(getattr(build_meta, sys.argv[1])(sys.argv[2]))\n"
)


def project_files() -> list[Path]:
    """What belongs to the project: what git tracks, or in a source archive everything."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return [Path(name) for name in listed.splitlines() if (ROOT / name).exists()]
    return [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and source archive, made of a copy, so that the checkout stays as it is."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for path in project_files():
        (copy / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
    made = {}
    for what in ("build_sdist", "build_wheel"):
        command = [sys.executable, "-c", BUILD, what, str(out)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        made[what] = out / done.stdout.splitlines()[-1]
    return made


def test_the_source_archive_is_whole(built: dict[str, Path]) -> None:
    with tarfile.open(built["build_sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    mine = {str(path) for path in project_files()} - {".gitignore", ".gitattributes"}
    missing = sorted(name for name in mine - names if not name.startswith(".github/"))
    assert not missing, f"add to MANIFEST.in: {missing[:10]}"


def test_the_wheel_holds_the_package_and_its_examples_alone(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["build_wheel"]) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        about = wheel.read(metadata).decode()
        for example in ("gpt_stdlib", "dlrm"):
            inside = wheel.read(f"shardwise/examples/{example}.yaml")
            assert inside == (ROOT / "examples" / f"{example}.yaml").read_bytes()
    source = ROOT / "src"
    mine = {str(path.relative_to("src")) for path in project_files() if path.parts[0] == "src"}
    assert mine <= set(names), f"missing: {sorted(mine - set(names))[:10]} of {source}"
    assert {name.partition("/")[0] for name in names} <= {"shardwise", Path(metadata).parts[0]}
    assert "License-Expression: Apache-2.0" in about and "Classifier: Typing :: Typed" in about
    addresses = re.findall(r"^Project-URL: \w+, (\S+)$", about, re.M)
    assert addresses, "the metadata has project URLs"
    # The top-level domain .invalid can belong to nobody (RFC 2606): any other placeholder may be somebody's tomorrow.
    assert all(address.startswith("https://repository.invalid/shardwise") for address in addresses)


def test_continuous_integration_runs_what_the_metadata_promises() -> None:
    """The matrix has every Python of the classifiers and every torch minor that the requirement admits."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(about["classifiers"]))
    assert matrix["python"] == classified
    low, high = re.findall(
        r"2\.(\d+)", next(each for each in about["dependencies"] if each.startswith("torch"))
    )
    assert matrix["torch"] == [f"2.{minor}" for minor in range(int(low), int(high))]
    assert workflow["jobs"]["test"]["steps"][-1]["run"].startswith("make test ")


def test_examples_are_run_by_name_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(examples.found()) == {
        "gpt_stdlib",
        "gpt_experts",
        "dlrm",
        "cifar",
        "resnet50",
        "alexnet_pipeline",
        "bert",
        "gpt2",
    }
    for name in examples.found():
        assert load(examples.named(name)).model is not None
    examples.command(copy=tmp_path / "mine")
    assert yaml.safe_load((tmp_path / "mine" / "dlrm.yaml").read_text())["output_dir"] == "runs/dlrm"
    with pytest.raises(Exception, match="there already"):
        examples.command(copy=tmp_path / "mine")
    (tmp_path / "dlrm").write_text("a file of the user's own goes first")
    assert examples.named("dlrm") == "dlrm"
    assert examples.named("other.yaml") == "other.yaml"


def test_no_message_names_a_package_that_is_not_ours() -> None:
    """The name on the index is not ours: `pip install shardwise` would bring a stranger's package."""
    for path in project_files():
        if path.parts[0] == "src" and path.suffix == ".py":
            assert "shardwise[" not in (ROOT / path).read_text(encoding="utf-8"), path
