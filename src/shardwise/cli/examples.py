"""``shardwise examples``: configurations that come with the package, to run by name or to begin with."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

import shardwise
from shardwise.plan.errors import ConfigError, UsageError

FOLDER = Path(shardwise.__file__).parent / "examples"


def command(
    copy: Annotated[
        Path | None, typer.Option("--copy", metavar="FOLDER", help="Copy them there, to be changed.")
    ] = None,
) -> None:
    """List the example configurations, each of which ``shardwise train NAME`` runs; or copy them."""
    for name, path in found().items():
        if copy is None:
            typer.echo(f"{name:12} {_about(path)}")
        else:
            typer.echo(str(_copied(path, copy)))


def found() -> dict[str, Path]:
    """The examples by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def named(config: str) -> str:
    """The path of the example called ``config``, where there is one and no such file; else ``config``.

    Errors: ConfigError for what is nearly the name of one.
    """
    known = found()
    if "." in config or Path(config).exists():
        return config
    if config not in known and (near := get_close_matches(config, known, n=1)):
        raise ConfigError(
            f"config: no file and no example is called {config!r}; did you mean {near[0]!r}? shardwise examples lists "
            "them"
        )
    return str(known.get(config, config))


def _about(path: Path) -> str:
    """Return the sentence that its comment begins with, which may go over lines."""
    said = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        said = f"{said} {line.lstrip('# ')}".strip()
        if said.endswith("."):
            break
    return said


def _copied(path: Path, folder: Path) -> Path:
    target = folder / path.name
    if target.exists():
        raise UsageError(f"examples: {target} is there already and would be overwritten; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(path.read_bytes())
    return target
