"""Docstrings as plain text become reStructuredText that shows the same: docs/site/docstrings.py."""

import runpy
import textwrap
from pathlib import Path

CONVERT = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "site" / "docstrings.py"))["convert"]


def converted(text: str) -> str:
    return "\n".join(CONVERT(textwrap.dedent(text).strip().splitlines()))


def test_columns_stay_columns_and_sentences_flow() -> None:
    made = converted(
        """
        A step is a list
        of Actions.

            F  forward       B  backward

              G  further to the right

        Between.
        wide      has columns too
        The end.
        """
    )
    assert "A step is a list of Actions.\n" in made
    assert "::\n\n    F  forward       B  backward\n\n      G  further to the right\n" in made
    assert "::\n\n    wide      has columns too\n" in made
    assert made.rstrip().endswith("\nThe end.")


def test_sections_become_fields() -> None:
    made = converted(
        """
        Return it.

        Args:
            *names: the names, of
                which each is given once.
            size: bytes.

        Returns:
            The sum, over
            all ranks.

        Raises:
            PlanError: if ``size`` is 0.
        """
    )
    assert r":param \*names: the names, of which each is given once." in made
    assert ":param size: bytes." in made
    assert ":returns: The sum, over all ranks." in made
    assert ":raises PlanError: if ``size`` is 0." in made


def test_characters_with_a_meaning_are_escaped_outside_of_code() -> None:
    made = converted("Count * and a_ and |x|, not in ``*args`` or `b_`; ``x``s.")
    assert made.startswith(r"Count \* and a\_ and \|x\|, not in ``*args`` or ``b_``")
    assert r"``x``\ s." in made, "a literal must not touch a letter"


def test_labels_and_papers() -> None:
    made = converted("Paper: Some 2020,\n       arXiv:2006.09503.\nCost:   two sends.")
    assert ":Paper: Some 2020, `arXiv:2006.09503 <https://arxiv.org/abs/2006.09503>`__" in made
    assert ":Cost: two sends." in made


def test_an_item_keeps_its_own_paragraph() -> None:
    assert "- one, with its end\n\n- two\n" in converted("Two:\n\n- one, with\n  its end\n- two")
