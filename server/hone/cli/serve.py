"""`hone serve`: read the settings, run the server until a signal ends it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, TextIO, cast

from hone.cli.settings import SettingsError, add_arguments, read_settings


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model repository",
        description="Serve a model repository over KServe v2 (HTTP and gRPC). On a terminal the models' state stays at"
        " its bottom, and the log goes by above it.",
        usage="hone serve [--FLAG[=VALUE] ...]",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="tell addresses and readiness as JSON, a line each, and log as JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and not hasattr(arguments, "log_format"):
        arguments.log_format = "json"
    try:
        settings = read_settings(arguments, os.environ)
    except SettingsError as problem:
        print(f"hone serve: {problem}", file=sys.stderr)
        return 2
    # Both load much that is not needed to refuse a setting or to print the manual.
    from hone.app import Display, serve
    from hone.cli.board import Board
    from hone.cli.terminal import is_terminal

    live = is_terminal(sys.stdout) and os.environ.get("TERM", "dumb") != "dumb"
    if arguments.json or not live or settings.log_format == "json":
        return serve(settings, Display(sys.stdout, sys.stderr, as_json=arguments.json))
    board = Board(sys.stdout)
    try:
        out = cast(TextIO, board)
        return serve(settings, Display(out, out if is_terminal(sys.stderr) else sys.stderr, show=board.show))
    finally:
        board.stop()
