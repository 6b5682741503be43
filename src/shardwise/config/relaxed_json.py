"""A parser of relaxed JSON: JSON, JSON with comments, JSON5 (json5.org) and Hjson (hjson.github.io).

    # a comment, as are // this and /* this */
    {
      stage: 2                  commas may be left out where a line ends, and stand before a closing bracket
      lr: 3e-4,                 keys need no quotes
      type: Adam                nor does text: it goes on to the end of its line, commas included
      'single': '''             as in Hjson
        several lines'''
    }

The outer braces may be left out. A key given twice is an error. Errors are ValueErrors with line and column.
"""

import re
from typing import Any, NoReturn

_SPACE = re.compile(r"(?:\s|\ufeff|#[^\n]*|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
_KEY = re.compile(r"[^\s,:{}\[\]]+")
_BARE = re.compile(r"[^\n]*")
_STOP = re.compile(r"[,}\]\n#]|//|/\*|$")
_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d*|(?=\.\d))(?:\.\d*)?(?:[eE][+-]?\d+)?")
_HEX = re.compile(r"[+-]?0[xX][0-9a-fA-F]+")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "Infinity": float("inf"),
    "+Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "NaN": float("nan"),
}
_ESCAPES = {
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "0": "\0",
    "\n": "",
    "\u2028": "",
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(\r\n|.))", re.DOTALL)
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_NO_TEXT = object()


def read_json(text: str) -> Any:
    """Return the value of a text in relaxed JSON.

    Raises:
        ValueError: if the text does not parse; the error contains line and column.
    """
    return _JsonScanner(text).read()


class _JsonScanner:
    """A parser that reads a text from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> Any:
        """Return the value of the whole text."""
        self._space()
        found = self._value(is_root=True) if self._next() in ("{", "[") else self._bare_root()
        self._space()
        if self.at < len(self.text):
            self._fail(f"expected the end, found {self._next()!r}")
        return found

    def _bare_root(self) -> Any:
        """Return an object without its braces, or a single value."""
        start = self.at
        key = self._key() if self._next() not in ("", ",", ":", "}", "]") else None
        self._space()
        is_object = key is not None and self._next() == ":"
        self.at = start
        return self._object("") if is_object or not self._next() else self._value()

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _space(self) -> None:
        while found := _SPACE.match(self.text, self.at):
            self.at = found.end()
        if self.text.startswith("/*", self.at):
            self._fail("a comment without its end")

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        place = self.at if at is None else at
        line = self.text.count("\n", 0, place) + 1
        column = place - (self.text.rfind("\n", 0, place) + 1) + 1
        raise ValueError(f"{what}, line {line}, column {column}")

    def _value(self, is_root: bool = False) -> Any:
        sign = self._next()
        if sign == "{":
            self.at += 1
            return self._object("}")
        if sign == "[":
            self.at += 1
            return self._list()
        if sign in ('"', "'"):
            return self._quoted()
        if sign in ("", ",", ":", "}", "]"):
            self._fail(f"expected a value, found {sign!r}" if sign else "expected a value, found the end")
        return self._plain()

    def _object(self, end: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while True:
            self._space()
            if self._next() == end:
                self.at += len(end)
                return found
            start = self.at
            key = self._key()
            self._space()
            if self._next() != ":":
                self._fail(f"expected ':' after the key {key!r}, found {self._next() or 'the end'!r}")
            self.at += 1
            self._space()
            if key in found:
                self._fail(f"key {key!r} is given twice", start)
            found[key] = self._value()
            self._comma()

    def _list(self) -> list[Any]:
        found: list[Any] = []
        while True:
            self._space()
            if self._next() == "]":
                self.at += 1
                return found
            found.append(self._value())
            self._comma()

    def _comma(self) -> None:
        self._space()
        if self._next() == ",":
            self.at += 1

    def _key(self) -> str:
        if self._next() in ('"', "'"):
            return self._quoted()
        found = _KEY.match(self.text, self.at)
        if found is None:
            self._fail(f"expected a key, found {self._next() or 'the end'!r}")
        self.at = found.end()
        return found[0]

    def _quoted(self) -> str:
        if self.text.startswith("'''", self.at):
            return self._lines()
        mark, start = self._next(), self.at
        at = start + 1
        while (sign := self.text[at : at + 1]) != mark:
            if sign in ("", "\n"):
                self._fail("text without its closing quote", start)
            at += 2 if sign == "\\" else 1
        self.at = at + 1
        said = _ESCAPE.sub(_unescaped, self.text[start + 1 : at])
        return _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), said)

    def _lines(self) -> str:
        """Return text in triple quotes; as in Hjson, indentation up to the column of the quotes is removed."""
        start = self.at
        indent = start - (self.text.rfind("\n", 0, start) + 1)
        end = self.text.find("'''", start + 3)
        if end < 0:
            self._fail("text without its closing '''", start)
        self.at = end + 3
        first, *rest = self.text[start + 3 : end].replace("\r", "").split("\n")
        lines = [line[min(indent, len(line) - len(line.lstrip())) :] for line in rest]
        said = "\n".join(lines) if not first.strip() and rest else "\n".join([first.lstrip(), *lines])
        return said[:-1] if said.endswith("\n") else said

    def _plain(self) -> Any:
        """Return a number or constant that ends before a comma, bracket or comment; else the rest of the line."""
        start = self.at
        stop = _STOP.search(self.text, start)
        assert stop is not None, "a text has an end"
        found = _known(self.text[start : stop.start()].strip())
        if found is not _NO_TEXT:
            self.at = stop.start()
            return found
        line = _BARE.match(self.text, start)
        assert line is not None, "a line may be empty"
        self.at = line.end()
        return line[0].strip()


def _known(word: str) -> Any:
    """Return the number or constant that a word is; ``_NO_TEXT`` for any other word."""
    if word in _WORDS:
        return _WORDS[word]
    if _HEX.fullmatch(word):
        return int(word, 16)
    if word.strip("+-") and _NUMBER.fullmatch(word):
        return float(word) if set(word) & set(".eE") else int(word)
    return _NO_TEXT


def _unescaped(found: "re.Match[str]") -> str:
    wide, narrow, sign = found.groups()
    if wide or narrow:
        return chr(int(wide or narrow, 16))
    return "" if sign == "\r\n" else _ESCAPES.get(sign, sign)
