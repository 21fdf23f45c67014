"""`hone completion SHELL`: a script by which a shell completes commands, flags and their values."""

from __future__ import annotations

import argparse
from typing import Any

from hone.errors import Unsupported

SHELLS = ("bash", "zsh", "tcsh")


def add_parser(commands: Any, whole: argparse.ArgumentParser) -> None:
    """`whole` is the parser of all commands, which the script is made of."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a script that completes commands and flags",
        description='Print a completion script. bash: eval "$(hone completion bash)" in ~/.bashrc; zsh: write it to'
        " a file named _hone in a folder of $fpath; tcsh: eval in ~/.tcshrc.",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda arguments: run(arguments, whole))


def run(arguments: argparse.Namespace, whole: argparse.ArgumentParser) -> int:
    try:
        import shtab
    except ImportError:
        raise Unsupported("completion scripts are made by the package 'shtab', which is not installed") from None

    _complete_files(whole)
    print(shtab.complete(whole, arguments.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Have every argument that is a path, here and in the commands below, completed as one."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_files(below)
        elif action.metavar in ("DIR", "CACHE", "REPOSITORY") or action.dest in ("model_repository", "kernels_cache"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in ("FILE", "CERT") or action.dest in ("file", "path", "config"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
