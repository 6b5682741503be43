"""Makes the table of docs/design.md on what is done to a module:  make reference   (or: python docs/make_design.py)

The rows are those of ``CHANGES`` in compose/apply.py, between two comments of the page. tests/test_reference.py holds
the page equal to what this program makes.
"""

from pathlib import Path

from shardwise.compose.apply import CHANGES, Phase

PAGE = Path(__file__).parent / "design.md"
BEGIN = "<!-- Made from compose/apply.py by `make reference`; edit the rows there instead. -->\n"
END = "<!-- End of the table from compose/apply.py. -->\n"


def page(text: str) -> str:
    """The page ``text`` with the table as the code has it now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


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
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
