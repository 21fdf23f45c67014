"""Writes docs/settings.md: `python -m hone.cli.reference >docs/settings.md`. A test keeps the file current."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from hone.cli.settings import CONFIG_VARIABLE, ENVIRONMENT_PREFIX, LIST_SEPARATOR
from hone.config import RESTRICTED_GROUPS, Settings

#: First setting of each section -> its title.
SECTIONS = {
    "model_repository": "Repository",
    "server_name": "What is served",
    "allow_http": "HTTP",
    "allow_grpc": "gRPC",
    "allow_client_shm": "Shared memory",
    "allow_metrics": "Metrics, logs, traces",
    "tuning": "Tuning",
}

_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}

INTRODUCTION = f"""\
# Settings of `hone serve`

Made by `.venv/bin/python -m hone.cli.reference >docs/settings.md` from the settings themselves; do not edit.

A setting can come from four places; the strongest first:

1. a flag: `--http-port 9000` or `--http-port=9000`; true-or-false flags may stand alone (`--exit-on-error`); a flag
   that takes several values is repeated (`--load-model a --load-model b`),
2. an environment variable: the flag's name in capitals behind `{ENVIRONMENT_PREFIX}`, as in
   `{ENVIRONMENT_PREFIX}HTTP_PORT=9000`; several values are separated by `{LIST_SEPARATOR}`,
3. a TOML file named by `--config FILE` or `{CONFIG_VARIABLE}`: the flag's name with underscores, as in
   `http_port = 9000`; several values are a list,
4. the defaults below.

Names that are not known are refused wherever they stand, with the nearest known one. Flags have Triton's names where
Triton has the flag. Keys (`--http-restricted-api`, `--grpc-restricted-protocol`) are best given by variable or file:
everybody on the machine can read a process's flags.
"""


def reference() -> str:
    """The whole page."""
    lines = [INTRODUCTION.rstrip("\n")]
    for name, field in Settings.model_fields.items():
        if name in SECTIONS:
            lines += ["", f"## {SECTIONS[name]}", "", "| flag | value | default | what it does |", "|---|---|---|---|"]
        flag = "--" + name.replace("_", "-")
        lines.append(f"| `{flag}` | {_values(field)} | {_default(field)} | {_cell(field.description or '')} |")
    groups = ", ".join(f"`{group}`" for group in RESTRICTED_GROUPS)
    lines += ["", f"Groups that can be restricted: {groups}; see [operation.md](operation.md#access)."]
    return "\n".join(lines) + "\n"


def _values(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"{_type(get_args(annotation)[0])}, may be repeated"
    return _type(annotation) + _bounds(field)


def _type(annotation: Any) -> str:
    return _TYPES.get(annotation, "path")


def _bounds(field: FieldInfo) -> str:
    # A constraint such as annotated_types.Ge holds its bound under its own name in small letters.
    bounds = {type(item).__name__: getattr(item, type(item).__name__.lower(), None) for item in field.metadata}
    if "Ge" in bounds and "Le" in bounds:
        return f", {bounds['Ge']} to {bounds['Le']}"
    if "Ge" in bounds:
        return f", at least {bounds['Ge']}"
    return f", more than {bounds['Gt']}" if "Gt" in bounds else ""


def _default(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return " ".join(f"`{item}`" for item in default)
    return f"`{default}`" if default not in ("", None) else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    sys.stdout.write(reference())
