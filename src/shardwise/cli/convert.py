"""``shardwise convert SOURCE OUT``: text to a token file."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[str, typer.Argument(help="A text file, a folder, or 'stdlib'.")],
    out: Annotated[Path, typer.Argument(help="The token file to write, such as text.tokens.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="'bytes', or the path of a tokenizer.json.")
    ] = "bytes",
    pattern: Annotated[str, typer.Option("--pattern", help="Which files of a folder are read.")] = "*",
) -> None:
    """Tokenise text once, into a file that training maps into memory."""
    from rich.console import Console
    from rich.progress import Progress

    from shardwise.data import convert, load_tokenizer
    from shardwise.observe.progress import bytes_text, count_text

    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None)
        made = convert(
            source,
            load_tokenizer(tokenizer),
            out,
            pattern=pattern,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    size = bytes_text(out.stat().st_size)
    console.print(
        f"{out}: {count_text(made.count)} tokens, {len(made.ends)} documents, {size}, tokenizer {made.tokenizer_name}",
        highlight=False,
        soft_wrap=True,
    )
