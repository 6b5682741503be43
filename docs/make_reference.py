"""Makes docs/reference/ from the code:  make reference   (or: python docs/make_reference.py [FOLDER])

    configuration.md   every key, from the policies
    engine.md          every public name of the package: signatures and docstrings
    command_line.md    every command and flag
    exit_codes.md      what the programs return
    run_files.md       the files of a run folder and the columns of metrics.csv

and docs/deepspeed.md: what becomes of every key of a DeepSpeed configuration.

One line for a key, a name or a flag, so that two changes at two places merge. tests/test_reference.py holds the pages
equal to what this program makes, and complete.
"""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import shardwise
from shardwise.base import errors
from shardwise.base.policy import Policy
from shardwise.cli import main as command_line
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.config import keys
from shardwise.config.deepspeed_keys import KEYS, REQUIRED, DeepSpeedKey
from shardwise.launch import failure
from shardwise.launch.function import launch
from shardwise.observe import metrics
from shardwise.verify.run import verify

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- Made from the code by `make reference`; edit the docstrings instead. -->\n\n"


def pages() -> dict[str, str]:
    """File name to content."""
    made = {
        "configuration.md": configuration(),
        "engine.md": engine(),
        "command_line.md": commands(),
        "exit_codes.md": exit_codes(),
        "run_files.md": run_files(),
    }
    return {name: MADE + "\n".join(lines).rstrip() + "\n" for name, lines in made.items()}


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder.parent / "deepspeed.md").write_text(deepspeed(), encoding="utf-8")


def deepspeed() -> str:
    """docs/deepspeed.md."""
    counts = {fate: sum(row.fate == fate for row in KEYS) for fate in FATES}
    opening = DEEPSPEED.format(count=len(KEYS), **counts)
    ours = {key.path for key in keys.all_keys()}
    sections: dict[str, list[DeepSpeedKey]] = {}
    for row in KEYS:
        sections.setdefault(row.path.rpartition(".")[0], []).append(row)
    lines = [opening]
    for block, rows in sections.items():
        lines += ["", f"## {block or 'Top level'}", ""]
        lines += ["| key | type | default | fate | here |", "|---|---|---|---|---|"]
        lines += [deepspeed_row(row, ours) for row in rows]
    return MADE + "\n".join(lines).rstrip() + "\n"


FATES = {"does": "acts", "idle": "no effect", "refused": "refused"}
DEEPSPEED = """# DeepSpeed configurations: what becomes of every key

A DeepSpeed configuration is taken as it is, in place of one of ours: by `shardwise.initialize(model,
config="ds_config.json")`, by `shardwise train ds_config.json --set model.name=gpt ...`, as a path, a dictionary or
url-safe base64. It is recognised by its keys. Both kinds of keys in one file are refused. `shardwise convert
ds_config.json run.yaml` writes it in our keys, and prints what became of each.

Files are read as Hjson and JSON5 write them: comments (`#`, `//`, `/* */`), commas left out or one too many, names and
text without quotes; in UTF-8 under any locale; a key given twice is an error.

The table has {count} keys: those of 0.19.6 and 0.19.8, the fourteen that 0.19.8 removed, and older names. {does} act.
{idle} have no effect here, for the reason that stands there. {refused} are refused where they ask for something, with
what to do instead; at their default, or in a block with `enabled: false`, they ask for nothing. An unknown key is an
error at every depth, with the nearest known one. All that is wrong in a file is named at once, before any work.

- Batch sizes: `train_batch_size` = `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × data-parallel
  ranks; what is left out follows. Microbatches weigh the same, as there (`batch.weigh_by: batches`).
- Defaults are theirs: gradients are clipped at 1.0 unless `gradient_clipping` says otherwise, and `Adam` is AdamW
  unless `adam_w_mode` is false.
- `"auto"` takes what the other keys say, else the default; without `fp16` and `bf16` the model's own dtypes stay.
- `activation_checkpointing` wraps the model's blocks (`recompute`), with no call in the model.
- Offloading: `cpu` is `offload: host`, `nvme` is `disk`. Each Unit is updated where its state lies, beside the next
  forward pass. Weights lie where their masters lie: where one block says `cpu` and the other `nvme`, both are on the
  disk, and `offload_param` alone moves masters and moments too. On CPU ranks `cpu` asks for nothing.
- `activation_checkpointing.cpu_checkpointing` lets the blocks' inputs wait in host memory (`offload.activations`); of
  what is alike along `tp` each rank keeps a part there, with `partition_activations` and without."""
"""What stands before the tables."""


