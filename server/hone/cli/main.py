"""The `hone` command: `serve`, `infer`, `tune`, `cache` and `doctor`.

Exit codes: 0 done, 1 it failed (the reason is on standard error), 2 unusable arguments.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from hone import __version__
from hone.cli import cache, doctor, infer, serve, tune
from hone.errors import HoneError


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hone", description="An inference server that makes its models faster.")
    parser.add_argument("--version", action="version", version=f"hone {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    infer.add_parser(commands)
    tune.add_parser(commands)
    cache.add_parser(commands)
    doctor.add_parser(commands)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands.choices[parsed.command]
        flags = [flag for action in command._actions for flag in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        return int(parsed.run(parsed))
    except (HoneError, OSError) as problem:
        print(f"hone {parsed.command}: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
