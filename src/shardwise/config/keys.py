"""A list of every configuration key, derived from the policies: path, type, default, unit and sentence.

    zero.stage                    one of 0, 1, 2, 3     0       What is cut along "dp_shard": ...
    optimizer.groups[].lr         number >= 0                   Learning rate of the group; ...
    tables.named.NAME.rows        integer > 0           rows    A static table: keys are 0 to rows - 1.

Printed keys, the reference and the schema for editors are generated from this list, so none of them can omit a key.
The unit is the suffix of the key's name (``_s``, ``_bytes``), or the first or second word of its sentence ("Steps
between two ...").
"""

import collections.abc
import copy
import json
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import Tag
from pydantic.fields import FieldInfo

from shardwise.base.errors import ConfigError
from shardwise.base.policy import Policy, nearest
from shardwise.config.foreign_keys import FOREIGN_KEYS, FORMER_KEYS
from shardwise.config.run import ONE_WORD, RunConfig

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false"}
_ENDINGS = {"_s": "seconds", "_bytes": "bytes", "_steps": "steps", "_tokens": "tokens", "_samples": "samples"}
_UNITS = frozenset(
    [
        "seconds",
        "bytes",
        "steps",
        "samples",
        "tokens",
        "rows",
        "ranks",
        "layers",
        "blocks",
        "heads",
        "microbatches",
        "evaluations",
        "processes",
        "threads",
        "features",
        "numbers",
        "outputs",
        "units",
        "stages",
        "passes",
        "keys",
    ]
)
_RANGES: tuple[tuple[type, str, str], ...] = (
    (annotated_types.Gt, "gt", "> {}"),
    (annotated_types.Ge, "ge", ">= {}"),
    (annotated_types.Lt, "lt", "< {}"),
    (annotated_types.Le, "le", "<= {}"),
)


class ConfigKey(NamedTuple):
    """One configuration key that a user may set."""

    path: str
    """The dotted path; ``[]`` stands for any item of a list, and a word in capitals for a name that the user
    chooses."""
    kind: str
    """The type of the value, in words."""
    default: str
    """The default, written as in YAML; empty if the key is left out by default."""
    is_required: bool
    unit: str
    """The unit: ``seconds``, ``bytes``, ``steps`` ...; empty for a value that is not a quantity."""
    sentence: str
    """The docstring of the field."""
    when: str
    """The condition of the key (``name: dlrm``, ``kind: clicks``), if only one form of the block has the key."""
    owner: type[Policy]
    """The policy that has the field."""
    holds: tuple[type[Policy], ...]
    """The policies whose keys are below this key."""


def all_keys() -> list[ConfigKey]:
    """Return all keys in the order of the policies; a block is followed by its keys."""
    return list(_walk(RunConfig, "", ""))


def keys_of(policy: type[Policy]) -> list[ConfigKey]:
    """Return the keys of one policy, without the keys of its blocks."""
    return [key for key in _walk(policy, "", "") if key.owner is policy]


def find(path: str) -> list[ConfigKey]:
    """Return the key ``path`` and all keys below it.

    Raises:
        ConfigError: if there is no such key; the error suggests the nearest known key.
    """
    known = all_keys()
    found = [key for key in known if _is_at(key.path, path)]
    if not found:
        names = {key.path for key in known}
        ours = FORMER_KEYS.get(path) or FOREIGN_KEYS.get(path.rpartition(".")[2])
        if ours is not None:
            raise ConfigError(f"config: there is no key {path!r}; here it is {ours}")
        ends = sorted(name for name in names if name.rpartition(".")[2] == path.rpartition(".")[2])
        hint = f"; did you mean {' or '.join(map(repr, ends[:4]))}?" if ends else nearest_of(path, names)
        raise ConfigError(f"config: there is no key {path!r}{hint}")
    return found


def nearest_of(path: str, names: set[str]) -> str:
    """Return a suggestion of the key nearest to ``path``; if none is near, name the command that prints all keys."""
    hint = nearest(path, names)
    return hint if "did you mean" in hint else "; `shardwise config` prints them all"


def _is_at(path: str, wanted: str) -> bool:
    """Return True if ``path`` is ``wanted`` or below it; a word in capitals and ``[]`` match anything."""
    have, want = path.replace("[]", "").split("."), wanted.replace("[]", "").split(".")
    return len(have) >= len(want) and all(
        h in (w, w.upper()) or h.isupper() for h, w in zip(have, want, strict=False)
    )