def deepspeed_row(row: DeepSpeedKey, ours: set[str]) -> str:
    """One key; our key, where the sentence begins with one, as code."""
    head = row.said.partition(";")[0].partition(":")[0].partition(",")[0]
    said = f"`{head}`{row.said[len(head) :]}" if head in ours else row.said
    types = f" ({', '.join(row.of)})" if row.of else ""
    kind = row.kind.replace("|", ", ").removesuffix("?") + (" or null" if row.kind.endswith("?") else "")
    default = (
        REQUIRED if row.default == REQUIRED else "" if row.default in (None, {}) else f"`{row.default!r}`"
    )
    name = row.path.rpartition(".")[2]
    return f"| `{name}`{types} | {kind} | {default} | {FATES[row.fate]} | {cell(said)} |"


def prose(text: str | None) -> str:
    """A docstring as Markdown: code marks are single."""
    return inspect.cleandoc(text or "").replace("``", "`").replace(":func:", "").replace(":class:", "")


def cell(text: str) -> str:
    """On one line, for a table."""
    return " ".join(prose(text).split()).replace("|", "\\|")


# configuration.md --------------------------------------------------------------------------------------------------


def configuration() -> Iterator[str]:
    """A table for every block."""
    yield "# Configuration: every key"
    yield ""
    yield (
        "A dictionary, a YAML or a JSON file. `shardwise config` prints the same in a terminal, `shardwise config "
        "--yaml` a file to begin with, `shardwise config --schema` a JSON Schema for editors. Any key is overridden by "
        "`--set a.b=value`. A key without a default is left out by default; `null` sets it back."
    )
    found = keys.all_keys()
    top = [key for key in found if "." not in key.path]
    yield from ["", "## Top level", "", *key_table(top)]
    blocks: dict[tuple[type[Policy], str], list[keys.ConfigKey]] = {}
    for key in found:
        if "." in key.path:
            blocks.setdefault((key.owner, key.when), []).append(key)
    for rows in blocks.values():
        places = dict.fromkeys(key.path.rpartition(".")[0] for key in rows)
        first, *others = places
        when = f" ({rows[0].when})" if rows[0].when else ""
        yield from ["", f"## `{first}`{when}", ""]
        if about := prose(rows[0].owner.__doc__):
            yield from [about, ""]
        if others:
            yield from [f"The same keys stand under {', '.join(f'`{place}`' for place in others)}.", ""]
        yield from key_table([key for key in rows if key.path.rpartition(".")[0] == first])


def key_table(rows: Iterable[keys.ConfigKey]) -> Iterator[str]:
    """Key, type, unit, default, sentence."""
    yield "| key | type | unit | default | what it does |"
    yield "|---|---|---|---|---|"
    for key in rows:
        default = "required" if key.is_required else f"`{key.default}`" if key.default else ""
        kind = key.kind.replace("|", "\\|")
        yield f"| `{key.path.rpartition('.')[2]}` | {kind} | {key.unit} | {default} | {cell(key.sentence)} |"


# engine.md ---------------------------------------------------------------------------------------------------------


def engine() -> Iterator[str]:
    """Every name of ``shardwise.__all__``."""
    yield "# Public names of `shardwise`"
    yield ""
    yield "What `import shardwise` offers. *Collective*: every rank calls it, in the same order."
    public = {f"shardwise.{name}": getattr(shardwise, name) for name in shardwise.__all__}
    for place in SHOWN:
        module, name = place.split(":")
        public[name] = getattr(importlib.import_module(module), name)
    public["shardwise.launch"] = launch  # the package of that name can be called, and calls it
    public["shardwise.verify"] = verify  # likewise
    for title, thing in public.items():
        name = title.removeprefix("shardwise.")
        yield from ["", f"## `{title}`", ""]
        if isinstance(thing, type):
            yield from of_class(thing)
        else:
            yield from of_function(source_of(thing), name)


