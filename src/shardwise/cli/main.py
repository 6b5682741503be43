"""``shardwise``: the set of all commands, and the form of errors.

An error of Shardwise's own is an answer to the user: one line, no traceback, exit code 2 if the configuration or the
call is at fault and 1 if the run failed. An error that passed through the user's own code (a target) shows its
traceback from that code on. Any other error is a defect and keeps its traceback.

The commands import what they need when they run, so that ``shardwise --help`` does not wait for torch.
"""

import sys
import traceback
from typing import Annotated

import typer

import shardwise
from shardwise.base.errors import ShardwiseError
from shardwise.cli import config, convert, doctor, examples, generate, inspect, launch, plan, train, verify
from shardwise.launch.failure import exit_code, headline, users_part
from shardwise.launch.report import show_answer
from shardwise.launch.terminal import lasting_console, open_standard_streams

app = typer.Typer(
    help="Train PyTorch models that are larger than the hardware at hand.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.command)
app.command("plan")(plan.command)
# Everything behind the script's name belongs to the script, including options.
app.command("launch", context_settings={"allow_interspersed_args": False})(launch.command)
app.command("verify")(verify.command)
app.command("generate")(generate.command)
app.command("doctor")(doctor.command)
app.command("inspect")(inspect.command)
app.command("convert")(convert.command)
app.command("config")(config.command)
app.command("examples")(examples.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {shardwise.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Handle the options that may precede a command."""


def main() -> None:
    """Run the installed ``shardwise`` program."""
    open_standard_streams()
    try:
        app()
    except ShardwiseError as error:
        show_answer(lasting_console(stderr=True), headline(error))
        sys.exit(exit_code(error))
    except Exception as error:
        trace = users_part(error.__traceback__)
        if trace is None:
            raise
        traceback.print_exception(type(error), error, trace)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
