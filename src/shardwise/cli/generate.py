"""``shardwise generate RUN``: generate text with a trained model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.runs.chosen_step import NEWEST, StepOption


def command(
    source: Annotated[Path, typer.Argument(help="A run folder, its checkpoints, or one step.")],
    prompt: Annotated[
        str, typer.Option("--prompt", help="What the text begins with; '-' reads it from stdin.")
    ] = "\n",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=0, help="Tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token each time.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Choose among this many tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            help="Choose among the likeliest tokens that together reach this probability.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = 0,
    step: StepOption = NEWEST,
    as_json: Annotated[
        bool, typer.Option("--json", help="The text, its tokens and the step of the weights as JSON.")
    ] = False,
) -> None:
    """Continue a prompt with a checkpoint of a run, the newest if ``--step`` names no other."""
    import torch

    from shardwise.base.words import printable
    from shardwise.cli.runs.trained import open_trained
    from shardwise.models.generate import generate

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    trained = open_trained(source, device or torch.device("cpu"), step)
    begin = sys.stdin.read() if prompt == "-" else prompt
    tokens = trained.tokenizer.encode(begin) or [trained.tokenizer.end_of_document or 0]
    given = torch.tensor([tokens], device=device or "cpu")
    made = generate(trained.model, given, max_new_tokens, temperature, top_k, seed, top_p=top_p)
    text = trained.tokenizer.decode(made[0].tolist())
    if as_json:
        import json

        about = {"step": trained.step, "prompt_tokens": len(tokens), "tokens": made[0].tolist(), "text": text}
        typer.echo(json.dumps(about))
        return
    typer.echo(printable(text) if sys.stdout.isatty() else text)
