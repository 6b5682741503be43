"""Builds the documentation as a site:  make docs   (or: python docs/make_site.py [FOLDER] [--jobs=N])

FOLDER is build/site by default, and FOLDER/index.html is the first page. N processes read and write the pages, by
default one a core. The site needs no server and no network.

The pages are the Markdown files that a repository shows, at the same places, so that their links hold in both. This
program adds menus, a page for the folders of guides and reference, a page for each file of the examples, and the
reference of the Python code from signatures and docstrings. Sphinx ends with an error if a link or a reference is
broken, or if a page is missing from NAVIGATION.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sphinx.cmd.build import build_main

import shardwise
from shardwise.launch.function import launch

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md", "docs/pictures/*", "examples/*.md", "benchmarks/**/*.md")
LISTED = ("examples/*.py", "examples/*.yaml", "CITATION.cff")
"""Files that become a page each, because pages link to them."""

ROOMS = ("base", "plan", "compose", "parallel", "engine", "comm", "simulate")
"""Rooms of the package whose modules have a section in the site, in the order of the menu."""

NAVIGATION = {
    "README": [
        "docs/guides/README",
        "docs/techniques/README",
        "Design <docs/design>",
        "docs/reference/README",
        "docs/modules/README",
        "examples/README",
        "Measured <docs/measured>",
        "All pages <docs/README>",
    ],
    "docs/guides/README": [
        "install",
        "own_loop",
        "hugging_face",
        "coming_from",
        "deepspeed",
        "memory",
        "errors",
        "*",
    ],
    "docs/techniques/README": ["zero", "tensor", "sequence", "pipeline", "experts", "tables", "*"],
    "docs/design": ["plan", "add_a_technique", "accelerators", "foreign_models", "../CONTRIBUTING"],
    "docs/reference/README": ["configuration", "engine", "command_line", "*", "../deepspeed", "../glossary"],
    "docs/modules/README": [*(f"{room}*" for room in ROOMS)],
    "examples/README": ["*"],
    "docs/measured": ["../benchmarks/README", "../benchmarks/**/*"],
    "docs/README": ["../CHANGELOG", "../SECURITY", "../CODE_OF_CONDUCT", "../CITATION*"],
}
"""Menus: a page, and the pages below it."""


def main() -> int:
    """Lay out the pages beside FOLDER and build them."""
    folders = [word for word in sys.argv[1:] if not word.startswith("--jobs=")]
    jobs = [word for word in sys.argv[1:] if word not in folders] or ["--jobs=auto"]
    folder = Path(folders[0]) if folders else ROOT / "build" / "site"
    work = folder.with_name(f"{folder.name}_work")
    lay_out(work / "pages")
    options = ["--fail-on-warning", "--keep-going", "--quiet", *jobs]
    places = [f"--conf-dir={ROOT / 'docs' / 'site'}", f"--doctree-dir={work / 'doctrees'}"]
    code = build_main(["-b", "html", *options, *places, str(work / "pages"), str(folder)])
    if code == 0:
        print(f"the site is built: {folder / 'index.html'}")
    return code


def lay_out(folder: Path) -> None:
    """Write all pages into `folder`, and remove what is left there of pages that are no more."""
    made = dict(pages())
    for name, content in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:  # Sphinx reads again what has a new time
            path.write_bytes(content)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if str(path.relative_to(folder)) not in made:
            path.unlink()


def pages() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of every page and picture."""
    listed = {path for pattern in LISTED for path in ROOT.glob(pattern)}
    for path in listed:
        yield f"{path.relative_to(ROOT)}.md", listing(path).encode()
    for path in {path for pattern in PAGES for path in ROOT.glob(pattern)}:
        name = path.relative_to(ROOT)
        if path.suffix != ".md":
            yield str(name), path.read_bytes()
        elif name != PUBLIC:
            yield str(name), page(path, listed).encode()
    yield str(PUBLIC), public_names().encode()
    yield from ((f"docs/modules/{name}", text.encode()) for name, text in modules())
    for name, title in (("guides", "Guides"), ("reference", "Reference")):
        yield f"docs/{name}/README.md", section(name, title).encode()


