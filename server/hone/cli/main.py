"""The `hone` command.

Exit codes: 0 done; 1 it failed, or found what it looks for (the reason is on standard error, findings on standard
output); 2 unusable arguments; 130 interrupted by Ctrl-C; 141 the reader of standard output is gone.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from hone import __version__
from hone.cli import advise, bench, cache, completion, config, doctor, explain, infer, kernels, serve, status, top, tune
from hone.errors import HoneError

_EPILOG = "All take --help and --json. Exit: 0 done, 1 failed, 2 bad usage, 130 Ctrl-C."


class _Short(argparse.HelpFormatter):
    """A command a line, so that the whole fits a screen of 24 lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16)
        self._action_max_length = 14  # the longest command's line, which argparse counts too short

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        # The line above the commands would only say "COMMAND", as the title does.
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone",
        description="An inference server that makes its models faster.",
        epilog=_EPILOG,
        formatter_class=_Short,
    )
    parser.add_argument("--version", action="version", version=f"hone {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for command in (serve, status, top, infer, bench, tune, explain, advise, cache, kernels, config, doctor):
        command.add_parser(commands)
    completion.add_parser(commands, parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = _named(parser, parsed)
        flags = [flag for action in command._actions for flag in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read has enough, as in `hone top --json | head -1`. What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (HoneError, OSError) as problem:
        print(f"hone {parsed.command}: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _named(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the command, or of its action, that was named."""
    for name in (parsed.command, getattr(parsed, "action", None)):
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if below and name in below[0].choices:
            parser = below[0].choices[name]
    return parser
