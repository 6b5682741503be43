"""Make docs/guides/errors.md: run small programs that go wrong, and write down what they print.

    python docs/make_errors.py         (part of: make reference)

Each case is a program of a few lines, the error that it ends with, and what to do. The text of the error is what the
code raises today: tests/test_reference.py compares the page with what this program makes.
"""

import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import shardwise
from shardwise.cli.main import main as command_line

PAGE = Path(__file__).parent / "guides" / "errors.md"
MADE = "<!-- Made by `make reference` from programs that are run; edit docs/make_errors.py instead. -->\n\n"
SHOWN = "<!-- shown, not run -->"
"""The comment before a block that the test of the guides does not run."""
OPENING = """# Common errors

Each error of Shardwise says where it happened, what was given, what was expected and what to do. This page lists the
frequent ones, so that a search for their words leads here: the program that raises an error, the message, and the way
out. All classes: [every public name](../reference/engine.md). What a run returns: [exit
codes](../reference/exit_codes.md).
"""


class Case(NamedTuple):
    """A mistake: its title, the program that makes it, and the way out."""

    title: str
    program: str
    advice: str


class Chapter(NamedTuple):
    """Mistakes of one kind, with the lines that all their programs begin with."""

    title: str
    setting: str
    cases: tuple[Case, ...]
    ranks: int = 1


SETTING = """\
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
def loss_of(model, batch):
    return model(batch).square().mean()
x = torch.randn(4, 8)
"""

CHAPTERS = (
    Chapter(
        "Configuration",
        SETTING,
        (
            Case(
                "A misspelt key",
                'shardwise.initialize(model, {"zero": {"stge": 2}})',
                "Use the suggested key. `shardwise config zero` prints every key of the block.",
            ),
            Case(
                "A key of another library",
                'shardwise.initialize(model, {"max_norm": 1.0})',
                "Use the key that the message names.",
            ),
            Case(
                "A batch that does not divide",
                'shardwise.initialize(model, {"batch": {"global_size": 33, "micro_size": 4}})',
                "Choose a global size that is a multiple of `micro_size` times the data-parallel ranks.",
            ),
            Case(
                "A mesh for more ranks than the job has",
                'shardwise.initialize(model, {"mesh": {"tp": 2}})',
                "Start as many ranks as the mesh covers: `shardwise launch --ranks 2 train.py`.",
            ),
            Case(
                "A file that is not there",
                'shardwise.initialize(model, "runn.yaml")',
                "Give the path relative to the folder where the program starts, or an absolute path.",
            ),
        ),
    ),
    Chapter(
        "Gradients and steps",
        SETTING + "engine = shardwise.initialize(model, loss=loss_of)\n",
        (
            Case(
                "`loss.backward()` in place of `engine.backward(loss)`",
                "loss = engine(x)\nloss.backward()\nengine.step()",
                "Call `engine.backward(loss)`: it weighs microbatches, scales fp16 losses and starts the reductions.",
            ),
            Case(
                "`torch.nn.utils.clip_grad_norm_`",
                "engine.backward(engine(x))\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "Set `max_grad_norm` in the configuration. `result.grad_norm` has the norm before clipping.",
            ),
            Case(
                "Reading `p.grad`",
                "engine.backward(engine(x))\nprint(model[0].weight.grad.norm())",
                "Read `engine.gradients()` between backward and step: whole gradients by name, on every layout.",
            ),
            Case(
                "A NaN in the loss",
                'engine.backward(engine(x * float("nan")))\nengine.step()',
                "Look at the named module and batch first; then at the learning rate and at clipping.",
            ),
        ),
    ),
    Chapter(
        "Several ranks",
        SETTING
        + 'config = {"zero": {"stage": 3}}\nengine = shardwise.initialize(model, config, loss=loss_of)\n',
        (
            Case(
                "Every rank brings the same batch",
                "engine.backward(engine(x))\nengine.step()",
                "Iterate over `engine.loader(dataset)`, which gives every rank its own samples.",
            ),
            Case(
                "Editing a weight in place at stage 3",
                "with torch.no_grad():\n    engine.module[0].weight.clamp_(-1, 1)",
                "Edit inside of `with engine.full_parameters(write=True)`.",
            ),
            Case(
                "Saving the module's own `state_dict()` at stage 3",
                "engine.module.state_dict()",
                "Save `engine.state_dict()`, which gathers the weights; all ranks call it.",
            ),
            Case(
                "`evaluate` on one rank alone",
                "if engine.is_main:\n    engine.evaluate([(x, 4)])\nelse:\n    engine.train_step([2 * x])",
                "All ranks call `evaluate`, `save`, `load`, `state_dict` and `full_parameters`, in the same order.",
            ),
        ),
        ranks=2,
    ),
    Chapter(
        "Checkpoints",
        SETTING,
        (
            Case(
                "A checkpoint of another model",
                'engine = shardwise.initialize(model, loss=loss_of)\nengine.save("steps")\nengine.wait_for_save()\n'
                "engine.close()\nwider = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))\n"
                'shardwise.initialize(wider, loss=loss_of).load("steps")',
                "Name with `missing` and `unexpected` what may differ; patterns are allowed.",
            ),
            Case(
                "A path without a checkpoint",
                'shardwise.initialize(model, loss=loss_of).load("stepz")',
                "Check the path. Weights of a file are loaded by `init_from` or `engine.load_state_dict`.",
            ),
        ),
    ),
    Chapter(
        "The command line",
        "",
        (
            Case(
                "A misspelt key in `--set`",
                "shardwise train gpt_stdlib --check --set zero.stge=3",
                "Use the suggested key.",
            ),
            Case(
                "An example that does not exist",
                "shardwise train gpt_stdlb --check",
                "`shardwise examples` lists the examples.",
            ),
            Case(
                "A folder that is no run",
                "shardwise inspect nowhere",
                "Give the run folder, the value of `output_dir`.",
            ),
        ),
    ),
)