def source_of(thing: Any) -> ast.FunctionDef | ast.ClassDef:
    """Its definition as a tree."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node


def of_function(node: Any, name: str) -> Iterator[str]:
    """Signature and docstring."""
    yield from ["```python", signature(node, name), "```", ""]
    yield literal(ast.get_docstring(node))


def literal(text: str | None) -> str:
    """A docstring with its columns: indented and aligned parts keep their form."""
    lines, inside, made = prose(text).splitlines(), False, []
    for line in lines:
        is_columns = bool(line) and ("  " in line.strip() or line.startswith("   "))
        if is_columns and not inside:
            made.append("```text")
        if inside and not is_columns:
            made.append("```")
        inside = is_columns
        made.append(line)
    return "\n".join([*made, "```"] if inside else made)


SHOWN = ("shardwise.engine.step.end:StepResult",)
"""What calls return, and no name of the package itself."""


def signature(node: ast.FunctionDef, name: str) -> str:
    """``name(arguments) -> result`` without self, on as many lines as it takes."""
    given = node.args
    for first in (given.posonlyargs, given.args):
        if first and first[0].arg in ("self", "cls"):
            del first[0]
            break
    result = f" -> {unquoted(node.returns)}" if node.returns else ""
    parts = split_arguments(given)
    one_line = f"{name}({', '.join(parts)}){result}"
    if len(one_line) <= 100:
        return one_line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def split_arguments(given: ast.arguments) -> list[str]:
    """The arguments one by one."""

    def text(arg: ast.arg, default: ast.expr | None = None, stars: str = "") -> str:
        kind = "" if arg.annotation is None else f": {unquoted(arg.annotation)}"
        value = "" if default is None else f" = {ast.unparse(default)}"
        return f"{stars}{arg.arg}{kind}{value}"

    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    parts = [text(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if given.vararg or given.kwonlyargs:
        parts.append(text(given.vararg, stars="*") if given.vararg else "*")
    parts += [text(arg, value) for arg, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return parts + ([text(given.kwarg, stars="**")] if given.kwarg else [])


def unquoted(annotation: ast.expr) -> str:
    """An annotation that stands as a string without its quotes."""
    is_text = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return annotation.value if is_text else ast.unparse(annotation)


class Member:
    """A public attribute, property or method of a class."""

    def __init__(self, name: str, node: Any, doc: str | None, kind: str):
        self.name, self.node, self.doc, self.kind = name, node, doc, kind


def members(owner: type) -> list[Member]:
    """What a user may touch, those of our own bases included, in the order of the source."""
    found: dict[str, Member] = {}
    for base in owner.__mro__:
        if not base.__module__.startswith("shardwise"):
            continue
        tree = source_of(base)
        assert isinstance(tree, ast.ClassDef)
        for member in (*attributes(tree), *methods(tree)):
            if not member.name.startswith("_") or member.name == "__call__":
                found.setdefault(member.name, member)
    return list(found.values())


def methods(tree: ast.ClassDef) -> Iterator[Member]:
    """Methods and properties."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
            if decorators & {"overload", "setter"} or any("validator" in mark for mark in decorators):
                continue
            kind = "property" if decorators & {"property", "cached_property"} else "method"
            yield Member(node.name, node, ast.get_docstring(node), kind)


def attributes(tree: ast.ClassDef) -> Iterator[Member]:
    """Fields of the class, and what ``__init__`` sets; each with the string that follows it."""
    bodies = [tree.body]
    bodies += [
        node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    for body in bodies:
        for node, after in zip(body, [*body[1:], None], strict=True):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            name = target.attr if is_own else target.id if isinstance(target, ast.Name) else "_"
            doc = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else None
            )
            if isinstance(target, ast.Name) and body is not tree.body:
                continue
            yield Member(name, node, doc, "attribute")


def of_class(owner: type) -> Iterator[str]:
    """Docstring, constructor, attributes, methods."""
    if issubclass(owner, Exception):
        yield literal(importlib.import_module(owner.__module__).__doc__)
        return
    is_made_for_users = owner is shardwise.Engine  # its module says more than the class
    given: set[str] = set()
    yield literal(importlib.import_module(owner.__module__).__doc__ if is_made_for_users else owner.__doc__)
    if issubclass(owner, Policy):
        if owner is shardwise.RunConfig:
            yield from ["", "Its fields: [configuration.md](configuration.md)."]
        else:
            yield from ["", *key_table(keys.keys_of(owner))]
    elif "__init__" in vars(owner):
        tree = source_of(owner)
        (make,) = [node for node in tree.body if getattr(node, "name", "") == "__init__"]
        given = {
            arg.arg
            for arg in (*make.args.args, *make.args.kwonlyargs, make.args.vararg, make.args.kwarg)
            if arg
        }
        if owner is not shardwise.Engine:  # which initialize makes
            yield from ["", "```python", signature(make, owner.__name__), "```"]
            if doc := ast.get_docstring(make):
                yield from ["", literal(doc)]
    found = members(owner)
    hidden = {*getattr(owner, "model_fields", ()), "model_config"}
    values = [
        m for m in found if m.kind != "method" and m.name not in hidden and (m.doc or m.name not in given)
    ]
    if values:
        yield from ["", "| attribute | what it is |", "|---|---|"]
        for member in values:
            yield f"| `{member.name}` | {cell(member.doc or '')} |"
    for member in found:
        if member.kind == "method":
            yield from ["", f"### `{owner.__name__}.{member.name}`", ""]
            name = owner.__name__.lower() if member.name == "__call__" else member.name
            yield from of_function(member.node, name)


# command_line.md ---------------------------------------------------------------------------------------------------