def unit_of(name: str, kind: str, sentence: str) -> str:
    """Return the unit of a key; empty if the key is not a number.

    Args:
        name: The name of the key, whose suffix may be a unit.
        kind: The type of the key, in words.
        sentence: The docstring of the field, which may have the unit as its first or second word.
    """
    if not any(word in kind for word in ("integer", "number")):
        return ""
    for ending, unit in _ENDINGS.items():
        if name.endswith(ending):
            return unit
    opening = (word.strip(",;:.").lower() for word in sentence.split()[:2])
    return next((word for word in opening if word in _UNITS), "")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration, with which editors complete keys and mark unknown ones."""
    made = RunConfig.model_json_schema()
    definitions = made["$defs"]
    for block, word in ONE_WORD.items():
        target = made["properties"][block]
        if "$ref" in target:
            name = target["$ref"].rpartition("/")[2]
            one_word = copy.deepcopy(definitions[name]["properties"][word])
            reference = {"$ref": target.pop("$ref")}
            made["properties"][block] = {"anyOf": [reference, one_word], **target}
    _any_of(made)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Shardwise configuration",
        **made,
    }


def _any_of(part: Any) -> None:
    """Replace ``oneOf`` by ``anyOf`` in a schema, so that a block that fits two forms is valid.

    For example, ``{width: 16}`` is the beginning of any model with a width.
    """
    if isinstance(part, dict):
        if "oneOf" in part:
            part["anyOf"] = part.pop("oneOf")
        for inner in part.values():
            _any_of(inner)
    elif isinstance(part, list):
        for inner in part:
            _any_of(inner)


# Walking the policies ----------------------------------------------------------------------------------------------


def _walk(policy: type[Policy], prefix: str, when: str) -> Iterator[ConfigKey]:
    for name, field in policy.model_fields.items():
        path = f"{prefix}{name}"
        kind = _kind_of(field)
        forms = list(_forms(_whole_type(field), path))
        sentence = _sentence(field)
        yield ConfigKey(
            path,
            kind,
            _default_of(field),
            field.is_required(),
            unit_of(name, kind, sentence),
            sentence,
            when,
            policy,
            tuple(form for form, _, _ in forms),
        )
        for form, inner, tag in forms:
            yield from _walk(form, f"{inner}.", _when(form, tag) if len(forms) > 1 else when)


def _whole_type(field: FieldInfo) -> Any:
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _forms(kind: Any, path: str, tag: str = "") -> Iterator[tuple[type[Policy], str, str]]:
    """Yield (policy, path, tag) of every policy inside a type."""
    origin, inside = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Policy):
        yield kind, path, tag
    elif origin is Annotated:
        tags = [item.tag for item in inside[1:] if isinstance(item, Tag)]
        yield from _forms(inside[0], path, tags[0] if tags else tag)
    elif origin in (Union, types.UnionType):
        for one in inside:
            yield from _forms(one, path, tag)
    elif origin in (list, tuple):
        yield from _forms(inside[0], f"{path}[]", tag)
    elif origin in (dict, collections.abc.Mapping):
        yield from _forms(inside[1], f"{path}.NAME", tag)


def _when(form: type[Policy], tag: str) -> str:
    """Return the key and value that distinguish one form of a block from the others."""
    for name in _TELLS:
        if name in form.model_fields:
            return f"{name}: {tag}"
    return f"{tag}: ..."


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, Policy):
        return ""
    return as_yaml(value)


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, float) and plain == int(plain) and abs(plain) < 1e6:
        return str(plain)
    if isinstance(plain, float):
        return _yaml_float(plain)
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6).strip()
    return text.removesuffix("...").strip()


def _yaml_float(value: float) -> str:
    """Return a float as YAML: without a decimal point, YAML would read 1e-08 as text."""
    text = repr(value)
    mantissa, letter, exponent = text.partition("e")
    return text if "." in mantissa or not letter else f"{mantissa}.0e{exponent}"


def _kind_of(field: FieldInfo) -> str:
    return _text_of(field.annotation, tuple(field.metadata))


def _text_of(kind: Any, limits: tuple[Any, ...] = ()) -> str:
    """Return a type in words."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        more: list[Any] = []
        for item in inside[1:]:
            more += item.metadata if isinstance(item, FieldInfo) else [item]
        return _text_of(inside[0], (*limits, *more))
    if origin in (Union, types.UnionType):
        texts = [_text_of(one, limits) for one in inside if one is not type(None)]
        return " or ".join(dict.fromkeys(texts))
    if origin is Literal:
        values = ", ".join(f"`{as_yaml(value)}`" for value in inside)
        return values if len(inside) == 1 else f"one of {values}"
    if origin in (list, tuple):
        if origin is tuple and Ellipsis not in inside:
            return f"list of {len(inside)} × {_text_of(inside[0])}"
        return f"list of {_text_of(inside[0])}"
    if origin in (dict, collections.abc.Mapping):
        value = inside[1]
        return "mapping" if value is Any else f"mapping of name to {_text_of(value)}"
    if isinstance(kind, type) and issubclass(kind, Policy):
        return "block"
    word = _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    found = [
        text.format(f"{getattr(limit, attribute):g}")
        for limit in limits
        for limit_type, attribute, text in _RANGES
        if isinstance(limit, limit_type)
    ]
    return " ".join([word, " and ".join(found)]) if found else word


