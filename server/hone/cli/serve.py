"""`hone serve`: read the settings, run the server until a signal ends it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from hone.cli.settings import SettingsError, add_arguments, read_settings


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model repository",
        description="Serve a model repository over KServe v2 (HTTP and gRPC).",
        usage="hone serve [--FLAG[=VALUE] ...]",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        settings = read_settings(arguments, os.environ)
    except SettingsError as problem:
        print(f"hone serve: {problem}", file=sys.stderr)
        return 2
    from hone.app import serve  # loads the server: not needed to refuse a setting or to print the manual

    return serve(settings)