def page(path: Path, listed: set[Path]) -> str:
    """Return a Markdown file with links to the pages of listed files and folders, and with its menu."""

    def target(match: re.Match[str]) -> str:
        to = path.parent / match[1]
        if to.resolve() in listed:
            return f"]({match[1]}.md)"
        return f"]({match[1].rstrip('/')}/README.md)" if (to / "README.md").exists() else match[0]

    text = re.sub(r"\]\(([^)#:]+)\)", target, path.read_text(encoding="utf-8"))
    return text + menu(str(path.relative_to(ROOT).with_suffix("")))


def menu(name: str) -> str:
    """Return the menu of a page, which the page itself does not show."""
    entries = "\n".join(NAVIGATION.get(name, ()))
    return f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{entries}\n```\n" if entries else ""


def listing(path: Path) -> str:
    """Return the page of a file: its name and its text."""
    language = "python" if path.suffix == ".py" else "yaml"
    return f"# {path.name}\n\n````{language}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def section(name: str, title: str) -> str:
    """Return the page of a folder: the rows of docs/README.md that name its pages."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    rows = [row for row in rows if f"({name}/" in row.split("|")[1]]
    moved = [re.sub(r"\]\(([\w./]+\.md)", lambda match: f"]({relative(match[1], name)}", row) for row in rows]
    table = [f"# {title}", "", "| page | what it contains |", "|---|---|", *moved, ""]
    return "\n".join(table) + menu(f"docs/{name}/README")


def relative(target: str, name: str) -> str:
    """Return a link of docs/README.md as a page of the folder docs/`name` writes it."""
    return os.path.relpath(ROOT / "docs" / target, ROOT / "docs" / name)


PUBLIC = Path("docs/reference/engine.md")
"""In the site this page comes from Sphinx, which adds links to types and to sources."""
FOREIGN = "Module, BaseModel, Exception, tuple, dict, object"
"""Classes of Python and of libraries, whose members are documented elsewhere."""


def public_names() -> str:
    """Return the page of the names that the package exports."""
    lines = ["# Public names of `shardwise`", ""]
    lines += ["What `import shardwise` offers. *Collective*: every rank calls it, in the same order.", ""]
    members = (
        ":members:",
        ":special-members: __call__",
        f":inherited-members: {FOREIGN}",
        ":show-inheritance:",
    )
    for name in shardwise.__all__:
        thing = launch if name == "launch" else getattr(shardwise, name)
        place = f"{thing.__module__}.{name}"
        if isinstance(thing, type):
            lines += directive(f"autoclass:: {place}", *members)
        else:
            lines += directive(f"autofunction:: {place}")
    return "\n".join(lines)


MODULES = """# Modules

The rooms of the code that [the design](../design.md) describes: every documented class and function, with a link to its
source.

| room | what it contains |
|---|---|
"""


def modules() -> Iterator[tuple[str, str]]:
    """Yield a page for each folder of the rooms, and the page that lists them."""
    source = ROOT / "src" / "shardwise"
    rows = []
    for room in ROOMS:
        for package in sorted(path.parent for path in (source / room).rglob("__init__.py")):
            name = ".".join(package.relative_to(source).parts)
            rows.append(f"| [`shardwise.{name}`]({name}.md) | {first_line(package / '__init__.py')} |\n")
            lines = [f"# `shardwise.{name}`", "", *directive(f"automodule:: shardwise.{name}")]
            for path in sorted(package.glob("*.py")):
                if path.stem != "__init__":
                    lines += [f"## `{path.stem}`", "", *module(f"shardwise.{name}.{path.stem}")]
            yield f"{name}.md", "\n".join(lines)
    yield "README.md", MODULES + "".join(rows) + menu("docs/modules/README")


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def module(name: str) -> list[str]:
    """Return a module's directive, without the names that are on the page of public names, and a link to those."""
    public = [
        each for each in shardwise.__all__ if getattr(getattr(shardwise, each), "__module__", "") == name
    ]
    if not public:
        return directive(f"automodule:: {name}", ":members:", ":show-inheritance:")
    names = ", ".join(f"`shardwise.{each}`" for each in public)
    without = f":exclude-members: {', '.join(public)}"
    lines = directive(f"automodule:: {name}", ":members:", ":show-inheritance:", without)
    return [*lines, f"On the page of [public names](../reference/engine.md): {names}.", ""]


def directive(head: str, *options: str) -> list[str]:
    """Return a directive of Sphinx inside Markdown."""
    return ["```{eval-rst}", f".. {head}", *(f"   {option}" for option in options), "```", ""]


if __name__ == "__main__":
    sys.exit(main())
