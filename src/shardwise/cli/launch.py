"""``shardwise launch --ranks N script.py ...``: any script, on several ranks of this host."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Handed to the script as they are.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Processes to start.")] = 1,
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT names a module.")] = False,
    logs: Annotated[
        Path | None,
        typer.Option("--logs", help="Folder for one log per rank; the terminal then shows rank 0 alone."),
    ] = None,
) -> None:
    """Run a Python script on several ranks of this host.

    The script finds its rank as under torchrun. If one rank fails, all are stopped and its traceback is shown.
    """
    from shardwise.launch.local import Program, run

    made = Program("module" if is_module else "script", program, tuple(arguments or ()))
    raise typer.Exit(run(made, ranks, logs))
