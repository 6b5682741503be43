"""Policy: the user's settings of one component, as a small frozen model.

A policy stands beside the component that it steers. It checks its own fields and never changes them; rules that
span several policies are rows of ``config/rules.py``. An unknown key is an error that names the nearest known key.
"""

import difflib
from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

UNKNOWN = "unknown key"
"""Start of the message for an unknown key; the key itself is the fault's input."""


def nearest(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` if a name in ``known`` is close to ``given``, else the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known) or 'none'}"


class Policy(BaseModel):
    """Base of every policy: frozen, keyword-only, unknown keys refused with a suggestion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report every unknown key as a fault of its own, together with the faults of the known keys."""
        unknown = [key for key in given if key not in cls.model_fields] if isinstance(given, dict) else []
        if not unknown:
            return handler(given)
        faults = [
            _fault(f"{UNKNOWN} {key!r:.100}{nearest(str(key), cls.model_fields)}", (), key) for key in unknown
        ]
        try:
            handler({key: value for key, value in given.items() if key not in unknown})
        except ValidationError as error:
            faults += [_fault(e["msg"], e["loc"], e["input"]) for e in error.errors(include_url=False)]
        raise ValidationError.from_exception_data(cls.__name__, faults)


def _fault(said: str, place: tuple[int | str, ...], given: Any) -> InitErrorDetails:
    # The sentence is passed as a value, so that a brace in it is not taken for a placeholder.
    return InitErrorDetails(
        type=PydanticCustomError("fault", "{said}", {"said": said}), loc=place, input=given
    )
