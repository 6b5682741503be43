"""Policy: what the user may set about one component, as a small frozen model.

A policy stands beside the component that it steers. It checks its own fields and never changes them; rules that
span several policies are rows of ``config/rules.py``. An unknown key is an error that names the nearest known one.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def nearest(given: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` where one of ``known`` is close to ``given``, else the list of the known."""
    known = sorted(known)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known) or 'none'}"


class Policy(BaseModel):
    """Base of every policy: frozen, keyword-only, unknown keys refused with a suggestion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for key in given:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}{nearest(str(key), cls.model_fields)}")
        return given
