"""Where the fields of a protobuf text file stand. The protobuf parser keeps no positions, and stops at the first thing
that it does not know; a linter wants all of them.

Grammar: the Protocol Buffers text format (fields, nested messages in braces or angle brackets, lists, adjacent strings,
comments). Values are not interpreted here; the real parser does that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>[\s\ufeff]+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[A-Za-z0-9_.+-]+)
      | (?P<mark>[{}<>\[\]:;,/])""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}
_MAX_DEPTH = 100


class Malformed(Exception):
    """The text has no such structure; `line` and `column` count from 1."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(message)
        self.line, self.column = line, column


class _Token(NamedTuple):
    kind: str
    text: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Field:
    """One field as it was written; an item of a list counts as one. `value` is the text of a scalar (strings without
    quotes), None for a message. Lines and columns count from 1."""

    name: str
    line: int
    column: int
    value: str | None
    value_line: int
    value_column: int
    fields: tuple[Field, ...] = ()

    def named(self, name: str) -> list[Field]:
        return [one for one in self.fields if one.name == name]

    def text(self, name: str) -> str | None:
        """Value of the first scalar field of that name."""
        return next((one.value for one in self.fields if one.name == name), None)


def parse(text: str) -> Field:
    """The file as a message without a name. Raises Malformed."""
    reader = _Reader(_tokens(text))
    fields = reader.fields(None, 0)
    return Field("", 1, 1, None, 1, 1, tuple(fields))


def find(root: Field, path: str) -> Field | None:
    """The field of a path as our checks write it: `input[1].dims[0]`, `parameters["key"]`. Where a part of it was not
    written, the innermost that was; None where none of it was."""
    found: Field | None = None
    message = root
    for name, index in _parts(path):
        written = message.named(name)
        chosen = _choose(written, index)
        if chosen is None:
            return found
        found = message = chosen
    return found


def _choose(written: list[Field], index: str | None) -> Field | None:
    if index is None:
        return written[0] if written else None
    keyed = [one for one in written if one.text("key") == index.strip('"')]
    if index.startswith('"') or (keyed and not index.isdigit()):
        return keyed[0] if keyed else None
    if written and written[0].text("key") is not None and written[0].named("value"):
        return keyed[0] if keyed else None  # a map with numbers for keys
    return written[int(index)] if int(index) < len(written) else None


def _parts(path: str) -> Iterator[tuple[str, str | None]]:
    for match in re.finditer(r'([A-Za-z_]\w*)(?:\[("[^"]*"|\d+)\])?', path):
        yield match[1], match[2]


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at, line, start = 0, 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Malformed(line, at - start + 1, f"unexpected {text[at]!r}")
        kind = str(match.lastgroup)
        if kind != "space":
            tokens.append(_Token(kind, match[0], line, at - start + 1))
        newlines = match[0].count("\n")
        if newlines:
            line += newlines
            start = at + match[0].rfind("\n") + 1
        at = match.end()
    return tokens


@dataclass(slots=True)
class _Reader:
    tokens: list[_Token]
    at: int = 0
    last: _Token = field(default_factory=lambda: _Token("mark", "", 1, 1))

    def peek(self) -> str:
        """Text of the next token; empty at the end."""
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def take(self, expected: str) -> _Token:
        if self.at >= len(self.tokens):
            raise Malformed(self.last.line, self.last.column, f"expected {expected}, found the end of the file")
        self.last = self.tokens[self.at]
        self.at += 1
        return self.last

    def fields(self, closing: str | None, depth: int) -> list[Field]:
        """Fields up to `closing`, which is taken; up to the end of the file where that is None."""
        if depth > _MAX_DEPTH:
            raise Malformed(self.last.line, self.last.column, f"nested deeper than {_MAX_DEPTH}")
        found: list[Field] = []
        while self.at < len(self.tokens) or closing is not None:
            token = self.take(f"a field or '{closing}'")
            if token.text == closing:
                return found
            if token.kind != "word":
                raise Malformed(token.line, token.column, f"expected a field's name, found {token.text!r}")
            found += self.values(token, depth)
            if self.peek() in (";", ","):
                self.take("a separator")
        return found

    def values(self, name: _Token, depth: int) -> list[Field]:
        if self.peek() == ":":
            self.take("':'")
        elif self.peek() not in ("{", "<", "["):
            raise Malformed(name.line, name.column, f"expected ':' or '{{' behind '{name.text}'")
        if self.peek() != "[":
            return [self.value(name, name, depth)]
        self.take("'['")
        items: list[Field] = []
        while self.peek() != "]":
            if self.at >= len(self.tokens):
                raise Malformed(name.line, name.column, f"the list '{name.text}' has no end: expected ']'")
            items.append(self.value(name, self.tokens[self.at], depth))
            if self.peek() == ",":
                self.take("','")
        self.take("']'")
        return items

    def value(self, name: _Token, where: _Token, depth: int) -> Field:
        token = self.take(f"a value of '{name.text}'")
        if token.text in _CLOSING:
            fields = self.fields(_CLOSING[token.text], depth + 1)
            return Field(name.text, where.line, where.column, None, token.line, token.column, tuple(fields))
        if token.kind == "mark":
            raise Malformed(token.line, token.column, f"expected a value of '{name.text}', found {token.text!r}")
        text = token.text[1:-1] if token.kind == "string" else token.text
        while token.kind == "string" and self.at < len(self.tokens) and self.tokens[self.at].kind == "string":
            text += self.take("a string").text[1:-1]
        return Field(name.text, where.line, where.column, text, token.line, token.column)