def commands() -> Iterator[str]:
    """Every command with its arguments and flags."""
    yield "# Command line"
    yield ""
    yield "`shardwise COMMAND ...`, or `python -m shardwise COMMAND ...`. `--help` works everywhere; exit codes: "
    yield "[exit_codes.md](exit_codes.md)."
    for info in command_line.app.registered_commands:
        assert info.callback is not None
        yield from ["", f"## `shardwise {info.name}`", "", prose(info.callback.__doc__), ""]
        yield "| argument | type | default | what it does |"
        yield "|---|---|---|---|"
        for parameter in inspect.signature(info.callback).parameters.values():
            yield flag_row(parameter)
    yield from [
        "",
        "## Before a command",
        "",
        "| argument | type | default | what it does |",
        "|---|---|---|---|",
    ]
    for parameter in inspect.signature(command_line._options).parameters.values():
        yield flag_row(parameter)


def flag_row(parameter: inspect.Parameter) -> str:
    """One argument or flag."""
    kind, info = get_args(parameter.annotation)
    name = parameter.name
    is_option = type(info).__name__ == "OptionInfo"
    if is_option:
        # Inside Annotated the first name stands where a default would.
        declared = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        if not declared:
            long = f"--{name.replace('_', '-')}"
            declared = [f"{long}/--no-{long[2:]}" if kind is bool else long]
        shown = ", ".join(f"`{each}`" for each in declared)
        shown += f" {info.metavar}" if info.metavar else ""
    else:
        shown = f"`{info.metavar or name.upper()}`"
    default = parameter.default
    is_required = default is inspect.Parameter.empty
    text = "required" if is_required else "" if default in (None, False) else f"`{default!r}`"
    low = f" >= {info.min}" if getattr(info, "min", None) is not None else ""
    return f"| {shown} | {flag_kind(kind)}{low} | {text} | {cell(info.help or '')} |"


def flag_kind(kind: Any) -> str:
    """A type in words."""
    words = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "switch",
        Path: "path",
        list: "text, may repeat",
    }
    if kind in words:
        return words[kind]
    if get_origin(kind) is list:
        return words[list]
    if get_origin(kind) is Annotated:
        return flag_kind(get_args(kind)[0])
    return " or ".join(flag_kind(each) for each in get_args(kind) if each is not type(None))


# exit_codes.md -----------------------------------------------------------------------------------------------------


def exit_codes() -> Iterator[str]:
    """The codes, and which error gives which."""
    yield "# Exit codes"
    yield ""
    yield "Of every `shardwise` command. Under `shardwise launch` a script's own code is handed on."
    yield from ["", "| code | what it means |", "|---|---|"]
    for code, sentence in failure.EXIT_CODES.items():
        yield f"| {code} | {cell(sentence)} |"
    yield from ["", "## Errors", "", "All are `shardwise.ShardwiseError`, in `shardwise.base.errors`:", ""]
    yield from ["| error | code | what is wrong |", "|---|---|---|"]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.ShardwiseError):
            yield f"| `{name}` | {failure.exit_code(kind(''))} | {cell(kind.__doc__ or '')} |"


# run_files.md ------------------------------------------------------------------------------------------------------


def run_files() -> Iterator[str]:
    """The run folder, and the columns of its metrics."""
    yield "# Files of a run folder"
    yield ""
    yield "`shardwise train` leaves these in the folder that `output_dir` names. Files that do not apply are not made."
    yield from ["", "| file | what it holds |", "|---|---|"]
    for line in prose(folder_docstring()).splitlines()[2:]:
        name, _, about = line.partition("  ")
        if about.strip() and not line.startswith(" "):
            yield f"| `{name}` | {cell(about)} |"
    for kind, whose in (
        (metrics.StepRecord, "a language model, or a model of your own"),
        (metrics.ClickRecord, "a click-through model"),
        (metrics.ImageRecord, "a model of images"),
    ):
        yield from ["", f"## `metrics.csv` of {whose}", ""]
        yield "One row per optimizer step. A number that is not known is an empty cell."
        yield from ["", "| column | what it is |", "|---|---|"]
        about = columns_of(metrics.StepRecord) | columns_of(kind)
        for column in kind._fields:
            yield f"| `{column}` | {cell(about[column])} |"


def columns_of(kind: type) -> dict[str, str]:
    """The sentences of a record's columns; a column without one means what StepRecord's column means."""
    tree = source_of(kind)
    assert isinstance(tree, ast.ClassDef)
    return {member.name: member.doc for member in attributes(tree) if member.doc}


def folder_docstring() -> str:
    """The table that the module of the run folder opens with."""
    return importlib.import_module(RunFolder.__module__).__doc__ or ""


if __name__ == "__main__":
    main()