def page() -> str:
    """Return the page, with the message of every case as the code raises it now."""
    lines = [OPENING]
    with elsewhere():
        for chapter in CHAPTERS:
            lines += [f"## {chapter.title}", ""]
            if chapter.setting:
                begin = (
                    "begins with" if chapter.ranks == 1 else f"runs on {chapter.ranks} ranks and begins with"
                )
                lines += [f"Every program of this chapter {begin}", "", SHOWN, "```python"]
                lines += ["import torch", "from torch import nn", "", "import shardwise", ""]
                lines += [chapter.setting.rstrip(), "```", ""]
            for case, message in zip(chapter.cases, messages_of(chapter), strict=True):
                kind = "python" if chapter.setting else "bash"
                lines += [f"### {case.title}", "", SHOWN, f"```{kind}", case.program, "```", "", "```text"]
                lines += [*wrapped(message), "```", "", case.advice, ""]
    return MADE + "\n".join(lines).rstrip() + "\n"


def messages_of(chapter: Chapter) -> list[str]:
    """Return the class and the text of the error that each case of a chapter ends with on rank 0.

    Raises:
        RuntimeError: if a program ends without an error, or with one that is not of Shardwise.
    """
    if not chapter.setting:
        return [command_message(case) for case in chapter.cases]
    programs = [chapter.setting + case.program for case in chapter.cases]
    is_alone = chapter.ranks == 1
    messages = errors_of(programs) if is_alone else shardwise.launch(errors_of, programs, ranks=chapter.ranks)
    for case, message in zip(chapter.cases, messages, strict=True):
        if not message:
            raise RuntimeError(f"the case {case.title!r} ended without an error; mend docs/make_errors.py")
    return messages


def errors_of(programs: list[str]) -> list[str]:
    """Return the errors of programs that one process runs in turn."""
    return [error_of(program) for program in programs]


def error_of(program: str) -> str:
    """Run a program, and return the class and the text of its error, or nothing if it ends well."""
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            exec(compile(program, "program", "exec"), {"torch": torch, "nn": nn, "shardwise": shardwise})
    except shardwise.ShardwiseError as error:
        # How long a rank has waited is another number in each run.
        message = re.sub(r"(waited[^.;:]{0,20}?)\b\d+ s", r"\g<1>7 s", f"{type(error).__name__}: {error}")
        return message if rank == 0 else ""
    return ""


def command_message(case: Case) -> str:
    """Return the last line that a command writes to the terminal when it fails."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ["COLUMNS"] = "1000"
        sys.argv = case.program.split()
        code = 0
        try:
            command_line()
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        printed = [line for line in pipe.read().splitlines() if line.strip()]
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 or not printed:
        raise RuntimeError(f"the case {case.title!r} ended without an error; mend docs/make_errors.py")
    return printed[-1]


def wrapped(message: str) -> Iterator[str]:
    """Yield the message in lines of at most 116 characters."""
    for line in message.splitlines():
        yield from textwrap.wrap(line, 116, break_long_words=False, break_on_hyphens=False) or [""]


@contextmanager
def elsewhere() -> Iterator[None]:
    """Work in an empty temporary folder, so that no path of this machine reaches the page."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