# A file to begin with ----------------------------------------------------------------------------------------------

START: dict[str, Any] = {
    "model": {"name": "gpt", "layers": 4, "width": 128, "heads": 4, "context": 128},
    "batch": {"global_size": 16},
}
"""The smallest configuration that starts a run."""
_FORM_AT_START = {"model": "gpt", "data": "text", "schedule": "constant"}
_TELLS = ("name", "kind", "type")
"""Keys that distinguish the forms of a block."""


def annotated_yaml() -> str:
    """Return every key with its default and its sentence, as a YAML file that starts a run without changes.

    Keys that are left out by default are comments; so are the other models and readers.
    """
    lines = ["# Every key of Shardwise with its default. A key behind # is not set."]
    _write_block(lines, RunConfig, 0, START, is_comment=False)
    return "\n".join(lines) + "\n"


def _write_block(
    lines: list[str], policy: type[Policy], depth: int, given: dict[str, Any], is_comment: bool
) -> None:
    for name, field in policy.model_fields.items():
        forms = [form for form, path, _ in _forms(_whole_type(field), "") if not path]
        value = given.get(name)
        if forms:
            lines += _wrapped(_sentence(field), depth)
            default = field.get_default(call_default_factory=True)
            is_off = is_comment or (default is None and value is None)
            is_empty = not value and not any(_default_of(f) for f in forms[0].model_fields.values())
            lines.append(_line(f"{name}: {{}}" if is_empty and not is_off else f"{name}:", depth, is_off))
            for form in forms:
                tag = _tag_of(form)
                is_other = len(forms) > 1 and tag != _FORM_AT_START.get(name)
                if is_other:
                    lines += _wrapped(f"or, with {tag}:", depth + 1)
                inner = value if isinstance(value, dict) and not is_other else {}
                _write_block(lines, form, depth + 1, inner, is_off or is_other)
        else:
            lines += _wrapped(f"{_sentence(field)} ({_kind_of(field)})", depth)
            text = _default_of(field) if value is None else as_yaml(value)
            lines.append(_line(f"{name}: {text}".rstrip(), depth, is_comment or not text))


def _sentence(field: FieldInfo) -> str:
    return " ".join((field.description or "").replace("``", "`").split())


def _tag_of(form: type[Policy]) -> str:
    for name in _TELLS:
        if name in form.model_fields:
            field = form.model_fields[name]
            return str(get_args(field.annotation)[0] if field.is_required() else field.default)
    return "target" if "target" in form.model_fields else ""


def _line(text: str, depth: int, is_comment: bool) -> str:
    return "  " * depth + ("#" if is_comment else "") + text


def _wrapped(text: str, depth: int) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="  " * depth + "# ", subsequent_indent="  " * depth + "# ")


def as_json(found: list[ConfigKey]) -> str:
    """Return keys as a JSON list with one object per key."""
    return json.dumps(
        [
            {
                "key": key.path,
                "type": key.kind.replace("`", ""),
                "default": None if not key.default else yaml.safe_load(key.default),
                "required": key.is_required,
                "unit": key.unit or None,
                "when": key.when or None,
                "description": key.sentence,
            }
            for key in found
        ],
        indent=2,
        ensure_ascii=False,
    )
