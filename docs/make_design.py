"""Makes the tables of two pages from the code:  make reference   (or: python docs/make_design.py)

    docs/design.md      what is done to a module    the rows of ``CHANGES`` in compose/apply.py
    docs/glossary.md    Actions                     the rows of ``Kind`` in plan/kinds.py

Each table stands between two comments of its page. tests/test_reference.py holds the pages equal to what this program
makes.
"""

from pathlib import Path

from shardwise.compose.apply import CHANGES, Phase
from shardwise.plan.kinds import AnyKind, Kind

PAGE = Path(__file__).parent / "design.md"
BEGIN = "<!-- Made from compose/apply.py by `make reference`; edit the rows there instead. -->\n"
END = "<!-- End of the table from compose/apply.py. -->\n"
GLOSSARY = Path(__file__).parent / "glossary.md"
KINDS_BEGIN = "<!-- Made from plan/kinds.py by `make reference`; edit the rows there instead. -->\n"
KINDS_END = "<!-- End of the table from plan/kinds.py. -->\n"


def page(text: str) -> str:
    """The page docs/design.md, ``text``, with the table as the code has it now."""
    return filled(text, BEGIN, table(), END)


def glossary(text: str) -> str:
    """The page docs/glossary.md, ``text``, with the table as the code has it now."""
    return filled(text, KINDS_BEGIN, kinds_table(tuple(Kind)), KINDS_END)


def filled(text: str, begin: str, table: str, end: str) -> str:
    """The page ``text`` with ``table`` between two comments."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + table + end + after


def kinds_table(kinds: tuple[AnyKind, ...]) -> str:
    """One line for each Kind: its name, the words of other systems, what it does."""
    lines = ["", "| word | elsewhere | what the Action does |", "|---|---|---|"]
    lines += [f"| `{kind.name}` | {kind.row.elsewhere} | {kind.row.meaning} |" for kind in kinds]
    return "\n".join([*lines, "", ""])


def table() -> str:
    """One line for a row, under a line for each phase."""
    lines = ["", "| name | what | why there | where | undone by |", "|---|---|---|---|---|"]
    for phase in Phase:
        lines.append(f"| | **{phase.value}** | | | |")
        for change in CHANGES:
            if change.phase is phase:
                where = ", ".join(f"`{file}`" for file in change.where)
                lines.append(
                    f"| {change.name} | {change.what} | {change.why} | {where} | {change.undone.value} |"
                )
    return "\n".join([*lines, "", ""])


def main() -> None:
    """Write the pages."""
    for path, made in ((PAGE, page), (GLOSSARY, glossary)):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
