"""``shardwise examples``: configurations that come with the package, to run by name or to start from."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

import shardwise
from shardwise.base.errors import ConfigError, UsageError

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
    """Return the paths of the examples by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def named(config: str) -> str:
    """Return the path of the example called ``config``, or ``config`` itself if it names a file or no example.

    Raises:
        ConfigError: if ``config`` is nearly the name of an example.
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
    """Return the first sentence of the file's comment, which may span lines."""
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
