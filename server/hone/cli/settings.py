"""Where settings come from: flags, then `HONE_*` variables, then a TOML file, then the defaults.

Nothing below the command line reads the environment. Unknown flags, variables and keys are refused by name, with the
nearest known one.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hone.config import Settings
from hone.errors import InvalidRequest

ENVIRONMENT_PREFIX = "HONE_"
#: Between the items of a list in an environment variable; ',' and ':' have meanings inside some items.
LIST_SEPARATOR = ";"
CONFIG_VARIABLE = "HONE_CONFIG"
#: What the commands that ask a server read by themselves (`cli.client`): no settings of a server.
CLIENT_VARIABLES = ("HONE_URL", "HONE_KEY")
#: Settings that hold keys: their values are never shown.
SECRET = ("http_restricted_api", "grpc_restricted_protocol")


class SettingsError(InvalidRequest):
    """A setting that cannot be used: says where it was found and what is expected."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting, named as in Triton: `--model-repository DIR`, `--strict-readiness[=false]`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with settings (names as the flags, with underscores)"
    )
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        shown = f"{field.description} (default: {_shown(field.default)})".replace("%", "%%")
        if _is_list(field):
            parser.add_argument(flag, action="append", default=argparse.SUPPRESS, metavar=_metavar(name), help=shown)
        elif field.annotation is bool:
            parser.add_argument(
                flag, nargs="?", const="true", default=argparse.SUPPRESS, metavar="true|false", help=shown
            )
        elif get_origin(field.annotation) is Literal:
            parser.add_argument(flag, choices=get_args(field.annotation), default=argparse.SUPPRESS, help=shown)
        else:
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar=_metavar(name), help=shown)


def read_settings(flags: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Merge the sources. Raises SettingsError."""
    given = vars(flags)
    origin: dict[str, str] = {}
    values: dict[str, Any] = {}
    file = given.get("config") or environment.get(CONFIG_VARIABLE)
    if file:
        for name, value in _read_toml(Path(file)).items():
            values[name], origin[name] = value, f"{name} in {file}"
    for name, value in _read_environment(environment).items():
        values[name], origin[name] = value, f"{ENVIRONMENT_PREFIX}{name.upper()}"
    for name in Settings.model_fields:
        if name in given:
            values[name], origin[name] = given[name], "--" + name.replace("_", "-")
    return made_settings(values, origin)


def made_settings(values: Mapping[str, Any], origin: Mapping[str, str]) -> Settings:
    """The settings; `origin` tells by their names where values were given. Raises SettingsError."""
    try:
        return Settings(**values)
    except ValidationError as problem:
        told = []
        for error in problem.errors():
            name = str(error["loc"][0]) if error["loc"] else ""
            where = origin.get(name, name)
            told_input = name and name not in SECRET and not isinstance(error["input"], dict)
            found = f", got {error['input']!r}" if told_input else ""
            told.append(
                f"{where}: {error['msg'].removeprefix('Value error, ')}{found}"
                if where
                else error["msg"].removeprefix("Value error, ")
            )
        raise SettingsError("; ".join(told)) from problem


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise SettingsError(f"cannot read settings from {path}: {problem}") from problem
    for name in values:
        if name not in Settings.model_fields:
            raise SettingsError(f"{path}: unknown setting '{name}'{_nearest(name, Settings.model_fields)}")
    return values


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in (CONFIG_VARIABLE, *CLIENT_VARIABLES):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        field = Settings.model_fields.get(name)
        if field is None:
            known = {ENVIRONMENT_PREFIX + known.upper() for known in Settings.model_fields}
            raise SettingsError(f"unknown environment variable {variable}{_nearest(variable, known)}")
        values[name] = [item for item in text.split(LIST_SEPARATOR) if item] if _is_list(field) else text
    return values


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _metavar(name: str) -> str:
    return name.rsplit("_", 1)[-1].upper()


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(str(item) for item in default) or "none"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if default not in ("", None) else "none"
