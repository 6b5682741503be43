"""``shardwise config [KEY]``: every key with its default, type, unit and description."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwise.config.keys import ConfigKey


def command(
    key: Annotated[
        str | None,
        typer.Argument(help="A key or a block, as in zero.stage or zero; left out: all of them."),
    ] = None,
    as_yaml: Annotated[
        bool,
        typer.Option("--yaml", help="An annotated configuration of all keys, which starts a run as it is."),
    ] = False,
    as_schema: Annotated[
        bool, typer.Option("--schema", help="JSON Schema: completion and checks in an editor.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A list of keys as JSON.")] = False,
) -> None:
    """Print the keys of a configuration: default, type, unit and description of each."""
    import json

    from shardwise.base.errors import UsageError
    from shardwise.config import keys

    if as_yaml + as_schema + as_json > 1 or (key is not None and (as_yaml or as_schema)):
        raise UsageError("config: give one of --yaml, --schema and --json; KEY goes with --json or alone")
    if as_yaml:
        typer.echo(keys.annotated_yaml(), nl=False)
    elif as_schema:
        typer.echo(json.dumps(keys.schema(), indent=2))
    else:
        found = keys.find(key) if key else keys.all_keys()
        typer.echo(keys.as_json(found)) if as_json else _show(found)


def _show(found: "list[ConfigKey]") -> None:
    """Print a line for each key, with its description below."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for key in found:
        head = Text(key.path, style="bold")
        if key.default:
            head.append(f": {key.default}", style="not bold")
        about = [key.kind.replace("`", ""), key.unit, "required" if key.is_required else "", key.when]
        head.append("  " + ", ".join(part for part in about if part), style="dim not bold")
        console.print(head, soft_wrap=True)
        console.print(Padding(Text(key.sentence.replace("`", "")), (0, 0, 0, 4), expand=False))
