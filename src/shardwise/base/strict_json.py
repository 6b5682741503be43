"""Strict reading of JSON files by a schema: for every header and manifest that Shardwise reads.

    found = read_object(data, "x.tokens, header")            # bounded before it is parsed; one object
    header = validated(Header, found, "x.tokens, header")    # a pydantic model: exact types, exact bounds

A checksum proves that bytes are as they were written, not that they are valid: whoever can write a file can write its
checksum. So no value of a header is used, and no memory is allocated for it, before the header has passed both checks.
"""

import json
import math
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.base.errors import DamagedError, ShardwiseError

JSON_BYTES = 64 * 2**20
"""Largest JSON of a checkpoint."""
JSON_NODES = 1_000_000
"""Most values in one JSON: Python uses tens of bytes for each byte-sized value of the file."""
_SHOWN = 400
"""Characters of a fault that an error repeats."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of bytes, elements or steps."""


class StrictModel(BaseModel):
    """Base of the schemas of files: exact types, frozen, keys of later versions ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


Schema = TypeVar("Schema", bound=BaseModel)


def read_object(
    data: bytes, where: str, *, limit_bytes: int = JSON_BYTES, kind: type[ShardwiseError] = DamagedError
) -> dict[str, Any]:
    """Parse one JSON object strictly.

    Args:
        data: Bytes of the file.
        where: Place of the data, which begins the error.
        limit_bytes: Largest size that is parsed.
        kind: Class of the error.

    Raises:
        kind: if the data are too large or not one valid JSON object.
    """
    nodes = data.count(b",") + data.count(b"[") + data.count(b"{")
    if len(data) > limit_bytes or nodes > JSON_NODES:
        raise kind(
            f"{where}: {len(data)} bytes with some {nodes} values; at most {limit_bytes} and {JSON_NODES} are read"
        )
    try:
        found = json.loads(
            data.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_constant
        )
    except (ValueError, RecursionError) as error:
        raise kind(f"{where}: not the JSON that was written ({str(error)[:_SHOWN]})") from None
    if not isinstance(found, dict):
        raise kind(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


def validated(
    schema: type[Schema], found: Any, where: str, *, kind: type[ShardwiseError] = DamagedError
) -> Schema:
    """Return ``found`` as an object of ``schema``.

    Args:
        schema: A pydantic model.
        found: Parsed JSON.
        where: Place of the data, which begins the error.
        kind: Class of the error.

    Raises:
        kind: if a key does not fit; the message names the first.
    """
    try:
        return schema.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise kind(f"{where}: {place or 'contents'}: {first['msg'][:_SHOWN]}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:80]!r} stands twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is not finite")
    return number


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
