"""Converts the package's docstrings to the reStructuredText that Sphinx renders.

A docstring of the package is plain text: sentences, Google-style sections, and parts in columns (formulas, schedules,
tables) that a reader of the source sees as they are typed. Read as reStructuredText, such columns would run together,
and a lone ``*`` or ``_`` would be an error. This module makes literal blocks of columns and fields of sections, and
escapes every character outside of code that has a meaning in reStructuredText.
"""

import re
from collections.abc import Iterator

FIELDS = {"Args": "param", "Attributes": "var", "Raises": "raises", "Returns": "returns", "Yields": "yields"}
"""Sections of named entries, and sections of one text, with the field that Sphinx has for each."""
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Shape|Example|Note):$")
LABEL = re.compile(r"(Papers?|Cost|Shapes|Source|Memory): +(?=\S)")
ENTRY = re.compile(r"(\*{0,2}[\w.]+(?:, [\w.]+)*): ")
CODE = re.compile(r"(``.+?``|:\w+:`[^`]+`|`[^`]+`)")
PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")


def convert(lines: list[str]) -> list[str]:
    """Return a docstring, which is given without its common indentation, as reStructuredText."""
    made: list[str] = []
    for block in _blocks(lines):
        head = block[0]
        if SECTION.match(head):
            made += _section(head[:-1], _without_indentation(block[1:]))
        elif LABEL.match(head):
            made += _labels(block)
        else:
            made += _text(block)
        made.append("")
    return made


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Yield paragraphs; a section, or a label such as ``Cost:``, contains the indented lines after its first line."""
    block: list[str] = []
    for line in lines:
        is_new = bool(SECTION.match(line) or LABEL.match(line))
        is_after = bool(block) and bool(SECTION.match(block[0])) and bool(line) and not line.startswith(" ")
        if block and (is_new or is_after):
            yield block
            block = []
        if block or line.strip():
            block.append(line.rstrip())
    if block:
        yield block


def _section(name: str, body: list[str]) -> list[str]:
    """Return one of the Google-style sections."""
    if name in ("Returns", "Yields"):
        return [f":{FIELDS[name]}: {_inline(_joined(body))}"]
    if name in FIELDS and ENTRY.match(body[0]):
        entries: list[str] = []
        for line in body:
            if not line.startswith(" ") and ENTRY.match(line):
                entries.append(line)
            elif line.strip():
                entries[-1] += " " + line.strip()
        return [_entry(FIELDS[name], line) for line in entries]
    return [f".. rubric:: {name}", "", *_text(body)]


def _entry(field: str, line: str) -> str:
    """Return an argument or an exception with its sentence."""
    names, _, text = line.partition(": ")
    escaped = names.replace("*", r"\*")
    return f":{field} {escaped}: {_inline(text)}"


def _labels(block: list[str]) -> list[str]:
    """Return ``Paper:``, ``Cost:`` or ``Shapes:`` as a field, with what follows in columns as a literal block."""
    label, text = block[0].split(":", 1)
    more: list[str] = []
    rest = block[1:]
    while rest and rest[0].startswith("  "):
        more.append(rest.pop(0))
    made = [f":{label}: {_inline(_joined([text, *more]))}"]
    return made + (["", *_text(rest)] if any(line.strip() for line in rest) else [])


def _text(lines: list[str]) -> list[str]:
    """Return sentences as paragraphs, and lines in columns as literal blocks."""
    made: list[str] = []
    kind = ""
    run: list[str] = []
    for line in [*lines, ""]:
        now = "columns" if _is_in_columns(line) else "words" if line.strip() else ""
        if now == "words" and line.startswith("- "):
            now = "item"
        if kind == "item" and line.startswith("  "):
            now = "words"
        goes_on = now == kind != "item" or (kind, now) in (("columns", ""), ("item", "words"))
        if not goes_on and run:
            made += _paragraph(kind, run)
            run = []
        if not goes_on:
            kind = now
        run.append(line)
    return made + _paragraph(kind, run)


def _paragraph(kind: str, lines: list[str]) -> list[str]:
    """Return lines of one kind, with a blank line after them."""
    if kind == "columns":
        return ["::", "", *(f"    {line}".rstrip() for line in _trimmed(lines)), ""]
    if kind == "item":
        return [f"- {_inline(_joined(lines)[2:])}", ""]
    return [_inline(_joined(lines)), ""] if kind else []


def _is_in_columns(line: str) -> bool:
    """Return True for a line whose spaces mean something."""
    return line.startswith((" ", "|")) or ">>>" in line or "  " in line.strip()


def _trimmed(lines: list[str]) -> list[str]:
    """Return lines without common indentation, and without blank lines at the end."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return _without_indentation(lines)


def _without_indentation(lines: list[str]) -> list[str]:
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[depth:] for line in lines]


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def _inline(text: str) -> str:
    """Return a sentence with its code as literals, its papers as links, and everything else as plain text."""
    made = ""
    for part in CODE.split(text):
        if not part:
            continue
        if CODE.fullmatch(part):
            part = f"``{part.rpartition(':')[2].strip('`~')}``" if not part.startswith("``") else part
        else:
            part = PAPER.sub(r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", escape(part))
        # An escaped space prints nothing, and separates a literal from a letter next to it.
        is_apart = not made or made.endswith(" ") or part.startswith(" ")
        made += part if is_apart else f"\\ {part}"
    return made


def escape(text: str) -> str:
    """Return text without code in which no character has a meaning in reStructuredText."""
    return re.sub(r"([\\*`|_])", r"\\\1", text)
