"""``shardwise inspect DIR``: contents and size of a checkpoint, and whether every byte is as it was written."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.base.words import bytes_text, printable
from shardwise.cli.runs.chosen_step import StepOption, step_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shardwise.checkpoint import FolderSummary, StepSummary


def command(
    directory: Annotated[Path, typer.Argument(help="A run folder, its checkpoints, or one step.")],
    verify: Annotated[bool, typer.Option(help="Read every byte and hold it against its checksum.")] = True,
    step: StepOption = "",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor of a step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")] = False,
) -> None:
    """Print, size and verify a checkpoint, or a folder of them. Exit code 1 if one is damaged.

    With ``--step`` only one step of a folder is inspected.
    """
    from rich.console import Console

    from shardwise.checkpoint import StepSummary, describe
    from shardwise.cli.runs.run_folder import RunFolder

    if step:
        directory = step_at(directory, step).path
    inside = RunFolder(directory).checkpoints
    found = describe(inside if inside.is_dir() else directory, verify)
    steps = (found,) if isinstance(found, StepSummary) else found.steps
    console = Console(highlight=False)
    if as_json:
        leftovers = () if isinstance(found, StepSummary) else found.leftovers
        typer.echo(_as_json(steps, leftovers, tensors))
    elif isinstance(found, StepSummary):
        _show_step(console, found, tensors)
    else:
        _show_folder(console, found)
    if any(not step.is_whole for step in steps):
        raise typer.Exit(1)


def _as_json(steps: "Sequence[StepSummary]", leftovers: "Sequence[str]", tensors: bool) -> str:
    """Return the steps as JSON, newest first. ``verified`` is null without verification; ``state`` describes damage."""
    import dataclasses
    import json

    def of_step(step: "StepSummary") -> dict[str, Any]:
        about = {
            "path": str(step.path),
            "state": _state(step),
            "is_whole": step.is_whole,
            "verified": None if step.damage is None else not step.damage,
            "damage": [str(damage) for damage in step.damage or ()],
        }
        if step.problem:
            return about
        kept = step.trainer or {}
        about |= {
            "step": step.step,
            "run": step.run,
            "base": step.base,
            "parameters": step.elements,
            "bytes": step.bytes,
            "bytes_by_kind": step.bytes_by_kind,
            "versions": step.versions,
            "engine": kept.get("engine"),
        }
        if tensors:
            about["tensors"] = [dataclasses.asdict(row) for row in step.tensors]
        return about

    return json.dumps({"steps": [of_step(step) for step in steps], "leftovers": list(leftovers)}, indent=2)


def _state(step: "StepSummary") -> str:
    """Return ``whole``, ``opens, not verified``, or a description of the damage."""
    if step.damage:
        more = f" and {len(step.damage) - 1} more" if len(step.damage) > 1 else ""
        return f"damaged: {step.damage[0]}{more}"
    if step.problem:
        return step.problem
    return "opens, not verified" if step.damage is None else "whole"


def _show_folder(console: "Console", folder: "FolderSummary") -> None:
    from rich.table import Table
    from rich.text import Text

    from shardwise.observe.progress import count_text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("step", "parameters", "size", "state"):
        table.add_column(title, justify="left" if title == "state" else "right", overflow="fold")
    for step in folder.steps:
        name = str(step.step) if not step.problem else step.path.name
        size = ("", "") if step.problem else (count_text(step.elements), bytes_text(step.bytes))
        table.add_row(name, *size, Text(printable(_state(step)), style="" if step.is_whole else "red"))
    console.print(table)
    for name in folder.leftovers:
        console.print(f"left over, removed by the next save: {printable(name)}", style="dim", markup=False)


def _show_step(console: "Console", step: "StepSummary", tensors: bool) -> None:
    from shardwise.engine.state.saved_state import SavedState
    from shardwise.observe.progress import count_text

    def say(text: str, style: str = "") -> None:
        console.print(printable(text), style=style, markup=False, soft_wrap=True)

    say(f"{step.path}: {'damaged' if step.damage else _state(step)}", "" if step.is_whole else "red")
    for damage in step.damage or ():
        say(f"    {damage}", "red")
    if step.problem:
        return
    layout = SavedState.of(step.trainer, step.path).engine.layout
    saved_from = f", saved from {layout.mesh}, ZeRO-{layout.zero_stage}" if layout else ""
    size = f"{count_text(step.elements)} parameters, {bytes_text(step.bytes)}"
    say(f"step {step.step} of run {step.run}{saved_from}; {size}")
    if step.base is not None:
        say(f"holds the rows of tables that changed since step {step.base}, which it needs")
    if step.versions:
        say(f"written with {', '.join(f'{name} {version}' for name, version in step.versions.items())}")
    for kind, kind_bytes in (step.bytes_by_kind or {}).items():
        count = sum(row.kind == kind for row in step.tensors)
        say(f"    {kind:12} {bytes_text(kind_bytes):>10}  {count} tensors")
    for name, other in (step.aliases or {}).items():
        say(f"    {name} is also {', '.join(other)}")
    for row in step.tensors if tensors else ():
        shape = "x".join(map(str, row.shape)) or "scalar"
        say(f"{row.kind:12} {row.dtype:5} {shape:>14} {bytes_text(row.bytes):>10}  {row.name}")
